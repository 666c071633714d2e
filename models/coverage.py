"""Which share of a layer's experts some rows meet, where nobody has routed them: the model of routing in simulations.

Routing is neither even nor independent, and a model of it that is would read far too many experts:

- Some experts are popular. A token takes a given expert with probability p, and p varies over the experts as a Beta
  distribution of mean experts_per_token / num_experts and shape `POPULARITY`. The smaller the shape, the more uneven.
  n tokens of different requests all miss an expert with probability E[(1 - p)^n] = B(a, b + n) / B(a, b).
- Tokens of one prompt are alike. L of them meet as many experts as L ** `LIKENESS` tokens of different requests.

Both numbers are fitted, to Layered Prefill's measurements of Qwen3-30B-A3B (arXiv:2510.08055; 128 experts, 8 a token):

- `POPULARITY` to its table 1, decode batches of ShareGPT, by least squares: coverage .50, .55, .70, .863 at 16, 32, 64,
  128 rows (of the first and third the paper says "below"). The model gives .466, .606, .724, .812: within .06.
- `LIKENESS` to one point of its figure 2: chunks of 512 tokens of an 8,192-token prompt load 765 GB in all, which is a
  coverage of .825. The other four points were not used: for chunks of 1,024, 2,048, 4,096 and 8,192 tokens the paper's
  plot shows 405, 213, 110 and 57 GB, and the model gives 405, 211, 109 and 55.
"""

from __future__ import annotations

from math import exp, lgamma

from models.config import MoEConfig

POPULARITY = 0.616
LIKENESS = 0.796


def independent_rows(tokens: int) -> float:
    """How many tokens of different requests meet as many experts as `tokens` consecutive ones of one sequence."""
    return float(tokens**LIKENESS)


def coverage(moe: MoEConfig, independent: float) -> float:
    """The expected share of a layer's experts that so many independent rows are routed to, 0 to 1."""
    mean = moe.experts_per_token / moe.num_experts
    if mean == 1:
        return min(independent, 1.0)
    a, b = POPULARITY, POPULARITY * (1 - mean) / mean
    return 1 - exp(lgamma(b + independent) + lgamma(a + b) - lgamma(b) - lgamma(a + b + independent))
