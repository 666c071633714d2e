"""Where requests come from: a generator fitted to a published trace, or a file of recorded ones.

    python -m examples.workload TRACE --plot FILE

TRACE is a file (examples/traces.py says of which formats) or a generator: qwen, qwen-long, arxiv, sharegpt, azure,
mooncake. Prints what its lengths and arrivals are like, by type; the picture is that of FlowPrefill's figure 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import mean, pstdev
from typing import Protocol

from engine.metrics import percentile
from examples.arrivals import Arrival, renewal, scaled
from examples.command import Outputs, Parser, count, picture, positive, whole
from examples.lengths import ARXIV, AZURE, MOONCAKE, QWENTRACE, QWENTRACE_LONG, SHAREGPT, RequestType
from examples.slos import slo_of, slo_table
from examples.traces import Row, Trace, read_trace
from examples.workload_options import add_workload_arguments, workload_options
from scheduling.request import SLO

QWENTRACE_RATE = 2.746  # requests per second: 327 in 119.08 s
MOST_CV = 100.0  # of gaps; far beyond it they are all 0 in floating point
RECORDED = None  # in place of a coefficient of variation: the gaps as they are


class Workload(Protocol):
    """Something to draw arrivals from. `rate`: requests per second as it comes, which `at_rate` changes."""

    @property
    def name(self) -> str: ...

    @property
    def rate(self) -> float: ...

    def draw(self, n: int, *, seed: int = 0, cv: float | None = 1.0) -> list[Arrival]:
        """`n` arrivals at `rate`, with gaps of this coefficient of variation (1: Poisson) or RECORDED ones."""
        ...


@dataclass(frozen=True, slots=True)
class Generated:
    """Arrivals drawn from distributions: a longer run begins with the shorter one."""

    name: str
    types: Mapping[str, RequestType]
    slos: Mapping[str, SLO]
    rate: float

    def draw(self, n: int, *, seed: int = 0, cv: float | None = 1.0) -> list[Arrival]:
        if cv is RECORDED:
            raise ValueError(f"{self.name} is a generator and has no recorded arrivals: use poisson or gamma=CV")
        labels = Random(f"{seed}/types").choices(list(self.types), [each.share for each in self.types.values()], k=n)
        arrivals = []
        for index, (label, time) in enumerate(zip(labels, renewal(seed, self.rate, cv), strict=False)):
            # A stream for each request and quantity: one more draw here moves nothing elsewhere.
            prompt = self.types[label].prompt(Random(f"{seed}/prompt tokens/{index}"))
            output = self.types[label].output(Random(f"{seed}/output tokens/{index}"))
            arrivals.append(Arrival(index, time, label, prompt, output, self.slos[label]))
        return arrivals


@dataclass(frozen=True, slots=True)
class Recorded:
    """Rows of a file: bootstrapped (drawn with replacement, with new arrivals), or as recorded.

    `label` and its SLO are those of rows without a type. Rows without times have `rate` 1.
    """

    trace: Trace
    slos: Mapping[str, SLO]
    label: str

    @property
    def name(self) -> str:
        return self.trace.name

    @property
    def rate(self) -> float:
        return self.trace.rate or 1.0

    def draw(self, n: int, *, seed: int = 0, cv: float | None = 1.0) -> list[Arrival]:
        """As recorded: the file's first `n` rows, or all if it has fewer, whatever the seed."""
        if cv is not RECORDED:
            rows: Sequence[Row] = Random(f"{seed}/rows").choices(self.trace.rows, k=n)
            times = renewal(seed, self.rate, cv)
            return [self._arrival(index, row, time) for index, (row, time) in enumerate(zip(rows, times, strict=False))]
        if not self.trace.timed:
            raise ValueError(f"{self.name} has lengths and no times: use poisson or gamma=CV")
        return [self._arrival(index, row, row.time or 0.0) for index, row in enumerate(self.trace.rows[:n])]

    def _arrival(self, index: int, row: Row, time: float) -> Arrival:
        label = row.label or self.label
        slo = row.slo or self.slos[label]
        tokens = row.prompt_tokens, row.output_tokens
        return Arrival(index, time, label, *tokens, slo, row.blocks, self.trace.block_tokens)


