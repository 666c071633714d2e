"""The default model, with its real weights: its tokens, and its greedy text beside transformers'."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.gate import Gate
from kv.cache import KVCache
from models.batch import Batch
from models.decoder import Model
from models.hub import ModelNotFound, resolve
from models.load import load_model
from models.tokenizer import TokenizerFiles, load_tokenizer

STEPS = 64
CHAT = [{"role": "user", "content": "Why does a lorry use a layby? Answer in three sentences."}]
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "<|im_start|>user\nWhy does a slow lorry pull over into a layby?<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time, 12 příliš žluťoučkých koní",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return resolve("smollm2")
    except ModelNotFound as error:
        pytest.skip(f"SmolLM2 is to be had from no cache, no hub and no package index: {error}")


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load_model(folder, dtype="float32")


@pytest.fixture(scope="module")
def files(folder: Path) -> TokenizerFiles:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded.generation_config.eos_token_id = None  # here and there, go on to the full length
    return loaded


@torch.inference_mode()
def greedy(model: Model, prompts: Sequence[list[int]], steps: int) -> list[list[int]]:
    """Prefill all prompts as one cohort, then decode them as one batch: no engine, a cache and a gate."""
    config = model.config
    block_size, blocks_each = 16, -(-(max(map(len, prompts)) + steps) // 16)
    cache = KVCache(
        config.num_layers,
        blocks_each * len(prompts),
        block_size,
        config.num_kv_heads,
        config.head_dim,
        model.cache_dtype,
    )
    tables = [range(i * blocks_each, (i + 1) * blocks_each) for i in range(len(prompts))]
    new, contexts = [list(prompt) for prompt in prompts], [0] * len(prompts)
    generated: list[list[int]] = [[] for _ in prompts]
    for _ in range(steps):
        batch = Batch.build(cache, zip(new, contexts, tables, strict=True))
        forward = model.run_layers(model.embed(batch.tokens), 0, config.num_layers, batch, Gate())
        with pytest.raises(StopIteration) as done:  # a coroutine that nobody parks runs to its end
            forward.send(None)
        tokens = model.head(done.value.value[batch.last_rows]).argmax(-1).tolist()
        contexts = [context + len(part) for context, part in zip(contexts, new, strict=True)]
        new = [[token] for token in tokens]
        for text, token in zip(generated, tokens, strict=True):
            text.append(token)
    return generated


@pytest.mark.timeout(600)
def test_greedy_text_is_that_of_transformers(model: Model, reference: Any, files: TokenizerFiles) -> None:
    prompts = [files.tokenizer.encode(prompt).ids for prompt in PROMPTS]
    ours = greedy(model, prompts, STEPS)
    for prompt, text in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)  # left to itself, generate would mask <|im_end|> as padding
        theirs = reference.generate(ids, attention_mask=mask, max_new_tokens=STEPS, do_sample=False)
        theirs = theirs[0, len(prompt) :].tolist()
        assert files.tokenizer.decode(text) == files.tokenizer.decode(theirs)
        assert text == theirs


def test_it_makes_sense(model: Model, files: TokenizerFiles) -> None:
    """Wrong weights can agree with transformers loading the same wrong weights; they cannot know this."""
    prompts = [
        "The capital of France is",
        "<|im_start|>user\nWhat is the capital of Japan?<|im_end|>\n<|im_start|>assistant\n",
    ]
    first, second = greedy(model, [files.tokenizer.encode(prompt).ids for prompt in prompts], 8)
    assert files.tokenizer.decode(first).startswith(" Paris")
    assert "Tokyo" in files.tokenizer.decode(second)


def test_config(model: Model) -> None:
    config = model.config
    shape = (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim)
    assert shape == (30, 576, 9, 3, 64)
    assert (config.vocab_size, config.intermediate_size, config.max_position_embeddings) == (49_152, 1536, 8192)
    assert (config.rope.theta, config.rms_norm_eps, config.tie_word_embeddings) == (100_000.0, 1e-5, True)
    assert config.eos_token_ids == {2}


# What transformers makes of the same text with its own conversion of the GGUF.
TOKENS = {
    "Příliš žluťoučký kůň": [
        *(64, 144, 243, 6160, 1418, 20848, 18811, 139, 1374, 144, 115, 279, 30033, 91, 47546, 501, 144, 124, 144, 226)
    ],
    "你好，世界！2024年": [
        *(18645, 250, 48392, 138, 12831, 7906, 240, 178, 239, 230, 8083, 219, 34, 32, 34, 36, 32090, 129)
    ],
    "👩‍👩‍👧 🎉": [10813, 235, 119, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117, 15107, 232, 227],
    "def f(x):\n    return x**2 + 10_000\t# ok": [
        *(1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 1232, 216, 33, 32, 79, 32, 32, 32, 197, 19, 10907)
    ],
    "<|im_start|>user\nit's I'LL<|im_end|>\n": [1, 4093, 198, 269, 506, 339, 23, 16421, 2, 198],
    " 3.14159\n\n\n  end ": [216, 35, 30, 33, 36, 33, 37, 41, 1116, 3805, 1112, 216],
}


@pytest.mark.parametrize("text", TOKENS)
def test_tokens(files: TokenizerFiles, text: str) -> None:
    assert files.tokenizer.encode(text).ids == TOKENS[text]
    assert files.tokenizer.decode(TOKENS[text], skip_special_tokens=False) == text


def test_every_digit_is_a_token_of_its_own(files: TokenizerFiles) -> None:
    """Split before the words are: a space stays with what is before the digit. (transformers' conversion misses it.)"""
    assert files.tokenizer.encode("a  23").tokens == ["a", "ĠĠ", "2", "3"]


def test_chat_template(files: TokenizerFiles, folder: Path) -> None:
    assert files.special["bos_token"] == "<|im_start|>"
    assert files.special["eos_token"] == "<|im_end|>"
    assert files.eos_token_id == 2
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    assert theirs.chat_template == files.chat_template
    text = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("three sentences.<|im_end|>\n<|im_start|>assistant\n")
    assert files.tokenizer.encode(text).ids == theirs(text)["input_ids"]
