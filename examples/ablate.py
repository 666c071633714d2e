"""Compare systems on the same requests: attainment by rate and SLO scale, knees, and what a change is worth.

    python -m examples.ablate --systems distserve,flowprefill --rates 4,8,12 --seeds 0,1,2 --knee 0.9 --plot knee.png
    python -m examples.ablate --systems flowprefill --set preempt=layer --set preempt=never --report ablation.md
    python -m examples.ablate --backend torch --model smollm2 --systems distserve,flowprefill --requests 60 --rates 1

Every --set adds a variant of each system with these answers changed (several at once: --set preempt=layer,order=edf).
All systems see the same requests, seed by seed, so differences are paired. An ablation that was interrupted goes on
where it was: finished runs are in --cache. How knees are searched for on curves that need not be monotone:
examples/search.py.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

from engine.simulation import Deployment
from examples.ablation import Ablation, carry_out
from examples.backends import Machine, simulated
from examples.command import Outputs, Parser, count, items, nonempty, picture, positive, share, whole
from examples.experiment import Live, Load, Variant, load_digest, variant
from examples.findings import Findings
from examples.report import METRIC, csv_of, json_of, markdown, text
from examples.runner import Cache, Carry, Cores, OneAtATime, Progress, Runner, cores
from examples.slos import A800_1K_PREFILL
from examples.workload import RECORDED, Recorded, open_workload, parse_process
from examples.workload_options import add_workload_arguments, workload_options
from scheduling.placement import Disaggregated

LONGEST_SHARE = 0.9  # of a live model's context: what the longest prompt is scaled to, to leave room for its output


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argument_parser()
    args = parser.parse_args(argv)
    machine: Machine | None = None
    with parser.user_errors():
        report_plot = args.report.with_suffix(".png") if args.report is not None and args.plot is None else args.plot
        outputs = Outputs(args.json, args.csv, report_plot, args.report)
        ablation = ablation_from(args)
        if isinstance(ablation.backend, Live):
            machine = Machine.prepare(ablation.backend)
            ablation = fit_to_machine(args, ablation, machine)
        cache = Cache(args.cache)
    try:
        findings = asyncio.run(experiment(ablation, machine, cache, args.workers or cores()))
    except (KeyboardInterrupt, BrokenProcessPool) as stop:
        code, why = (
            (130, "stopped") if isinstance(stop, KeyboardInterrupt) else (1, "a process was killed, from outside")
        )
        parser.exit(code, f"{parser.prog}: {why}; the same command goes on from here, with what {args.cache} has\n")
    finally:
        cache.close()
    print(text(findings))
    write(args, argv, ablation, findings, outputs, report_plot)
    for path in outputs.commit():
        print(f"  {path}")


def argument_parser() -> Parser:
    parser = Parser("ablate", __doc__)
    group = parser.add_argument_group("what is compared")
    group.add_argument(
        "--systems",
        type=items(nonempty),
        default=["distserve", "flowprefill"],
        help="a,b,c; with changes: flowprefill preempt=layer",
    )
    group.add_argument("--set", action="append", default=[], metavar="KEY=VALUE,...", help="add variants so changed")
    group.add_argument("--order", help="change every system's order: a name, or an import path like pkg.module:MyOrder")
    group.add_argument("--metric", choices=list(METRIC), default="ttft", help="whose attainment (default %(default)s)")
    group = parser.add_argument_group("under which load")
    group.add_argument("--trace", default="qwen", help="a file, or a generator of examples/workload.py (default qwen)")
    group.add_argument("--rates", type=items(positive), help="requests a second: a,b,c (default: the trace's own)")
    group.add_argument("--slo-scales", type=items(positive), default=[1.0], help="a,b,c (default 1)")
    group.add_argument("--seeds", type=items(whole), default=[0, 1, 2], help="a,b,c (default 0,1,2)")
    group.add_argument("--requests", type=count, help="in each run (default: 2,000 simulated, 100 live)")
    group.add_argument("--arrivals", default="poisson", help="poisson, gamma=CV or recorded (default %(default)s)")
    group.add_argument("--prompt-scale", type=positive, help="of prompt lengths (default: 1; live: so that they fit)")
    group.add_argument("--output-scale", type=positive, default=1.0, help="of output lengths (default %(default)s)")
    group.add_argument("--max-output", type=count, help="tokens")
    group = parser.add_argument_group("searched for")
    group.add_argument("--knee", type=share, metavar="SHARE", help="the highest rate with this attainment")
    group.add_argument("--min-slo", type=share, metavar="SHARE", help="the tightest SLO scale with this attainment")
    group = parser.add_argument_group("on what")
    group.add_argument("--backend", choices=("sim", "torch"), default="sim", help="simulated, or live on this machine")
    group.add_argument("--model", help="default: llama3-8b simulated, smollm2 live")
    group.add_argument("--device", help="default: a800-80g simulated; live: cpu")
    group.add_argument("--tp", type=count, help="devices of each instance (simulated only)")
    group.add_argument("--prefill-instances", type=count, default=1, help="or co-located ones (default 1)")
    group.add_argument("--decode-instances", type=count, default=1, help="of systems that have some (default 1)")
    group.add_argument("--workers", type=count, help="processes (simulated only; default: all cores)")
    group.add_argument("--cache", type=Path, default=Path("out/ablate.cache.jsonl"), help="default %(default)s")
    group = parser.add_argument_group("results")
    group.add_argument("--json", type=Path, metavar="FILE", help="runs, knees and configuration")
    group.add_argument("--csv", type=Path, metavar="FILE", help="a line for each run")
    group.add_argument("--plot", type=picture, metavar="FILE.png", help="curves and knees")
    group.add_argument("--report", type=Path, metavar="FILE.md", help="one Markdown file, and its picture if no --plot")
    group.add_argument("--question", help="the report's title (default: made of the systems)")
    add_workload_arguments(parser)
    return parser


def ablation_from(args: argparse.Namespace) -> Ablation:
    """All options, checked. ValueError or OSError says what is wrong."""
    live = args.backend == "torch"
    for option in ("tp", "workers"):
        if live and getattr(args, option) is not None:
            raise ValueError(f"--{option} is for simulation: it has no meaning with --backend torch")
    variants = variants_from(args.systems, args.set, args.order)
    if args.decode_instances > 1 and not any(isinstance(v.system.placement, Disaggregated) for v in variants):
        raise ValueError("--decode-instances: none of these systems has any, all decode beside their prefills")
    backend: Deployment | Live
    instances = {"prefill_instances": args.prefill_instances, "decode_instances": args.decode_instances}
    if live:
        backend = Live(args.model or "smollm2", args.device or "cpu", **instances)
    else:
        backend = Deployment(args.model or "llama3-8b", args.device or "a800-80g", args.tp or 1, **instances)
        assert backend.kv_blocks  # ValueError for a model or device that is not there, or does not fit
    options = workload_options(args)
    workload = open_workload(args.trace, model=str(backend.model), **options)
    cv = parse_process(args.arrivals)
    if cv is RECORDED and len(args.seeds) > 1:
        raise ValueError("recorded arrivals are the same for every seed: give one of --seeds, or poisson arrivals")
    requests = args.requests or (100 if live else 2000)
    if cv is RECORDED and isinstance(workload, Recorded):
        requests = min(requests, len(workload.trace.rows))  # what is sent is what the report says
    load = Load(
        source=args.trace,
        digest=load_digest(args.trace, workload),
        requests=requests,
        cv=cv,
        model=str(backend.model),
        prompt_scale=args.prompt_scale or 1.0,
        output_scale=args.output_scale,
        max_output=args.max_output,
        **options | {"slos": tuple(options["slos"].items())},
    )
    searching = args.knee is not None
    rates = args.rates or ([] if searching and args.min_slo is None else [workload.rate])
    for end in (min, max):  # ValueError for arrivals that the source does not have, and for scales beyond all numbers
        load.arrivals(end(rates, default=1.0), end(args.slo_scales), args.seeds[0])
    return Ablation(variants, backend, load, rates, args.slo_scales, args.seeds, args.metric, args.knee, args.min_slo)


def variants_from(systems: Sequence[str], sets: Sequence[str], order: str | None) -> list[Variant]:
    """The systems, and behind each its variants. A variant's changes come after the system's own, and win."""
    variants = []
    for words in (*systems, *sets):
        keys = [word.partition("=")[0] for word in words.replace(",", " ").split()]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise ValueError(f"{words!r} says {twice} twice: --set once more is another variant")
    for system in systems:
        name = system if order is None else f"{system} order={order}"
        variants += [variant(name), *(variant(f"{name} {settings.replace(',', ' ')}") for settings in sets)]
    return list({each.name: each for each in variants}.values())


def fit_to_machine(args: argparse.Namespace, ablation: Ablation, machine: Machine) -> Ablation:
    """Live: prompts scaled to the model's context, unless a scale was asked for, and SLOs to the machine's speed: its
    prefill time of 1,024 tokens over an A800's."""
    load = ablation.load
    if args.prompt_scale is None:
        drawn = [a.prompt_tokens for seed in ablation.seeds for a in load.arrivals(1.0, 1.0, seed)]
        room = LONGEST_SHARE * machine.engine(ablation.variants[0]).max_model_len
        load = replace(load, prompt_scale=min(1.0, room / max(drawn)))
    slo_base = machine.predictor([(0, 1024)]) / A800_1K_PREFILL
    return replace(ablation, load=replace(load, slo_base=round(slo_base, 2)))


