"""The demo's second picture: tokens that keep coming while long prompts are prefilled, on this machine.

    python -m examples.demo_layered        (also the end of: make demo)

Some requests decode; two long prompts arrive. Computed whole they stop every decode until they are done. In chunks, or
in groups of layers, they share every iteration with the decodes, which never wait for more than one. Chunks read most
experts of the small mixture of experts again each time, groups once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from engine.config import EngineConfig
from engine.counters import Account
from engine.engine import Engine
from engine.timeline import Event, Kind
from examples.arrivals import Arrival
from examples.command import Parser
from examples.driving import run
from examples.layered_live import CHUNKED, KV_BYTES, LAYERED, load_sparse, seconds_alone, sized
from examples.open_loop import replay
from models.decoder import Model
from scheduling.presets import preset
from scheduling.request import SLO

WHOLE = "orca"
SYSTEMS = {WHOLE: "prompts whole", CHUNKED: "in chunks", LAYERED: "in groups of layers"}
DECODES, LONG = 6, 2  # requests
WORK = 512  # tokens of a chunk, and of the whole model's work in a layered iteration
PROMPT, TOKENS = 3000, 220  # of a long prompt; tokens that a decoding request asks for
DECODING, ARRIVING = "decode", "prompt"  # labels


@dataclass(slots=True)
class Lanes:
    """A Timeline sink: when each decoding request had its tokens, and when each long prompt arrived and had its first.
    Seconds since the first event."""

    tokens: dict[int, list[float]] = field(default_factory=dict)
    waits: dict[int, tuple[float, float]] = field(default_factory=dict)  # arrival, first token
    _began: float | None = None

    def __call__(self, event: Event) -> None:
        if self._began is None:
            self._began = event.time
        request = event.request
        if request is None:
            return
        if request.label == DECODING and event.kind in (Kind.FIRST_TOKEN, Kind.TOKEN):
            self.tokens.setdefault(request.id, []).append(event.time - self._began)
        elif request.label == ARRIVING and event.kind is Kind.FIRST_TOKEN:
            self.waits[request.id] = request.arrival - self._began, event.time - self._began


@dataclass(frozen=True, slots=True)
class Shown:
    """One system's run. `prompt_bytes`: of experts read for the long prompts; where decodes share a layer's pass, the
    rows there share what is read evenly (engine/counters.py)."""

    system: str
    lanes: Lanes
    prompt_bytes: float

    @property
    def name(self) -> str:
        return f"{self.system}, {SYSTEMS[self.system]}"

    @property
    def longest_gap(self) -> float:
        """Between two tokens of a decoding request, in seconds, while long prompts waited."""
        began, ended = min(w[0] for w in self.lanes.waits.values()), max(w[1] for w in self.lanes.waits.values())
        gaps = [b - a for times in self.lanes.tokens.values() for a, b in pairwise(times) if b > began and a < ended]
        return max(gaps, default=0.0)

    @property
    def ttfts(self) -> list[float]:
        """Of the long prompts, in seconds."""
        return [first - arrival for arrival, first in self.lanes.waits.values()]


async def show(model: Model, system: str, step: float) -> Shown:
    """`step`: seconds of a decode step, by which the prompts' arrivals are set."""
    chosen = preset(system) if system == WHOLE else sized(system, WORK)
    engine = Engine(model, EngineConfig(system=chosen, kv_bytes=KV_BYTES, counters=True))
    await engine.start()
    await seconds_alone(engine, PROMPT)  # warms up
    lanes, books = Lanes(), Account()
    engine.timeline.add(lanes)
    engine.timeline.add(books)
    decodes = [Arrival(i, 0.0, DECODING, 20 + i, TOKENS, SLO()) for i in range(DECODES)]
    times = [step * TOKENS * share for share in (0.15, 0.55)]
    prompts = [Arrival(DECODES + i, time, ARRIVING, PROMPT, 1, SLO()) for i, time in enumerate(times)]
    await replay(engine, [*decodes, *prompts], drain_seconds=60.0)
    await engine.stop()
    return Shown(system, lanes, sum(books.expert_bytes[request] for request in lanes.waits))


async def step_seconds(model: Model) -> float:
    """Of a decode step of all the decodes, on average."""
    engine = Engine(model, EngineConfig(system=preset(WHOLE), kv_bytes=KV_BYTES))
    await engine.start()
    began = engine.clock.now()
    await replay(engine, [Arrival(i, 0.0, DECODING, 20, 40, SLO()) for i in range(DECODES)], drain_seconds=60.0)
    seconds = (engine.clock.now() - began) / 40
    await engine.stop()
    return seconds


async def compare(model: Model) -> list[Shown]:
    step = await step_seconds(model)
    return [await show(model, system, step) for system in SYSTEMS]


def table(shown: Sequence[Shown]) -> str:
    lines = [f"{'system':<30}{'longest gap':>13}{'TTFT of the long prompts':>28}{'experts read for them':>24}"]
    for each in shown:
        ttfts = ", ".join(f"{1e3 * ttft:.0f}" for ttft in each.ttfts)
        gap = f"{1e3 * each.longest_gap:.0f} ms"
        lines.append(f"{each.name:<30}{gap:>13}{ttfts + ' ms':>28}{each.prompt_bytes / 1e6:>21.0f} MB")
    return "\n".join(lines)


def report(shown: Sequence[Shown], folder: Path) -> list[Path]:
    """The picture, if it can be drawn; returns the files that are there now."""
    try:
        from examples.demo_layered_plot import plot
    except ImportError:
        return []
    path = folder / "demo-layered.png"
    path.write_bytes(plot(shown))
    return [path]


def demo(folder: Path, model: str = "toy-moe") -> None:
    """Serve, print and draw."""
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{model}: {DECODES} requests decode while {LONG} prompts of {PROMPT:,} tokens are prefilled\n")
    shown = run(compare(load_sparse(model)))
    print(table(shown))
    for path in report(shown, folder):
        print(f"  {path}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("demo_layered", __doc__)
    parser.add_argument("--model", default="toy-moe", help="a mixture of experts (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args(argv)
    with parser.user_errors():
        load_sparse(args.model)
    demo(args.out, args.model)


if __name__ == "__main__":
    main()
