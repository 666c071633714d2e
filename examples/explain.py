"""Explain every scheduling decision of a run: who stood for election, with which deadline, slack and priority, and why
this one was chosen.

    python -m examples.explain examples/three.csv --plot out/explain.png

A TRACE is a small CSV (time, prompt, output, slo; see examples/three.csv) or any workload of examples/workload.py. The
last of --systems is explained, the others are drawn above it for comparison. On three requests the picture is what
FlowPrefill's figures 2 and 8 show: what the granularity of preemption does to a short request behind a long one, and
how arrivals and completions drive the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from engine.simulation import Deployment, simulate
from examples.arrivals import Arrival
from examples.backends import simulated_arrival
from examples.command import Outputs, Parser, count, items, nonempty, picture, positive, whole
from examples.decisions import Choice, Decisions
from examples.experiment import Variant, variant
from examples.history import History
from examples.reasons import Contender
from examples.workload import Recorded, at_rate, open_workload, parse_process
from examples.workload_options import add_workload_arguments, workload_options
from scheduling.request import Request

SYSTEMS = "distserve,distserve-cp8k order=s-edf,distserve-cp2k order=s-edf,flowprefill"


@dataclass(frozen=True, slots=True)
class Explained:
    """One system's run."""

    system: str
    history: History
    choices: Sequence[Choice]


def explain(chosen: Variant, arrivals: Sequence[Arrival], deployment: Deployment) -> Explained:
    history, decisions = History(), Decisions(letter_of(len(arrivals)))
    simulate(chosen.system, map(simulated_arrival, arrivals), deployment, sinks=[history], on_start=decisions.watch)
    return Explained(chosen.name, history, decisions.choices)


def letter_of(requests: int) -> Callable[[Request], str]:
    """Names for a few requests are letters, for more of them numbers, in order of arrival."""
    few = requests <= len(ascii_uppercase)
    return lambda request: ascii_uppercase[request.id] if few else f"#{request.id}"


def text(explained: Explained, limit: int) -> str:
    """The requests, the first `limit` decisions, and what became of it all."""
    history = explained.history
    name = letter_of(len(history.requests))
    lines = [f"{explained.system}, {len(history.requests)} requests:", ""]
    for request in history.requests.values():
        due = "best effort" if request.slo.ttft is None else f"first token due at {request.deadline:.3f} s"
        size = f"{len(request.prompt):,}"
        lines.append(
            f"  {name(request):<5}{request.label:<10}{size:>8} tokens, comes at {request.arrival:.3f} s, {due}"
        )
    for number, choice in enumerate(explained.choices[:limit], 1):
        where = f" on {choice.instance}" if len({each.instance for each in explained.choices}) > 1 else ""
        lines += ["", f"{number}. {choice.time:.3f} s{where}: {'; '.join(choice.causes) or 'blocks are free'}"]
        lines += table(choice, name)
        lines.append(f"   -> {choice.why}")
    if len(explained.choices) > limit:
        lines += ["", f"... and {len(explained.choices) - limit} more decisions (--decisions shows more)"]
    return "\n".join([*lines, "", outcome(history, name)])


def table(choice: Choice, name: Callable[[Request], str]) -> list[str]:
    """The contenders, highest rank first; a mark for whom the decision is about."""
    heads = f"     {'':<6}{'state':<14}{'tokens':>12}{'predicted':>12}{'deadline':>12}{'slack':>12}{'priority':>11}"
    return [heads, *(f"   {'>' if c.request in choice.members else ' '} {row(c, name)}" for c in choice.contenders)]


def row(contender: Contender, name: Callable[[Request], str]) -> str:
    request = contender.request
    best_effort = request.slo.ttft is None
    deadline = "-" if best_effort else f"{request.deadline:.3f} s"
    slack = "-" if best_effort else f"{contender.slack:+.3f} s"
    priority = "-" if contender.priority is None else f"{contender.priority:+.3f}"
    mates = f" +{len(contender.cohort) - 1}" if len(contender.cohort) > 1 else ""
    return (
        f"{name(request) + mates:<6}{contender.state:<14}{contender.tokens:>12,}{contender.remaining:>10.3f} s"
        f"{deadline:>12}{slack:>12}{priority:>11}"
    )


def outcome(history: History, name: Callable[[Request], str]) -> str:
    """Who was in time."""
    words = []
    for request in history.requests.values():
        first = history.first_tokens.get(request.id)
        if first is None:
            words.append(f"{name(request)} got none")
        else:
            late = request.slo.ttft is not None and first > request.deadline
            words.append(f"{name(request)} at {first:.3f} s{' (late)' if late else ''}")
    return f"First tokens: {', '.join(words[:26])}" + (" ..." if len(words) > 26 else "")


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("explain", __doc__)
    parser.add_argument("trace", metavar="TRACE", help="a file, or a generator's name")
    parser.add_argument(
        "--systems", type=items(nonempty), default=SYSTEMS, help="the last one is explained (default: %(default)s)"
    )
    parser.add_argument("--requests", type=count, default=50, help="the first so many (default %(default)s)")
    parser.add_argument("--decisions", type=count, default=100, help="to print (default %(default)s)")
    parser.add_argument("--arrivals", help="poisson, gamma=CV or recorded (default: recorded, if it has times)")
    parser.add_argument("--rate", type=positive, help="requests a second (default: the trace's own)")
    parser.add_argument("--seed", type=whole, default=0)
    parser.add_argument("--model", default="llama3-8b", help="default %(default)s")
    parser.add_argument("--device", default="a800-80g", help="default %(default)s")
    parser.add_argument("--tp", type=count, default=1, help="devices of each instance")
    parser.add_argument("--plot", type=picture, metavar="FILE.png", help="draw it into this PNG")
    add_workload_arguments(parser)
    args = parser.parse_args(argv)
    with parser.user_errors():
        outputs = Outputs(args.plot)
        variants = [variant(name) for name in args.systems]
        deployment = Deployment(args.model, args.device, args.tp)
        assert deployment.kv_blocks  # ValueError for a model or device that is not there, or does not fit
        workload = open_workload(args.trace, model=args.model, **workload_options(args))
        timed = isinstance(workload, Recorded) and workload.trace.timed
        cv = parse_process(args.arrivals or ("recorded" if timed else "poisson"))
        drawn = workload.draw(args.requests, seed=args.seed, cv=cv)
        arrivals = at_rate(drawn, workload, args.rate or workload.rate)
    runs = [explain(each, arrivals, deployment) for each in variants]
    print(text(runs[-1], args.decisions))
    if args.plot is not None:
        from examples.explain_plot import plot

        outputs.add(args.plot, plot(runs))
    for path in outputs.commit():
        print(f"\n  {path}")


if __name__ == "__main__":
    main()
