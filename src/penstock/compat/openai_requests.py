"""Requests of the OpenAI API, as the server takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.compat import openai_wire as wire
from penstock.compat.openai_errors import short
from penstock.model.answer_format import with_decoded_arguments
from penstock.rollout import bodies

MAX_TOP_LOGPROBS = 20
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of the parts of a message that are text, in all dialects."""
SAMPLING_FIELDS = {
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
    **{name: name for name in ("n", "temperature", "top_p", "top_k", "min_p", "logit_bias")},
    **{name: name for name in ("frequency_penalty", "presence_penalty", "repetition_penalty")},
    **{name: name for name in ("stop", "stop_token_ids", "ignore_eos")},
}
"""Names of the sampling fields here and in the body of `/generate`."""


def generate_body(body: wire.SamplingFields, max_tokens: int, *, top: int | None, wanted: bool) -> bodies.GenerateBody:
    """Return the request as a body of `/generate`. Raises ValueError for unsupported fields and invalid values."""
    num_samples = 1 if body.n is None else body.n
    unserved = [name for name in wire.UnservedFields.__struct_fields__ if bodies.asks(getattr(body, name))]
    form = "text" if body.response_format is None else body.response_format.get("type")
    refuse_if(
        (max_tokens < 0, f"max_tokens must be at least 0, not {max_tokens}"),
        (not 0 <= (top or 0) <= MAX_TOP_LOGPROBS, f"at most {MAX_TOP_LOGPROBS} top log-probabilities, not {top}"),
        (body.best_of not in (None, 1, body.n), "`best_of` is not served: sample with `n` and choose"),
        (unserved, f"`{'`, `'.join(unserved)}` is not served"),
        (not body.skip_special_tokens, "`skip_special_tokens` false is not served: read `token_ids`"),
        (top and not wanted, "`top_logprobs` needs `logprobs`"),
        (body.prompt_logprobs is not None, "`prompt_logprobs` is not served: use `echo`, or `/generate`"),
        (
            body.stream_options is not None and body.stream_options.continuous_usage_stats,
            "`continuous_usage_stats` is not served: `include_usage` tells the usage at the end",
        ),
        (form != "text", "`response_format` is not served but for `text`"),
        (not 1 <= num_samples <= bodies.MAX_SAMPLES, f"n must be from 1 to {bodies.MAX_SAMPLES}, not {num_samples}"),
    )
    sampling = {name: value for field, name in SAMPLING_FIELDS.items() if (value := getattr(body, field)) is not None}
    rid, params = body.rid or body.request_id, bodies.SamplingBody(max_new_tokens=max_tokens, **sampling)
    return bodies.GenerateBody(rid=rid, return_logprob=wanted, top_logprobs_num=top or 0, sampling_params=params)


def must_call(body: wire.ChatBody) -> str | None:
    """Return the tool that the answer must call: empty for any, None if it may call none. Raises ValueError for other
    choices, and for a tool that is not offered."""
    match body.tool_choice:
        case None | "auto" | "none":
            return None
        case "required":
            tool = ""
        case {"type": "function", "function": {"name": str(tool)}}:
            pass
        case other:
            raise ValueError(f"`tool_choice` is `auto`, `none`, `required` or a named function, not {short(other)}")
    names = [function.get("name") for each in body.tools or () if isinstance(function := each.get("function"), dict)]
    if not names or (tool and tool not in names):
        raise ValueError(
            f"`tool_choice` asks for a call of {short(tool) if tool else 'a tool'}, and `tools` does not have it"
        )
    return tool


def offered(body: wire.ChatBody) -> list[dict[str, Any]]:
    """Return the tools that the policy may call."""
    return (body.tools or []) if body.tool_choice != "none" else []


def refuse_if(*problems: tuple[object, str]) -> None:
    """Raise ValueError with the message of the first problem that is present."""
    for is_present, message in problems:
        if is_present:
            raise ValueError(message)


def message_of(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as chat templates expect it: text parts joined to plain text, arguments of tool calls as
    objects. Raises ValueError for parts that are not text."""
    content = message.get("content")
    if isinstance(content, list):
        content = text_of(content, "a message")
    if not isinstance(message.get("role"), str) or not isinstance(content, str | None):
        raise ValueError("a message has a `role` and a `content` of text")
    plain = message | {"content": content or ""}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [with_decoded_arguments(call) for call in calls]
    return plain


def text_of(content: object, where: str) -> str:
    """Return a text, or the joined text of the parts of a message. Raises ValueError for parts that are not text."""
    if content is None or isinstance(content, str):
        return content or ""
    parts: Sequence[Any] = content if isinstance(content, list) else [content]
    if not all(isinstance(part, dict) and part.get("type") in TEXT_PARTS for part in parts):
        raise ValueError(f"{where}: only text is served, and this has parts of another type")
    return "".join(str(part.get("text", "")) for part in parts)
