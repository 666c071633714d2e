"""Systems by name, answers changed by words, orders by import path, and what is refused with which reason."""

from __future__ import annotations

import inspect
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from scheduling_helpers import Device, Job

from engine.lab import Lab
from engine.options import add_engine_arguments, system_from_args
from examples import my_order
from scheduling.batch import Alone, Batch, FillBudget, FillChunks, SLOAware
from scheduling.change import ANSWERS, change
from scheduling.layered import Layered
from scheduling.order import DEDF, EDF, FCFS, SEDF, SJF, Late
from scheduling.orders import find_order
from scheduling.placement import Interleave, Piggyback
from scheduling.plan import Chunked, Plan, Whole
from scheduling.preempt import Preempt
from scheduling.presets import PRESETS, System, preset
from scheduling.request import State

# The disaggregated systems, as the design's table has them.
DISAGGREGATED = {
    "distserve": System(FCFS(), FillBudget(4096), Whole(), Preempt.NEVER),
    "distserve-cp2k": System(FCFS(), FillChunks(2048), Chunked(2048), Preempt.SLICE),
    "distserve-cp8k": System(FCFS(), FillChunks(8192), Chunked(8192), Preempt.SLICE),
    "restart": System(SEDF(), Alone(), Whole(), Preempt.RESTART),
    "flowprefill-layer": System(SEDF(), SLOAware(4096), Whole(), Preempt.LAYER),
    "flowprefill": System(SEDF(), SLOAware(4096), Chunked(8192, above=32 * 1024), Preempt.OPERATOR),
    "flowprefill-release": System(
        SEDF(Late.PUBLISHED), SLOAware(2048, 0.1, "skip", "stop", True), Chunked(8192), Preempt.HALF_LAYER
    ),
}


@pytest.mark.parametrize("name", DISAGGREGATED)
def test_the_presets_are_the_designs(name: str) -> None:
    assert preset(name) == DISAGGREGATED[name]


def test_a_system_that_does_not_exist_is_told_which_do() -> None:
    with pytest.raises(ValueError, match=r"no system called 'vllm'; there are: distserve, distserve-cp2k, "):
        preset("vllm")


# Impossible systems


@pytest.mark.parametrize(
    ("batch", "plan", "preempt", "reason"),
    [
        (FillChunks(2048), Whole(), Preempt.SLICE, "it cuts prompts to fill a pass of 2048 tokens, and the plan gives"),
        (FillChunks(2048), Chunked(2049), Preempt.SLICE, "use chunks of at most 2048 tokens"),
        (FillChunks(2048), Chunked(512, above=4096), Preempt.SLICE, "gives a prompt 4096 at once"),
        (FillChunks(2048), Layered(512), Preempt.SLICE, "gives a prompt inf at once"),
        (Alone(), Chunked(2048), Preempt.RESTART, "of one that is cut it would keep the slices done"),
        (Alone(), Layered(512), Preempt.RESTART, "of one that is cut it would keep the slices done"),
    ],
)
def test_impossible_answers_are_refused_with_the_reason(
    batch: Batch, plan: Plan, preempt: Preempt, reason: str
) -> None:
    with pytest.raises(ValueError, match=f"impossible with .*{reason}"):
        System(SEDF(), batch, plan, preempt)


def test_a_prefill_that_starts_over_cannot_be_interleaved_with_decodes() -> None:
    with pytest.raises(ValueError, match="every decode step would make the prefill start over"):
        System(SEDF(), Alone(), Whole(), Preempt.RESTART, Interleave())


def test_every_other_combination_serves_everyone() -> None:
    """Nothing is refused that works, and nothing is let through that does not."""
    trace = [Job(0.0, 40, 50.0), Job(0.0, 9, 2.0), Job(0.25, 30), Job(0.5, 3, 1.0), Job(1.0, 17, 9.0)]
    orders = [FCFS(), SJF(), EDF(), DEDF(), SEDF()]
    batches: list[Batch] = [Alone(), FillBudget(24), FillChunks(24), SLOAware(24)]
    plans: list[Plan] = [Whole(), Chunked(8), Chunked(8, above=20), Layered(16), Layered(16, chunk=8)]
    possible = 0
    for order, batch, plan, preempt in product(orders, batches, plans, Preempt):
        try:
            system = System(order, batch, plan, preempt)
        except ValueError:
            continue
        possible += 1
        device = Device(system, trace)
        device.run()
        assert all(request.state == State.FINISHED for request in device.requests), system
    # Of 5 x 6 choices of plan and preempt, restart takes away 4; filled passes take whole, and layered without chunks.
    assert possible == 5 * (3 * (30 - 4) + 3 * 5)


