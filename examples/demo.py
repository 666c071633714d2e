"""See a long prefill pull over: one mixed workload against three systems, on the same kernels and this machine.

    python -m examples.demo        (or: make demo)

1. Measure: how fast does this machine prefill, with decodes beside it?
2. Size: scale the QwenTrace-like workload so that the executor is busy `--load` of the time for `--seconds`.
3. Replay it, arrival by arrival, against each system. 4. One table, one picture, and the traces for Perfetto.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.metrics import RequestRows, Results, Summary
from engine.profile import load_or_measure
from engine.trace import ChromeTrace
from examples.arrivals import Arrival, scaled
from examples.driving import run
from examples.history import History
from examples.open_loop import replay
from examples.slos import A800_1K_PREFILL
from examples.workload import open_workload
from models.decoder import Model
from models.load import load_model
from scheduling.predictor import Predictor
from scheduling.presets import preset
from scheduling.request import SLO, Sampling

SYSTEMS = ("distserve", "flowprefill-layer", "flowprefill")
OUTPUT_SCALE, MAX_OUTPUT = 0.25, 64
KV_BYTES = 1 << 30  # of each engine: ample for a workload of this size
CALIBRATION_REQUESTS = 12


@dataclass(frozen=True, slots=True)
class Scenario:
    """A workload sized to this machine: the same arrivals for every system."""

    arrivals: list[Arrival]
    length_scale: float
    slo_scale: float

    @property
    def seconds(self) -> float:
        return self.arrivals[-1].time


def size(drawn: Sequence[Arrival], predict: Predictor, *, load: float, seconds: float, longest: int) -> Scenario:
    """Scale `drawn` so that its prefills keep one executor busy for `load` of `seconds`.

    Prompts are never scaled up, nor beyond `longest` tokens; where that binds, the arrivals come faster instead.
    SLOs follow the measured prefill time of what 1,024 tokens have been scaled to, over the A800's for 1,024.
    """
    most = max(arrival.prompt_tokens for arrival in drawn)

    def work(scale: float) -> float:
        return sum(predict([(0, arrival.prompt_tokens)]) for arrival in scaled(drawn, prompt=scale))

    low, high = 0.0, min(1.0, longest / most)
    if work(high) > load * seconds:
        while high - low > 1e-4:
            middle = (low + high) / 2
            low, high = (low, middle) if work(middle) > load * seconds else (middle, high)
    length_scale = high
    slo_scale = predict([(0, round(1024 * length_scale))]) / A800_1K_PREFILL
    arrivals = scaled(
        drawn,
        prompt=length_scale,
        output=OUTPUT_SCALE,
        max_output=MAX_OUTPUT,
        slo=slo_scale,
        time=work(length_scale) / load / drawn[-1].time,
    )
    return Scenario(arrivals, length_scale, slo_scale)


def make_engine(system: str, model: Model, predictor: Predictor) -> Engine:
    return Engine(model, EngineConfig(system=preset(system), predictor=predictor, kv_bytes=KV_BYTES))


async def calibrate(engine: Engine, predictor: Predictor, arrivals: Sequence[Arrival]) -> Predictor:
    """The predictor, corrected for what decodes beside the prefills cost them; its profile was taken without."""
    burst = [replace(arrival, time=0.0) for arrival in arrivals[:CALIBRATION_REQUESTS]]
    history = History()
    engine.timeline.add(history)
    await engine.start()
    await replay(engine, burst, drain_seconds=60.0)
    await engine.stop()
    prefills = [drive for drive in history.drives if drive.kind == "prefill"]
    measured = sum(drive.end - drive.start for drive in prefills)
    predicted = sum(predictor([(0, len(history.requests[id].prompt)) for id in drive.requests]) for drive in prefills)
    slower = measured / predicted
    return replace(
        predictor,
        per_step=predictor.per_step * slower,
        per_token=predictor.per_token * slower,
        per_pair=predictor.per_pair * slower,
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one system made of the scenario."""

    system: str
    results: Results
    history: History


async def serve(system: str, model: Model, predictor: Predictor, scenario: Scenario, folder: Path) -> Outcome:
    """Replay the scenario against one system, on an engine of its own."""
    engine = make_engine(system, model, predictor)
    await engine.start()
    await warm_up(engine)
    rows, history = RequestRows(), History()
    trace = ChromeTrace(folder / f"demo-{system}.trace.json")
    for sink in (rows, history, trace):
        engine.timeline.add(sink)
    showing = asyncio.create_task(show_progress(system, rows, len(scenario.arrivals), engine.clock.now))
    await replay(engine, scenario.arrivals, drain_seconds=scenario.seconds / 3)
    showing.cancel()
    await asyncio.gather(showing, return_exceptions=True)
    await engine.stop()
    trace.close()
    return Outcome(system, rows.results(), history)


async def warm_up(engine: Engine) -> None:
    """One request through both instances, before anything is counted."""
    request = engine.submit([0] * 64, sampling=Sampling(max_tokens=4, ignore_eos=True), slo=SLO())
    async for _ in engine.stream(request):
        pass


async def show_progress(system: str, rows: RequestRows, total: int, now: Callable[[], float]) -> None:
    """One line that keeps changing on a terminal; on anything else, a line every ten seconds."""
    began, terminal = now(), sys.stdout.isatty()
    try:
        while True:
            if terminal:
                print("\r" + progress_line(system, rows, total, now() - began), end="", flush=True)
            await asyncio.sleep(0.25 if terminal else 10.0)
            if not terminal:
                print(progress_line(system, rows, total, now() - began), flush=True)
    finally:
        print("\r" * terminal + progress_line(system, rows, total, now() - began), flush=True)