async def experiment(ablation: Ablation, machine: Machine | None, cache: Cache, workers: int) -> Findings:
    progress = Progress()
    pool = Cores(simulated, workers)
    carry: Carry = pool
    if machine is not None:
        seed, rate = ablation.seeds[0], ablation.rates[0] if ablation.rates else ablation.load.workload().rate
        machine = await machine.calibrated(ablation.variants[0], ablation.load.arrivals(rate, 1.0, seed))
        carry = OneAtATime(machine.run)
    try:
        return await carry_out(ablation, Runner(carry, cache, progress))
    finally:
        pool.close()
        progress.close()


def write(
    args: argparse.Namespace,
    argv: Sequence[str],
    ablation: Ablation,
    findings: Findings,
    outputs: Outputs,
    picture: Path | None,
) -> None:
    """Everything that was asked for, into `outputs`."""
    if args.json is not None:
        outputs.add(args.json, json_of(findings))
    if args.csv is not None:
        outputs.add(args.csv, csv_of(findings))
    if picture is not None:
        from examples.ablate_plot import plot

        outputs.add(picture, plot(findings))
    if args.report is not None:
        link = os.path.relpath(picture, args.report.parent) if picture is not None else None
        command = "python -m examples.ablate " + shlex.join(argv)
        title = args.question or question(findings, args.trace)
        report = markdown(findings, question=title, setting=setting(ablation), command=command, plot=link)
        outputs.add(args.report, report)


