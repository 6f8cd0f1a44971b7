"""The JSON of the rollout server, typed: SGLang's `/generate` plus what is ours. Shared by server and client.

Foreign names stay foreign here (`weight_version`); the scheduler, the store and the trainer never see them.
Unknown fields are ignored, because routers add their own, unless they look like a known one misspelt; those of
`sampling_params`, which only clients write, are refused. So is a known field we do not implement.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from penstock.types import DeviceTensors, GroupTensors, UpdateMode

MAX_SAMPLES = 1024
"""Samples one request may ask for."""

LogprobTriple = tuple[float | None, int, str | None]
"""(log-probability, token id, text or null); of a prompt's first token there is no log-probability."""

MISSPELT = 0.9
"""Similarity from which an unknown field is a misspelt one; what other engines add differs more."""
ALIKE = 0.5
"""Similarity from which a field is worth proposing in place of one that is refused anyway."""
MAX_LOOKED_AT, MAX_NAME = 64, 64
"""Unknown fields, and characters of one, that are compared with known ones."""
UNKNOWN = re.compile("unknown field `(.*)` - at")

T = TypeVar("T")
_json = msgspec.json.Encoder()


class SamplingBody(Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """`sampling_params`. Lists in `max_new_tokens` and `sampling_seed` (one value per sample) are our extension."""

    n: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] = 1
    max_new_tokens: int | list[int] = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float | None = None
    stop: str | int | list[str | int] | None = None
    """Strings, and token ids that some clients put here."""
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
    """Of no effect, since special tokens are skipped."""
    stream_interval: int | None = None
    """Of no effect: streams tell every token."""
    sampling_seed: int | list[int] | None = None
    # Known but not served: ignoring them would change what is sampled.
    stop_regex: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    custom_params: Any = None


UNSERVED_SAMPLING = ("stop_regex", "json_schema", "regex", "ebnf", "structural_tag", "custom_params")
UNSERVED = (
    "lora_path",
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "session_params",
    "token_ids_logprob",
    "return_hidden_states",
    "custom_logit_processor",
)
"""Fields that are refused when they ask for something."""


def asks(value: Any) -> bool:
    """Whether the value of an unserved field asks for something: None, "", 0, false, [] and {} do not, and neither does
    a list of such values, one per prompt; a number in a list is a token."""
    if isinstance(value, list):
        return any(each is not False and each not in (None, "", [], {}) for each in value)
    return bool(value)


class GenerateBody(Struct, kw_only=True, omit_defaults=True):
    """The request of `/generate`: exactly one of `input_ids` and `text`, one or a batch. `return_text` is our
    extension."""

    input_ids: list[int | list[int]] | None = None
    text: str | list[str] | None = None
    sampling_params: SamplingBody | list[SamplingBody] = msgspec.field(default_factory=SamplingBody)
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = False
    logprob_start_len: int | list[int] | None = -1
    """From this place of the prompt on its tokens' log-probabilities are told too; -1 for none."""
    top_logprobs_num: int | list[int] | None = 0
    return_text_in_logprobs: bool = False
    return_text: bool = True
    stream: bool = False
    # Known but not served: ignoring them would change the answer.
    lora_path: Any = None
    input_embeds: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    session_params: Any = None
    token_ids_logprob: Any = None
    return_hidden_states: Any = None
    custom_logit_processor: Any = None


class Stop(Struct, tag_field="type", tag="stop"):
    """Ended by a stop token or string."""

    matched: int | str


class Length(Struct, tag_field="type", tag="length"):
    """Ended by `max_new_tokens`."""

    length: int


class Abort(Struct, tag_field="type", tag="abort"):
    """Ended from outside."""

    message: str = "Aborted by request"
    status_code: int | None = None
    err_type: str | None = None


class WeightSpan(Struct):
    """Output tokens [start, end) were sampled by `version`."""

    version: str
    start: int
    end: int