def generators(slos: Mapping[str, SLO]) -> dict[str, Generated]:
    """By name. The lengths of ShareGPT and arXiv are published without times: 1 request a second."""
    made = (
        Generated("qwen", QWENTRACE, slos, QWENTRACE_RATE),
        Generated("qwen-long", QWENTRACE_LONG, slos, QWENTRACE_RATE),
        Generated("arxiv", ARXIV, slos, 1.0),
        Generated("sharegpt", SHAREGPT, slos, 1.0),
        Generated("azure", AZURE, slos, 5.53),  # its gaps' coefficient of variation is 1.09
        Generated("mooncake", MOONCAKE, slos, 3.40),
    )
    return {each.name: each for each in made}


def open_workload(
    source: str,
    *,
    model: str = "llama3-8b",
    slo_class: str | None = None,
    slos: Mapping[str, SLO] | None = None,
    allow_equal_times: bool = False,
    keep_history: bool = False,
) -> Workload:
    """The workload called `source`, or read from the file of that name, with the SLOs of `model`.

    `slo_class` is the type of rows whose format has none (default: text), and of all a generator's requests. `slos`
    changes classes or adds some. ValueError or OSError says what is wrong, and where.
    """
    table = {**slo_table(model), **(slos or {})}
    if slo_class is not None:
        slo_of(slo_class, table)
    made = generators(table)
    if source in made:
        generated = made[source] if slo_class is None else _relabelled(made[source], slo_class)
        _refuse_unused(slos or {}, generated.name, generated.types)
        return generated
    if not Path(source).exists():
        raise ValueError(f"no workload {source!r}: neither a file nor one of {', '.join(made)}")
    trace = read_trace(source, types=table, allow_equal_times=allow_equal_times, keep_history=keep_history)
    default = slo_class or "text"
    labels = dict.fromkeys(row.label or default for row in trace.rows)
    _refuse_unused(slos or {}, trace.name, labels)
    if slo_class is not None and slo_class not in labels:
        raise ValueError(f"{trace.name} has types of its own, {', '.join(labels)}: --slo-class is for others")
    return Recorded(trace, table, default)


def _refuse_unused(slos: Mapping[str, SLO], name: str, labels: Iterable[str]) -> None:
    """ValueError for targets of a type that nobody has: a slip of the pen, most likely."""
    for label in slos:
        if label not in labels:
            raise ValueError(f"--slo {label}: {name} has no requests of that type; it has {', '.join(labels)}")


def _relabelled(generated: Generated, label: str) -> Generated:
    """All of it as one type: a mixture keeps its lengths only if it has a single type."""
    if len(generated.types) > 1:
        raise ValueError(
            f"{generated.name} has types of its own, {', '.join(generated.types)}: --slo-class is for others"
        )
    [kind] = generated.types.values()
    return Generated(generated.name, {label: kind}, generated.slos, generated.rate)


def at_rate(arrivals: Sequence[Arrival], workload: Workload, rate: float) -> list[Arrival]:
    """The arrivals of `workload` at `rate` requests per second: the same gaps, stretched."""
    if not rate > 0:
        raise ValueError(f"the arrival rate must be above 0 requests per second, got {rate:g}")
    return scaled(arrivals, time=workload.rate / rate)


def parse_process(text: str) -> float | None:
    """`poisson`, `gamma=CV` or `recorded`, as a coefficient of variation or RECORDED."""
    name, _, value = text.partition("=")
    if text == "recorded":
        return RECORDED
    if text == "poisson":
        return 1.0
    try:
        cv = float(value)
    except ValueError:
        cv = 0.0
    if name != "gamma" or not 0 < cv <= MOST_CV:
        raise ValueError(f"arrivals {text!r} are none of poisson, gamma=CV (above 0, at most {MOST_CV:g}), recorded")
    return cv