def question(findings: Findings, trace: str) -> str:
    first, *others = findings.systems
    if not others:
        return f"How does {first} fare on {trace}?"
    them = others[0] if len(others) == 1 else f"{len(others)} other systems"
    return f"How {'does' if len(others) == 1 else 'do'} {them} compare with {first} on {trace}?"


def setting(ablation: Ablation) -> list[str]:
    """What the runs have in common, in words."""
    load, backend = ablation.load, ablation.backend
    arrivals = "as recorded" if load.cv is RECORDED else "Poisson" if load.cv == 1 else f"gamma, CV {load.cv:g}"
    scales = [(load.prompt_scale, "prompts"), (load.output_scale, "outputs"), (load.slo_base, "SLOs")]
    scaled = "".join(f"; {what} x {scale:.3g}" for scale, what in scales if scale != 1)
    instances = f"{backend.prefill_instances} prefill and {backend.decode_instances} decode instance(s)"
    where = f"{backend.model} on {backend.device}, live"
    if isinstance(backend, Deployment):
        where = f"{backend.model} on {backend.device.name}, tensor parallelism {backend.tp}, simulated"
    return [
        f"Requests: {load.requests:,} a run from `{load.source}`, arrivals {arrivals}{scaled}",
        f"Where: {where}; {instances}",
        f"Metric: {METRIC[ablation.metric]}",
    ]


if __name__ == "__main__":
    main()