def progress_line(system: str, rows: RequestRows, total: int, seconds: float) -> str:
    done, met = len(rows.rows), sum(row.meets_ttft is True for row in rows.rows)
    bar = "#" * (24 * done // total)
    return f"{system:<18} [{bar:<24}] {done:>4}/{total} done, {met:>4} first tokens in time, {seconds:>4.0f} s"


def table(outcomes: Sequence[Outcome]) -> str:
    """Systems as columns, figures as rows."""
    totals = [outcome.results.total for outcome in outcomes]
    blocking = [outcome.results.blocking for outcome in outcomes]
    labels = sorted(outcomes[0].results.labels, key=lambda label: -outcomes[0].results.labels[label].n)

    def row(name: str, cells: Sequence[str]) -> str:
        return f"{name:<28}" + "".join(f"{cell:>19}" for cell in cells)

    def seconds(pick: Callable[[Summary], float | None]) -> list[str]:
        return ["-" if (value := pick(total)) is None else f"{value:.2f} s" for total in totals]

    def milliseconds(values: Sequence[float | None]) -> list[str]:
        return ["-" if value is None else f"{value * 1e3:.1f} ms" for value in values]

    lines = [row("", [outcome.system for outcome in outcomes])]
    lines.append(row(f"TTFT attainment  n={totals[0].n}", [percent(total.ttft_attainment) for total in totals]))
    for label in labels:
        parts = [outcome.results.labels[label] for outcome in outcomes]
        lines.append(row(f"  {label:<14} n={parts[0].n}", [percent(part.ttft_attainment) for part in parts]))
    lines += [
        row("TTFT  mean", seconds(lambda total: total.ttft_mean)),
        row("      p50", seconds(lambda total: total.ttft_p50)),
        row("      p99", seconds(lambda total: total.ttft_p99)),
        row("TBT attainment", [percent(total.tbt_attainment) for total in totals]),
        row("requests met per second", [f"{total.met_per_s:.2f}" for total in totals]),
        row("parks", [str(spread.n) for spread in blocking]),
        row("blocking  mean", milliseconds([spread.mean for spread in blocking])),
        row("          max", milliseconds([spread.max if spread.n else None for spread in blocking])),
    ]
    rule = "-" * len(lines[0])
    return "\n".join([lines[0], rule, *lines[1:], rule])


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


async def demo(args: argparse.Namespace, model: Model, drawn: Sequence[Arrival]) -> list[Outcome]:
    args.out.mkdir(parents=True, exist_ok=True)
    prefill_threads, decode_threads = EngineConfig().threads()
    predictor = load_or_measure(model, args.model, prefill_threads).predictor()
    print(
        f"{args.model}, {str(model.dtype).removeprefix('torch.')}, on {model.device}: "
        f"{prefill_threads} thread(s) for prefill, {decode_threads} for decode"
    )

    engine = make_engine("distserve", model, predictor)
    bounds = {"load": args.load, "seconds": args.seconds, "longest": engine.max_model_len - MAX_OUTPUT}
    predictor = await calibrate(engine, predictor, size(drawn, predictor, **bounds).arrivals)
    scenario = size(drawn, predictor, **bounds)
    one_k = predictor([(0, 1024)])
    print(
        f"1,024 tokens take {one_k:.2f} s with decodes beside them, {one_k / A800_1K_PREFILL:.1f} times an A800's "
        f"{A800_1K_PREFILL * 1e3:.0f} ms\n"
        f"{len(drawn)} requests in {scenario.seconds:.0f} s, load {args.load:g}; drawn from {args.workload}, "
        f"lengths x {scenario.length_scale:.3f}, SLOs x {scenario.slo_scale:.2f}, outputs x {OUTPUT_SCALE:g} "
        f"up to {MAX_OUTPUT}\n"
    )
    outcomes = [await serve(system, model, predictor, scenario, args.out) for system in SYSTEMS]
    print("\n" + table(outcomes))
    return outcomes


def report(outcomes: Sequence[Outcome], folder: Path) -> list[Path]:
    """Write figures and picture; returns the files that are there now."""
    figures = {outcome.system: asdict(outcome.results) for outcome in outcomes}
    (folder / "demo.json").write_text(json.dumps(figures, indent=2) + "\n")
    files = [folder / "demo.json", *(folder / f"demo-{outcome.system}.trace.json" for outcome in outcomes)]
    try:
        from examples.demo_plot import plot
    except ImportError:
        print("no picture: matplotlib is not installed (pip install 'layby[plots]')")
        return files
    plot([(outcome.system, outcome.results, outcome.history) for outcome in outcomes], folder / "demo.png")
    return [folder / "demo.png", *files]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--seconds", type=float, default=75.0, help="of arrivals, for each system")
    parser.add_argument("--load", type=float, default=0.85, help="share of the time that the prefill executor is busy")
    parser.add_argument("--workload", default="qwen", help="a generator, or a file of recorded requests to draw from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args(argv)
    if args.requests < 2:
        parser.error(f"--requests must be at least 2, got {args.requests}")
    for name in ("seconds", "load"):
        if not getattr(args, name) > 0:
            parser.error(f"--{name} must be above 0, got {getattr(args, name)}")
    try:
        model = load_model(args.model, device=args.device)
        drawn = open_workload(args.workload).draw(args.requests, seed=args.seed)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    outcomes = run(demo(args, model, drawn))
    for path in report(outcomes, args.out):
        print(f"  {path}")


if __name__ == "__main__":
    main()
