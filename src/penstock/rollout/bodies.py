"""Typed JSON bodies of the rollout server: SGLang's `/generate` plus our own routes. Server and client share them.

This module keeps SGLang's names, such as `weight_version`. The scheduler, the store and the trainer never see them.
Unknown fields are ignored, because routers add fields, unless they look like a misspelt known field. Unknown fields of
`sampling_params` are refused, because only clients write these. Known fields that are not implemented are refused too.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from penstock.types import UpdateMode, WeightsTransport

MAX_SAMPLES = 1024
"""Maximum number of samples per request."""

LogprobTriple = tuple[float | None, int, str | None]
"""(log-probability, token id, text or null). The log-probability of a prompt's first token is null."""

MISSPELT = 0.9
"""Similarity from which an unknown field counts as misspelt. Fields that other engines add are less similar."""
ALIKE = 0.5
"""Similarity from which the error message proposes a known field instead of a refused one."""
MAX_LOOKED_AT, MAX_NAME = 64, 64
"""Maximum number of unknown fields, and of characters per field, that are compared with known fields."""
UNKNOWN = re.compile("unknown field `(.*)` - at")

T = TypeVar("T")
encode = msgspec.json.Encoder().encode
"""Returns a struct, a dataclass or plain values as JSON."""


class UnservedSampling(Struct, kw_only=True, omit_defaults=True):
    """Fields of `sampling_params` that are refused if set (see `asks`): ignoring them would change the samples."""

    stop_regex: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    custom_params: Any = None


class SamplingBody(UnservedSampling, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """`sampling_params`. Lists in `max_new_tokens` and `sampling_seed` (one value per sample) are our extension."""

    n: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] = 1
    max_new_tokens: int | list[int] = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float | None = None
    stop: str | int | list[str | int] | None = None
    """Stop strings. Some clients also put token ids here."""
    stop_token_ids: list[int] | None = None
    no_stop_trim: bool = False
    ignore_eos: bool = False
    min_new_tokens: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    """No effect, because special tokens are skipped."""
    stream_interval: int | None = None
    """No effect, because a stream reports every token."""
    sampling_seed: int | list[int] | None = None


def asks(value: Any) -> bool:
    """Return whether the value of an unserved field asks for something.

    None, "", 0, false, [] and {} ask for nothing. A list of such values, one per prompt, asks for nothing either. A
    number in a list, even 0, is a token and does ask."""
    if isinstance(value, list):
        return any(each is not False and each not in (None, "", [], {}) for each in value)
    return bool(value)


class UnservedFields(Struct, kw_only=True, omit_defaults=True):
    """Fields of `/generate` that are refused if set (see `asks`): ignoring them would change the answer."""

    lora_path: Any = None
    input_embeds: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    session_params: Any = None
    token_ids_logprob: Any = None
    return_hidden_states: Any = None
    custom_logit_processor: Any = None


class GenerateBody(UnservedFields, kw_only=True, omit_defaults=True):
    """The request of `/generate`. It has exactly one of `input_ids` and `text`, for one prompt or a batch.

    `return_text` and `compact_routed_experts` are our extensions."""

    input_ids: list[int | list[int]] | None = None
    text: str | list[str] | None = None
    sampling_params: SamplingBody | list[SamplingBody] = msgspec.field(default_factory=SamplingBody)
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = False
    logprob_start_len: int | list[int] | None = -1
    """The reply includes log-probabilities of prompt tokens from this position on; -1 for none."""
    top_logprobs_num: int | list[int] | None = 0
    return_text_in_logprobs: bool = False
    return_text: bool = True
    return_routed_experts: bool = False
    """Whether the reply has the experts that computed each token, if the model has experts."""
    routed_experts_start_len: int = 0
    """The first token with experts in the reply. The last token has none: it was not computed."""
    compact_routed_experts: bool = False
    """Whether they are sent in the smallest type that holds them, as `routed_experts_dtype` says, and not as int32."""
    stream: bool = False


class Stop(Struct, tag_field="type", tag="stop"):
    """The sample ended at a stop token or stop string."""

    matched: int | str


class Length(Struct, tag_field="type", tag="length"):
    """The sample ended at `max_new_tokens`."""

    length: int


class Abort(Struct, tag_field="type", tag="abort"):
    """The sample was aborted."""

    message: str = "Aborted by request"
    status_code: int | None = None
    err_type: str | None = None


class WeightSpan(Struct):
    """The output tokens [start, end), sampled by the weights `version`."""

    version: str
    start: int
    end: int


class MetaInfo(Struct, kw_only=True):
    """`meta_info` of one sample."""

    id: str
    finish_reason: Stop | Length | Abort | None
    """None while the sample is still growing."""
    prompt_tokens: int
    completion_tokens: int
    weight_version: str
    weight_versions: list[WeightSpan]
    e2e_latency: float
    input_token_logprobs: list[LogprobTriple] | None = None
    input_top_logprobs: list[list[LogprobTriple] | None] | None = None
    output_token_logprobs: list[LogprobTriple] | None = None
    output_top_logprobs: list[list[LogprobTriple]] | None = None
    cached_tokens: int = 0
    routed_experts: str | UnsetType = UNSET
    """Numbers in base64, [num_tokens, layers with experts, k]."""
    routed_experts_dtype: str | UnsetType = UNSET
    """int32 if it is not there."""


