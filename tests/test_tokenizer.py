"""Tokenizers: the toy's bytes, and what is read from a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from models.checkpoint import CheckpointError
from models.hub import ModelNotFound
from models.tokenizer import load_tokenizer
from models.toy import BOS_ID, EOS_ID, PAD_ID, toy_config

TEXTS = [
    "",
    "plain",
    "Příliš žluťoučký kůň",
    "你好，世界",
    "👩‍👩‍👧 🎉",
    "tab\there\r\n\n  two  ",
    "\x00\x7f",
    "<0x41> 100 %",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    load_tokenizer("toy").tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize("text", TEXTS)
def test_the_toy_has_one_token_a_byte(text: str) -> None:
    tokenizer = load_tokenizer("toy").tokenizer
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_the_toys_special_tokens() -> None:
    files = load_tokenizer("toy")
    assert files.special == {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    assert files.tokenizer.encode("<bos>a<eos><pad>").ids == [BOS_ID, ord("a"), EOS_ID, PAD_ID]
    assert files.tokenizer.decode([BOS_ID, ord("a"), EOS_ID]) == "a"
    assert files.eos_token_id == EOS_ID
    assert toy_config().eos_token_ids == {EOS_ID}
    assert files.tokenizer.get_vocab_size() == toy_config().vocab_size


def test_bytes_that_are_no_text_decode_to_replacement_characters() -> None:
    """A random model says such things, and so does a stream cut inside a character."""
    tokenizer = load_tokenizer("toy").tokenizer
    assert tokenizer.decode(list("ž".encode()[:1])) == "\ufffd"
    assert tokenizer.decode(list(range(256)))


def test_the_toys_chat_template() -> None:
    files = load_tokenizer("toy")
    assert files.chat_template is not None
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(files.chat_template)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\nthere"}]
    text = template.render(messages=messages, add_generation_prompt=True, **files.special)
    assert text == "<bos>system: Be brief.\nuser: Hi\nthere\nassistant: "
    assert template.render(messages=messages[1:], **files.special) == "<bos>user: Hi\nthere\n"


def test_two_toy_tokenizers_share_no_state() -> None:
    one = load_tokenizer("toy").tokenizer
    one.add_tokens(["layby"])
    assert load_tokenizer("toy").tokenizer.encode("layby").ids == list(b"layby")


def test_a_folder_without_extras(folder: Path) -> None:
    files = load_tokenizer(folder)
    assert files.tokenizer.encode("ab").ids == [97, 98]
    assert (files.chat_template, files.special, files.eos_token_id) == (None, {}, None)


def test_special_tokens_as_text_and_as_objects(folder: Path) -> None:
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<old>", "unk_token": "<pad>"}))
    config = {"bos_token": {"content": "<bos>", "lstrip": False}, "eos_token": "<eos>", "pad_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": True, "model_max_length": 9}))
    files = load_tokenizer(folder)
    assert files.special == {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<pad>"}
    assert files.eos_token_id == EOS_ID


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("one", "one"),
        ([{"name": "tool_use", "template": "two"}, {"name": "default", "template": "one"}], "one"),
        ([{"name": "tool_use", "template": "two"}], None),
        (None, None),
    ],
)
def test_the_chat_template_of_the_config(folder: Path, template: object, expected: str | None) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert load_tokenizer(folder).chat_template == expected


def test_a_template_file_wins_over_the_config(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))
    (folder / "chat_template.jinja").write_text("{{ 'nové' }}", encoding="utf-8")
    assert load_tokenizer(folder).chat_template == "{{ 'nové' }}"


def test_a_template_of_the_wrong_type(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": {"a": 1}}))
    with pytest.raises(CheckpointError, match="chat_template must be text"):
        load_tokenizer(folder)


def test_settings_left_from_training_do_not_cut_prompts(folder: Path) -> None:
    tokenizer = load_tokenizer("toy").tokenizer
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8, pad_id=PAD_ID)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder).tokenizer.encode("seven").ids == list(b"seven")


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json\. .*save_pretrained"):
        load_tokenizer(tmp_path)


def test_a_broken_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Telepathy"}}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: "):
        load_tokenizer(tmp_path)


def test_a_name_that_is_no_model() -> None:
    with pytest.raises(ModelNotFound, match="'no-such-model'"):
        load_tokenizer("no-such-model")
