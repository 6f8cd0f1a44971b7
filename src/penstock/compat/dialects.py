"""The other dialects in which a chat may be asked for."""

from __future__ import annotations

from penstock.compat.anthropic_messages import AnthropicMessages
from penstock.compat.openai import OpenAI
from penstock.compat.openai_responses import OpenAIResponses
from penstock.rollout.http import Surface


def dialects(chats: OpenAI, *, model_name: str) -> tuple[Surface, ...]:
    """Return the endpoints of all dialects beside Chat Completions."""
    return OpenAIResponses(chats, model_name=model_name), AnthropicMessages(chats, model_name=model_name)
