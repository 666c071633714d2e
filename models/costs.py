"""What the operators of a model cost, from its config: operations, bytes, kernels. No seconds: those are a device's.

The names are those that the model's gates report (models/decoder.py), in the same order; a test holds that. A norm
belongs to the operator behind it, RoPE and the writing of K and V to `qkv_proj`, a residual add to the operator before.

Under tensor parallelism every projection and the attention's heads are shared out over `tp` ranks (Megatron-LM,
arXiv:1909.08053): the figures are one rank's, and `o_proj`, `down_proj` and `combine` end with an all-reduce of the
hidden state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import NamedTuple

from models.config import ModelConfig, MoEConfig
from models.coverage import coverage, separate_rows


class Volume(NamedTuple):
    """How much one forward pass, or a part of it, computes and reads.

    rows        new tokens
    pairs       (query, key) pairs that attention computes
    keys        cached tokens whose K and V it reads: each sequence's length, once
    sequences   that the rows belong to
    drawn       rows of which the logits are needed
    alike       rows that meet no further experts, as tokens of one prompt are alike (models/coverage.py)
    """

    rows: int = 0
    pairs: float = 0.0
    keys: float = 0.0
    sequences: int = 0
    drawn: int = 0
    alike: float = 0.0

    @classmethod
    def of(cls, context: int, rows: int, drawn: int = 0) -> Volume:
        """Of the `rows` tokens of one sequence that follow its first `context`."""
        pairs = rows * context + rows * (rows + 1) / 2
        return cls(rows, pairs, context + rows, 1, drawn, rows - separate_rows(rows))

    def __add__(self, other: object) -> Volume:
        if not isinstance(other, Volume):
            return NotImplemented
        (rows, pairs, keys, sequences, drawn, alike), more = self, other
        return Volume(
            rows + more.rows,
            pairs + more.pairs,
            keys + more.keys,
            sequences + more.sequences,
            drawn + more.drawn,
            alike + more.alike,
        )

    def later(self, steps: int) -> Volume:
        """Of the same decode step so many steps later: every sequence is that much longer, and has one new row."""
        longer = self.sequences * steps
        keys = self.keys + longer
        return Volume(self.sequences, keys, keys, self.sequences, self.drawn)


def whole(separate: float) -> float:
    """The share of its weights that a dense operator reads: all of them, however few the rows."""
    return 1.0


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator on one rank. `coverage(separate)`: the share of `weight_bytes` that so many separate rows
    read; experts that no row is routed to are not read."""

    name: str
    flops_per_row: float = 0.0
    flops_per_pair: float = 0.0
    weight_bytes: float = 0.0
    bytes_per_row: float = 0.0  # activations, and K and V written
    bytes_per_key: float = 0.0  # K and V read
    reduced_bytes_per_row: float = 0.0  # of the all-reduce behind it
    kernels: int = 1  # launches
    grouped: bool = False  # one matrix product for many weights, each with rows of its own
    coverage: Callable[[float], float] = whole

    def flops(self, volume: Volume) -> float:
        return self.flops_per_row * volume.rows + self.flops_per_pair * volume.pairs

    def weights_read(self, volume: Volume) -> float:
        """Bytes."""
        return self.weight_bytes * self.coverage(volume.rows - volume.alike)

    def bytes(self, volume: Volume) -> float:
        """Read and written in all."""
        return self.weights_read(volume) + self.bytes_per_row * volume.rows + self.bytes_per_key * volume.keys


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """`layers`: the operators of every layer in turn; consecutive layers that are alike. `head` counts the drawn rows
    only, final norm included. `weight_bytes` and `kv_bytes_per_token`: what one rank holds."""

    layers: tuple[tuple[Operator, ...], ...]
    embed: Operator
    head: Operator
    weight_bytes: float
    kv_bytes_per_token: float
    tp: int = 1

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def stretches(self, first: int, last: int) -> list[tuple[int, tuple[Operator, ...]]]:
        """The layers [first, last) as (how many, their operators), alike ones together."""
        return [(len(list(alike)), operators) for operators, alike in groupby(self.layers[first:last])]


