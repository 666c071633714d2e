"""Text in and text out: prompts and chats to tokens, tokens to text as it comes, stop strings.

codec = TextCodec(files.tokenizer, files.chat_template, files.special)
prompt = await codec.encode("Once upon a time")
stream = codec.stream(stop=["\\n"]);  shown = stream.push(token);  ...;  shown += stream.flush()
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer, decoders, pre_tokenizers

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no UTF-8
MAX_CHARACTER_BYTES = 4


class PromptError(ValueError):
    """The prompt cannot be turned into tokens. The message is meant for the user."""


class TextCodec:
    """One model's tokenizer and chat template. `special` are the names a template may use, such as bos_token."""

    def __init__(self, tokenizer: Tokenizer, chat_template: str | None, special: Mapping[str, str]) -> None:
        """ValueError where the chat template is not valid Jinja."""
        self._tokenizer = tokenizer
        self._special = dict(special)
        self._longest_token = max(map(len, tokenizer.get_vocab()))  # characters of text that a token stands for at most
        self._special_ids = frozenset(
            token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special
        )
        self._template = None if chat_template is None else _compile(chat_template)

    async def encode(self, text: str, limit: int | None = None) -> list[int]:
        """The tokens of a plain prompt. The tokenizer adds its BOS, if it has one, unless `text` begins with it.

        PromptError for a text that cannot be had in `limit` tokens, before any time is spent on it.
        """
        self._refuse_too_long(text, limit)
        bos = self._special.get("bos_token")
        return await asyncio.to_thread(self._encode, text, not (bos and text.startswith(bos)))

    async def encode_chat(self, messages: Sequence[Mapping[str, str]], limit: int | None = None) -> list[int]:
        """The tokens of a chat, up to where the assistant's turn begins. The template alone says where a BOS stands.

        PromptError where the model has no template, the template refuses the messages, or they are too long.
        """

        def work() -> list[int]:
            text = self.render(messages)
            self._refuse_too_long(text, limit)
            return self._encode(text, add_special_tokens=False)

        return await asyncio.to_thread(work)

    def _refuse_too_long(self, text: str, limit: int | None) -> None:
        if limit is None:
            return
        most = limit * self._longest_token
        if len(text) > most:
            raise PromptError(
                f"the prompt has {len(text)} characters, and the context of {limit} tokens holds {most} at most"
            )

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # The batch call, unlike encode(), computes no offsets and lets go of the interpreter's lock.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The chat as one text. PromptError as for `encode_chat`."""
        if self._template is None:
            raise PromptError("this model has no chat template: use /v1/completions")
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special)
        except jinja2.TemplateError as error:
            raise PromptError(f"the chat template refuses the messages: {error}") from error
        except Exception as error:  # a template is a program: it can fail in every way a program can
            raise PromptError(f"the chat template failed on the messages: {type(error).__name__}: {error}") from error

    def stream(self, stop: Sequence[str] = ()) -> TextStream:
        return TextStream(self._tokenizer, self._special_ids, stop)

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes of one token, which may be a part of a character; empty for an id without a token."""
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if isinstance(self._tokenizer.decoder, decoders.ByteLevel) and all(c in self._byte_of for c in piece):
            return bytes(self._byte_of[character] for character in piece)
        if fallback := re.fullmatch("<0x([0-9A-F]{2})>", piece):  # how SentencePiece spells a byte
            return bytes.fromhex(fallback[1])
        return self._tokenizer.decode([token], skip_special_tokens=False).encode()

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        """GPT-2's alphabet, in which a byte-level tokenizer spells its tokens: a printable byte is the character of its
        own number, the others are, in order, the characters from 256 on."""
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        shown = [ord(character) for character in alphabet if ord(character) < 256]
        hidden = [byte for byte in range(256) if byte not in shown]
        return dict(zip(alphabet, shown + hidden, strict=True))


class TextStream:
    """The text of one choice: push its tokens, get what may be shown.

    The deltas joined, with what `flush` returns, are the decoder's text of all tokens but the special ones, cut before
    the first stop string. Bytes of an unfinished character are held back, and so is text that may be the beginning of a
    stop string.

    Bytes that are no UTF-8 become U+FFFD. With a byte-level tokenizer there is one for each broken sequence, as if all
    were decoded at once. A decoder with byte fallback (SentencePiece's) writes one for every byte of a run that has a
    broken one, intact characters included: of those, the ones that were shown before stay shown.
    """

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[int], stop: Sequence[str] = ()) -> None:
        self.stopped = False  # a stop string was found: nothing more will come
        self._detokenizer = Detokenizer(tokenizer)
        self._special_ids = special_ids
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""  # decoded, but a stop string may begin in it

    def push(self, token: int) -> str:
        """The text that may be shown now; often empty."""
        if self.stopped or token in self._special_ids:
            return ""
        return self._release(self._detokenizer.push(token))

    def flush(self) -> str:
        """Generation has ended: everything still held back. It may yet complete a stop string."""
        if self.stopped:
            return ""
        shown = self._release(self._detokenizer.flush())
        shown, self._held = shown + self._held, ""
        return shown

    @property
    def position(self) -> int:
        """Characters decoded so far, held ones included: where the next token's text will begin."""
        return self._detokenizer.length

    def _release(self, text: str) -> str:
        if not self._stop:
            return text
        held = self._held + text
        # The stop string that *ends* first wins, and of several that end together the longest: so the result does not
        # depend on how the text was cut into tokens.
        found = [(at + len(stop), at) for stop in self._stop if (at := held.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return held[: min(found)[1]]
        keep = min(self._longest - 1, len(held))
        while keep and not any(stop.startswith(held[-keep:]) for stop in self._stop):
            keep -= 1
        show = len(held) - keep
        self._held = held[show:]
        return held[:show]


class Detokenizer:
    """Incremental decoding, of a short window of the last tokens: a token costs the same however many came before.

    A decoder writes U+FFFD for bytes that are no character yet. It is held back while the coming tokens may complete
    the character: a character has at most four bytes and a token at least one, so after three such tokens it is final.
    """

    _WINDOW = 16  # tokens; a few more while a character is unfinished

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.length = 0  # characters delivered so far
        self._decode = tokenizer.decode
        self._tokens: list[int] = []
        self._sent = 0  # characters of the window's text that have been delivered
        self._whole = 0  # tokens of the window up to the last one that ended with a character
        self._unfinished = 0  # tokens since then

    def push(self, token: int) -> str:
        """`token` must not be a special one, which has no bytes."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if not text.endswith(REPLACEMENT):
            shown = self._deliver(text, len(text))
            if len(self._tokens) > self._WINDOW:
                # Keep the last whole characters as context: decoders treat the first word of a text differently.
                self._cut(self._whole, held=0)
            self._whole, self._unfinished = len(self._tokens), 0
            return shown
        self._unfinished += 1
        if self._unfinished < MAX_CHARACTER_BYTES:
            # Some decoders write one U+FFFD for the whole unfinished character, some one for each of its bytes.
            return self._deliver(text, len(text.rstrip(REPLACEMENT)))
        # No character takes this long: the bytes are broken. Only the last few may still begin one.
        shown = self._deliver(text, len(text) - 1)
        self._cut(-MAX_CHARACTER_BYTES, held=1)
        return shown

    def flush(self) -> str:
        """What is held back, as the decoder writes it."""
        text = self._decode(self._tokens)
        return self._deliver(text, len(text))

    def _deliver(self, text: str, end: int) -> str:
        shown = text[self._sent : end]
        self._sent = max(self._sent, end)
        self.length += len(shown)
        return shown

    def _cut(self, first: int, held: int) -> None:
        """Keep the window's tokens from `first` on; `held` characters at its end are not delivered yet."""
        self._tokens = self._tokens[first:]
        self._sent = len(self._decode(self._tokens)) - held
        self._whole = 0


def _compile(source: str) -> jinja2.Template:
    """Templates come with the weights, from strangers: they run in Jinja's sandbox and cannot change what they get."""

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:  # Jinja's own escapes for HTML
        return json.dumps(value, ensure_ascii=False, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ValueError(f"the model's chat template is not valid: {error}") from error