# Changes by words


@pytest.mark.parametrize(
    ("system", "settings", "changed"),
    [
        ("flowprefill", ["preempt=layer"], {"preempt": Preempt.LAYER}),
        ("flowprefill", ["preempt=half-layer"], {"preempt": Preempt.HALF_LAYER}),
        ("flowprefill", ["preempt=half_layer"], {"preempt": Preempt.HALF_LAYER}),
        ("flowprefill", ["order=d-edf"], {"order": DEDF()}),
        ("flowprefill", ["order=sjf"], {"order": SJF()}),
        ("flowprefill", ["late=refused"], {"order": SEDF(Late.REFUSED)}),
        ("flowprefill", ["late=aged", "patience=2.5"], {"order": SEDF(Late.AGED, 2.5)}),
        ("flowprefill", ["order=edf", "batch=alone"], {"order": EDF(), "batch": Alone()}),
        ("flowprefill", ["budget=8192", "margin=0.1"], {"batch": SLOAware(8192, 0.1)}),
        ("flowprefill", ["on_misfit=stop"], {"batch": SLOAware(4096, on_misfit="stop")}),
        ("flowprefill", ["long_head_alone=true"], {"batch": SLOAware(4096, long_head_alone=True)}),
        ("flowprefill", ["chunk=2048"], {"plan": Chunked(2048, above=32768)}),
        ("flowprefill", ["chunk=2048", "above=0"], {"plan": Chunked(2048)}),
        ("flowprefill", ["chunk=none", "preempt=restart"], {"plan": Whole(), "preempt": Preempt.RESTART}),
        ("distserve", ["chunk=512"], {"plan": Chunked(512)}),
        ("distserve-cp2k", ["chunk=4096", "budget=4096"], {"batch": FillChunks(4096), "plan": Chunked(4096)}),
        (
            "flowprefill",
            ["plan=layered", "chunk=4096", "work=256", "placement=piggyback", "preempt=slice"],
            {"plan": Layered(256, chunk=4096), "placement": Piggyback(), "preempt": Preempt.SLICE},
        ),
        ("layby-colocated", ["placement.patience=2"], {"placement": Interleave(patience=2.0)}),
    ],
)
def test_one_answer_is_changed_and_the_others_kept(
    system: str, settings: list[str], changed: dict[str, object]
) -> None:
    assert change(preset(system), *settings) == replace(preset(system), **changed)  # type: ignore[arg-type]


def test_no_change_is_the_same_system() -> None:
    assert change(preset("flowprefill")) == preset("flowprefill")


@pytest.mark.parametrize("key", ANSWERS)
def test_every_answer_can_be_named(key: str) -> None:
    """Judged together, so that an answer which fits no preset may come with those it needs."""
    fitting = {"interleave": ["preempt=operator"], "fill-chunks": ["chunk=512"], "restart": ["chunk=none"]}
    for name, answer in ANSWERS[key].items():
        system = change(preset("distserve"), *fitting.get(name, []), f"{key}={name}")
        assert getattr(system, key) == answer


