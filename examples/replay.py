"""Replay a workload against any OpenAI-compatible server, and measure it from the client's side.

    python -m examples.replay --url http://127.0.0.1:8000/v1 --trace qwen --rates 0.5,1 --json replay.json

Open loop: every request is sent when it is due, however far behind the server is. Servers of this project are sent SLO
fields, others are not (--dialect); the record of a run is that of `ablate`, so servers can be compared on one trace.
Bounded in number (--requests) and time: what is due after --seconds is not sent, and what is unfinished --drain seconds
after the last arrival is given up, and a miss. What only a server can know of itself (blocking, utilisation) is null.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx

from examples.arrivals import Arrival
from examples.client import DIALECTS, Exchange, Server, exchange
from examples.command import Outputs, Parser, count, items, positive, whole
from examples.experiment import Load, load_digest
from examples.findings import Findings
from examples.report import METRIC, csv_of, json_of, text
from examples.results import Record, fold
from examples.runner import Progress
from examples.workload import RECORDED, open_workload, parse_process
from examples.workload_options import add_workload_arguments, workload_options


async def replay(
    connection: httpx.AsyncClient, server: Server, arrivals: Sequence[Arrival], *, seed: int, drain: float
) -> list[Exchange]:
    """Send `arrivals` at their times from now on; give up what is unfinished `drain` seconds after the last."""
    progress = Progress("requests")
    bodies = [json.dumps(server.dialect.body(server.model, arrival, seed)).encode() for arrival in arrivals]
    began = perf_counter()
    exchanges = [Exchange(arrival, began + arrival.time) for arrival in arrivals]

    async def one(of: Exchange, body: bytes) -> None:
        progress.asked()
        await asyncio.sleep(max(0.0, of.due - perf_counter()))
        await exchange(connection, server, of, body, perf_counter)
        progress.done(fresh=True)

    tasks = [asyncio.create_task(one(of, body)) for of, body in zip(exchanges, bodies, strict=True)]
    await asyncio.wait(tasks, timeout=arrivals[-1].time + drain)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    progress.close()
    return exchanges


def record(exchanges: Sequence[Exchange], seconds: float) -> Record:
    """The run's figures (examples/results.py), those that a client can know."""
    return fold([each.row() for each in exchanges], seconds=seconds)


def errors(exchanges: Sequence[Exchange]) -> list[str]:
    """What went wrong, and how often; the most frequent first."""
    found = Counter(each.error for each in exchanges if each.error)
    given_up = sum(each.finish is None for each in exchanges)
    lines = [f"{number} x {error}" for error, number in found.most_common(5)]
    return lines + ([f"{given_up} given up, unfinished"] if given_up else [])


def client(args: argparse.Namespace) -> httpx.AsyncClient:
    """One that opens as many connections as there are requests under way."""
    key = os.environ.get(args.api_key_env or "", "")
    return httpx.AsyncClient(
        headers={"authorization": f"Bearer {key}"} if key else {},
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        timeout=httpx.Timeout(None, connect=10.0),
    )


async def meet(args: argparse.Namespace) -> Server:
    async with client(args) as connection:
        return await Server.meet(connection, args.url, args.model, args.dialect)


