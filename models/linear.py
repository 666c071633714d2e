"""The two token-wise building blocks. Every projection and every norm of every family goes through these classes, so
that sharding a weight, or replacing a kernel, is done here once."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class Linear:
    """y = x W^T + b on rows [tokens, in_features] -> [tokens, out_features].

    Several projections of the same input share one weight, their outputs side by side (`parts`): one matrix product
    in place of three for q, k and v. The weight is allocated here, once and uninitialised; a loader fills its views.
    """

    def __init__(
        self, in_features: int, parts: dict[str, int], bias: bool, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.sizes = list(parts.values())
        self.names = list(parts)
        self.weight = torch.empty(sum(self.sizes), in_features, dtype=dtype, device=device)
        self.bias = torch.empty(sum(self.sizes), dtype=dtype, device=device) if bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def parameters(self, prefix: str) -> dict[str, torch.Tensor]:
        """Checkpoint name of each part's weight and bias -> the view it is copied into."""
        views = {}
        for kind, tensor in (("weight", self.weight), ("bias", self.bias)):
            if tensor is not None:
                for name, view in zip(self.names, torch.split(tensor, self.sizes), strict=True):
                    views[f"{prefix}{name}.{kind}"] = view
        return views


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, arXiv:1910.07467)."""

    def __init__(self, name: str, size: int, eps: float, dtype: torch.dtype, device: torch.device | str) -> None:
        self.name = name
        self.eps = eps
        self.weight = torch.empty(size, dtype=dtype, device=device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def parameters(self, prefix: str) -> dict[str, torch.Tensor]:
        return {f"{prefix}{self.name}.weight": self.weight}
