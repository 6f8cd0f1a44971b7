import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.config.run_settings import TinyModelConfig
from penstock.model.chat import ChatTokenizer
from penstock.model.chat_template import ChatTemplate
from penstock.model.files import ModelError
from penstock.model.tiny import ALPHABET, SPECIAL_TOKENS, write_tiny_model

CONVERSATION = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Spell backward: \n cat"},
    {"role": "assistant", "content": "tac "},
    {"role": "user", "content": "again"},
]

CHATML = (
    "{%- for message in messages %}\n"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}\n"
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_model(directory, TinyModelConfig(), max_context=128)
    return directory


@pytest.fixture(scope="module")
def chat(model_dir: Path) -> ChatTokenizer:
    return ChatTokenizer.load(model_dir)


@given(text=st.text(alphabet=list(ALPHABET)))
def test_printable_text_round_trips_one_token_per_character(chat: ChatTokenizer, text: str) -> None:
    assume(not any(token in text for token in SPECIAL_TOKENS))
    token_ids = chat.encode(text)
    assert len(token_ids) == len(text)
    assert chat.decode(token_ids) == text


def test_an_unknown_character_is_one_unknown_token(chat: ChatTokenizer) -> None:
    assert chat.decode(chat.encode("aéß1"), skip_special=False) == "a<unk><unk>1"


@given(observation=st.text(alphabet=list(ALPHABET), max_size=20), ended=st.booleans())
def test_continuation_equals_rendering_the_whole_conversation(
    chat: ChatTokenizer, observation: str, ended: bool
) -> None:
    assume(not any(token in observation for token in SPECIAL_TOKENS))
    opening, answer = [{"role": "user", "content": "guess"}], "50"
    generated = chat.encode(answer) + (list(chat.eos_ids[:1]) if ended else [])
    grown = (
        chat.prompt(opening) + generated + chat.continuation([{"role": "user", "content": observation}], ended=ended)
    )
    whole = [*opening, {"role": "assistant", "content": answer}, {"role": "user", "content": observation}]
    assert grown == chat.prompt(whole)


def test_hugging_face_agrees(model_dir: Path, chat: ChatTokenizer) -> None:
    from transformers import AutoConfig, AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(model_dir)
    rendered = theirs.apply_chat_template(CONVERSATION, add_generation_prompt=True, tokenize=False)
    assert chat.render(CONVERSATION) == rendered
    encoded = theirs.apply_chat_template(CONVERSATION, add_generation_prompt=True, return_dict=True)
    assert chat.prompt(CONVERSATION) == encoded["input_ids"]
    text = "Hello, 7\n world! é"
    assert chat.encode(text) == theirs(text, add_special_tokens=False).input_ids
    assert chat.decode(chat.prompt(CONVERSATION)) == theirs.decode(chat.prompt(CONVERSATION), skip_special_tokens=True)
    assert chat.eos_ids == (theirs.eos_token_id,)
    config = AutoConfig.from_pretrained(model_dir)
    assert config.vocab_size == chat.vocab_size == len(theirs)


def test_a_template_in_a_file_of_its_own_is_rendered_as_hugging_face_does(model_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for name in ("tokenizer.json", "generation_config.json", "config.json"):
        (tmp_path / name).write_text((model_dir / name).read_text())
    config = json.loads((model_dir / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    rendered = theirs.apply_chat_template(CONVERSATION, add_generation_prompt=True, tokenize=False)
    assert ChatTokenizer.load(tmp_path).render(CONVERSATION) == rendered


def test_generation_tags_are_transparent() -> None:
    template = ChatTemplate("a{% generation %}{{ x }}{% endgeneration %}c")
    assert template.render({"messages": [], "x": "b"}) == "abc"


@pytest.mark.parametrize("missing", ["tokenizer.json", "tokenizer_config.json"])
def test_a_missing_file_is_named(model_dir: Path, tmp_path: Path, missing: str) -> None:
    for name in {"tokenizer.json", "tokenizer_config.json"} - {missing}:
        (tmp_path / name).write_text((model_dir / name).read_text())
    with pytest.raises(ModelError, match=f"has no {missing}"):
        ChatTokenizer.load(tmp_path)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere does not exist"):
        ChatTokenizer.load(tmp_path / "nowhere")


def test_a_template_that_refuses_says_why(model_dir: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (tmp_path / name).write_text((model_dir / name).read_text())
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    with pytest.raises(ModelError, match="no system role"):
        ChatTokenizer.load(tmp_path).prompt(CONVERSATION)


def test_the_torch_free_path_stays_torch_free() -> None:
    code = "import sys, penstock.model.chat, penstock.model.tiny; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == 0


def test_tools_that_the_template_leaves_out_are_refused(model_dir: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (tmp_path / name).write_text((model_dir / name).read_text())
    (tmp_path / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    chat, tool = ChatTokenizer.load(tmp_path), {"type": "function", "function": {"name": "add"}}
    with pytest.raises(ModelError, match="ignores `tools`"):
        chat.prompt(CONVERSATION, tools=[tool])
    assert chat.prompt(CONVERSATION, tools=[]) == chat.prompt(CONVERSATION)


def test_the_tiny_policy_is_shown_tools_and_calls(chat: ChatTokenizer) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {}, "b": {}}}}}
    call = {"type": "function", "id": "x", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    messages = [
        {"role": "user", "content": "2+3"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "5"},
    ]
    shown = chat.render(messages, tools=[tool])
    assert shown.startswith("<|user|>tools: add(a, b)<|user|>2+3<|assistant|>")
    assert shown.endswith("<|end|><|user|><tool_response>5</tool_response><|assistant|>")
    said = shown.removeprefix("<|user|>tools: add(a, b)<|user|>2+3<|assistant|>").partition("<|end|>")[0]
    (again,) = chat.answers.read(said, [tool]).calls
    assert (again.name, again.arguments) == ("add", '{"a": 2, "b": 3}')
