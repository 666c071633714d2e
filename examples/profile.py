"""Measure this machine's prefill times, fit the TTFT predictor, and show how well it fits: `make profile`."""

from __future__ import annotations

import argparse
import sys

from engine.config import EngineConfig
from engine.profile import Profile, load_or_measure
from models.load import load_model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="toy, toy-moe, smollm2, a folder, or org/name of the hub")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="default: what one prefill instance is given")
    parser.add_argument("--cached", action="store_true", help="show the cached profile, if there is one")
    args = parser.parse_args()
    try:
        model = load_model(args.model, dtype=args.dtype, device=args.device)
        threads, _ = EngineConfig(prefill_threads=args.threads).threads()
        profile = load_or_measure(model, args.model, threads, fresh=not args.cached)
    except ValueError as error:
        print(f"profile: {error}", file=sys.stderr)
        return 2
    show(profile)
    return 0


def show(profile: Profile) -> None:
    predictor = profile.predictor()
    print(", ".join(f"{name} {value}" for name, value in profile.provenance.items()))
    print(f"\n{'prefill':>24}  {'measured':>10}  {'predicted':>10}  error")
    for sample in profile.samples:
        context, tokens = sample.parts[0]
        shape = f"{len(sample.parts)} x {tokens}" if len(sample.parts) > 1 else f"{tokens}"
        shape += f" after {context}" if context else ""
        predicted = predictor(sample.parts)
        error = predicted / sample.seconds - 1
        print(f"{shape:>24}  {sample.seconds * 1e3:>7.1f} ms  {predicted * 1e3:>7.1f} ms  {error:+.1%}")
    print(
        f"\nseconds = {predictor.per_step:.3g} + {predictor.per_token:.3g} * tokens + {predictor.per_pair:.3g} * pairs"
        f"    mean error {predictor.error_mean:.1%}, largest {predictor.error_max:.1%}"
    )


if __name__ == "__main__":
    sys.exit(main())
