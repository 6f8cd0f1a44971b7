"""Messages in the tokens of observations, for the chat templates of several families."""

from __future__ import annotations

import pytest

from penstock.dashboard.heard import messages_in
from penstock.dashboard.trajectory_pages import _said
from penstock.model.chat import ChatTokenizer, byte_level
from penstock.model.chat_template import ChatTemplate

CHATML = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] -}}"
    "{{- '<|im_end|>\\n' -}}{%- endfor -%}{{- '<|im_start|>assistant\\n' -}}"
    "{#- </think> <tool_call> -#}"
)
LLAMA = (
    "{%- for message in messages -%}{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' -}}"
    "{{- message['content'] + '<|eot_id|>' -}}{%- endfor -%}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}"
)
ZEPHYR = (
    "{%- for message in messages -%}{{- '<|' + message['role'] + '|>' + message['content'] + '</s>' -}}{%- endfor -%}"
    "{{- '<|assistant|>' -}}"
)
CONTROLS = {
    "chatml": (CHATML, ("<|im_start|>", "<|im_end|>")),
    "llama": (LLAMA, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "zephyr": (ZEPHYR, ("<|user|>", "<|system|>", "<|assistant|>", "</s>")),
}


def tokenizer(name: str) -> ChatTokenizer:
    template, controls = CONTROLS[name]
    return ChatTokenizer(byte_level(controls), ChatTemplate(template), {}, (len(controls) - 1,))


@pytest.mark.parametrize("name", CONTROLS)
def test_messages_come_back(name: str) -> None:
    spelled = " ".join(CONTROLS[name][1])
    messages = [
        {"role": "system", "content": "be\n\nbrief"},
        {"role": "user", "content": f"what? {spelled}"},
        {"role": "assistant", "content": "this"},
        {"role": "user", "content": "<b>and</b>?"},
    ]
    chat = tokenizer(name)
    assert messages_in(chat, chat.prompt(messages)) == messages


def test_answers_of_tools_in_a_message_of_the_user() -> None:
    chat = tokenizer("chatml")
    content = "<tool_response>\n1\n</tool_response>\n<tool_response>\n</b>\n</tool_response>"
    found = messages_in(chat, chat.prompt([{"role": "user", "content": content}]))
    assert found == [{"role": "tool", "content": "1"}, {"role": "tool", "content": "</b>"}]
    mixed = content + "and more"
    assert messages_in(chat, chat.prompt([{"role": "user", "content": mixed}])) == [{"role": "user", "content": mixed}]


def test_text_without_messages_is_a_prompt() -> None:
    chat = tokenizer("chatml")
    assert messages_in(chat, chat.encode("once upon")) == [{"role": "prompt", "content": "once upon"}]
    assert messages_in(chat, []) == []


def test_thoughts_are_apart_from_the_answer() -> None:
    chat = tokenizer("chatml")
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    message = _said(chat, f"<think>\nhm\n</think>\n\nso\n{call}", is_thinking=False)
    assert (message["thinking"], message["content"]) == ("hm", "so")
    assert message["tool_calls"] == [{"name": "f", "arguments": "{}"}]
    assert _said(chat, "hm\n</think>\n\nso", is_thinking=True)["thinking"] == "hm"