class GenerateReply(Struct, kw_only=True):
    """The reply of `/generate` for one sample."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | None = None
    """Index of the sample, in a stream of several samples."""


class SampledMeta(Struct, kw_only=True):
    """What a client reads of `meta_info`. It skips everything else, which may be as long as the reply."""

    finish_reason: Stop | Length | Abort | None
    weight_versions: list[WeightSpan]
    output_token_logprobs: list[LogprobTriple] | None = None
    routed_experts: str | None = None
    routed_experts_dtype: str | None = None


class SampledReply(Struct, kw_only=True):
    """What a client reads of the reply of `/generate` for one sample."""

    output_ids: list[int]
    meta_info: SampledMeta


class AbortBody(Struct, kw_only=True):
    """The request of `/abort_request`: abort one request, all requests with an id prefix, or all requests."""

    rid: str = ""
    rid_prefix: Annotated[str, Meta(min_length=1)] | None = None
    abort_all: bool = False


class AbortReply(Struct, kw_only=True):
    """The number of requests that were aborted, and the requested `rid` if the server does not serve it."""

    aborted: int
    unknown: list[str]


class CommitBody(Struct, kw_only=True):
    """The request of `/weights/commit`.

    `mode` says how the update treats running samples. `fingerprint` is the expected fingerprint of the staged weights.
    The server verifies it before generation pauses. A handle was already verified against its own fingerprint."""

    policy_version: int
    mode: UpdateMode = "in_place"
    fingerprint: str | None = None


class ClaimBody(Struct, kw_only=True):
    """The request of `/claim`: the run claims the server for `lease_s` seconds; 0 releases the claim."""

    run_id: Annotated[str, Meta(min_length=1, max_length=200)]
    nonce: Annotated[str, Meta(min_length=1, max_length=200)]
    """Distinguishes runs with the same `run_id`."""
    lease_s: Annotated[float, Meta(ge=0, le=3600)]


class MemoryBody(Struct, kw_only=True, omit_defaults=True):
    """The request of `/release_memory_occupation` and `/resume_memory_occupation`."""

    tags: Annotated[list[Literal["weights", "kv_cache", "cuda_graph"]], Meta(min_length=1)] | None = None
    """Parts of the memory; None for all of them."""


class StateReply(Struct, kw_only=True):
    """The state after the call.

    The memory is `released` or `resumed`. The staged weights are `aborted`. The served and the staged
    weights are `forgotten`. The server is `claimed` or `free`."""

    state: str


class WeightsReply(Struct, kw_only=True):
    """The state that a weights transaction reached (`staged` or `committed`), its weights, and how they came."""

    state: str
    policy_version: int
    fingerprint: str
    transport: WeightsTransport


class FetchedWeights(Struct, kw_only=True):
    """Published weights on the machine of a foreign engine, and how they came there."""

    path: str
    """Of the file. Its directory has nothing but what the engine loads."""
    transport: WeightsTransport


class Outcome(Struct, kw_only=True):
    """Result of a call of SGLang's control API that changes the server's state."""

    success: bool
    message: str


class ErrorMessage(Struct, kw_only=True):
    """The message of an error."""

    message: str


class ErrorReply(Struct, kw_only=True):
    """An error in SGLang's format."""

    error: ErrorMessage


class Ready(Struct, kw_only=True):
    """The reply of `/ready`. `state` is `serving`, `paused`, `released`, `waiting_for_weights` or `dead`."""

    run_id: str
    nonce: str
    """Distinguishes runs with the same `run_id`. It gives no control."""
    policy_version: int
    state: str


_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def refuse_misspelt(data: bytes, kind: type[Any]) -> None:
    """Raise ValueError if an unknown field of the JSON object `data` looks like a misspelt field of `kind`. At most
    `MAX_LOOKED_AT` unknown fields are checked."""
    known = getattr(kind, "__struct_fields__", ())
    given = _fields_decoder.decode(data)
    unknown = (name for name in given if name not in known)
    for name in itertools.islice(unknown, MAX_LOOKED_AT):
        if near := _nearest(name, known, MISSPELT):
            raise ValueError(f"unknown field `{name}`: did you mean `{near}`?")


@functools.lru_cache(maxsize=1024)
def _nearest(name: str, known: tuple[str, ...], cutoff: float) -> str | None:
    if len(name) > MAX_NAME:
        return None
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), None)


def decode(data: bytes, kind: type[T]) -> T:
    """Decode JSON into `kind`. Raises msgspec.DecodeError (msgspec.ValidationError for a wrong shape)."""
    try:
        if not data.isascii():
            data.decode()  # msgspec skips unknown fields without checking their UTF-8
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        unknown = UNKNOWN.search(str(error))
        near = unknown and _nearest(unknown[1], SamplingBody.__struct_fields__, ALIKE)
        if near:
            raise msgspec.ValidationError(f"{error}: did you mean `{near}`?") from None
        raise
    except RecursionError:
        raise msgspec.DecodeError("JSON nested too deeply") from None
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"JSON is malformed: invalid UTF-8 (byte {error.start})") from None
