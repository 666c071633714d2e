"""Make the papers' figures and tables anew, and say what of their claims holds here.

    python -m examples.figures fig9
    python -m examples.figures fig12 --backend torch --model smollm2
    python -m examples.figures all

`figN` are FlowPrefill's; `layered-figN` and `layered-tabN` Layered Prefill's. Each prints the paper's claim,
ours, and whether it holds, and writes NAME.png and NAME.csv; where more than one is made, also README.md, the table
of all their claims.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

from examples.command import Outputs, Parser, count
from examples.figures.catalogue import FIGURES, LIVE
from examples.figures.figure import Figure, table, write
from examples.figures.workers import Workers


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("figures", __doc__)
    parser.add_argument("names", nargs="+", metavar="NAME", help=f"all, or some of {', '.join(FIGURES)}")
    parser.add_argument("--backend", choices=("sim", "torch"), default="sim", help="torch: live, on this machine")
    parser.add_argument("--model", help="live: what to load (default: smollm2)")
    parser.add_argument("--out", type=Path, default=Path("out/figures"), help="where to write (default %(default)s)")
    parser.add_argument("--workers", type=count, help="processes (simulated only; default: all cores)")
    args = parser.parse_args(argv)
    with parser.user_errors():
        live = args.backend == "torch"
        if args.model and not live:
            raise ValueError("--model is for --backend torch: what is simulated are the paper's models")
        if args.workers and live:
            raise ValueError("--workers is for simulation: it has no meaning with --backend torch")
        names = chosen(args.names, list(LIVE if live else FIGURES), live=live)
        Outputs(args.out / "README.md")  # OSError now, not after the work
    model = args.model or "smollm2"
    figures = asyncio.run(make_live(names, model, args.out) if live else make_simulated(names, args.workers, args.out))
    if len(figures) > 1:
        (args.out / "README.md").write_text(table(figures) + "\n", encoding="utf-8")
        print(args.out / "README.md")


def chosen(names: Sequence[str], there: Sequence[str], *, live: bool) -> list[str]:
    """`all`, or each of `names`. ValueError, naming those there are, for one that cannot be made."""
    if names == ["all"]:
        return list(there)
    for name in names:
        if name not in there:
            known = f"{name} cannot be measured live" if name in FIGURES else f"no figure {name!r}"
            raise ValueError(f"{known}; there are {', '.join(there)}{'' if live else ' and all'}")
    return list(dict.fromkeys(names))


async def make_simulated(names: Sequence[str], processes: int | None, folder: Path) -> dict[str, Figure]:
    """One after the other, each on all cores."""
    figures = {}
    with Workers(processes) as workers:
        for name in names:
            began = monotonic()
            figures[name] = await FIGURES[name](workers)
            report(name, figures[name], folder, monotonic() - began)
    return figures


async def make_live(names: Sequence[str], model: str, folder: Path) -> dict[str, Figure]:
    figures = {}
    for name in names:
        began = monotonic()
        shown = f"{name}-live"
        figures[shown] = await LIVE[name](model)
        report(shown, figures[shown], folder, monotonic() - began)
    return figures


def report(name: str, figure: Figure, folder: Path, seconds: float) -> None:
    print(f"{name}: {figure.text()}")
    for path in write(name, figure, folder):
        print(f"  {path}")
    print(f"  {seconds:.0f} s\n", flush=True)


if __name__ == "__main__":
    main()
