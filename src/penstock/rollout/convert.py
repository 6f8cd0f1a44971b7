"""Between the wire and the engine: a JSON body becomes requests, segments become replies."""

from __future__ import annotations

import itertools
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from penstock.rollout import wire
from penstock.rollout.request import GenerateRequest, SamplingParams
from penstock.rollout.text import Stops, Tokenizer
from penstock.types import Segment, VersionSpan, stable_seed

MAX_BATCH = 1024
"""Prompts one body may hold."""

MAX_STOP_STRINGS, MAX_STOP_LENGTH = 16, 256

_rids = (f"{secrets.token_hex(4)}-{number}" for number in itertools.count())


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One prompt, and what is to be told of it."""

    rid: str
    prompt_ids: list[int]
    request: GenerateRequest | None
    """None if the prompt is only to be scored (`max_new_tokens` 0)."""
    num_samples: int
    stops: Stops
    body: wire.GenerateBody

    @property
    def scored_from(self) -> int | None:
        """Place in the prompt from which on its log-probabilities are wanted."""
        start = self.body.logprob_start_len
        return start if self.body.return_logprob and isinstance(start, int) and start >= 0 else None


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of it: one segment per sample."""

    asked: Asked
    segments: Sequence[Segment]
    prompt_logprobs: Sequence[float] | None
    """Of every token of the prompt but the first, if they were asked for."""
    scored_by: tuple[int, ...] = ()
    """Versions that computed these, first and last."""

    @property
    def versions(self) -> list[int]:
        """Every policy_version that had a part in it."""
        return [*self.scored_by, *(span.policy_version for segment in self.segments for span in segment.spans)]


def read_requests(body: wire.GenerateBody, tokenizer: Tokenizer | None) -> list[Asked]:
    """One per prompt. Raises ValueError for whatever cannot be served."""
    return [_read(single, tokenizer) for single in _split(body)]


def is_batch(body: wire.GenerateBody) -> bool:
    """Whether the answer is a list even if it holds a single reply."""
    several = body.input_ids is not None and any(isinstance(ids, list) for ids in body.input_ids)
    return several or isinstance(body.text, list)


def write_replies(answer: Answer, *, tokenizer: Tokenizer | None, latency_s: float) -> list[wire.GenerateReply]:
    """One reply per sample."""
    replies = []
    asked, decoder = answer.asked, tokenizer
    tokenizer = tokenizer if asked.body.return_text else None
    for index, segment in enumerate(answer.segments):
        meta = _meta(asked, index, latency_s=latency_s)
        meta.finish_reason = finish_reason(asked, segment, decoder)
        meta.completion_tokens = len(segment.token_ids)
        _stamp(meta, segment.spans)
        if answer.scored_by and not segment.spans:
            meta.weight_version = str(answer.scored_by[-1])
        if asked.body.return_logprob:
            triples = partial(_triples, tokenizer=tokenizer if asked.body.return_text_in_logprobs else None)
            meta.output_token_logprobs = triples(segment.logprobs, segment.token_ids)
            if segment.top_logprobs is not None:
                meta.output_top_logprobs = [triples(*zip(*place, strict=True)) for place in segment.top_logprobs]
            if (start := asked.scored_from) is not None and answer.prompt_logprobs is not None:
                meta.input_token_logprobs = triples([None, *answer.prompt_logprobs][start:], asked.prompt_ids[start:])
        text = answer_text(asked, segment, tokenizer)
        replies.append(wire.GenerateReply(text=text, output_ids=segment.token_ids, meta_info=meta))
    return replies


def version_header(answers: Sequence[Answer]) -> dict[str, str]:
    """`X-Policy-Version`: the one that made all of it, as in `7`, or the oldest and the newest, as in `7-9`."""
    versions = sorted({version for answer in answers for version in answer.versions})
    return {"X-Policy-Version": "-".join(map(str, dict.fromkeys((versions[0], versions[-1]))))} if versions else {}


