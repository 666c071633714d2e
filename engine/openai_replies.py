"""What a client gets: the bodies of OpenAI's API, for completions and chats, whole and in chunks, and for errors.

Log-probabilities are of the raw logits: temperature 1, no top-p. Beyond OpenAI, where `return_token_ids` asks for it:
`token_ids` in every choice, and `prompt_token_ids` (of a completion: in each choice; of a chat: beside the choices).
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from engine.generation import Delta, Generation, Token
from engine.text import TextCodec

Json = dict[str, Any]

_MAX_MESSAGE = 400  # characters of an error message


class ApiError(Exception):
    """An answer that is an error: an HTTP status, and OpenAI's body for it."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        shown = message if len(message) <= _MAX_MESSAGE else message[: _MAX_MESSAGE - 1] + "…"
        self.body: Json = {"error": {"message": shown, "type": type, "param": param, "code": code}}


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """The parts of a reply that a client may ask for."""

    logprobs: bool = False
    token_ids: bool = False
    usage_chunk: bool = False  # stream_options.include_usage


class Replies(ABC):
    """The replies to one call."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, model: str, codec: TextCodec, generation: Generation, options: ReplyOptions) -> None:
        self.generation = generation
        self.options = options
        self._codec = codec
        self._head = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, deltas: Sequence[Delta]) -> Json:
        """The reply to a call that does not stream, from all its deltas."""
        pieces: list[list[Delta]] = [[] for _ in range(self.generation.count)]
        for delta in deltas:
            pieces[delta.index].append(delta)
        choices = [self.choice(_joined(index, mine)) for index, mine in enumerate(pieces)]
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": self.usage()}

    def opening(self) -> list[Json]:
        """The chunks before the first token."""
        return []

    def chunk(self, delta: Delta) -> Json:
        return self._chunk([self.chunk_choice(delta)])

    def closing(self) -> list[Json]:
        """The chunks behind the last token: the usage, if the client wants it."""
        return [{**self._chunk([]), "usage": self.usage()}] if self.options.usage_chunk else []

    def usage(self) -> Json:
        prompt, completion = self.generation.prompt_tokens, self.generation.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    @abstractmethod
    def choice(self, delta: Delta) -> Json:
        """A whole choice."""

    @abstractmethod
    def chunk_choice(self, delta: Delta) -> Json:
        """A piece of a choice."""

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = {**self._head, "object": self.chunk_object, "choices": choices}
        return {**chunk, "usage": None} if self.options.usage_chunk else chunk

    def _token_ids(self, delta: Delta) -> Json:
        return {"token_ids": [token.id for token in delta.tokens]} if self.options.token_ids else {}


class CompletionReplies(Replies):
    """/v1/completions: a chunk's choice looks like a whole one."""

    id_prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, codec: TextCodec, generation: Generation, options: ReplyOptions) -> None:
        super().__init__(model, codec, generation, options)
        self._begun: set[int] = set()  # choices whose prompt_token_ids have been sent

    def choice(self, delta: Delta) -> Json:
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs(delta.tokens) if self.options.logprobs else None,
            "finish_reason": delta.finish,
            **self._token_ids(delta),
            **self._prompt_token_ids(delta.index),
        }

    chunk_choice = choice

    def _prompt_token_ids(self, index: int) -> Json:
        if not self.options.token_ids or index in self._begun:
            return {}
        self._begun.add(index)
        return {"prompt_token_ids": list(self.generation.prompts[index // self.generation.choices_per_prompt])}

    def _logprobs(self, tokens: Sequence[Token]) -> Json:
        """The likeliest tokens, and the chosen one beside them where it is not among them."""
        return {
            "tokens": [self._name(token.id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                {self._name(other): logprob for other, logprob in (*token.top, (token.id, token.logprob))}
                for token in tokens
            ],
            "text_offset": [token.offset for token in tokens],
        }

    def _name(self, token: int) -> str:
        """A token as text; one that is only a part of a character is spelt in bytes, as OpenAI does."""
        raw = self._codec.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class ChatReplies(Replies):
    """/v1/chat/completions: whole choices have a message, pieces have a delta, and the first delta has the role."""

    id_prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def whole(self, deltas: Sequence[Delta]) -> Json:
        return {**super().whole(deltas), **self._prompt_token_ids()}

    def opening(self) -> list[Json]:
        role = {"role": "assistant", "content": ""}
        choices = [self._piece(index, role, None) for index in range(self.generation.count)]
        return [{**self._chunk(choices), **self._prompt_token_ids()}]

    def choice(self, delta: Delta) -> Json:
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return {
            "index": delta.index,
            "message": message,
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish,
            **self._token_ids(delta),
        }

    def chunk_choice(self, delta: Delta) -> Json:
        content = {"content": delta.text} if delta.text else {}
        piece = self._piece(delta.index, content, self._logprobs(delta), delta.finish)
        return {**piece, **self._token_ids(delta)}

    def _piece(self, index: int, delta: Json, logprobs: Json | None, finish: str | None = None) -> Json:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _prompt_token_ids(self) -> Json:
        return {"prompt_token_ids": list(self.generation.prompts[0])} if self.options.token_ids else {}

    def _logprobs(self, delta: Delta) -> Json | None:
        if not self.options.logprobs:
            return None
        content = [
            {
                **self._token(token.id, token.logprob),
                "top_logprobs": [self._token(other, logprob) for other, logprob in token.top],
            }
            for token in delta.tokens
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float | None) -> Json:
        """A part of a character has no text of its own: a client joins the `bytes`."""
        raw = self._codec.token_bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}


def _joined(index: int, pieces: Sequence[Delta]) -> Delta:
    """A whole choice as one delta."""
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    return Delta(index, "".join(piece.text for piece in pieces), tokens, pieces[-1].finish)
