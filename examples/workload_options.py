"""The command line's options for how a TRACE is read, shared by all examples that take one."""

from __future__ import annotations

import argparse
from typing import Any

from engine.slo_classes import parse_slo_class
from scheduling.request import SLO


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument("--slo-class", metavar="TYPE", help="of requests whose source has no types (default: text)")
    group.add_argument(
        "--slo", action="append", default=[], type=_slo, metavar="TYPE=TTFT_MS,TBT_MS", help="targets of a type"
    )
    group.add_argument("--allow-equal-times", action="store_true", help="take equal times in a file as a burst")
    group.add_argument("--keep-history", action="store_true", help="Qwen-Bailian: count a chat's earlier turns too")


def workload_options(args: argparse.Namespace) -> dict[str, Any]:
    """What `open_workload` takes of them."""
    return {
        "slo_class": args.slo_class,
        "slos": dict(args.slo),
        "allow_equal_times": args.allow_equal_times,
        "keep_history": args.keep_history,
    }


def _slo(text: str) -> tuple[str, SLO]:
    try:
        return parse_slo_class(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