async def experiment(args: argparse.Namespace, server: Server, load: Load, rates: Sequence[float]) -> Findings:
    """All runs, one after the other."""
    name = args.name or server.model
    runs: list[Record] = []
    async with client(args) as connection:
        for scale, rate, seed in product(args.slo_scales, rates, args.seeds):
            drawn = load.arrivals(rate, scale, seed)
            arrivals = [arrival for arrival in drawn if arrival.time <= args.seconds]
            place = f"{rate:g} requests a second, seed {seed}"
            if unsent := len(drawn) - len(arrivals):
                print(f"  {place}: {unsent} of {len(drawn)} are due after {args.seconds:g} s (--seconds), and not sent")
            began = perf_counter()
            exchanges = await replay(connection, server, arrivals, seed=seed, drain=args.drain)
            identity = {"system": name, "rate": rate, "slo_scale": scale, "seed": seed}
            runs.append({**identity, **record(exchanges, perf_counter() - began)})
            for line in errors(exchanges):
                print(f"  {place}: {line}")
    config: dict[str, Any] = {
        "systems": {name: {"url": args.url, "model": server.model, "dialect": server.dialect.name}},
        "backend": "client",
        "load": repr(load),
        "rates": list(rates),
        "slo_scales": args.slo_scales,
        "seeds": args.seeds,
        "seconds": args.seconds,
        "drain": args.drain,
        "metric": args.metric,
    }
    return Findings(config, args.metric, [name], rates, args.slo_scales, args.seeds, runs, [], [])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser()
    args = parser.parse_args(argv)
    with parser.user_errors():
        outputs = Outputs(args.json, args.csv)
        if args.api_key_env is not None and not os.environ.get(args.api_key_env):
            raise ValueError(f"--api-key-env {args.api_key_env}: no such environment variable, or an empty one")
        options = workload_options(args)
        workload = open_workload(args.trace, model=args.slos_of, **options)
        cv = parse_process(args.arrivals)
        if cv is RECORDED and len(args.seeds) > 1:
            raise ValueError("recorded arrivals are the same for every seed: give one of --seeds, or poisson arrivals")
        load = Load(
            source=args.trace,
            digest=load_digest(args.trace, workload),
            requests=args.requests,
            cv=cv,
            model=args.slos_of,
            prompt_scale=args.prompt_scale,
            output_scale=args.output_scale,
            max_output=args.max_output,
            **options | {"slos": tuple(options["slos"].items())},
        )
        load.arrivals(1.0, 1.0, args.seeds[0])  # ValueError for arrivals that the source does not have
        server = asyncio.run(meet(args))
    try:
        findings = asyncio.run(experiment(args, server, load, args.rates or [workload.rate]))
    except KeyboardInterrupt:
        parser.exit(130, f"{parser.prog}: stopped; nothing has been written\n")
    print(text(findings))
    if args.json is not None:
        outputs.add(args.json, json_of(findings))
    if args.csv is not None:
        outputs.add(args.csv, csv_of(findings))
    for path in outputs.commit():
        print(f"  {path}")


def argument_parser() -> Parser:
    parser = Parser("replay", __doc__)
    group = parser.add_argument_group("server")
    group.add_argument("--url", default="http://127.0.0.1:8000/v1", help="default %(default)s")
    group.add_argument("--model", help="default: the first that the server has")
    group.add_argument("--dialect", choices=list(DIALECTS), help="default: by who owns the model, else openai")
    group.add_argument(
        "--api-key-env", metavar="VARIABLE", help="environment variable that holds a key, if one is needed"
    )
    group.add_argument("--name", help="of the system, in the results (default: the model)")
    group = parser.add_argument_group("load")
    group.add_argument("--trace", default="qwen", help="a file, or a generator of examples/workload.py (default qwen)")
    group.add_argument("--rates", type=items(positive), help="requests a second: a,b,c (default: the trace's own)")
    group.add_argument("--slo-scales", type=items(positive), default=[1.0], help="a,b,c (default 1)")
    group.add_argument(
        "--slos-of", default="llama3-8b", metavar="MODEL", help="whose SLO classes (default %(default)s)"
    )
    group.add_argument("--seeds", type=items(whole), default=[0], help="a,b,c (default 0)")
    group.add_argument("--requests", type=count, default=100, help="in each run (default %(default)s)")
    group.add_argument("--seconds", type=positive, default=120.0, help="of arrivals at most (default %(default)s)")
    group.add_argument("--drain", type=positive, default=30.0, help="seconds to wait behind them (default %(default)s)")
    group.add_argument("--arrivals", default="poisson", help="poisson, gamma=CV or recorded (default %(default)s)")
    group.add_argument("--prompt-scale", type=positive, default=1.0, help="of prompt lengths (default %(default)s)")
    group.add_argument("--output-scale", type=positive, default=1.0, help="of output lengths (default %(default)s)")
    group.add_argument("--max-output", type=count, help="tokens")
    group = parser.add_argument_group("results")
    group.add_argument("--metric", choices=list(METRIC), default="ttft", help="whose attainment (default %(default)s)")
    group.add_argument("--json", type=Path, metavar="FILE", help="as ablate writes it")
    group.add_argument("--csv", type=Path, metavar="FILE", help="a line for each run")
    add_workload_arguments(parser)
    return parser


if __name__ == "__main__":
    main()
