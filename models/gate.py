"""What a forward pass asks of its gate; engine/gate.py has the real one."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

import torch


class Gate(Protocol):
    """`routed`: where someone counts experts, every mixture of experts appends its groups' ends (models/moe.py)."""

    routed: list[torch.Tensor] | None

    def operator(self, name: str) -> Awaitable[None]:
        """Operator `name` is done; to be awaited, as the forward pass may be asked to pull over here."""
        ...
