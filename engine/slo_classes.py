"""SLO classes: names for targets, so that a client can say `slo: "chat"` and a report can say how chats fare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from scheduling.request import SLO

BEST_EFFORT: Final = "best-effort"

# The targets that FlowPrefill's authors set for Llama-3.1-8B on an A800, by the type of request.
SLO_CLASSES: Final[Mapping[str, SLO]] = {
    "text": SLO(ttft=0.25, tbt=0.1),
    "chat": SLO(ttft=0.25, tbt=0.1),  # another name for text
    "image": SLO(ttft=0.5, tbt=0.1),
    "search": SLO(ttft=4.0, tbt=0.2),
    "file": SLO(ttft=6.0, tbt=0.2),
    BEST_EFFORT: SLO(),
}


def parse_slo_class(text: str) -> tuple[str, SLO]:
    """`chat=250,100`: a name, TTFT and TBT in milliseconds; one left empty is no target. ValueError if malformed."""
    name, equals, targets = text.partition("=")
    ttft, _, tbt = targets.partition(",")
    if not name or not equals:
        raise ValueError(f"{text!r} is not of the form name=ttft_ms,tbt_ms")
    seconds: list[float | None] = []
    for value in (ttft, tbt):
        try:
            seconds.append(float(value) / 1000 if value else None)
        except ValueError:
            raise ValueError(f"{text!r}: {value!r} is not a number of milliseconds") from None
    return name, SLO(*seconds)
