"""Fit the A800's host times and efficiency to published prefill times of Llama-3.1-8B; show the errors on the others.

    python -m examples.calibrate

engine/hardware.py holds the result. It was fitted before any figure of the papers was looked at.
"""

from __future__ import annotations

from engine.calibration import FITTED, LLAMA3_8B_ON_A800, fit_prefill, prefill_seconds
from engine.hardware import DEVICES
from models.architectures import ARCHITECTURES
from models.costs import model_costs


def main() -> None:
    costs, kept = model_costs(ARCHITECTURES["llama3-8b"]), DEVICES["a800-80g"]
    fitted = fit_prefill(costs, kept, {tokens: LLAMA3_8B_ON_A800[tokens] for tokens in FITTED})
    for name in ("launch", "step", "matmul_efficiency"):
        print(f"{name:>18}  fitted {getattr(fitted, name):.4g}  kept {getattr(kept, name):.4g}")
    print(f"\n{'tokens':>8}  measured  simulated  error")
    for tokens, measured in LLAMA3_8B_ON_A800.items():
        simulated = prefill_seconds(costs, kept, tokens)
        error, role = simulated / measured - 1, "fitted" if tokens in FITTED else "held out"
        print(f"{tokens:>8}  {measured * 1e3:>5.0f} ms  {simulated * 1e3:>6.1f} ms  {error:+.1%}  {role}")


if __name__ == "__main__":
    main()
