"""Tokenizers made in memory: one token a byte, byte-level BPE with merges, SentencePiece style with byte fallback."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

BOS, EOS = 256, 257  # of the byte tokenizer
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

TEMPLATE = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {{- '[' + message.role + ']' + message.content + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""

CORPUS = [
    "the quick brown fox jumps over the lazy dog " * 20,
    "Příliš žluťoučký kůň úpěl ďábelské ódy. " * 20,
    "敏捷的棕色狐狸跳过懒狗。" * 20,
    "😀 😀 👨‍👩‍👧 🚀 " * 20,
]


def byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of the 256 bytes: those that can be seen as themselves, the others from U+0100 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(0x100 + i): byte for i, byte in enumerate(unseen)}


@cache
def byte_tokenizer(add_bos: bool = False) -> Tokenizer:
    """The token of a byte is the byte; `<s>` is 256, `</s>` is 257, and `<word>`, an added token that is text, 258."""
    tokenizer = Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    tokenizer.add_tokens([AddedToken("<word>", special=False, normalized=False)])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return tokenizer


@cache
def bpe_tokenizer() -> Tokenizer:
    """Byte-level BPE with merges, as Llama 3, Qwen and SmolLM2 have: tokens end inside characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@cache
def fallback_tokenizer() -> Tokenizer:
    """As SentencePiece does it: `▁` begins a word, and a character without a token of its own is its bytes."""
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "q"), ("▁q", "u")]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz."]
    pieces += [left + right for left, right in merges]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer
