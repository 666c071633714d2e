"""What does a decision cost when many requests wait?

    python -m examples.bench_scheduler [--waiting 100,1000,10000,100000] [--json FILE]

head         a request arrives, and whose turn is it now? By the queue that stays sorted
  re-sorted  the same by the queue that sorts at every look
decision     on a free device: the head, its batch by Algorithm 1, the cohort
nobody fits  the same where the head leaves too little of the budget for any of the others
busy         a request arrives while the device is busy, and nothing has to be done: most decisions are this one

FlowPrefill's system and QwenTrace-like prompts; the targets are stretched until one part of the queue is late and the
other is not, and as many arrive as leave. Wall time in microseconds: median and 99th percentile.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from random import Random
from time import perf_counter

from engine.metrics import percentile
from examples.command import Outputs, Parser, items
from examples.command import count as whole_number
from examples.lengths import QWENTRACE
from examples.slos import slo_table
from scheduling.order import SEDF, Candidate
from scheduling.predictor import Predictor
from scheduling.presets import preset
from scheduling.ranked import Size
from scheduling.request import SLO, Request
from scheduling.scheduler import Scheduler
from scheduling.waiting import ResortingWaiting, SortedWaiting, Waiting

WAITING = [100, 1_000, 10_000, 100_000]
RESORTED = 500_000  # requests that the re-sorting queue is made to sort in all: more would tell no more
PREDICT = Predictor(per_step=0.02, per_token=7e-5, per_pair=1e-9)  # about Llama-3.1-8B on an A800
GAP = 0.05  # seconds between arrivals
MISFIT = 4000  # tokens; of a budget of 4,096 it leaves nothing for another


@dataclass(frozen=True, slots=True)
class Blocks:
    """As many KV blocks as one can want."""

    free: int = 1 << 30
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds."""

    median: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Cost:
        return cls(round(percentile(seconds, 50) * 1e6, 1), round(percentile(seconds, 99) * 1e6, 1))

    def __str__(self) -> str:
        return f"{self.median:,.0f} / {self.p99:,.0f}"


@dataclass(frozen=True, slots=True)
class Row:
    waiting: int
    head: Cost
    head_resorted: Cost
    decision: Cost
    nobody_fits: Cost
    busy: Cost


def arrivals(waiting: int, tokens: int | None = None) -> Iterator[Request]:
    """Requests without end, for a queue of this length; all of one size, if `tokens` says so."""
    random, slos = Random(0), slo_table("llama3-8b")
    shares = [each.share for each in QWENTRACE.values()]
    for number in count():
        (label,) = random.choices(list(QWENTRACE), shares)
        length = tokens or QWENTRACE[label].prompt(random)
        ttft = (slos[label].ttft or 1.0) * (1.0 + GAP * waiting)
        yield Request(number, range(length), slo=SLO(ttft), arrival=number * GAP)


def timed(call: Callable[[], object]) -> float:
    began = perf_counter()
    call()
    return perf_counter() - began


def head_cost(queue: Waiting, waiting: int, looks: int) -> Cost:
    """Every look follows an arrival; then the head leaves."""

    def arrive(request: Request) -> None:
        tokens = len(request.prompt)
        queue.add(Candidate(request, PREDICT([(0, tokens)])), Size(tokens, -(-tokens // 16)))

    def arrive_and_look(request: Request) -> None:
        arrive(request)
        queue.first(request.arrival)

    costs = []
    for request in arrivals(waiting):
        if len(queue) < waiting:
            arrive(request)
            continue
        costs.append(timed(lambda request=request: arrive_and_look(request)))  # type: ignore[misc]
        if len(costs) == looks:
            return Cost.of(costs)
        head = queue.first(request.arrival)
        assert head is not None
        queue.discard(head.request)
    raise AssertionError("arrivals do not end")


def decision_costs(waiting: int, decisions: int, tokens: int | None = None) -> tuple[Cost, Cost]:
    """(on a free device, on a busy one)"""
    scheduler = Scheduler(preset("flowprefill"), PREDICT, Blocks(), num_layers=32)
    coming = arrivals(waiting, tokens)
    now = 0.0

    def arrive() -> None:
        nonlocal now
        request = next(coming)
        now = request.arrival
        scheduler.on_arrival(request)

    while len(scheduler.waiting) < waiting:
        arrive()
    scheduler.decide(now)
    free, busy = [], []
    for number in range(decisions):
        assert scheduler.running is not None
        best_effort = Request(-1 - number, range(100), arrival=now)  # never more urgent than what runs
        scheduler.on_arrival(best_effort)
        busy.append(timed(lambda: scheduler.decide(now)))
        scheduler.on_abort(best_effort)
        scheduler.on_completion(scheduler.running)
        while len(scheduler.waiting) < waiting:
            arrive()
        free.append(timed(lambda: scheduler.decide(now)))
    return Cost.of(free), Cost.of(busy)


def measure(waiting: int, looks: int) -> Row:
    decision, busy = decision_costs(waiting, looks)
    nobody_fits, _ = decision_costs(waiting, looks, MISFIT)
    return Row(
        waiting,
        head=head_cost(SortedWaiting(SEDF()), waiting, looks),
        head_resorted=head_cost(ResortingWaiting(SEDF()), waiting, min(looks, max(5, RESORTED // waiting))),
        decision=decision,
        nobody_fits=nobody_fits,
        busy=busy,
    )


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'waiting':>10}{'head':>16}{'re-sorted':>22}{'decision':>16}{'nobody fits':>16}{'busy':>14}"]
    for row in rows:
        cells = f"{row.head!s:>16}{row.head_resorted!s:>22}{row.decision!s:>16}{row.nobody_fits!s:>16}{row.busy!s:>14}"
        lines.append(f"{row.waiting:>10,}{cells}")
    return "\n".join(lines)


def main() -> int:
    parser = Parser("bench_scheduler", __doc__)
    parser.add_argument("--waiting", type=items(whole_number), default=WAITING, help="lengths of the queue")
    parser.add_argument("--looks", type=whole_number, default=1000, help="decisions of each kind, for each length")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    with parser.user_errors():
        outputs = Outputs(args.json)
    print("microseconds, median / p99")
    rows = [measure(waiting, args.looks) for waiting in args.waiting]
    print(table(rows))
    if args.json is not None:
        outputs.add(args.json, json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        outputs.commit()
    return 0


if __name__ == "__main__":
    sys.exit(main())
