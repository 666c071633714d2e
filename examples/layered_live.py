"""Chunks against groups of layers on this machine: which experts the routing really chose, and how long tokens take.

    python -m examples.layered_live [--model toy-moe]

The same arrivals are served twice with real forward passes. Every pass counts the experts that some row was routed to,
so the bytes are measured, not modelled. Chunks and groups carry the same work: --work tokens through the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import mean

import numpy as np

from engine.config import EngineConfig
from engine.counters import Account
from engine.engine import Engine
from engine.metrics import RequestRows, Row
from examples.arrivals import Arrival, renewal
from examples.command import Parser, count, share
from examples.driving import run
from examples.open_loop import replay
from examples.token_gaps import TokenGaps
from models.decoder import Model
from models.load import load_model
from scheduling.batch import FillBudget, FillChunks
from scheduling.layered import Layered
from scheduling.plan import Chunked
from scheduling.presets import System, preset
from scheduling.request import SLO, Sampling

CHUNKED, LAYERED = "sarathi", "layered"
WORK = 128  # tokens: of a chunk, and of the whole model's work in a layered iteration
PROMPTS, OUTPUTS = (256, 1024), (16, 64)  # tokens, evenly spread
KV_BYTES = 256 << 20
DRAIN = 20.0  # seconds


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one system served the arrivals. `gaps`: seconds between the tokens of all requests."""

    system: str
    rows: Sequence[Row]
    gaps: np.ndarray
    expert_bytes: float  # read for one request, decodes included
    prefill_expert_bytes: float  # of that, what is charged to prefill rows
    decode_batch: float

    @property
    def ttft(self) -> float:
        """Mean, in seconds."""
        return mean(row.ttft for row in self.rows if row.ttft is not None)


def sized(name: str, work: int) -> System:
    """The preset with chunks, or groups, of so much work."""
    system = preset(name)
    if name == CHUNKED:
        return replace(system, batch=FillChunks(work), plan=Chunked(work))
    return replace(system, batch=FillBudget(16 * work), plan=Layered(work))  # cohorts in proportion: 8,192 to 512


def draw(requests: int, rate: float, seed: int = 0) -> list[Arrival]:
    """Poisson arrivals of so many a second."""
    random = Random(f"{seed}/lengths")
    lengths = [(random.randint(*PROMPTS), random.randint(*OUTPUTS)) for _ in range(requests)]
    times = renewal(seed, rate)
    return [Arrival(index, next(times), "text", *tokens, SLO()) for index, tokens in enumerate(lengths)]


async def serve(model: Model, name: str, system: System, arrivals: Sequence[Arrival]) -> Outcome:
    engine = Engine(model, EngineConfig(system=system, kv_bytes=KV_BYTES, counters=True))
    await engine.start()
    await seconds_alone(engine, PROMPTS[0])  # warms up
    rows, books, gaps = RequestRows(), Account(), TokenGaps()
    for sink in (rows, books, gaps):
        engine.timeline.add(sink)
    await replay(engine, arrivals, drain_seconds=DRAIN)
    await engine.stop()
    served = len(arrivals)
    return Outcome(
        name,
        rows.rows,
        np.array(gaps.seconds),
        books.total.expert_bytes / served,
        books.total.prefill_expert_bytes / served,
        books.mean_decode_batch,
    )


async def seconds_alone(engine: Engine, tokens: int) -> float:
    """To the first token of one prompt, with nothing else to do."""
    began = engine.clock.now()
    request = engine.submit([0] * tokens, sampling=Sampling(max_tokens=1, ignore_eos=True))
    async for _ in engine.stream(request):
        pass
    return engine.clock.now() - began


async def compare(model: Model, *, work: int = WORK, requests: int = 40, load: float = 0.5) -> tuple[Outcome, Outcome]:
    """Chunked and layered. `load`: how much of the time prompts in chunks would keep this machine busy, alone."""
    engine = Engine(model, EngineConfig(system=sized(CHUNKED, work), kv_bytes=KV_BYTES))
    await engine.start()
    middle = sum(PROMPTS) // 2
    await seconds_alone(engine, middle)
    alone = min([await seconds_alone(engine, middle) for _ in range(3)])
    await engine.stop()
    arrivals = draw(requests, load / alone)
    chunked, layered = [await serve(model, name, sized(name, work), arrivals) for name in (CHUNKED, LAYERED)]
    return chunked, layered


def load_sparse(name: str) -> Model:
    """ValueError for a model without experts."""
    model = load_model(name)
    if model.config.moe is None:
        raise ValueError(f"{name} has no experts to count: take a mixture of experts, such as toy-moe")
    return model


def table(outcomes: Sequence[Outcome]) -> str:
    lines = [
        f"{'':<10}{'experts, MB a request':>32}{'decodes':>10}{'TTFT, ms':>20}{'gaps, ms':>18}",
        f"{'system':<10}{'in all':>12}{'prefills':>10}{'decodes':>10}{'a pass':>10}{'mean':>10}{'max':>10}"
        f"{'p50':>6}{'p99':>6}{'max':>6}",
    ]
    for each in outcomes:
        loads = (each.expert_bytes, each.prefill_expert_bytes, each.expert_bytes - each.prefill_expert_bytes)
        longest = max(row.ttft for row in each.rows if row.ttft is not None)
        gaps = np.percentile(each.gaps, (50, 99, 100))
        lines.append(
            f"{each.system:<10}{loads[0] / 1e6:>12.1f}{loads[1] / 1e6:>10.1f}{loads[2] / 1e6:>10.1f}"
            f"{each.decode_batch:>10.1f}{1e3 * each.ttft:>10.0f}{1e3 * longest:>10.0f}"
            + "".join(f"{1e3 * gap:>6.0f}" for gap in gaps)
        )
    before, after = outcomes[0], outcomes[-1]
    lines.append(
        f"\nwith {after.system}, {100 * (after.expert_bytes / before.expert_bytes - 1):+.0f} % of the experts' bytes, "
        f"{100 * (after.ttft / before.ttft - 1):+.0f} % of the mean TTFT"
    )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("layered_live", __doc__)
    parser.add_argument("--model", default="toy-moe", help="a mixture of experts (default %(default)s)")
    parser.add_argument("--work", type=count, default=WORK, help="tokens (default %(default)s)")
    parser.add_argument("--requests", type=count, default=40)
    parser.add_argument(
        "--load", type=share, default=0.5, help="share of the time that prompts take (default %(default)s)"
    )
    args = parser.parse_args(argv)
    with parser.user_errors():
        model = load_sparse(args.model)
    print(table(run(compare(model, work=args.work, requests=args.requests, load=args.load))))


if __name__ == "__main__":
    main()
