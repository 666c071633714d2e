"""FlowPrefill's figure 13: how well the TTFT predictor predicts.

Two predictors are fitted to the same device, and judged on passes that neither was fitted to: ours, whose terms are
those of the work (scheduling/predictor.py), and the paper's cubic of the number of tokens. On a batch, and on a chunk
behind others, the number of tokens does not tell how much attention there is.

Live (`--backend torch`) the passes are timed on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from random import Random
from statistics import mean

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import FuncFormatter, PercentFormatter

from engine.deployment import Deployment, profile
from engine.profile import SHAPES, Sample, fit, measure
from engine.timing import pass_seconds
from examples.arrivals import Arrival
from examples.driving import serving_threads
from examples.figures.figure import Claim, Figure
from examples.figures.study import generated
from examples.figures.style import headline, ratio_axis, tidy
from examples.figures.workers import Workers
from examples.palette import BLUE, INK, MARKERS, ORANGE, png
from models.costs import Volume
from models.load import load_model
from scheduling.predictor import Extent

Shape = tuple[Extent, ...]
Predictor = Callable[[Shape], float]  # seconds of a pass

OURS, CUBIC = "terms of the work", "cubic of the tokens"
REQUESTS = 400
BATCH_TOKENS = 4096
LENGTHS = (16, 32, 64, 128, 256, *range(512, 20481, 512))  # that the paper's profiler times
KINDS = ("prompt", "batch", "chunk")
CLOSE = 0.1  # mean error that we call close to the diagonal

# Live: other passes than the predictors are fitted to.
LIVE: Mapping[str, Sequence[Shape]] = {
    "prompt": [((0, tokens),) for tokens in (24, 48, 96, 192, 384, 768, 1280, 1536, 1792)],
    "batch": [((0, 32),) * 12, ((0, 100),) * 4, ((0, 200), (0, 300), (0, 100)), ((0, 512),) * 3],
    "chunk": [((512, 256),), ((768, 512),), ((1280, 512),)],
}


def shapes_of(arrivals: Sequence[Arrival]) -> dict[str, list[Shape]]:
    """Passes over what a workload asks for: prompts alone, texts together, and second chunks of long prompts."""
    prompts = [arrival.prompt_tokens for arrival in arrivals]
    batches: list[list[Extent]] = [[]]
    for tokens in (arrival.prompt_tokens for arrival in arrivals if arrival.label == "text"):
        if sum(size for _, size in batches[-1]) + tokens > BATCH_TOKENS:
            batches.append([])
        batches[-1].append((0, tokens))
    return {
        "prompt": [((0, tokens),) for tokens in prompts],
        "batch": [tuple(batch) for batch in batches if len(batch) > 1],
        "chunk": [((2048, tokens - 2048),) for tokens in prompts if tokens > 2048 + 256],
    }


def cubic(samples: Sequence[Sample]) -> Predictor:
    """The paper's: fitted to prompts alone, and once more without those far off; a batch is as long as its sum."""
    tokens = np.array([total(sample.parts) for sample in samples], float)
    seconds = np.array([sample.seconds for sample in samples])
    residuals = np.abs(np.polyval(np.polyfit(tokens, seconds, 3), tokens) - seconds)
    kept = residuals <= 0.4 * residuals.max()
    coefficients = np.polyfit(tokens[kept], seconds[kept], 3)
    return lambda shape: float(np.polyval(coefficients, total(shape)))


def total(shape: Shape) -> int:
    return sum(tokens for _, tokens in shape)


@dataclass(frozen=True, slots=True)
class Point:
    """A pass, how long it took, and how long each predictor thought it would, in seconds."""

    kind: str
    tokens: int
    measured: float
    predicted: Mapping[str, float]

    def error(self, predictor: str) -> float:
        return self.predicted[predictor] / self.measured - 1


async def make(workers: Workers) -> Figure:
    deployment = Deployment(model="llama3-8b", hardware="a800-80g")
    timing, layers = deployment.timing, deployment.config.num_layers

    def seconds(shape: Shape) -> float:
        return pass_seconds(timing, layers, sum((Volume.of(*extent, drawn=1) for extent in shape), Volume()))

    paper = cubic([Sample(((0, tokens),), seconds(((0, tokens),))) for tokens in LENGTHS])
    shapes = shapes_of(generated("qwen", REQUESTS).arrivals(1.0, 1.0, seed=1))
    points = compare(shapes, seconds, {OURS: profile(timing, layers), CUBIC: paper})
    return figure_of(
        points,
        title="FlowPrefill, figure 13: predicted and actual prefill times",
        setting=f"Llama3-8B on A800, cost model; passes over {REQUESTS} prompts like QwenTrace's",
        why="Up to 128 tokens a pass takes as long as the host needs to launch it: ours has such a floor, a cubic none",
    )