@pytest.mark.parametrize(
    ("system", "setting", "error"),
    [
        ("flowprefill", "preempt", "'preempt' is not of the form KEY=VALUE"),
        ("flowprefill", "preempt=leyer", "must be one of never, slice, layer, half-layer, operator, restart"),
        ("flowprefill", "batch=big", "must be one of alone, fill-budget, fill-chunks, fill-sequences, slo-aware"),
        ("flowprefill", "late=ages", "must be one of published, earliest, aged, refused"),
        ("flowprefill", "speed=9", "has no 'speed'; it has order, chunk, batch, .* late, patience, budget, margin"),
        ("distserve", "late=aged", "has no 'late'; it has .* as parts of them budget"),
        ("restart", "budget=9", "has no 'budget'"),
        ("flowprefill", "budget=many", "budget=many: not a whole number"),
        ("flowprefill", "budget=4096.5", "budget=4096.5: not a whole number"),
        ("flowprefill", "margin=much", "margin=much: not a number"),
        ("flowprefill", "margin=1", "margin must be at least 0 and below 1"),
        ("flowprefill", "long_head_alone=perhaps", "must be one of true, false"),
        ("flowprefill", "on_late=skips", "must be one of skip, stop"),
        ("flowprefill", "chunk=0", "chunk size must be at least 1 token, got 0"),
        ("flowprefill", "preempt=restart", "preempt restart is impossible with Chunked"),
        ("distserve-cp2k", "chunk=none", "is impossible with Whole"),
        ("layby-colocated", "patience=2", "say which, order.patience or placement.patience"),
        ("flowprefill", "order=fifo", "no order called 'fifo'; there are fcfs, sjf, edf, d-edf, s-edf, and your own"),
    ],
)
def test_a_change_that_is_none_is_told_what_is_possible(system: str, setting: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        change(preset(system), setting)


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ("--system distserve --order s-edf", ["order=s-edf"]),
        ("--system restart --order examples.my_order:ShortestFirst", ["order=examples.my_order:ShortestFirst"]),
        ("--system flowprefill --preempt half_layer --late aged", ["preempt=half-layer", "late=aged"]),
        ("--system flowprefill-release --token-budget 512", ["budget=512"]),
        ("--system distserve-cp2k --order edf --preempt never", ["order=edf", "preempt=never"]),
    ],
)
def test_the_command_line_changes_answers_too(line: str, settings: list[str]) -> None:
    parser = ArgumentParser()
    add_engine_arguments(parser)
    args = parser.parse_args(line.split())
    assert system_from_args(args) == change(preset(args.system), *settings)


# Orders by import path


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Writes a module into the current directory, which is not on the path otherwise."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(source)

    return write


LAST_COME = """
from scheduling.order import Order

class LastCome(Order):
    def rank(self, candidate, now):
        return 0, -candidate.request.arrival

newest_first = LastCome()
"""


@pytest.mark.parametrize("name", ["LastCome", "newest_first"])
def test_an_order_of_ones_own_is_found_in_the_current_directory(
    module: Callable[[str, str], None], name: str
) -> None:
    module("last_come", LAST_COME)
    system = change(replace(preset("distserve"), batch=Alone()), f"order=last_come:{name}")
    device = Device(system, [Job(0.0, 20), Job(0.125, 5), Job(0.25, 5)])
    device.run()
    assert [request.id for request in device.finished_at] == [0, 2, 1]


def test_the_example_of_ten_lines_serves_the_shortest_first() -> None:
    with Lab(change(preset("distserve"), "order=examples.my_order:ShortestFirst", "batch=alone")) as lab:
        lengths = [300, 200, 20, 100]
        requests = [lab.submit(tokens=length) for length in lengths]
        lab.run()
        firsts = [e.request for e in lab.events if e.kind == "first_token"]
        assert [len(request.prompt) for request in firsts if request] == [20, 100, 200, 300]
        assert all(request.state == State.FINISHED for request in requests)
    assert sum(bool(line.strip()) for line in inspect.getsource(my_order).splitlines()) <= 10


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("nowhere:MyOrder", "order nowhere:MyOrder: ModuleNotFoundError: No module named 'nowhere'"),
        ("broken:MyOrder", "order broken:MyOrder: SyntaxError: "),
        ("raising:MyOrder", "order raising:MyOrder: RuntimeError: this is my own fault"),
        ("fine:MyOrder", "order fine:MyOrder: AttributeError: module 'fine' has no attribute 'MyOrder'"),
        ("fine:Picky", r"order fine:Picky: TypeError: .*missing 1 required positional argument: 'taste'"),
        ("fine:NoOrder", "order fine:NoOrder has no method rank and no method refuses; subclass"),
        ("fine:", "no order called 'fine:'; there are fcfs, "),
        ("fine", "no order called 'fine'; .* like mypackage.mymodule:MyOrder"),
    ],
)
def test_a_bad_import_path_is_one_line(module: Callable[[str, str], None], path: str, error: str) -> None:
    module("broken", "def\n")
    module("raising", "raise RuntimeError('this is\\nmy own fault')\n")
    module("fine", "class NoOrder: pass\nclass Picky:\n    def __init__(self, taste): pass\n")
    with pytest.raises(ValueError, match=error) as raised:
        find_order(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", PRESETS)
def test_any_preset_takes_any_order(name: str) -> None:
    changed = change(preset(name), "order=examples.my_order:ShortestFirst")
    assert changed == replace(preset(name), order=my_order.ShortestFirst())


def test_looking_for_an_order_leaves_the_import_path_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "an_order_of_mine.py").write_text("from scheduling.order import FCFS\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = list(sys.path)
    find_order("an_order_of_mine:FCFS")
    assert sys.path == before
