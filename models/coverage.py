"""Which share of a layer's experts some rows meet, where nobody has routed them: the model of routing in simulations.

Routing is neither even nor independent, and a model of it that is would read far too many experts:

- Some experts are popular. A token takes a given expert with probability p, and p varies over the experts as a Beta
  distribution of mean experts_per_token / num_experts and shape `POPULARITY`. The smaller the shape, the more uneven.
  n independent tokens all miss an expert with probability E[(1 - p)^n] = B(a, b + n) / B(a, b).
- Requests are alike. Tokens of n of them meet as many experts as n ** `KINSHIP` independent ones.
- Tokens of one prompt are even more alike. L of them meet as many experts as tokens of L ** `LIKENESS` requests.

All three are fitted, by least squares over nine shares, to what Layered Prefill measured of Qwen3-30B-A3B (128 experts,
8 a token) without groups of layers (arXiv:2510.08055):

- table 1, decode batches of ShareGPT of 16, 32, 64, 128 rows: below .50, about .55, below .70, .863. A bound counts
  only where the model breaks it. The model gives .402, .558, .713, .838.
- figure 2, a prompt of 8,192 tokens in chunks of 512, 1,024, 2,048, 4,096, 8,192: 765, 405, 213, 110, 57 GB, read off a
  plot, which are shares of .825, .873, .918, .949, .983. The model gives .806, .881, .932, .963, .981.

Two figures do not do: with independent requests the model is six points too high at 32 rows and five too low at 128.
"""

from __future__ import annotations

from math import exp, lgamma

from models.config import MoEConfig

POPULARITY = 1.87
KINSHIP = 0.793
LIKENESS = 0.746


def separate_rows(tokens: int) -> float:
    """How many tokens of different requests meet as many experts as `tokens` consecutive ones of one sequence."""
    return float(tokens**LIKENESS)


def coverage(moe: MoEConfig, separate: float) -> float:
    """The expected share of a layer's experts that so many rows, each of another request, are routed to, 0 to 1."""
    mean = moe.experts_per_token / moe.num_experts
    if mean == 1:
        return min(separate, 1.0)
    independent = separate**KINSHIP
    a, b = POPULARITY, POPULARITY * (1 - mean) / mean
    return 1 - exp(lgamma(b + independent) - lgamma(b) + lgamma(a + b) - lgamma(a + b + independent))
