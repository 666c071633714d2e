"""What can never be served, and is therefore refused at once, with both numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.devices import Device
from engine.prompt import Blank
from scheduling.request import Sampling


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_model_len`: tokens of prompt and output together. Blocks: what one instance of each kind holds at most."""

    max_model_len: int
    vocab_size: int
    block_size: int
    prefill_blocks: int
    decode_blocks: int
    max_batch: int

    @classmethod
    def of(cls, devices: Sequence[Device], config: EngineConfig) -> Limits:
        quotas = {name: quota for device in devices for name, quota in device.pool.quotas.items()}
        prefill = min(quota.limit for name, quota in quotas.items() if not name.startswith("decode"))
        decode = min(quota.limit for name, quota in quotas.items() if not name.startswith("prefill"))
        shape = devices[0].model.config
        if config.max_model_len > shape.context_length:
            raise ValueError(
                f"max_model_len {config.max_model_len} is more than the {shape.context_length} tokens of the model"
            )
        fits = min(shape.context_length, min(prefill, decode) * config.block_size)
        length = config.max_model_len or fits
        return cls(length, shape.vocab_size, config.block_size, prefill, decode, config.max_batch)

    def why_not(self, prompt: Sequence[int], sampling: Sampling) -> str | None:
        """Why this can never be served; None if it can be. `max_tokens` beyond the context is no reason: it is cut."""
        if not prompt:
            return "the prompt is empty; it must have at least one token"
        for token in () if isinstance(prompt, Blank) else (min(prompt), max(prompt)):
            if not 0 <= token < self.vocab_size:
                return f"token id {token} is not in the vocabulary of {self.vocab_size}"
        length = len(prompt)
        if length >= self.max_model_len:
            return (
                f"the prompt has {length} tokens, and the context of {self.max_model_len} tokens must hold it and at "
                f"least one more"
            )
        if sampling.n > self.max_batch:
            return f"n is {sampling.n}; at most {self.max_batch} choices are decoded together"
        prefill = self._blocks(length)
        if prefill > self.prefill_blocks:
            holds = self._tokens(self.prefill_blocks)
            return f"the prompt has {length} tokens, and the KV cache for prefill holds {holds}"
        whole = self._blocks(min(length + sampling.max_tokens, self.max_model_len))
        decode = whole + (sampling.n - 1) * (whole - length // self.block_size)
        if decode > self.decode_blocks:
            return (
                f"prompt and max_tokens ask for {self._tokens(decode)} tokens of KV cache with n = {sampling.n}, and "
                f"the KV cache for decode holds {self._tokens(self.decode_blocks)}"
            )
        return None

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _tokens(self, blocks: int) -> int:
        return blocks * self.block_size
