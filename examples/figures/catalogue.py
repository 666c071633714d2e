"""Which figures there are. The key is the name on the command line and of the files; the value makes it.

A figure is an `async def make(workers: Workers) -> Figure`. Those in LIVE can also be measured on this machine,
by an `async def live(model: str) -> Figure`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from examples.figures import (
    fig03_chunks,
    fig04_batching,
    fig09_goodput,
    fig09_length,
    fig10_orders,
    fig11_budget,
    fig12_blocking,
    fig13_predictor,
    fig14_single_slo,
    fig15_long,
    fig16_colocated,
    fig17_moe,
    layered_dense,
    layered_fig02_chunks,
    layered_fig03_frontier,
    layered_fig04_attainment,
    layered_fig05_tokens,
    layered_tab01_coverage,
    layered_tab02_tradeoff,
    layered_tab06_latency,
    layered_tab07_experts,
    layered_tab08_energy,
    layered_tab11_groups,
    layered_urgent,
)
from examples.figures.figure import Figure
from examples.figures.workers import Workers

Make = Callable[[Workers], Awaitable[Figure]]
Live = Callable[[str], Awaitable[Figure]]

FIGURES: Mapping[str, Make] = {
    # FlowPrefill (arXiv 2602.16603)
    "fig3": fig03_chunks.make,
    "fig4": fig04_batching.make,
    "fig9": fig09_goodput.make,
    "fig9-length": fig09_length.make,
    "fig10": fig10_orders.make,
    "fig11": fig11_budget.make,
    "fig12": fig12_blocking.make,
    "fig13": fig13_predictor.make,
    "fig14": fig14_single_slo.make,
    "fig15": fig15_long.make,
    "fig16": fig16_colocated.make,
    "fig17": fig17_moe.make,
    # Layered Prefill (arXiv 2510.08055)
    "layered-fig2": layered_fig02_chunks.make,
    "layered-fig3": layered_fig03_frontier.make,
    "layered-fig4": layered_fig04_attainment.make,
    "layered-fig5": layered_fig05_tokens.make,
    "layered-tab1": layered_tab01_coverage.make,
    "layered-tab2": layered_tab02_tradeoff.make,
    "layered-tab6": layered_tab06_latency.make,
    "layered-tab7": layered_tab07_experts.make,
    "layered-tab8": layered_tab08_energy.make,
    "layered-tab11": layered_tab11_groups.make,
    "layered-dense": layered_dense.make,
    # Ours
    "layered-urgent": layered_urgent.make,
}

LIVE: Mapping[str, Live] = {
    "fig12": fig12_blocking.live,
    "fig13": fig13_predictor.live,
}
