"""See a long prefill pull over: one mixed workload against three systems, on the same kernels and this machine.

    python -m examples.demo        (or: make demo)

1. Measure: how fast does this machine prefill, with decodes beside it?
2. Size: scale the QwenTrace-like workload so that the executor is busy `--load` of the time for `--seconds`.
3. Replay it, arrival by arrival, against each system. 4. One table, one picture, and the traces for Perfetto.
5. A second picture: tokens that keep coming beside long prompts (examples/demo_layered.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.metrics import RequestRows
from engine.profile import load_or_measure
from engine.timeline import Kind
from engine.trace import ChromeTrace
from examples import demo_layered
from examples.arrivals import Arrival, scaled
from examples.demo_report import Outcome, show_progress, table
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
MOST_SLOWDOWN = 1.25  # of prefills during a run, against the calibration before it


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
    return predictor.scaled(slowdown(history, predictor))


def slowdown(history: History, predictor: Predictor) -> float:
    """Seconds on the executor over those predicted, of the prefills that were completed; 1 if none was."""
    done = {drive.drive for drive in history.drives if drive.kind == "prefill" and drive.until is Kind.COMPLETED}
    measured = predicted = 0.0
    for drive in history.drives:
        if drive.kind == "prefill" and drive.drive in done and not drive.parked:
            measured += drive.end - drive.start
            if drive.until is Kind.COMPLETED:
                predicted += predictor([(0, len(history.requests[id].prompt)) for id in drive.requests])
    return measured / predicted if predicted else 1.0


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
    return Outcome(system, rows.results(), history, slowdown(history, predictor))


async def warm_up(engine: Engine) -> None:
    """One request through both instances, before anything is counted."""
    request = engine.submit([0] * 64, sampling=Sampling(max_tokens=4, ignore_eos=True), slo=SLO())
    async for _ in engine.stream(request):
        pass


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
    for outcome in outcomes:
        if outcome.slowdown > MOST_SLOWDOWN:
            print(
                f"Do not compare: prefills took {outcome.slowdown:.1f} times as long as calibrated while "
                f"{outcome.system} ran. Something else keeps this machine busy."
            )
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
    plot(outcomes, folder / "demo.png")
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
    print()
    demo_layered.demo(args.out)


if __name__ == "__main__":
    main()
