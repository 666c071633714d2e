"""Fit devices' host times and efficiencies to published prefill times; show the errors.

Llama-3.1-8B on A800, with the lengths left out of the fit; Qwen3-30B-A3B in chunks on two H100.

    python -m examples.calibrate

engine/hardware.py holds the result. It was fitted before any figure of the papers was looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.calibration import (
    FITTED,
    LLAMA3_8B_ON_A800,
    QWEN3_30B_ON_H100,
    chunk_seconds,
    fit_chunks,
    fit_prefill,
    prefill_seconds,
)
from engine.hardware import DEVICES, DeviceSpec
from examples.command import Parser
from models.architectures import ARCHITECTURES
from models.costs import model_costs


def main(argv: Sequence[str] | None = None) -> None:
    Parser("calibrate", __doc__).parse_args(argv)  # --help, and no other option
    llama_on_a800()
    print()
    qwen_on_h100()


def llama_on_a800() -> None:
    costs, kept = model_costs(ARCHITECTURES["llama3-8b"]), DEVICES["a800-80g"]
    fitted = fit_prefill(costs, kept, {tokens: LLAMA3_8B_ON_A800[tokens] for tokens in FITTED})
    compare(fitted, kept, "launch", "step", "matmul_efficiency")
    print(f"\n{'tokens':>8}  measured  simulated  error")
    for tokens, measured in LLAMA3_8B_ON_A800.items():
        simulated = prefill_seconds(costs, kept, tokens)
        error, role = simulated / measured - 1, "fitted" if tokens in FITTED else "held out"
        print(f"{tokens:>8}  {measured * 1e3:>5.0f} ms  {simulated * 1e3:>6.1f} ms  {error:+.1%}  {role}")


def qwen_on_h100() -> None:
    costs, kept = model_costs(ARCHITECTURES["qwen3-30b-a3b"], tp=2), DEVICES["h100-80g-nano-vllm"]
    fitted = fit_chunks(costs, kept, QWEN3_30B_ON_H100)
    efficiencies = ("grouped_efficiency", "attention_efficiency", "bandwidth_efficiency")
    compare(fitted, kept, "launch", "step", *efficiencies)
    print(f"\n{'chunk':>8}  {'experts':>22}  {'all else':>22}")
    for chunk, measured in QWEN3_30B_ON_H100.items():
        cells = [
            f"{theirs * 1e3:>6.0f} {ours * 1e3:>6.1f} ms {ours / theirs - 1:+.1%}"
            for theirs, ours in zip(measured, chunk_seconds(costs, kept, chunk), strict=True)
        ]
        print(f"{chunk:>8}  {cells[0]:>22}  {cells[1]:>22}")


def compare(fitted: DeviceSpec, kept: DeviceSpec, *names: str) -> None:
    for name in names:
        print(f"{name:>22}  fitted {getattr(fitted, name):.4g}  kept {getattr(kept, name):.4g}")


if __name__ == "__main__":
    main()
