"""Types of the OpenAI API's JSON, with the extensions of vLLM and SGLang. Unknown fields are ignored, because clients
add their own, unless they look like a misspelt known field. A known field that is not served is refused."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct


class StreamOptions(Struct, kw_only=True):
    """Options of a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Known but not served."""


class UnservedFields(Struct, kw_only=True):
    """Known fields that are refused, because ignoring them would change the answer."""

    suffix: Any = None
    regex: Any = None
    json_schema: Any = None
    ebnf: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    truncate_prompt_tokens: Any = None
    prompt_logprobs: Any = None
    stop_regex: Any = None
    lora_path: Any = None
    use_beam_search: Any = None
    return_tokens_as_token_ids: Any = None


class SamplingFields(UnservedFields, kw_only=True):
    """Sampling fields of both kinds of request: OpenAI's fields, then the extensions of vLLM and SGLang."""

    model: str | None = None
    n: int | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    stop: str | list[str | int] | None = None
    seed: int | None = None
    frequency_penalty: float | None = 0.0
    presence_penalty: float | None = 0.0
    logit_bias: dict[int, float] | None = None
    top_k: int | None = -1
    min_p: float | None = 0.0
    repetition_penalty: float | None = 1.0
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    min_tokens: int | None = 0
    return_token_ids: bool | None = None
    rid: str | None = None
    request_id: str | None = None
    # Served for neutral values only: ignoring other values would change the answer.
    best_of: int | None = None
    response_format: dict[str, Any] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False


class CompletionBody(SamplingFields, kw_only=True):
    """The request of `/v1/completions`."""

    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = False


class ChatBody(SamplingFields, kw_only=True):
    """The request of `/v1/chat/completions`. With `prompt_token_ids`, an extension of Penstock, the conversation is
    given in tokens and `messages` are not rendered."""

    messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_token_ids: list[int] | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    modalities: list[str] | None = None
    # Known but not served.
    chat_template: Any = None
    functions: Any = None
    function_call: Any = None


class TokenizeBody(Struct, kw_only=True):
    """The request of `/tokenize`: a prompt that is rendered already, or a conversation. The last fields are served for
    neutral values only."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeReply(Struct, kw_only=True):
    """Tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeBody(Struct, kw_only=True):
    """The request of `/detokenize`."""

    model: str | None = None
    tokens: list[int]


class DetokenizeReply(Struct, kw_only=True):
    """Text of tokens."""

    prompt: str


class Usage(Struct, kw_only=True):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionReply(Struct, kw_only=True):
    """The reply to both kinds of request. Choices are untyped, because they differ between the two kinds."""

    id: str
    object: str
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: Usage
    system_fingerprint: str | None = None
    metadata: dict[str, str] | None = None
    prompt_token_ids: list[int] | None = None


class Model(Struct, kw_only=True):
    """A model as `/v1/models` describes it."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "penstock"
    root: str
    max_model_len: int


class ModelList(Struct, kw_only=True):
    """The reply of `/v1/models`."""

    object: str = "list"
    data: list[Model]


class OpenAIErrorDetails(Struct, kw_only=True):
    """Message and kind of an error."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class OpenAIError(Struct, kw_only=True):
    """The reply to a request that failed."""

    error: OpenAIErrorDetails
