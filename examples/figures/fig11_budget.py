"""FlowPrefill's figure 11: how many tokens a batch may hold, under more load than the device can take.

Larger batches share more of the host's work, which is throughput. But a batch runs under its head's deadline: a text
that takes long prompts along holds up the texts that come meanwhile, since they are due later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, PercentFormatter

from engine.deployment import Deployment
from examples.figures.figure import Claim, Figure
from examples.figures.served import Served, average, served
from examples.figures.study import Study, gathered, generated
from examples.figures.style import LEGEND, headline, tidy
from examples.figures.workers import Workers
from examples.palette import BLUE, GREEN, MARKERS, ORANGE, png

REQUESTS, SEEDS = 600, (1, 2, 3, 4)
NONE = "none"
BUDGETS = (NONE, "1024", "2048", "4096", "8192", "16384")
LOADS = (3.0, 4.0, 6.0)  # over the trace's rate
CLAIMED = 4.0


async def make(workers: Workers) -> Figure:
    study = Study(workers, Deployment(model="llama3-8b", hardware="a800-80g"), generated("qwen", REQUESTS), SEEDS)

    async def measure(budget: str, load: float) -> Served:
        system = "flowprefill batch=alone" if budget == NONE else f"flowprefill budget={budget}"
        return average(await study.over_seeds(served, system, load * study.rate))

    keys = list(product(BUDGETS, LOADS))
    results = dict(zip(keys, await gathered(measure(*key) for key in keys), strict=True))
    at = {budget: results[budget, CLAIMED] for budget in BUDGETS}
    none, medium, large = at[NONE], at["4096"], at["8192"]
    best = max(at, key=lambda budget: at[budget].met_per_s)
    rate = CLAIMED * study.rate
    return Figure(
        title="FlowPrefill, figure 11: the token budget of a batch",
        setting=(
            f"Llama3-8B on A800, `flowprefill`, simulated; {REQUESTS} requests a run like QwenTrace's, {len(SEEDS)} "
            f"seeds; overloaded, with {rate:.3g} requests a second"
        ),
        claims=[
            Claim(
                "No batching has the lowest throughput",
                f"{none.tokens_per_s:,.0f} prompt tokens a second, against {medium.tokens_per_s:,.0f} with 4K",
                holds=none.tokens_per_s == min(each.tokens_per_s for each in at.values()),
                why=(
                    f"But by {medium.tokens_per_s / none.tokens_per_s - 1:.1%} only: most of the tokens are in long "
                    "prompts"
                ),
            ),
            Claim(
                "8K has slightly more throughput than 4K, and a lower attainment",
                f"{large.tokens_per_s / medium.tokens_per_s - 1:+.1%} throughput, {large.attainment:.0%} in time "
                f"instead of {medium.attainment:.0%}",
                holds=large.tokens_per_s > medium.tokens_per_s and large.attainment < medium.attainment,
            ),
            Claim(
                "4K is a good balance",
                f"most requests in time with a budget of {best}: {at[best].met_per_s:.2f} a second; with 4K "
                f"{medium.met_per_s:.2f}",
                holds=medium.met_per_s >= 0.98 * at[best].met_per_s,
                why=(
                    "A batch runs under its head's deadline. Up to 4K a text takes long prompts along, and texts that "
                    "come meanwhile, due later, wait for them. With 2K, as in the authors' code, they hardly can. What "
                    "else large batches suffer from: fig9-length"
                ),
            ),
        ],
        rows=[
            {
                "budget_tokens": budget,
                "rate_per_s": load * study.rate,
                "tokens_per_s": each.tokens_per_s,
                "ttft_attainment": each.attainment,
                "met_per_s": each.met_per_s,
            }
            for (budget, load), each in results.items()
        ],
        png=plot(results, study.rate),
    )


def plot(results: Mapping[tuple[str, float], Served], rate: float) -> bytes:
    figure, axes = plt.subplots(1, 3, figsize=(11.5, 3.9), layout="constrained")
    panels: dict[str, Callable[[Served, Served], float]] = {
        "throughput over that without batches": lambda at, none: at.tokens_per_s / none.tokens_per_s - 1,
        "requests that meet TTFT": lambda at, none: at.attainment,
        "requests in time a second": lambda at, none: at.met_per_s,
    }
    for place, (title, of) in zip(axes, panels.items(), strict=True):
        for load, colour, marker in zip(LOADS, (GREEN, BLUE, ORANGE), MARKERS, strict=False):
            values = [of(results[budget, load], results[NONE, load]) for budget in BUDGETS]
            label = f"{load * rate:.2g} requests per second"
            place.plot(BUDGETS, values, color=colour, marker=marker, label=label, lw=1.6, ms=5, mfc="white", mew=1.4)
        place.set_title(title, loc="left", fontsize=10)
        place.set_xticks(BUDGETS, [NONE, *(f"{int(budget) // 1024}K" for budget in BUDGETS[1:])])
        place.set_xlabel("token budget of a batch")
        tidy(place)
    axes[0].yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:+.0%}"))
    axes[1].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    headline(figure, "FlowPrefill, figure 11: the token budget of a batch, under overload (Llama3-8B on A800)")
    figure.legend(*axes[0].get_legend_handles_labels(), **LEGEND, ncols=len(LOADS))
    return png(figure)