def model_costs(config: ModelConfig, *, tp: int = 1, itemsize: int = 2) -> ModelCosts:
    """The costs of a decoder on one of `tp` ranks; `itemsize`: bytes of a weight, an activation, a K or V.

    ValueError if the heads cannot be shared out evenly. Fewer KV heads than ranks are replicated.
    """
    hidden, inner, vocab, head_dim = config.hidden_size, config.intermediate_size, config.vocab_size, config.head_dim
    if tp < 1 or config.num_heads % tp or (config.num_kv_heads % tp and tp % config.num_kv_heads):
        raise ValueError(f"tp {tp} does not divide {config.num_heads} heads over {config.num_kv_heads} KV heads")
    heads, kv_heads = config.num_heads // tp, max(1, config.num_kv_heads // tp)
    q, kv, inner = heads * head_dim, 2 * kv_heads * head_dim, -(-inner // tp)
    reduced = hidden * itemsize if tp > 1 else 0

    def projection(
        name: str, wide_in: int, wide_out: int, *, kernels: int, moved: int = 0, reduced: int = 0
    ) -> Operator:
        """A matrix product; `moved`: elements a row that its norm, activation or residual add reads and writes."""
        return Operator(
            name,
            flops_per_row=2 * wide_in * wide_out,
            weight_bytes=wide_in * wide_out * itemsize,
            bytes_per_row=(wide_in + wide_out + moved) * itemsize,
            reduced_bytes_per_row=reduced,
            kernels=kernels,
        )

    attention = (
        # norm, matrix product, RoPE, writing K and V; Qwen3 also normalises q and k
        projection(
            "qkv_proj", hidden, q + kv, kernels=6 if config.family.qk_norm else 4, moved=2 * hidden + 2 * (q + kv)
        ),
        Operator(
            "attention",
            flops_per_pair=4 * q,  # q k^T and its product with v
            bytes_per_row=2 * q * itemsize,
            bytes_per_key=kv * itemsize,
            kernels=1,
        ),
        projection("o_proj", q, hidden, kernels=1, moved=2 * hidden, reduced=reduced),
    )
    dense = (
        projection("gate_up_proj", hidden, 2 * inner, kernels=3, moved=2 * hidden + 3 * inner),  # norm, product, SwiGLU
        projection("down_proj", inner, hidden, kernels=1, moved=2 * hidden, reduced=reduced),
    )
    embedding = hidden * vocab * itemsize / tp
    embed = Operator("embed", bytes_per_row=2 * hidden * itemsize, kernels=1)
    head = projection("head", hidden, -(-vocab // tp), kernels=2, moved=2 * hidden)
    sparse = _experts(hidden, config.moe, tp, itemsize, reduced) if config.moe is not None else ()
    layers = tuple(attention + (sparse if config.is_sparse(i) else dense) for i in range(config.num_layers))
    weights = sum(operator.weight_bytes for layer in layers for operator in layer)
    weights += embedding * (1 if config.tie_word_embeddings else 2)
    kv_bytes = config.num_layers * kv * itemsize
    return ModelCosts(layers, embed, head, weights, kv_bytes, tp)


def _experts(hidden: int, moe: MoEConfig, tp: int, itemsize: int, reduced: int) -> tuple[Operator, ...]:
    """A mixture of experts. Tensor parallelism shares out each expert, not the experts; every rank has the router."""
    k, inner = moe.experts_per_token, -(-moe.intermediate_size // tp)
    expert = 3 * hidden * inner  # weights of one, on one rank
    return (
        # norm, product, softmax with the choice
        Operator(
            "router",
            flops_per_row=2 * hidden * moe.num_experts,
            weight_bytes=hidden * moe.num_experts * itemsize,
            bytes_per_row=(3 * hidden + 2 * moe.num_experts) * itemsize,
            kernels=3,
        ),
        Operator("dispatch", bytes_per_row=2 * k * hidden * itemsize, kernels=2),  # the sort, the copies
        Operator(
            "experts",
            flops_per_row=2 * k * expert,
            weight_bytes=moe.num_experts * expert * itemsize,
            bytes_per_row=k * (2 * hidden + 6 * inner) * itemsize,
            kernels=3,  # product, SwiGLU, product
            grouped=True,
            coverage=partial(coverage, moe),
        ),
        Operator(
            "combine",
            flops_per_row=2 * k * hidden,
            bytes_per_row=(k + 2) * hidden * itemsize,
            reduced_bytes_per_row=reduced,
            kernels=1,
        ),
    )
