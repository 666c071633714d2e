"""Text: incremental decoding (C1), stop strings (C3, C4), chat templates and their BOS (C7, C20)."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from text_helpers import (
    BOS,
    CORPUS,
    EOS,
    SPECIAL,
    TEMPLATE,
    bpe_tokenizer,
    byte_tokenizer,
    fallback_tokenizer,
)
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from engine.text import Detokenizer, PromptError, TextCodec

TOKENIZERS = {"bytes": byte_tokenizer, "bpe": bpe_tokenizer, "sentencepiece": fallback_tokenizer}
MIXED = "Žluťoučký kůň 😀👨‍👩‍👧, 敏捷的棕色狐狸 🚀 the quick"


def codec(tokenizer: Tokenizer, template: str | None = None) -> TextCodec:
    return TextCodec(tokenizer, template, SPECIAL)


def deltas(tokenizer: Tokenizer, tokens: list[int], stop: list[str] | None = None) -> list[str]:
    stream = codec(tokenizer).stream(stop or [])
    return [*(stream.push(token) for token in tokens), stream.flush()]


# Incremental decoding


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=40))
@example(text=MIXED)
@example(text="😀" * 30)  # characters one after another, beyond the decoder's window
@example(text="".join(CORPUS))
def test_deltas_join_to_the_text_and_never_show_a_broken_character(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    shown = deltas(tokenizer, tokens)
    assert "".join(shown) == tokenizer.decode(tokens)
    assert not any("\ufffd" in delta for delta in shown)


@given(raw=st.lists(st.one_of(st.integers(0, 255), st.sampled_from(list("😀é日a".encode()))), max_size=60))
def test_any_bytes_decode_as_they_do_all_at_once(raw: list[int]) -> None:
    """Models do generate bytes that are no text. One U+FFFD for each broken sequence, and what follows is intact."""
    assert "".join(deltas(byte_tokenizer(), raw)) == bytes(raw).decode(errors="replace")


@given(raw=st.lists(st.one_of(st.integers(0, 255), st.sampled_from(list("😀é日a".encode()))), max_size=40))
@example(raw=list("日".encode() + b"\xff" + "日".encode()))
def test_broken_bytes_of_a_byte_fallback_invent_nothing_and_leave_words_intact(raw: list[int]) -> None:
    """Its decoder gives up a whole run of bytes for a broken one, but what has been shown cannot be taken back."""
    tokenizer = fallback_tokenizer()
    vocabulary = tokenizer.get_vocab()
    tokens = [vocabulary[f"<0x{byte:02X}>"] for byte in raw]
    *shown, word, rest = deltas(tokenizer, [vocabulary["q"], *tokens, vocabulary["▁the"]])
    joined = "".join(shown) + word + rest
    assert joined.startswith("q") and word.endswith(" the") and not rest
    intact = iter(bytes(raw).decode(errors="ignore"))
    assert all(character in intact for character in joined[1:-4].replace("\ufffd", ""))  # in their order


def test_a_character_shown_before_broken_bytes_stays() -> None:
    tokenizer = fallback_tokenizer()
    tokens = [tokenizer.get_vocab()[f"<0x{byte:02X}>"] for byte in "日".encode() + b"\xff"]
    assert tokenizer.decode(tokens) == "\ufffd" * 4
    shown = "".join(deltas(tokenizer, tokens))
    assert shown[0] == "日" and set(shown[1:]) == {"\ufffd"}


def test_broken_bytes_do_not_hold_back_what_follows() -> None:
    """A lead byte that nothing completes is given up as soon as that is certain, not at the end."""
    stream = codec(byte_tokenizer()).stream()
    assert [stream.push(byte) for byte in b"\xe6" + b"abc"] == ["", "\ufffda", "b", "c"]


def test_an_unfinished_character_is_held_and_flushed_at_the_end() -> None:
    stream = codec(byte_tokenizer()).stream()
    assert [stream.push(byte) for byte in b"a\xf0\x9f\x98"] == ["a", "", "", ""]
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_token_costs_the_same_however_many_came_before(kind: str) -> None:
    class Counting:
        widest = 0

        def decode(self, tokens: list[int]) -> str:
            self.widest = max(self.widest, len(tokens))
            return TOKENIZERS[kind]().decode(tokens)

    counting = Counting()
    detokenizer = Detokenizer(counting)  # type: ignore[arg-type]
    for token in TOKENIZERS[kind]().encode(MIXED * 20, add_special_tokens=False).ids:
        detokenizer.push(token)
    assert counting.widest <= 24


def test_special_tokens_are_no_text_and_added_ones_are() -> None:
    shown = deltas(byte_tokenizer(), [BOS, *b"a", 258, 0xC3, EOS, 0xA9])  # 258 is <word>; the é is torn apart
    assert "".join(shown) == "a<word>é"


def test_position_counts_the_characters_before_a_token() -> None:
    stream = codec(byte_tokenizer()).stream(stop=["zz"])
    positions = []
    for byte in "é1z2".encode():
        positions.append(stream.position)
        stream.push(byte)
    assert positions == [0, 0, 1, 2, 3]  # the held z counts


# Stop strings


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("one two three", ["two"], "one "),
        ("one two three", ["four"], "one two three"),
        ("aab", ["ab"], "a"),  # the first a begins no stop string, the second does
        ("ababac", ["abac"], "ab"),
        ("stop", ["stop"], ""),
        ("x\n\ny", ["\n\n"], "x"),
        ("abcd", ["bcd", "c"], "ab"),  # c ends first
        ("abcd", ["c", "bc"], "a"),  # they end together: the longer
        ("kůň 😀!", ["😀"], "kůň "),
    ],
)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_text_ends_before_the_first_stop_string(kind: str, text: str, stop: list[str], shown: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(deltas(tokenizer, tokens, stop)) == shown


@given(
    text=st.text("ab", max_size=30),
    stop=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_no_prefix_of_a_stop_string_leaks(text: str, stop: list[str]) -> None:
    """After every token, exactly what may still become a stop string is held back."""
    stream = codec(byte_tokenizer()).stream(stop)
    beginnings = [one[:length] for one in stop for length in range(1, len(one))]
    shown, so_far = "", ""
    for letter in text:
        shown += stream.push(ord(letter))
        so_far += letter
        if ended := [one for one in stop if so_far.endswith(one)]:
            assert stream.stopped
            assert shown == so_far.removesuffix(max(ended, key=len))
            return
        held = max((len(one) for one in beginnings if so_far.endswith(one)), default=0)
        assert shown == so_far[: len(so_far) - held]
    assert shown + stream.flush() == text
    assert not stream.stopped


@given(
    text=st.text("abc ", max_size=30),
    stop=st.lists(st.text("abc ", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings_do_not_depend_on_how_text_is_cut_into_tokens(text: str, stop: list[str]) -> None:
    by_bytes = deltas(byte_tokenizer(), list(text.encode()), stop)
    by_words = deltas(bpe_tokenizer(), bpe_tokenizer().encode(text).ids, stop)
    assert "".join(by_bytes) == "".join(by_words)


def test_nothing_comes_after_a_stop_string() -> None:
    stream = codec(byte_tokenizer()).stream(["b"])
    assert [stream.push(byte) for byte in b"abc"] == ["a", "", ""]
    assert stream.stopped
    assert stream.flush() == ""


def test_held_text_is_delivered_when_generation_ends_for_another_reason() -> None:
    stream = codec(byte_tokenizer()).stream(["###"])
    assert [stream.push(byte) for byte in b"a##"] == ["a", "", ""]
    assert stream.flush() == "##"
    assert not stream.stopped


# Prompts


def encode(one: TextCodec, text: str) -> list[int]:
    return asyncio.run(one.encode(text))


def test_a_plain_prompt_has_one_bos() -> None:
    one = codec(byte_tokenizer(add_bos=True))
    assert encode(one, "hi") == [BOS, *b"hi"]
    assert encode(one, "<s>hi") == [BOS, *b"hi"]  # a prompt that a client has made from the template itself
    assert encode(codec(byte_tokenizer()), "hi") == [*b"hi"]


def test_a_chat_has_the_bos_of_its_template_alone() -> None:
    chat = [{"role": "user", "content": "hi"}]
    tokens = asyncio.run(codec(byte_tokenizer(add_bos=True), TEMPLATE).encode_chat(chat))
    assert tokens == [BOS, *b"[user]hi", EOS, *b"[assistant]"]


def test_a_template_that_raises_says_why() -> None:
    twice = [{"role": "user", "content": "hi"}] * 2
    with pytest.raises(PromptError, match="roles must alternate"):
        asyncio.run(codec(byte_tokenizer(), TEMPLATE).encode_chat(twice))


@pytest.mark.parametrize("template", ["{{ messages[0].content + 1 }}", "{{ messages[7].content }}", "{{ 1 / 0 }}"])
def test_a_template_that_fails_is_an_error_of_the_prompt(template: str) -> None:
    with pytest.raises(PromptError, match="chat template"):
        codec(byte_tokenizer(), template).render([{"role": "user", "content": "hi"}])


def test_a_model_without_a_template_says_where_to_go() -> None:
    with pytest.raises(PromptError, match="no chat template: use /v1/completions"):
        codec(byte_tokenizer()).render([{"role": "user", "content": "hi"}])


def test_a_broken_template_is_found_at_the_start() -> None:
    with pytest.raises(ValueError, match="chat template is not valid"):
        codec(byte_tokenizer(), "{% for %}")


@pytest.mark.parametrize(
    "escape",
    ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}"],
)
def test_templates_are_locked_in(escape: str) -> None:
    with pytest.raises(PromptError):
        codec(byte_tokenizer(), escape).render([])


def test_templates_have_what_hugging_face_gives_them() -> None:
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}\n"
        "    {{ m.content | tojson }}\n"
        "{% endfor %}{{ strftime_now('%Y') | length }} {{ eos_token }}"
    )
    chat = [{"role": "user", "content": "<é>"}, {"role": "user", "content": "no"}]
    assert codec(byte_tokenizer(), template).render(chat) == '    "<é>"\n4 </s>'


@pytest.mark.parametrize(
    "template",
    [
        TEMPLATE,
        "{% for m in messages %}\n  {%- if m.role == 'user' %}\n  {{ m | tojson }}\n  {% endif %}\n{% endfor %}",
        "{%- set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}"
        "{{ m['content'] | trim }}{% endfor %}{% if tools %}no{% endif %}{{ tools is defined and tools is not none }}",
    ],
)
def test_templates_render_as_in_transformers(template: str) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), **SPECIAL)
    chat = [{"role": "user", "content": " kůň <b>"}, {"role": "assistant", "content": "x"}]
    expected = theirs.apply_chat_template(chat, chat_template=template, tokenize=False, add_generation_prompt=True)
    assert codec(byte_tokenizer(), template).render(chat) == expected


# Tokens by themselves


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_bytes_of_tokens_join_to_the_text(kind: str) -> None:
    one = codec(TOKENIZERS[kind]())
    tokens = TOKENIZERS[kind]().encode("kůň 😀", add_special_tokens=False).ids
    joined = b"".join(map(one.token_bytes, tokens)).decode()
    assert joined.replace(" ", "") == "kůň😀"  # decoders drop a lone token's leading space where it marks a word


def test_bytes_of_special_added_and_unknown_tokens() -> None:
    one = codec(byte_tokenizer())
    assert one.token_bytes(EOS) == b"</s>"
    assert one.token_bytes(258) == b"<word>"
    assert one.token_bytes(0xF0) == b"\xf0"
    assert one.token_bytes(10**6) == b""
