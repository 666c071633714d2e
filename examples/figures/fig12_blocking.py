"""FlowPrefill's figure 12: how long a newcomer waits until the running prefill has pulled over, by where it may stop.

Live (`--backend torch`) the same is measured of a real forward pass, parked at random moments: examples/blocking.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from random import Random
from statistics import mean

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from engine.deployment import Deployment
from engine.simulation import simulate
from engine.timeline import Event, Kind
from examples.backends import simulated_arrival
from examples.blocking import measure_parks, operator_times, predicted_mean
from examples.driving import Driver, serving_threads
from examples.experiment import Run
from examples.figures.figure import Claim, Figure
from examples.figures.study import Study, gathered, generated
from examples.figures.style import headline, tidy
from examples.figures.workers import Workers
from examples.palette import BLUE, GREEN, ORANGE, png
from models.costs import Volume
from models.load import load_model
from scheduling.preempt import Preempt

REQUESTS, SEEDS = 1000, (1, 2)
LONG = 4096  # tokens of a prompt that is worth parking
LIVE_TOKENS, LIVE_PARKS = 1024, 50
LEVELS = {"layer": (ORANGE, "--"), "half-layer": (GREEN, ":"), "operator": (BLUE, "-")}


@dataclass(frozen=True, slots=True)
class Setup:
    """`load`: over the trace's rate; the smaller models at that of the authors' example run."""

    title: str
    model: str
    tp: int
    load: float


SETUPS = (
    Setup("Llama3-8B", "llama3-8b", 1, 2.0),
    Setup("Qwen2.5-14B (TP2)", "qwen2.5-14b", 2, 2.0),
    Setup("Llama3-70B (TP4)", "llama3-70b", 4, 1.0),
)


class Waits:
    """A Timeline sink: seconds from each request to park until the drive had stopped, or ended before it could."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._since: dict[tuple[str | None, int | None], float] = {}

    def __call__(self, event: Event) -> None:
        drive = event.instance, event.drive
        if event.kind is Kind.PARK_REQUESTED:
            self._since[drive] = event.time
        elif event.kind in (Kind.PARKED, Kind.COMPLETED) and drive in self._since:
            self.seconds.append(event.time - self._since.pop(drive))


def waits(run: Run) -> list[float]:
    assert isinstance(run.backend, Deployment)
    sink = Waits()
    arrivals = run.load.arrivals(run.rate, run.slo_scale, run.seed)
    simulate(run.variant.system, map(simulated_arrival, arrivals), run.backend, sinks=[sink])
    return sink.seconds


async def make(workers: Workers) -> Figure:
    async def measure(setup: Setup, level: str) -> list[float]:
        """Milliseconds, in order."""
        deployment = Deployment(model=setup.model, hardware="a800-80g", tp=setup.tp)
        study = Study(workers, deployment, generated("qwen", REQUESTS, setup.model), SEEDS)
        found = await study.over_seeds(waits, f"flowprefill preempt={level}", setup.load * study.rate)
        return sorted(1e3 * seconds for each in found for seconds in each)

    keys = list(product(SETUPS, LEVELS))
    blocked = dict(zip(keys, await gathered(measure(*key) for key in keys), strict=True))
    means = {level: [mean(blocked[setup, level]) for setup in SETUPS] for level in LEVELS}
    bests = [best_ratio(setup) for setup in SETUPS]
    ratios = [layer / operator for layer, operator in zip(means["layer"], means["operator"], strict=True)]
    return Figure(
        title="FlowPrefill, figure 12: how long a running prefill blocks a newcomer",
        setting=(
            "A800, `flowprefill` at three levels of preemption, simulated; requests like QwenTrace's, 5.5 a second "
            "(70B: 2.7); " + ", ".join(setup.title for setup in SETUPS)
        ),
        claims=[
            Claim(
                "Blocking by operators is 3.5x to 4.2x shorter than by layers",
                ", ".join(f"{ratio:.1f}x" for ratio in ratios),
                holds=min(ratios) >= 3.5,
                why=(
                    "The mean wait falls with the sum of the squares of the operators' shares of a layer. gate_up_proj "
                    f"alone has half: five boundaries give {', '.join(f'{best:.1f}x' for best in bests)} for a prompt "
                    f"of {LONG:,} tokens. What the paper's layers wait for besides, it does not say"
                ),
            ),
            Claim(
                "By operators it is below 4.5 ms on average, at best 2.6 ms",
                milliseconds(means["operator"]),
                holds=max(means["operator"]) < 4.5,
            ),
            Claim(
                "By layers it is 9.5 ms or more",
                milliseconds(means["layer"]),
                holds=min(means["layer"]) >= 9.5,
                why=(
                    "About half of a layer of the prompts under way, by the cost model, and much the same at 2.7 to 8 "
                    "requests a second. What the paper's layers wait for besides is not explained"
                ),
            ),
        ],
        rows=[
            {
                "model": setup.model,
                "preempt": level,
                "parks": len(each),
                "mean_ms": mean(each),
                "p50_ms": each[len(each) // 2],
                "p99_ms": each[-1 - len(each) // 100],
                "max_ms": each[-1],
            }
            for (setup, level), each in blocked.items()
        ],
        png=plot(blocked),
    )


def best_ratio(setup: Setup) -> float:
    """How much shorter operators make the wait from a random moment of a prompt of LONG tokens than layers do."""
    deployment = Deployment(model=setup.model, hardware="a800-80g", tp=setup.tp)
    (layer, *_) = deployment.timing.legs(0, deployment.config.num_layers, Volume.of(0, LONG))
    lengths = [end - start for start, end in pairwise((0.0, *layer.ends))]
    return sum(lengths) ** 2 / sum(length**2 for length in lengths)


def milliseconds(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.1f} ms" for value in values)


def plot(blocked: Mapping[tuple[Setup, str], Sequence[float]]) -> bytes:
    figure, axes = plt.subplots(1, len(SETUPS), figsize=(11.5, 3.9), layout="constrained", sharey=True)
    for place, setup in zip(axes, SETUPS, strict=True):
        distribution(place, {level: blocked[setup, level] for level in LEVELS})
        place.set_title(setup.title, loc="left", fontsize=10)
    axes[0].set_ylabel("share of the parks that take at most so long")
    headline(figure, "FlowPrefill, figure 12: how long a running prefill blocks a newcomer, by where it may stop")
    return png(figure)


def distribution(axes: Axes, blocked: Mapping[str, Sequence[float]]) -> None:
    """Cumulative shares of the milliseconds of each level; a dot at the mean."""
    for level, waits in blocked.items():
        colour, style = LEVELS[level]
        shares = [(index + 1) / len(waits) for index in range(len(waits))]
        middle = mean(waits)
        axes.plot(waits, shares, color=colour, ls=style, lw=1.8, label=f"{level}, mean {middle:.1f} ms")
        below = sum(wait <= middle for wait in waits) / len(waits)
        axes.plot([middle], [below], marker="o", ms=6, mfc="white", mec=colour, mew=1.6)
    axes.set_xlim(0, 1.02 * max(waits[-1 - len(waits) // 100] for waits in blocked.values()))
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("ms from the request to park until it has stopped")
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    tidy(axes)


async def live(name: str) -> Figure:
    """Of one prompt of a real model on this machine, alone."""
    model, threads, random = load_model(name), serving_threads(), Random(0)
    driver = Driver(model, LIVE_TOKENS, threads=threads)
    prompt = driver.prompt(LIVE_TOKENS)
    await driver.seconds(prompt)  # warm up
    times = await operator_times(driver, prompt, repeats=3)
    forward = sum(seconds for _, seconds in times)
    levels = {level: Preempt[level.upper().replace("-", "_")] for level in LEVELS}
    blocked: dict[str, list[float]] = {level: [] for level in levels}
    while min(map(len, blocked.values())) < LIVE_PARKS:
        for level, preempt in levels.items():  # in turn, so that a slow minute of the machine falls on all
            blocked[level] += [1e3 * s for s in await measure_parks(driver, prompt, preempt, forward, random)]
    await driver.close()
    blocked = {level: sorted(each) for level, each in blocked.items()}
    predicted = {level: 1e3 * predicted_mean(times, preempt) for level, preempt in levels.items()}
    ratio = mean(blocked["layer"]) / mean(blocked["operator"])
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    distribution(axes, blocked)
    axes.set_ylabel("share of the parks that take at most so long")
    headline(figure, f"How long a prefill of {LIVE_TOKENS:,} tokens blocks ({name}, here)")
    return Figure(
        title="FlowPrefill, figure 12, live: how long a running prefill blocks a newcomer",
        setting=f"{name}, {LIVE_TOKENS:,} tokens, {threads} thread(s), parked at random moments, on this machine",
        claims=[
            Claim(
                "Blocking by operators is 3.5x to 4.2x shorter than by layers",
                f"{ratio:.1f}x ({mean(blocked['operator']):.1f} ms, {mean(blocked['layer']):.1f} ms); the operators' "
                f"times predict {predicted['layer'] / predicted['operator']:.1f}x",
                holds=ratio >= 3.5,
                why="Another model on another machine: its operators have other shares of a layer",
            )
        ],
        rows=[
            {
                "preempt": level,
                "parks": len(each),
                "mean_ms": mean(each),
                "predicted_mean_ms": predicted[level],
                "p50_ms": each[len(each) // 2],
                "max_ms": each[-1],
            }
            for level, each in blocked.items()
        ],
        png=png(figure),
    )