# The command


def table(arrivals: Sequence[Arrival]) -> str:
    """Lengths by type, and the arrivals of all."""
    labels = list(dict.fromkeys(sorted(arrival.label for arrival in arrivals)))
    lines = [f"{'':<10}{'':>8}{'share':>8} |{'prompt tokens':>42} |{'output tokens':>21} |{'SLO, s':>14}"]
    heads = [f"{head:>7}" for head in ("mean", "std", "p50", "p90", "p99", "max", "mean", "p50", "p90")]
    lines.append(f"{'type':<10}{'n':>8}{'':>8} |{''.join(heads[:6])} |{''.join(heads[6:])} |{'TTFT':>7}{'TBT':>7}")
    for label in [*labels, "all"] if len(labels) > 1 else labels:
        mine = [arrival for arrival in arrivals if label in (arrival.label, "all")]
        prompts, outputs = [a.prompt_tokens for a in mine], [a.output_tokens for a in mine]
        cells = [mean(prompts), pstdev(prompts), *(percentile(prompts, p) for p in (50, 90, 99)), max(prompts)]
        outs = [mean(outputs), *(percentile(outputs, p) for p in (50, 90))]
        slos = {arrival.slo for arrival in mine}
        targets = next(iter(slos)) if len(slos) == 1 else SLO()
        lines.append(
            f"{label:<10}{len(mine):>8}{len(mine) / len(arrivals):>8.1%} |{''.join(f'{c:>7.0f}' for c in cells)} |"
            f"{''.join(f'{c:>7.0f}' for c in outs)} |"
            + "".join(f"{'-' if target is None else format(target, 'g'):>7}" for target in (targets.ttft, targets.tbt))
        )
    gaps = [after.time - before.time for before, after in pairwise(arrivals)]
    if gaps and sum(gaps) > 0:
        per_second, variation = len(gaps) / sum(gaps), pstdev(gaps) / mean(gaps)
        lines.append(
            f"\n{arrivals[-1].time:,.1f} s of arrivals, {per_second:.3g} a second; "
            f"coefficient of variation of the gaps {variation:.2f}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("workload", __doc__)
    parser.add_argument("trace", metavar="TRACE", help="a file, or a generator's name")
    parser.add_argument("--requests", type=count, help="how many (default: all that are recorded; drawn: 2,000)")
    parser.add_argument("--arrivals", help="poisson, gamma=CV or recorded (default: recorded, if it has times)")
    parser.add_argument("--rate", type=positive, help="requests a second (default: the trace's own)")
    parser.add_argument("--seed", type=whole, default=0)
    parser.add_argument("--model", default="llama3-8b", help="whose SLOs (default %(default)s)")
    parser.add_argument("--plot", type=picture, metavar="FILE.png", help="draw lengths and arrivals into this PNG")
    add_workload_arguments(parser)
    args = parser.parse_args(argv)
    with parser.user_errors():
        outputs = Outputs(args.plot)
        workload = open_workload(args.trace, model=args.model, **workload_options(args))
        timed = isinstance(workload, Recorded) and workload.trace.timed
        cv = parse_process(args.arrivals or ("recorded" if timed else "poisson"))
        n = args.requests or (len(workload.trace.rows) if isinstance(workload, Recorded) else 2000)
        arrivals = at_rate(workload.draw(n, seed=args.seed, cv=cv), workload, args.rate or workload.rate)
    print(table(arrivals))
    if args.plot is not None:
        from examples.workload_plot import plot

        outputs.add(args.plot, plot(arrivals, workload.name))
    for path in outputs.commit():
        print(f"\n  {path}")


if __name__ == "__main__":
    main()
