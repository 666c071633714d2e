"""Text to tokens and back: a folder's tokenizer.json, its chat template and its special tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models

from models.checkpoint import CheckpointError, read_json
from models.hub import resolve
from models.toy import SPECIAL_TOKENS, TOYS

_TOY_SPECIAL = ("bos_token", "eos_token", "pad_token")
_TOY_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a model folder says about text.

    `tokenizer.encode(text)` adds a BOS where the model wants one; pass `add_special_tokens=False` for what came out of
    the chat template, which writes its own. `chat_template` is Jinja source, None for a base model. `special` holds
    the names that templates use, such as bos_token and eos_token, and their text.
    """

    tokenizer: Tokenizer
    chat_template: str | None
    special: dict[str, str]

    @property
    def eos_token_id(self) -> int | None:
        """The token that the tokenizer's own config calls the end; a model may have more (ModelConfig)."""
        return self.tokenizer.token_to_id(self.special.get("eos_token", ""))


def load_tokenizer(name: str | Path) -> TokenizerFiles:
    """For the names that `load_model` takes. CheckpointError if the folder has no tokenizer.json, or a broken one."""
    if name in TOYS:
        return TokenizerFiles(_toy_tokenizer(), _TOY_TEMPLATE, dict(zip(_TOY_SPECIAL, SPECIAL_TOKENS, strict=True)))
    folder = resolve(name)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: no tokenizer.json. It is the one tokenizer file read here; transformers writes it: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{path}: {error}") from error
    # A file may carry the settings of its training run, which would cut a long prompt short without a word.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _optional_json(folder / "tokenizer_config.json")
    special = _special_tokens(_optional_json(folder / "special_tokens_map.json")) | _special_tokens(config)
    return TokenizerFiles(tokenizer, _chat_template(folder, config), special)


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config.json's; of several named templates, the one named default."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((one.get("template") for one in template if one.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{folder}: tokenizer_config.json's chat_template must be text, or a list of named texts")
    return template


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Every `..._token` given as text, or as an object with its text in `content`."""
    found = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _toy_tokenizer() -> Tokenizer:
    """One token a byte of UTF-8, with the byte as its id. Nothing is added in front."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer
