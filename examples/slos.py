"""What counts as in time: SLO classes by the type of request, for each model, and the factor for another machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from engine.slo_classes import SLO_CLASSES
from scheduling.request import SLO

# Prefill of 1,024 tokens by Llama-3.1-8B on one A800, in seconds: what another machine's SLOs are scaled against.
A800_1K_PREFILL: Final = 0.080

# Layered Prefill does not publish its targets. These are ours: its TTFT rule of thumb and, as its p99 gap of 48 ms
# meets the TBT target and 129 ms does not, a round number between the two.
_LAYERED: Final = {"arxiv": SLO(ttft=10.0, tbt=0.1), "sharegpt": SLO(ttft=5.0, tbt=0.1)}

# TTFT and TBT in seconds on A800s. Llama-3.1-8B's are those of the FlowPrefill authors' benchmark; Qwen2.5-14B's are
# the defaults of a later version of it, probably the paper's; Llama-3-70B's are unverified, and come without TBT.
SLO_TABLES: Final[Mapping[str, Mapping[str, SLO]]] = {
    "llama3-8b": {**{name: SLO_CLASSES[name] for name in ("text", "image", "search", "file")}, **_LAYERED},
    "qwen2.5-14b": {
        "text": SLO(0.4, 0.1),
        "image": SLO(0.8, 0.05),
        "search": SLO(6.5, 0.2),
        "file": SLO(9.0, 0.2),
        **_LAYERED,
    },
    "llama3-70b": {"text": SLO(1.0), "image": SLO(2.0), "search": SLO(15.0), "file": SLO(18.0), **_LAYERED},
}


def slo_table(model: str) -> Mapping[str, SLO]:
    """The classes of `model`; a model without targets of its own has Llama-3.1-8B's, to be scaled to its speed."""
    return SLO_TABLES.get(model, SLO_TABLES["llama3-8b"])


def slo_of(label: str, table: Mapping[str, SLO]) -> SLO:
    """ValueError for a type that has no class."""
    if label not in table:
        raise ValueError(f"type {label!r} is none of {', '.join(table)}")
    return table[label]
