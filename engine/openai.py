"""What a client may ask for: the request bodies of OpenAI's API, checked field by field.

No field is accepted and ignored. What Layby does not do is refused by name, unless its value says "off"; `user`,
`metadata` and `safety_identifier` have no effect by definition. Reference: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeVar

import pydantic_core
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    field_validator,
    model_validator,
)

from engine.openai_replies import ApiError
from scheduling.request import SLO, Sampling

MAX_CHOICES = 128  # n, and prompts of one call
MAX_STOPS, MAX_STOP_LENGTH = 16, 256
MAX_SLO_MS = 10**9

# Fields that are not supported, and the values that mean "off" (null does in every field), exact in type: where a
# fraction could stand, 0 and 0.0 are the same, but false is no number, and 0 is not false.
_OFF: Final[dict[str, tuple[Any, ...]]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0, 0.0),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "min_p": (0, 0.0),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),  # says how tools are called, and there are none
    "prediction": (),
    "presence_penalty": (0, 0.0),
    "prompt_cache_key": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repetition_penalty": (1, 1.0),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "stop_token_ids": ([],),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_k": (0, -1),
    "verbosity": (),
    "web_search_options": (),
}


def _text_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


def _slo(value: Any) -> str | SLO:
    """A class by its name, or targets; a target left out is none, so `{}` asks for best effort."""
    if isinstance(value, str):
        return value
    if not (isinstance(value, dict) and value.keys() <= {"ttft_ms", "tbt_ms"}):
        raise ValueError('must be the name of a class, or targets such as {"ttft_ms": 250, "tbt_ms": 100}')
    targets = {name: ms for name, ms in value.items() if ms is not None}
    for name, ms in targets.items():
        if type(ms) not in (int, float) or not 0 < ms <= MAX_SLO_MS:
            raise ValueError(f"{name} must be a number of milliseconds above 0 and at most {MAX_SLO_MS}")
    seconds = {name.removesuffix("_ms"): ms / 1000 for name, ms in targets.items()}
    return SLO(**seconds)


def _prompts(value: Any) -> list[str | list[int]]:
    """One prompt or several, as a list. By hand: for a union of lists pydantic would collect an error for each element
    and each member of the union."""
    many = isinstance(value, list) and bool(value) and isinstance(value[0], str | list)
    prompts = value if many else [value]
    if len(prompts) > MAX_CHOICES:
        raise ValueError(f"takes at most {MAX_CHOICES} prompts, got {len(prompts)}")
    for one in prompts:
        if not isinstance(one, str) and not (isinstance(one, list) and all(type(token) is int for token in one)):
            raise ValueError("must be a text, a list of token ids, or a list of either")
        if not one:
            raise ValueError("must not be empty")
    return prompts


class GenerationRequest(BaseModel):
    """What both endpoints share. `model` may be left out: a server has one."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stop: Annotated[list[str], BeforeValidator(_text_list)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    # Beyond OpenAI
    ignore_eos: bool = False
    return_token_ids: bool = False
    slo: Annotated[str | SLO | None, PlainValidator(_slo)] = None

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: list[str]) -> list[str]:
        if len(stop) > MAX_STOPS or not all(0 < len(text) <= MAX_STOP_LENGTH for text in stop):
            raise ValueError(f"takes at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters")
        return stop

    @model_validator(mode="after")
    def _check_stream_options(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self

    @property
    def token_limit(self) -> int | None:
        """How many tokens the client wants at most; None where it did not say."""
        return self.max_tokens

    @property
    def top_logprobs_wanted(self) -> int | None:
        """How many alternatives to report beside each token; None: no log-probabilities at all."""
        raise NotImplementedError

    def sampling(self, max_tokens: int) -> Sampling:
        return Sampling(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            n=self.n,
            ignore_eos=self.ignore_eos,
            logprobs=self.top_logprobs_wanted,
        )


class CompletionRequest(GenerationRequest):
    """`prompt`: a text, a list of token ids, or a list of either: one prompt each, whose choices follow one another."""

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts)]
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def top_logprobs_wanted(self) -> int | None:
        return self.logprobs


class Message(BaseModel):
    """One turn of a chat. `content` is a text, or a list of text parts, which are joined by newlines."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, message: Any) -> Any:
        """Clients send back what they got, with fields that say nothing: `tool_calls: null`, `annotations: []`."""
        if not isinstance(message, dict):
            return message
        return {name: value for name, value in message.items() if value is not None and value != []}

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        for part in content:
            if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] != "text":
                raise ValueError(f"a part of type {part['type'][:40]!r} is not supported, only text")
            if not (isinstance(part, dict) and part.keys() == {"type", "text"} and isinstance(part["text"], str)):
                raise ValueError('takes a text, or parts of the form {"type": "text", "text": ...}')
        return "\n".join(part["text"] for part in content)

    def for_template(self) -> dict[str, str]:
        """Chat templates know no developer; it is the name that newer clients give the system."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class ChatRequest(GenerationRequest):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _check_pairs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens are two names of one limit, and these differ")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def top_logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


AnyRequest = TypeVar("AnyRequest", bound=GenerationRequest)


def parse(kind: type[AnyRequest], body: bytes | bytearray) -> AnyRequest:
    """The request in `body`, or an ApiError that names the first field that is wrong and does not echo its value."""
    try:
        # Unlike json.loads it refuses NaN, half a surrogate pair and endless nesting, which would only fail later.
        fields = pydantic_core.from_json(bytes(body), allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(f"the body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ApiError(f"the body must be a JSON object, got {type(fields).__name__}")
    fields = {name: value for name, value in fields.items() if value is not None}
    for name in [name for name in fields if name in _OFF]:
        value = fields.pop(name)
        if not any(type(value) is type(off) and value == off for off in _OFF[name]):
            raise ApiError(f"{name} is not supported", param=name, code="unsupported_parameter")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _first_problem(error) from error


def _first_problem(error: ValidationError) -> ApiError:
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    unknown = next((problem for problem in problems if problem["type"] == "extra_forbidden"), None)
    first = unknown or problems[0]
    place = ".".join(str(part)[:60] for part in first["loc"])
    if unknown:
        return ApiError(f"unknown field {place!r}", param=place, code="unknown_parameter")
    problem = first["msg"].removeprefix("Value error, ")
    return ApiError(f"{place}: {problem}" if place else problem, param=place or None)
