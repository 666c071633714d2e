"""Does Layby work on this device, and how fast? One command, one JSON; made for the first machine of a new kind.

    python -m examples.device_check --device cuda > device.json

Every check runs in a process of its own, so that one that fails, crashes or hangs does not hide the rest:
`attention`, `parity`, `transformers`, `parks`, `engine` say whether results are right (examples/checks.py);
`bench_prefill` and `blocking` measure.
"""

from __future__ import annotations

import argparse
import json
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from examples import checks
from examples.driving import describe

SECONDS = {"bench_prefill": 300.0, "blocking": 240.0}  # limits; the other checks have a minute each


def figures_of(module: str, *options: str) -> dict[str, Any]:
    """Run one of the benchmarks as its command would, and return the JSON that it writes."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        path = Path(folder) / "figures.json"
        sys.argv = [module, *options, "--json", str(path)]
        runpy.run_module(f"examples.{module}", run_name="__main__")
        return {"passed": True, **json.loads(path.read_text())}


def bench_prefill(model_name: str, device: str) -> dict[str, Any]:
    return figures_of("bench_prefill", "--model", model_name, "--device", device)


def blocking(model_name: str, device: str) -> dict[str, Any]:
    return figures_of("blocking", "--model", model_name, "--device", device, "--parks", "50", "--pairs", "20")


Check = Callable[[str, str], dict[str, Any]]
CHECKS: dict[str, Check] = {
    "attention": checks.attention,
    "parity": checks.parity,
    "transformers": checks.against_transformers,
    "parks": checks.parks,
    "engine": checks.engine,
    "bench_prefill": bench_prefill,
    "blocking": blocking,
}


def run_apart(name: str, model_name: str, device: str) -> dict[str, Any]:
    """One check in a process of its own. Never raises for what goes wrong in there."""
    command = [sys.executable, "-m", "examples.device_check", "--model", model_name, "--device", device, "--one", name]
    began = perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS.get(name, 60.0))
    except subprocess.TimeoutExpired as expired:
        return {"passed": False, "error": f"no result after {expired.timeout:.0f} s"}
    seconds = perf_counter() - began
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"passed": False, "seconds": seconds, "error": (done.stderr or done.stdout).strip()[-2000:]}
    return {**json.loads(lines[-1]), "seconds": seconds}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="for the benchmarks and one of the park checks")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=list(CHECKS), help="default: all")
    parser.add_argument("--one", choices=CHECKS, help=argparse.SUPPRESS)  # what a process of its own is started with
    args = parser.parse_args(argv)
    if args.one is not None:
        with torch.inference_mode():
            print(json.dumps(CHECKS[args.one](args.model, args.device)))
        return
    results = {}
    for name in args.checks:
        print(f"{name} ...", end=" ", file=sys.stderr, flush=True)
        results[name] = run_apart(name, args.model, args.device)
        print("passed" if results[name]["passed"] else "FAILED", file=sys.stderr, flush=True)
    passed = all(check["passed"] for check in results.values())
    machine = describe(torch.device(args.device))
    print(json.dumps({"passed": passed, "machine": machine, "checks": results}, indent=2))
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