def write_growing(
    asked: Asked,
    member: int,
    *,
    text: str,
    token_ids: list[int],
    logprobs: list[float],
    spans: Sequence[VersionSpan],
    latency_s: float,
) -> wire.GenerateReply:
    """What there is of one of the prompt's samples that has not ended."""
    meta = _meta(asked, member, latency_s=latency_s)
    _stamp(meta, spans)
    meta.completion_tokens = len(token_ids)
    if asked.body.return_logprob:
        meta.output_token_logprobs = _triples(logprobs, token_ids, tokenizer=None)
    return wire.GenerateReply(text=text, output_ids=token_ids, meta_info=meta)


def sample_id(asked: Asked, member: int) -> str:
    """Of one of a prompt's samples."""
    return asked.rid if asked.num_samples == 1 else f"{asked.rid}_{member}"


def _meta(asked: Asked, member: int, *, latency_s: float) -> wire.MetaInfo:
    return wire.MetaInfo(
        id=sample_id(asked, member),
        finish_reason=None,
        prompt_tokens=len(asked.prompt_ids),
        completion_tokens=0,
        weight_version="",
        weight_versions=[],
        e2e_latency=latency_s,
    )


def _stamp(meta: wire.MetaInfo, spans: Sequence[VersionSpan]) -> None:
    """Which version sampled which tokens, and the last of them."""
    meta.weight_version = str(spans[-1].policy_version) if spans else ""
    meta.weight_versions = [wire.WeightSpan(str(version), start, end) for version, start, end in spans]


def _split(body: wire.GenerateBody) -> list[wire.GenerateBody]:
    """A batch as bodies of one prompt each; what is no list is the same for all."""
    if (body.input_ids is None) == (body.text is None):
        raise ValueError("give exactly one of `input_ids` and `text`")
    if not is_batch(body):
        return [body]
    name = "text" if body.input_ids is None else "input_ids"
    prompts: list[Any] = getattr(body, name)
    if not 0 < len(prompts) <= MAX_BATCH:
        raise ValueError(f"a batch has between 1 and {MAX_BATCH} prompts, not {len(prompts)}")
    if name == "input_ids" and not all(isinstance(ids, list) for ids in prompts):
        raise ValueError("`input_ids` mixes token ids and lists of them")
    per_prompt = ("sampling_params", "rid", "return_logprob", "logprob_start_len", "top_logprobs_num")
    singles = []
    for index, prompt in enumerate(prompts):
        values = {key: _nth(getattr(body, key), index, len(prompts), key) for key in per_prompt}
        if isinstance(body.rid, str):
            values["rid"] = f"{body.rid}_{index}"
        singles.append(msgspec.structs.replace(body, **{name: prompt}, **values))
    return singles


def _nth(value: Any, index: int, count: int, name: str) -> Any:
    if not isinstance(value, list):
        return value
    if len(value) != count:
        raise ValueError(f"{len(value)} values in `{name}` for {count} prompts")
    return value[index]


def _read(body: wire.GenerateBody, tokenizer: Tokenizer | None) -> Asked:
    sampling = body.sampling_params
    for name in ("sampling_params", "rid", "return_logprob", "logprob_start_len", "top_logprobs_num"):
        if isinstance(getattr(body, name), list):
            raise ValueError(f"a list in `{name}` for a single prompt")
    assert isinstance(sampling, wire.SamplingBody)
    _refuse_unserved(body, sampling)
    stops = _stops(sampling)
    if stops.strings and tokenizer is None:
        raise ValueError("this server has no tokenizer: give stop token ids instead of strings")
    if tokenizer is not None and not sampling.skip_special_tokens and body.return_text:
        raise ValueError("`skip_special_tokens` false is not served: read `output_ids`")
    rid = body.rid if isinstance(body.rid, str) else next(_rids)
    prompt_ids = _prompt_ids(body, tokenizer)
    limits = _per_sample(sampling.max_new_tokens, sampling.n, "max_new_tokens")
    request = None
    if any(limits):
        request = GenerateRequest(
            rid=rid,
            prompt_ids=prompt_ids,
            params=_params(sampling, stops, top_logprobs=int(body.top_logprobs_num or 0)),  # type: ignore[arg-type]
            max_new_tokens=limits,
            seeds=_seeds(sampling),
            ends=partial(stops.end, tokenizer) if stops.strings and tokenizer is not None else None,
        )
    return Asked(rid=rid, prompt_ids=prompt_ids, request=request, num_samples=sampling.n, stops=stops, body=body)