class MetaInfo(Struct, kw_only=True):
    """`meta_info` of one sample."""

    id: str
    finish_reason: Stop | Length | Abort | None
    """None of an answer that is still growing."""
    prompt_tokens: int
    completion_tokens: int
    weight_version: str
    weight_versions: list[WeightSpan]
    e2e_latency: float
    input_token_logprobs: list[LogprobTriple] | None = None
    output_token_logprobs: list[LogprobTriple] | None = None
    output_top_logprobs: list[list[LogprobTriple]] | None = None
    cached_tokens: int = 0


class GenerateReply(Struct, kw_only=True):
    """One sample."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | None = None
    """Which of several, in a stream."""


class AbortBody(Struct, kw_only=True):
    """The request of `/abort_request`: one request, those whose ids begin alike, or all."""

    rid: str = ""
    rid_prefix: Annotated[str, Meta(min_length=1)] | None = None
    abort_all: bool = False


class AbortReply(Struct, kw_only=True):
    """How many requests were ended, and a `rid` that is not being served."""

    aborted: int
    unknown: list[str]


class ChunkBody(Struct, kw_only=True):
    """The request of `/weights/chunk`: part number `seq` of the weights, by exactly one way."""

    policy_version: int
    seq: Annotated[int, Meta(ge=0)]
    group: GroupTensors | None = None
    device: DeviceTensors | None = None


class ChunkReply(Struct, kw_only=True):
    """How much of the update is there: a repeated chunk changes nothing."""

    policy_version: int
    chunks: list[int]
    num_missing: int
    """Weights that have not come yet."""


class CommitBody(Struct, kw_only=True):
    """The request of `/weights/commit`. `mode`: what becomes of answers that are being generated. `fingerprint`: of
    what is staged, verified before anything is paused; a handle has been verified against its own before."""

    policy_version: int
    mode: UpdateMode = "in_place"
    fingerprint: str | None = None


class ClaimBody(Struct, kw_only=True):
    """The request of `/claim`: the server is this run's for `lease_s` seconds from now on; 0 gives it up."""

    run_id: Annotated[str, Meta(min_length=1, max_length=200)]
    nonce: Annotated[str, Meta(min_length=1, max_length=200)]
    """Tells the run from others of that name."""
    lease_s: Annotated[float, Meta(ge=0, le=3600)]


class MemoryBody(Struct, kw_only=True, omit_defaults=True):
    """The request of `/release_memory_occupation` and `/resume_memory_occupation`. Only KV memory is released."""

    tags: list[str] | None = None


class MemoryReply(Struct, kw_only=True):
    """What has been done: the generation memory is `released` or `resumed`; the staged weights are `aborted`; what was
    served and staged is `forgotten`; the server is `claimed` or `free`."""

    state: str


class WeightsReply(Struct, kw_only=True):
    """What a step of the weights transaction reached, `staged` or `committed`, and with which weights."""

    state: str
    policy_version: int
    fingerprint: str


class ErrorMessage(Struct, kw_only=True):
    """What went wrong."""

    message: str


class ErrorReply(Struct, kw_only=True):
    """An error as SGLang puts it."""

    error: ErrorMessage


class Health(Struct, kw_only=True):
    """The reply of `/health`: the engine's thread has not failed."""

    status: str


class Ready(Struct, kw_only=True):
    """The reply of `/ready`. `state` is `serving`, `paused`, `released`, `waiting_for_weights` or `dead`."""

    run_id: str
    nonce: str
    policy_version: int
    state: str


_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def refuse_misspelt(data: bytes, kind: type[Any]) -> None:
    """ValueError for a field of the JSON object `data` that is none of `kind`, but looks like one. Of very many unknown
    fields only some are looked at."""
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


def encode(value: object) -> bytes:
    """JSON of a struct, a dataclass or plain values."""
    return _json.encode(value)


def decode(data: bytes, kind: type[T]) -> T:
    """Typed JSON; raises msgspec.DecodeError (msgspec.ValidationError for a wrong shape)."""
    try:
        if not data.isascii():
            data.decode()  # msgspec skips what no field asks for, whatever it is
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
