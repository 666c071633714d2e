"""The command line's engine options, shared by the server and the examples."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace

import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.profile import load_or_measure
from models.load import load_model
from scheduling.change import ANSWERS, change
from scheduling.order import Late
from scheduling.orders import ORDERS
from scheduling.presets import PRESETS, System, preset
from scheduling.request import SLO


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, system and memory options. Each of them has an effect, or is refused by name in `engine_from_args`."""
    group = parser.add_argument_group("engine")
    group.add_argument("--model", default="smollm2", help="toy, toy-moe, smollm2, a folder, or org/name of the hub")
    group.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    group.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    group.add_argument("--decode-device", help="another device for the decode instances: K and V are copied there")
    group.add_argument("--system", default="flowprefill", choices=tuple(PRESETS))
    group.add_argument(
        "--order", help=f"whom first: {', '.join(ORDERS)}, or one of yours, as mypackage.mymodule:MyOrder"
    )
    group.add_argument("--preempt", help=f"where a prefill may be stopped: {', '.join(ANSWERS['preempt'])}")
    group.add_argument("--late", help=f"what becomes of requests that are late: {', '.join(Late)}")
    group.add_argument("--token-budget", type=int, help="tokens in a prefill batch; default: the system's")
    group.add_argument("--prefill-instances", type=int, default=1)
    group.add_argument("--decode-instances", type=int, default=1)
    group.add_argument(
        "--prefill-threads", type=int, default=0, help="of each instance; default: its share of the cores"
    )
    group.add_argument("--decode-threads", type=int, default=0)
    group.add_argument("--block-size", type=int, default=16, help="tokens in a KV block")
    group.add_argument("--num-blocks", type=int, default=0, help="KV blocks of each device; default: by --kv-gib")
    group.add_argument("--kv-gib", type=float, default=0.0, help="memory for K and V; default: a share of what is free")
    group.add_argument("--park-gib", type=float, default=0.0, help="what parked prefills may keep; default: by KV")
    group.add_argument("--max-model-len", type=int, default=0, help="prompt and output; default: what fits")
    group.add_argument("--max-batch", type=int, default=32, help="choices in a decode step")
    group.add_argument("--run-ahead", type=int, help="boundaries that CUDA kernels are queued ahead; default 1")
    group.add_argument("--seed", type=int, default=0, help="draws the seeds of sampled requests that bring none")


def system_from_args(args: argparse.Namespace) -> System:
    """The preset with the answers that the command line changes. ValueError if it has no such answer."""
    options = {"order": args.order, "preempt": args.preempt, "late": args.late, "budget": args.token_budget}
    settings = [f"{key}={value}" for key, value in options.items() if value is not None]
    return change(preset(args.system), *settings)


def engine_from_args(args: argparse.Namespace, *, default_slo: SLO | None = None) -> Engine:
    """Load the model, measure or look up its profile, and set the engine up; `await engine.start()` starts it.

    ValueError for every bad option or model, with a message fit to be shown.
    """
    device = torch_device(args.device)
    for name in ("kv_gib", "park_gib"):
        if not 0 <= getattr(args, name) < 2**20:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} must be a number of GiB, 0 or more, got {getattr(args, name)}")
    cores = os.cpu_count() or 1
    for name in ("prefill_threads", "decode_threads"):
        if getattr(args, name) > cores:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} {getattr(args, name)} is more than the {cores} cores of this machine")
    if args.run_ahead is not None and device.type != "cuda":
        raise ValueError("--run-ahead has no meaning on a CPU: nothing is queued ahead there")
    config = EngineConfig(
        system=system_from_args(args),
        prefill_instances=args.prefill_instances,
        decode_instances=args.decode_instances,
        prefill_threads=args.prefill_threads,
        decode_threads=args.decode_threads,
        block_size=args.block_size,
        num_blocks=args.num_blocks,
        kv_bytes=int(args.kv_gib * 2**30),
        park_limit_bytes=int(args.park_gib * 2**30),
        max_model_len=args.max_model_len,
        max_batch=args.max_batch,
        run_ahead=1 if args.run_ahead is None else args.run_ahead,
        default_slo=default_slo or SLO(),
        seed=args.seed,
    )
    model = load_model(args.model, dtype=args.dtype, device=device)
    decode_model = None
    if args.decode_device is not None:
        other = torch_device(args.decode_device)
        if other == device:
            raise ValueError(f"--decode-device {args.decode_device} is where the prefills run: leave it out")
        decode_model = load_model(args.model, dtype=args.dtype, device=other)
    prefill_threads, _ = config.threads()
    predictor = load_or_measure(model, args.model, prefill_threads).predictor()
    return Engine(model, replace(config, predictor=predictor), decode_model=decode_model)


def torch_device(name: str) -> torch.device:
    """The device of that name, or for `auto` the best there is. ValueError if it is none, or not here."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name}: not a device torch knows; use cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {name}: Layby runs on cpu and cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: this torch sees no CUDA device")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device