def _params(sampling: wire.SamplingBody, stops: Stops, *, top_logprobs: int) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(sampling.top_k, 0),
        min_p=sampling.min_p or 0.0,
        stop_token_ids=stops.tokens,
        ignore_eos=sampling.ignore_eos,
        min_new_tokens=sampling.min_new_tokens or 0,
        frequency_penalty=sampling.frequency_penalty or 0.0,
        presence_penalty=sampling.presence_penalty or 0.0,
        repetition_penalty=1.0 if sampling.repetition_penalty is None else sampling.repetition_penalty,
        logit_bias=sampling.logit_bias or {},
        top_logprobs=top_logprobs,
    )


def _stops(sampling: wire.SamplingBody) -> Stops:
    stop = sampling.stop
    listed = stop if isinstance(stop, list) else [] if stop is None else [stop]
    strings = tuple(entry for entry in listed if isinstance(entry, str))
    if not all(strings):
        raise ValueError("an empty string in `stop` would end every answer")
    if len(strings) > MAX_STOP_STRINGS or any(len(string) > MAX_STOP_LENGTH for string in strings):
        raise ValueError(f"`stop` holds at most {MAX_STOP_STRINGS} strings of {MAX_STOP_LENGTH} characters")
    tokens = [entry for entry in listed if isinstance(entry, int)] + (sampling.stop_token_ids or [])
    return Stops(strings=strings, tokens=frozenset(tokens), keep=sampling.no_stop_trim)


def answer_text(asked: Asked, segment: Segment, tokenizer: Tokenizer | None) -> str:
    """Without what ended it."""
    if tokenizer is None:
        return ""
    ids = asked.stops.spoken(segment.token_ids) if segment.finish_reason == "stop" else segment.token_ids
    return asked.stops.cut(tokenizer.decode(ids))


def finish_reason(asked: Asked, segment: Segment, tokenizer: Tokenizer | None) -> wire.Stop | wire.Length | wire.Abort:
    match segment.finish_reason:
        case "stop":
            searched = tokenizer is not None and asked.stops.strings
            matched = asked.stops.matched(tokenizer.decode(segment.token_ids)) if searched else None  # type: ignore[union-attr]
            return wire.Stop(matched=segment.token_ids[-1] if matched is None else matched)
        case "length":
            return wire.Length(length=len(segment.token_ids))
        case "abort":
            return wire.Abort()


def _triples(
    logprobs: Sequence[float | None], token_ids: Sequence[int], *, tokenizer: Tokenizer | None
) -> list[wire.LogprobTriple]:
    texts = [tokenizer.decode([token]) for token in token_ids] if tokenizer else [None] * len(token_ids)
    return list(zip(logprobs, token_ids, texts, strict=True))


def _prompt_ids(body: wire.GenerateBody, tokenizer: Tokenizer | None) -> list[int]:
    if body.input_ids is not None:
        if not all(isinstance(token, int) for token in body.input_ids):
            raise ValueError("`input_ids` mixes token ids and lists of them")
        return body.input_ids  # type: ignore[return-value]
    if tokenizer is None:
        raise ValueError("this server has no tokenizer: give `input_ids` instead of `text`")
    assert isinstance(body.text, str)
    return tokenizer.encode(body.text)


def _refuse_unserved(body: wire.GenerateBody, sampling: wire.SamplingBody) -> None:
    for name in wire.UNSERVED:
        if wire.asks(getattr(body, name)):
            raise ValueError(f"`{name}` is not served")
    for name in wire.UNSERVED_SAMPLING:
        if wire.asks(getattr(sampling, name)):
            raise ValueError(f"sampling parameter `{name}` is not served")


def _per_sample(value: int | list[int], num_samples: int, name: str) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * num_samples
    if len(value) != num_samples:
        raise ValueError(f"{len(value)} values in `{name}` for n = {num_samples}")
    return tuple(value)


def _seeds(sampling: wire.SamplingBody) -> tuple[int, ...]:
    seed = sampling.sampling_seed
    if isinstance(seed, list):
        return _per_sample(seed, sampling.n, "sampling_seed")
    if seed is None:
        return tuple(random.getrandbits(63) for _ in range(sampling.n))
    return (seed,) if sampling.n == 1 else tuple(stable_seed(seed, index) for index in range(sampling.n))
