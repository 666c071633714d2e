"""Measure this machine's prefill times, fit the TTFT predictor, and show how well it fits: `make profile`."""

from __future__ import annotations

from collections.abc import Sequence

from engine import measure
from engine.config import EngineConfig
from engine.machine import MachineProfile
from engine.options import torch_device
from engine.profile import Profile, load_or_measure
from examples.command import Parser
from examples.driving import run
from models.load import load_model
from scheduling.predictor import Extent

KV_BYTES = 1 << 30  # of the engine that decodes while it is measured


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("profile", __doc__)
    parser.add_argument("--model", default="smollm2", help="toy, toy-moe, smollm2, a folder, or org/name of the hub")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="default: what one prefill instance is given")
    parser.add_argument(
        "--operators", action="store_true", help="also what the simulator needs: operators, decode steps, slowdowns"
    )
    parser.add_argument("--cached", action="store_true", help="show the cached profile, if there is one")
    args = parser.parse_args(argv)
    with parser.user_errors():
        model = load_model(args.model, dtype=args.dtype, device=torch_device(args.device))
        config = EngineConfig(prefill_threads=args.threads, kv_bytes=KV_BYTES)
        profile = load_or_measure(model, args.model, config.threads()[0], fresh=not args.cached)
        show(profile)
        if args.operators:
            show_machine(run(measure.load_or_measure(model, args.model, config, fresh=not args.cached)))


def show(profile: Profile) -> None:
    predictor = profile.predictor()
    print(", ".join(f"{name} {value}" for name, value in profile.provenance.items()))
    print(f"\n{'prefill':>24}  {'measured':>10}  {'predicted':>10}  error")
    for sample in profile.samples:
        predicted = predictor(sample.parts)
        error = predicted / sample.seconds - 1
        print(f"{_shape(sample.parts):>24}  {sample.seconds * 1e3:>7.1f} ms  {predicted * 1e3:>7.1f} ms  {error:+.1%}")
    print(
        f"\nseconds = {predictor.per_step:.3g} + {predictor.per_token:.3g} * tokens + {predictor.per_pair:.3g} * pairs"
        f", at least {predictor.floor:.3g}"
        f"    mean error {predictor.error_mean:.1%}, largest {predictor.error_max:.1%}"
    )


def show_machine(machine: MachineProfile) -> None:
    """Operators in microseconds a layer, decode steps, and what prefills and decodes cost each other."""
    print(f"\n{'prefill':>24}" + "".join(f"{name:>14}" for name in machine.operators) + "   us a layer")
    for sample in machine.passes:
        print(f"{_shape(sample.parts):>24}" + "".join(f"{seconds * 1e6:>14.0f}" for seconds in sample.operators))
    print(f"\n{'decode step':>24}")
    for step in machine.steps:
        print(f"{f'{step.sequences} x {step.context:.0f} tokens':>24}  {step.seconds * 1e3:>7.1f} ms")
    beside = (
        ("prefills beside decodes", machine.prefill_slowdowns),
        ("decodes beside prefills", machine.decode_slowdowns),
    )
    for title, slowdowns in beside:
        times = ", ".join(f"{each.rows} rows {each.times:.2f} times" for each in slowdowns)
        print(f"\n{title:>24}  take longer: {times}")


def _shape(parts: Sequence[Extent]) -> str:
    context, tokens = parts[0]
    return (f"{len(parts)} x {tokens}" if len(parts) > 1 else f"{tokens}") + (f" after {context}" if context else "")


if __name__ == "__main__":
    main()
