"""A chat template with tools and reasoning, as Qwen3 has them, for the tiny policy's alphabet."""

from __future__ import annotations

from pathlib import Path

from penstock.config import TinyModelConfig
from penstock.model.chat import ChatTokenizer
from penstock.model.tiny import write_tiny_model

TEMPLATE = """
{%- if tools %}<|user|>tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}<|end|>{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<|assistant|>{{ message.content }}
{%- for call in message.tool_calls %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|end|>
{%- elif message.role == 'tool' %}<|user|><tool_response>{{ message.content }}</tool_response><|end|>
{%- else %}<|user|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% if thinks %}<think>{% endif %}{% endif %}
{%- if false %}</think>{% endif %}"""


def chat_with_tools(directory: Path) -> ChatTokenizer:
    write_tiny_model(directory, TinyModelConfig(), 2048)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return ChatTokenizer.load(directory)
