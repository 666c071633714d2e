"""Draw when decoding requests had their tokens, and when long prompts were waiting."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt

from examples.demo_layered import Shown
from examples.palette import BLUE, INK, ORANGE, png


def plot(shown: Sequence[Shown]) -> bytes:
    """A panel for each system, a lane for each decoding request, a tick for each token."""
    figure, panels = plt.subplots(len(shown), 1, figsize=(10, 1.7 * len(shown)), layout="constrained", sharex=True)
    for axes, each in zip(panels, shown, strict=True):
        for began, ended in each.lanes.waits.values():
            axes.axvspan(began, ended, color=ORANGE, alpha=0.25, lw=0)
        axes.eventplot(list(each.lanes.tokens.values()), colors=BLUE, linelengths=0.7, linewidths=0.8)
        ttfts = " and ".join(f"{1e3 * ttft:.0f}" for ttft in each.ttfts)
        title = (
            f"{each.name}: longest gap {1e3 * each.longest_gap:.0f} ms; first tokens of long prompts after {ttfts} "
            f"ms; {each.prompt_bytes / 1e6:.0f} MB of experts read for them"
        )
        axes.set_title(title, loc="left", fontsize=9, color=INK)
        axes.set_yticks([])
        axes.spines[["top", "right", "left"]].set_visible(False)
    panels[-1].set_xlim(0, 1.15 * max(ended for each in shown for _, ended in each.lanes.waits.values()))
    panels[-1].set_xlabel("seconds; a tick for each token of a decoding request, shaded while a long prompt waits")
    return png(figure)
