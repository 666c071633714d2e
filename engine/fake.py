"""A model that counts: the token after t is t + 1. For lessons and tests of everything around a model.

It awaits the gates of a real one, writes K and V, reads them back and refuses to go on if they are not what was
written, so that a scheduler's or a pool's mistake shows as an error rather than as a wrong number.
"""

from __future__ import annotations

import torch

from engine.gate import Gate
from models.batch import Batch
from models.config import ModelConfig

OPERATORS = ("qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj")


class FakeModel:
    """`fail_on`: a forward pass that sees this token raises, as a broken model would.

    `calls` records (tokens, first layer, last layer) of every forward pass.
    """

    device = torch.device("cpu")
    dtype = cache_dtype = torch.float32

    def __init__(
        self,
        *,
        num_layers: int = 4,
        vocab_size: int = 1000,
        context: int = 4096,
        eos: int | None = None,
        fail_on: int | None = None,
    ) -> None:
        self.config = ModelConfig.from_hf(
            {
                "architectures": ["LlamaForCausalLM"],
                "num_hidden_layers": num_layers,
                "num_attention_heads": 1,
                "hidden_size": 2,
                "intermediate_size": 2,
                "rms_norm_eps": 1e-5,
                "max_position_embeddings": context,
                "vocab_size": vocab_size,
                "eos_token_id": eos,
            }
        )
        self.fail_on = fail_on
        self.calls: list[tuple[list[int], int, int]] = []

    def layer_operators(self, layer: int) -> tuple[str, ...]:
        return OPERATORS

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.fail_on is not None and bool((tokens == self.fail_on).any()):
            raise RuntimeError(f"the fake model was asked to fail on token {self.fail_on}")
        return tokens.to(torch.float32).unsqueeze(1)

    async def run_layers(self, x: torch.Tensor, first: int, last: int, batch: Batch, gate: Gate) -> torch.Tensor:
        self.calls.append((batch.tokens.tolist(), first, last))
        for layer in range(first, last):
            key = batch.cache.key[layer].flatten(0, 1)
            key[batch.slots, 0, 0] = batch.positions.to(torch.float32)
            await gate.operator("qkv_proj")
            for span in batch.spans:
                size = batch.cache.block_size
                positions = torch.arange(span.length)
                slots = torch.tensor(span.blocks)[positions // size] * size + positions % size
                if not torch.equal(key[slots, 0, 0], positions.to(torch.float32)):
                    raise RuntimeError(f"layer {layer}: the cache of blocks {span.blocks} is not what was written")
            for operator in OPERATORS[1:]:
                await gate.operator(operator)
        return x

    def head(self, x: torch.Tensor) -> torch.Tensor:
        following = (x[:, 0].to(torch.int64) + 1) % self.config.vocab_size
        return torch.nn.functional.one_hot(following, self.config.vocab_size).to(torch.float32)
