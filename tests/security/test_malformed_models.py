"""A malformed model directory is refused with one clear error, which names the file and what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.config import Config, TinyModelConfig
from penstock.model.chat import ChatTokenizer
from penstock.model.files import ModelError, check_no_code, copy_companions
from penstock.model.load_policy import load_policy
from penstock.model.tiny import write_tiny_model
from penstock.processes.slot_server import make_engine

Change = Callable[[Path], object]
LENGTH_BYTES = 8
REMEDY = "copy or download it again, or let save_pretrained write it"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    drawn, saved = tmp_path_factory.mktemp("drawn"), tmp_path_factory.mktemp("saved")
    write_tiny_model(drawn, TinyModelConfig(num_layers=1, hidden_size=16), max_context=64)
    load_policy(drawn, weights=False, seed=0).save_pretrained(saved)
    copy_companions(drawn, saved)
    return saved


@pytest.fixture
def model_dir(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def setting(name: str, **settings: Any) -> Change:
    def change(directory: Path) -> None:
        path = directory / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))

    return change


def content(name: str, written: bytes) -> Change:
    return lambda directory: (directory / name).write_bytes(written)


def cut(name: str) -> Change:
    def change(directory: Path) -> None:
        path = directory / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return change


def overwritten(start: int, end: int) -> Change:
    def change(directory: Path) -> None:
        path = directory / "model.safetensors"
        before = path.read_bytes()
        path.write_bytes(before[:start] + b"\xff" * (end - start) + before[end:])

    return change


NESTED = b'{"a":' * 5000 + b"1" + b"}" * 5000
OF_MODELS: list[tuple[Change, str]] = [
    (setting("config.json", auto_map=["AutoConfig"]), r"config.json: auto_map is no object.*: remove it"),
    (setting("config.json", auto_map="AutoConfig"), r"config.json: auto_map is no object.*: remove it"),
    (setting("config.json", attn_implementation=["a/b"]), r"config.json: attn_implementation is no name.*remove it"),
    (setting("config.json", text_config={"_attn_implementation": {"": ["a/b"]}}), r"_attn_implementation is no name"),
    (setting("config.json", hidden_size="x"), f"hidden_size.*config.json.*{REMEDY}"),
    (setting("config.json", hidden_size=-4), f"negative.*config.json.*{REMEDY}"),
    (setting("config.json", num_labels=10**9), "config.json: num_labels is 1000000000: remove it"),
    (setting("config.json", num_labels=True), "config.json: num_labels is True: remove it"),
    (setting("config.json", model_type=[]), f"config.json.*{REMEDY}"),
    (setting("config.json", quantization_config=[1]), f"config.json.*{REMEDY}"),
    (content("config.json", NESTED), f"config.json is not valid JSON.*{REMEDY}"),
    (cut("config.json"), f"config.json is not valid JSON.*{REMEDY}"),
    (content("generation_config.json", b"[]"), f"generation_config.json.*{REMEDY}"),
    (cut("model.safetensors"), f"model.safetensors is damaged.*{REMEDY}"),
    (content("model.safetensors", b""), f"model.safetensors is damaged.*{REMEDY}"),
    (overwritten(0, LENGTH_BYTES), f"model.safetensors is damaged.*{REMEDY}"),
    (overwritten(LENGTH_BYTES, LENGTH_BYTES + 40), f"model.safetensors is damaged.*{REMEDY}"),
]
OF_TOKENIZERS: list[tuple[Change, str]] = [
    (cut("tokenizer.json"), f"tokenizer.json cannot be read.*{REMEDY}"),
    (content("tokenizer.json", b"[]"), f"tokenizer.json cannot be read.*{REMEDY}"),
    (content("tokenizer_config.json", b"\xff\xfe"), f"tokenizer_config.json is not valid JSON.*{REMEDY}"),
    (content("chat_template.jinja", b"\xff\xfe"), f"chat_template.jinja.*is no text.*{REMEDY}"),
    (content("chat_template.jinja", b"{{" + b"(" * 10_000), "the chat template of .*does not compile"),
    (
        content("chat_template.jinja", b"{% for x in y %}" * 30 + b"{% endfor %}" * 30),
        "the chat template .*not compile",
    ),
    (setting("tokenizer_config.json", chat_template=5), f"tokenizer_config.json.*is no text.*{REMEDY}"),
    (setting("tokenizer_config.json", chat_template=["x"]), f"tokenizer_config.json.*is no text.*{REMEDY}"),
    (
        setting("tokenizer_config.json", eos_token=["a"]),
        r"tokenizer_config.json: eos_token is no text.*write the",
    ),
    (
        content("tokenizer_config.json", b'{"eos_token": "\\ud800"}'),
        r"tokenizer_config.json: eos_token is no text.*write the",
    ),
    (content("generation_config.json", b'{"eos_token_id": "a"}'), r"generation_config.json.*'a': set it"),
]


def names(change: object) -> str:
    return change[:40] if isinstance(change, str) else ""


@pytest.mark.parametrize(("change", "message"), OF_MODELS, ids=names)
def test_a_malformed_model_is_refused(model_dir: Path, change: Change, message: str) -> None:
    change(model_dir)
    with pytest.raises(ModelError, match=f"(?s){message}"):
        load_policy(model_dir, weights=True)


@pytest.mark.parametrize("version", ["abc", 2**70, -2, True, None])
def test_a_checkpoint_with_a_malformed_version_is_not_served(model_dir: Path, version: object) -> None:
    (model_dir / "state.json").write_text(json.dumps({"policy_version": version}))
    with pytest.raises(ModelError, match=r"state\.json: policy_version is"):
        make_engine(Config(), model_dir, weights="stored")


@pytest.mark.parametrize(("length", "count"), [(5000, 1), (257, 1), (256, 100)])
def test_long_control_tokens_are_refused(model_dir: Path, length: int, count: int) -> None:
    path = model_dir / "tokenizer.json"
    tree = json.loads(path.read_text())
    for number in range(count):
        content = f"<{number}".ljust(length, "x")
        tree["added_tokens"].append(tree["added_tokens"][0] | {"id": 10_000 + number, "content": content})
    path.write_text(json.dumps(tree))
    with pytest.raises(ModelError, match=f"tokenizer.json has .* control tokens, the longest of {length} characters"):
        ChatTokenizer.load(model_dir)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 1 // 0 }}", "the chat template failed: ZeroDivisionError"),
        ("{% include 'x' %}", "the chat template failed: TypeError"),
        ("{% for n in range(10**12) %}{{ n }}{% endfor %}", "the chat template failed: OverflowError"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "the chat template failed: RecursionError"),
        ("{{ messages[0].content + 1 }}", "the chat template failed: TypeError"),
        ("{{ raise_exception('never') }}", "the chat template rejected the conversation: never"),
    ],
)
def test_a_template_that_fails_is_refused(model_dir: Path, template: str, message: str) -> None:
    (model_dir / "chat_template.jinja").write_text(template)
    with pytest.raises(ModelError, match=f"{message}.*: correct the chat template of {model_dir}"):
        ChatTokenizer.load(model_dir)


def test_half_a_character_of_a_template_is_replaced(model_dir: Path) -> None:
    (model_dir / "chat_template.jinja").write_text(r"{{ '\ud800' }}{{ messages[0].content }}")
    assert ChatTokenizer.load(model_dir).render([{"role": "user", "content": "a"}]) == "?a"


@pytest.mark.parametrize(("change", "message"), OF_TOKENIZERS, ids=names)
def test_a_malformed_tokenizer_is_refused(model_dir: Path, change: Change, message: str) -> None:
    (model_dir / "chat_template.jinja").unlink(missing_ok=True)
    change(model_dir)
    with pytest.raises(ModelError, match=f"(?s){message}"):
        ChatTokenizer.load(model_dir)


def test_the_whole_model_is_loaded(model_dir: Path) -> None:
    check_no_code(model_dir)
    load_policy(model_dir, weights=True)
    assert ChatTokenizer.load(model_dir).prompt([{"role": "user", "content": "a"}])