def compare(
    shapes: Mapping[str, Sequence[Shape]], seconds: Callable[[Shape], float], predictors: Mapping[str, Predictor]
) -> list[Point]:
    return [
        Point(kind, total(shape), seconds(shape), {name: predict(shape) for name, predict in predictors.items()})
        for kind, each in shapes.items()
        for shape in each
    ]


def figure_of(points: Sequence[Point], *, title: str, setting: str, why: str) -> Figure:
    def off(predictor: str, kind: str) -> float:
        return mean(abs(point.error(predictor)) for point in points if point.kind == kind)

    def errors(predictor: str) -> str:
        return ", ".join(f"{off(predictor, kind):.0%} ({kind})" for kind in KINDS)

    return Figure(
        title=title,
        setting=setting,
        claims=[
            Claim(
                "A polynomial of the tokens predicts TTFT: the points are close to the diagonal",
                f"mean error of a cubic: {errors(CUBIC)}; of our terms and floor: {errors(OURS)}",
                holds=off(CUBIC, "prompt") <= CLOSE,
                why=why,
            )
        ],
        rows=[
            {
                "kind": point.kind,
                "tokens": point.tokens,
                "measured_s": point.measured,
                **{f"predicted_{name.replace(' ', '_')}_s": seconds for name, seconds in point.predicted.items()},
            }
            for point in points
        ],
        png=plot(points, title),
    )


def plot(points: Sequence[Point], title: str) -> bytes:
    figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained", sharey="row")
    for column, (name, colour) in enumerate(((OURS, BLUE), (CUBIC, ORANGE))):
        above, below = axes[:, column]
        for kind, marker in zip(KINDS, MARKERS, strict=False):
            mine = [point for point in points if point.kind == kind]
            look = {"marker": marker, "s": 16, "facecolor": "none" if kind == "prompt" else colour, "edgecolor": colour}
            look |= {"linewidth": 0.8, "alpha": 0.7, "label": kind}
            above.scatter([1e3 * p.measured for p in mine], [1e3 * p.predicted[name] for p in mine], **look)
            below.scatter([p.tokens for p in mine], [p.error(name) for p in mine], **look)
        ends = [1e3 * f(point.measured for point in points) for f in (min, max)]
        above.plot(ends, ends, color=INK, lw=1)
        above.set_yscale("log")
        above.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        ratio_axis(above, "actual, ms")
        above.set_title(name, loc="left", fontsize=10, fontweight="bold")
        below.axhline(0, color=INK, lw=1)
        below.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        ratio_axis(below, "tokens in the pass")
        above.legend(frameon=False, fontsize=9, loc="upper left")
        tidy(above)
        tidy(below)
    axes[0, 0].set_ylabel("predicted, ms")
    axes[1, 0].set_ylabel("error of the prediction")
    headline(figure, title)
    return png(figure)


async def live(name: str) -> Figure:
    """Fitted to passes of this machine, and judged on others."""
    model, threads = load_model(name), serving_threads()
    shapes = [*SHAPES, *chain.from_iterable(LIVE.values())]
    Random(0).shuffle(shapes)  # so that a slow minute of the machine falls on all
    samples = {sample.parts: sample for sample in measure(model, threads, shapes)}
    fitted = [samples[shape] for shape in SHAPES if shape in samples]
    alone = [sample for sample in fitted if len(sample.parts) == 1 and sample.parts[0][0] == 0]
    predictors: dict[str, Predictor] = {OURS: fit(fitted), CUBIC: cubic(alone)}
    points = compare(LIVE, lambda shape: samples[shape].seconds, predictors)
    return figure_of(
        points,
        title=f"FlowPrefill, figure 13, live: predicted and actual prefill times ({name})",
        setting=f"{name}, {threads} thread(s), on this machine",
        why="A few lengths, timed on a machine that may have had other work",
    )
