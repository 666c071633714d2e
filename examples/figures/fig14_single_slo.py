"""FlowPrefill's figure 14: what its machinery costs where there is little to gain: one type of request, one target.

ShareGPT's lengths, all of them with the target of a chat. Those of the published file are long: many cannot be in time
even if they run alone, whoever schedules them.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import matplotlib.pyplot as plt
from matplotlib.ticker import PercentFormatter

from engine.deployment import Deployment
from engine.timing import pass_seconds
from examples.figures.figure import Claim, Figure
from examples.figures.served import Served, average, served
from examples.figures.study import Study, gathered, generated
from examples.figures.style import LEGEND, headline, line, ratio_axis, tidy
from examples.figures.workers import Workers
from examples.palette import FAINT, INK, png
from models.costs import Volume

REQUESTS, SEEDS = 500, (1, 2, 3, 4)
SYSTEMS = ("distserve-cp2k", "distserve-cp2k order=s-edf", "flowprefill")
RATES = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)  # requests per second
HIGH = 5.0  # just below what the device can take


async def make(workers: Workers) -> Figure:
    deployment = Deployment(model="llama3-8b", hardware="a800-80g")
    study = Study(workers, deployment, generated("sharegpt", REQUESTS), SEEDS)

    async def measure(system: str, rate: float) -> Served:
        return average(await study.over_seeds(served, system, rate))

    keys = list(product(SYSTEMS, RATES))
    results = dict(zip(keys, await gathered(measure(*key) for key in keys), strict=True))
    most = {system: results[system, RATES[-1]].tokens_per_s for system in SYSTEMS}
    high = {system: results[system, HIGH].attainment for system in SYSTEMS}
    fcfs, urgent, ours = SYSTEMS
    possible = feasible(study)
    return Figure(
        title="FlowPrefill, figure 14: a single target (ShareGPT, all chat)",
        setting=(
            f"Llama3-8B on A800, simulated; {REQUESTS} requests a run with ShareGPT's lengths (those of 8K at most), "
            f"{len(SEEDS)} seeds; {possible:.0%} of them can be in time if they run alone"
        ),
        claims=[
            Claim(
                "Throughput equals that of DistServe-CP2K: the checks cost next to nothing",
                f"{most[ours] / most[fcfs] - 1:+.1%} prompt tokens a second under overload",
                holds=most[ours] >= 0.99 * most[fcfs],
            ),
            Claim(
                "At high rates more requests are in time",
                f"at {HIGH:g} a second {high[ours]:.0%}, against {high[fcfs]:.0%} (with S-EDF between chunks "
                f"{high[urgent]:.0%})",
                holds=high[ours] > max(high[fcfs], high[urgent]),
            ),
        ],
        rows=[
            {
                "system": system,
                "rate_per_s": rate,
                "tokens_per_s": each.tokens_per_s,
                "ttft_attainment": each.attainment,
                "met_per_s": each.met_per_s,
            }
            for (system, rate), each in results.items()
        ],
        png=plot(results, possible),
    )


def feasible(study: Study) -> float:
    """The share of the requests that would be in time alone."""
    timing, layers = study.deployment.timing, study.deployment.config.num_layers
    arrivals = [arrival for seed in study.seeds for arrival in study.load.arrivals(1.0, 1.0, seed)]
    alone = [pass_seconds(timing, layers, Volume.of(0, arrival.prompt_tokens, 1)) for arrival in arrivals]
    in_time = [seconds <= (arrival.slo.ttft or 0.0) for seconds, arrival in zip(alone, arrivals, strict=True)]
    return sum(in_time) / len(in_time)


def plot(results: Mapping[tuple[str, float], Served], possible: float) -> bytes:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for system in SYSTEMS:
        left.plot(RATES, [results[system, rate].tokens_per_s / 1e3 for rate in RATES], label=system, **line(system))
        right.plot(RATES, [results[system, rate].attainment for rate in RATES], **line(system))
    left.set_ylim(0)
    left.set_title("thousand prompt tokens a second", loc="left", fontsize=10)
    right.axhline(possible, color=FAINT, lw=1, ls=(0, (4, 3)))
    right.text(RATES[-1], possible + 0.01, "in time if alone", ha="right", fontsize=9, color=INK)
    right.set_ylim(-0.02, 1.02)
    right.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    right.set_title("requests that meet TTFT", loc="left", fontsize=10)
    for axes in (left, right):
        ratio_axis(axes, "requests per second")
        tidy(axes)
    headline(figure, "FlowPrefill, figure 14: ShareGPT, all with the target of a chat (Llama3-8B on A800)")
    figure.legend(*left.get_legend_handles_labels(), **LEGEND, ncols=len(SYSTEMS))
    return png(figure)
