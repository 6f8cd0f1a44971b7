"""Convert JSON bodies to engine requests, and segments to JSON replies."""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from penstock.rollout import bodies
from penstock.rollout.generator import Increment, PromptScores
from penstock.rollout.prompt_text import MAX_BATCH
from penstock.rollout.request import MAX_STOP_LENGTH, GenerateRequest, SamplingParams
from penstock.rollout.text import GrowingText, Stops, Tokenizer
from penstock.routed_experts import to_wire
from penstock.samples import Segment, VersionSpan, add_spans
from penstock.seeding import stable_seed

MAX_BATCH_SAMPLES = 4096
"""Maximum number of samples of all prompts in one body."""
MAX_REPEATED_TOKENS = 2**20
"""Maximum number of tokens in the replies to one body that clients rarely ask for: a prompt's tokens, repeated in each
sample that echoes or scores them, and new tokens with their top log-probabilities."""
MAX_RID = 256
"""Maximum length of a request id."""
MAX_STOP_STRINGS = 16

PER_PROMPT = ("sampling_params", "rid", "return_logprob", "logprob_start_len", "top_logprobs_num")
"""Fields that may be a list with one value per prompt of a batch."""
UNCHANGED = ("temperature", "top_p", "ignore_eos")
"""Sampling parameters that the engine takes as they are."""
OPTIONAL = ("min_p", "min_new_tokens", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias")
"""Sampling parameters that may be null for their default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRequest:
    """One requested prompt, and the options for its reply."""

    rid: str
    prompt_ids: list[int]
    request: GenerateRequest | None
    """None if the prompt is only scored (`max_new_tokens` 0)."""
    num_samples: int
    stops: Stops
    body: bodies.GenerateBody

    @property
    def num_top(self) -> int:
        """Return how many of the likeliest tokens are requested at each place."""
        return int(self.body.top_logprobs_num or 0)  # type: ignore[arg-type]

    @property
    def scored_from(self) -> int | None:
        """Position in the prompt from which on its log-probabilities are requested, or None."""
        start = self.body.logprob_start_len
        return start if self.body.return_logprob and isinstance(start, int) and start >= 0 else None


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a requested prompt: one segment per sample."""

    prompt: PromptRequest
    segments: Sequence[Segment]
    scores: PromptScores | None = None
    """Scores of the prompt's tokens, if requested."""

    @property
    def versions(self) -> list[int]:
        """Every policy_version that computed a part of the answer."""
        scored_by = self.scores.versions if self.scores is not None else ()
        return [*scored_by, *(span.policy_version for segment in self.segments for span in segment.spans)]


@dataclass(slots=True)
class GrowingSample:
    """The tokens of one sample so far."""

    prompt: PromptRequest
    member: int
    """Index among the samples of its prompt."""
    index: int
    """Index among all samples of the HTTP request."""
    tokenizer: Tokenizer | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    top_logprobs: list[list[tuple[float, int]]] = field(default_factory=list)
    answer: Answer | None = None
    """The answer with this sample alone. It is set when the sample has ended."""
    _text: GrowingText | None = None

    def add(self, increment: Increment) -> None:
        add_spans(self.spans, increment.spans, offset=self.num_tokens)
        self.token_ids += increment.token_ids
        self.logprobs += increment.logprobs
        self.top_logprobs += increment.top_logprobs or ()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def since(self, place: int) -> tuple[list[int], list[float], list[list[tuple[float, int]]] | None]:
        """Return (token ids, log-probabilities, top log-probabilities if requested) from position `place` on."""
        tops = self.top_logprobs[place:] if self.top_logprobs else None
        return self.token_ids[place:], self.logprobs[place:], tops

    def text(self) -> str:
        """Return the text that later tokens cannot change. It excludes incomplete characters, stop tokens, and an
        end that may be the beginning of a stop string."""
        if self.tokenizer is None:
            return ""
        self._text = self._text or GrowingText(self.tokenizer)
        so_far = self._text.add(self.prompt.stops.without_stop_token(self.token_ids)[self._text.num_tokens :])
        return self.prompt.stops.without_partial_stop(self.prompt.stops.cut(so_far))


def read_requests(
    body: bodies.GenerateBody, tokenizer: Tokenizer | None, *, echoes: bool = False
) -> list[PromptRequest]:
    """Return one entry per prompt of a body in tokens (`PromptText`). Raises ValueError if a request cannot be
    served. `echoes`: each sample's reply repeats its prompt."""
    prompts = [_read(single, tokenizer) for single in _split(body)]
    if (count := sum(prompt.num_samples for prompt in prompts)) > MAX_BATCH_SAMPLES:
        raise ValueError(f"a request has at most {MAX_BATCH_SAMPLES} samples of all its prompts, not {count}")
    if (count := sum(_num_repeated(prompt, echoes=echoes) for prompt in prompts)) > MAX_REPEATED_TOKENS:
        raise ValueError(
            f"the replies would have {count} tokens of echoed or scored prompts and with top log-probabilities, more "
            f"than {MAX_REPEATED_TOKENS}: ask for fewer samples (`n`) or prompts in one request"
        )
    return prompts


def _num_repeated(prompt: PromptRequest, *, echoes: bool) -> int:
    """Return the number of tokens that count for `MAX_REPEATED_TOKENS`."""
    start = 0 if echoes else prompt.scored_from
    count = 0 if start is None else prompt.num_samples * max(len(prompt.prompt_ids) - start, 0)
    if prompt.request is not None and prompt.request.params.top_logprobs:
        count += sum(prompt.request.max_new_tokens)
    return count


def is_batch(body: bodies.GenerateBody) -> bool:
    """Return whether the body is a batch. The answer to a batch is a list, even with a single reply."""
    return body.input_ids is not None and any(isinstance(ids, list) for ids in body.input_ids)


def write_replies(
    answer: Answer, tokenizer: Tokenizer | None, *, latency_s: float, first: int = 0
) -> list[bodies.GenerateReply]:
    """Return one reply per sample. `first` is the index of the first sample among the samples of its prompt."""
    prompt, body, replies = answer.prompt, answer.prompt.body, []
    text_tokenizer = tokenizer if body.return_text else None
    logprob_tokenizer = text_tokenizer if body.return_text_in_logprobs else None
    scores = tops = None
    if (start := prompt.scored_from) is not None and answer.scores is not None:
        scored = answer.scores.tokens
        logprobs = [None, *(each.logprob for each in scored)]
        scores = _triples(logprobs[start:], prompt.prompt_ids[start:], tokenizer=logprob_tokenizer)
        if prompt.num_top:
            tops = [None, *(_tops(each.top_logprobs, logprob_tokenizer) for each in scored)][start:]
    for member, segment in enumerate(answer.segments, first):
        text = answer_text(prompt, segment, text_tokenizer)
        reply = write_reply(prompt, member, segment, logprob_tokenizer, text=text, latency_s=latency_s)
        meta = reply.meta_info
        meta.finish_reason = finish_reason(prompt, segment, tokenizer)
        if answer.scores is not None and answer.scores.versions and not segment.spans:
            meta.weight_version = str(answer.scores.versions[-1])
        if body.return_logprob and segment.top_logprobs is not None:
            meta.output_top_logprobs = [_tops(place, logprob_tokenizer) for place in segment.top_logprobs]
        meta.input_token_logprobs, meta.input_top_logprobs = scores, tops
        if segment.experts is not None:
            meta.routed_experts = to_wire(segment.experts, compacted=body.compact_routed_experts)
            if body.compact_routed_experts:
                meta.routed_experts_dtype = segment.experts.dtype.name
        replies.append(reply)
    return replies


def _tops(place: Sequence[tuple[float, int]], tokenizer: Tokenizer | None) -> list[bodies.LogprobTriple]:
    return _triples(*zip(*place, strict=True), tokenizer=tokenizer)


def write_reply(
    prompt: PromptRequest,
    member: int,
    tokens: Segment | GrowingSample,
    logprob_tokenizer: Tokenizer | None = None,
    *,
    text: str,
    latency_s: float,
) -> bodies.GenerateReply:
    """Return a reply with the tokens so far of sample `member` of a prompt. The sample may still be growing.

    With `logprob_tokenizer`, every log-probability is accompanied by the text of its token."""
    spans = [bodies.WeightSpan(str(version), start, end) for version, start, end in tokens.spans]
    meta = bodies.MetaInfo(
        id=prompt.rid if prompt.num_samples == 1 else f"{prompt.rid}_{member}",
        finish_reason=None,
        prompt_tokens=len(prompt.prompt_ids),
        completion_tokens=len(tokens.token_ids),
        weight_version=spans[-1].version if spans else "",
        weight_versions=spans,
        e2e_latency=latency_s,
    )
    if prompt.body.return_logprob:
        meta.output_token_logprobs = _triples(tokens.logprobs, tokens.token_ids, tokenizer=logprob_tokenizer)
    return bodies.GenerateReply(text=text, output_ids=tokens.token_ids, meta_info=meta)


def version_header(answers: Sequence[Answer]) -> dict[str, str]:
    """Return the header `X-Policy-Version`: a single version, as in `7`, or the oldest and newest, as in `7-9`."""
    versions = sorted({version for answer in answers for version in answer.versions})
    return {"X-Policy-Version": "-".join(map(str, dict.fromkeys((versions[0], versions[-1]))))} if versions else {}


def _split(body: bodies.GenerateBody) -> list[bodies.GenerateBody]:
    """Split a batch into bodies with one prompt each. A value that is not a list applies to all prompts."""
    if body.text is not None and body.input_ids is None:
        raise ValueError("this server has no tokenizer: set `input_ids` instead of `text`")
    if (body.input_ids is None) == (body.text is None):
        raise ValueError("set exactly one of `input_ids` and `text`")
    if not is_batch(body):
        return [body]
    prompts = body.input_ids
    assert prompts is not None
    if len(prompts) > MAX_BATCH:
        raise ValueError(f"a batch has between 1 and {MAX_BATCH} prompts, not {len(prompts)}")
    if not all(isinstance(ids, list) for ids in prompts):
        raise ValueError("`input_ids` mixes token ids and lists of them")
    columns = {key: _repeated(getattr(body, key), len(prompts), key, "prompts") for key in ("input_ids", *PER_PROMPT)}
    if isinstance(body.rid, str):
        columns["rid"] = tuple(f"{body.rid}_{index}" for index in range(len(prompts)))
    rows = zip(*columns.values(), strict=True)
    return [msgspec.structs.replace(body, **dict(zip(columns, row, strict=True))) for row in rows]


def _read(body: bodies.GenerateBody, tokenizer: Tokenizer | None) -> PromptRequest:
    sampling = body.sampling_params
    for name in PER_PROMPT:
        if isinstance(getattr(body, name), list):
            raise ValueError(f"`{name}` is a list, but the body has a single prompt")
    assert isinstance(sampling, bodies.SamplingBody)
    _refuse_unserved(body, sampling)
    stops = _stops(sampling)
    if stops.strings and tokenizer is None:
        raise ValueError("this server has no tokenizer: set `stop` to token ids instead of strings")
    if tokenizer is not None and not sampling.skip_special_tokens and body.return_text:
        raise ValueError("`skip_special_tokens` false is not supported: read `output_ids`")
    rid = body.rid if isinstance(body.rid, str) else secrets.token_hex(12)  # not to be guessed: it aborts the request
    if len(rid) > MAX_RID:
        raise ValueError(f"`rid` has {len(rid)} characters, more than {MAX_RID}")
    ids: Any = body.input_ids  # `_split` left token ids only
    limits = _repeated(sampling.max_new_tokens, sampling.n, "max_new_tokens", "samples")
    request, params = None, _params(sampling, stops, top_logprobs=int(body.top_logprobs_num or 0))  # type: ignore[arg-type]
    if sampling.n > 1 and not any(limits):
        raise ValueError(f"`n` is {sampling.n}, but nothing is sampled with max_new_tokens 0: set `n` to 1")
    if any(limits):
        request = GenerateRequest(
            rid=rid,
            prompt_ids=ids,
            params=params,
            max_new_tokens=limits,
            seeds=_seeds(sampling),
            ends=partial(stops.end, tokenizer) if stops.strings and tokenizer is not None else None,
            shown=partial(stops.shown, tokenizer) if tokenizer is not None else None,
            routed_from=body.routed_experts_start_len if body.return_routed_experts else None,
        )
    return PromptRequest(rid=rid, prompt_ids=ids, request=request, num_samples=sampling.n, stops=stops, body=body)


def _params(sampling: bodies.SamplingBody, stops: Stops, *, top_logprobs: int) -> SamplingParams:
    given = {name: value for name in (*UNCHANGED, *OPTIONAL) if (value := getattr(sampling, name)) is not None}
    return SamplingParams(top_k=max(sampling.top_k, 0), stop_token_ids=stops.tokens, top_logprobs=top_logprobs, **given)


def _stops(sampling: bodies.SamplingBody) -> Stops:
    stop = sampling.stop
    listed = stop if isinstance(stop, list) else [] if stop is None else [stop]
    strings = tuple(entry for entry in listed if isinstance(entry, str))
    if not all(strings):
        raise ValueError("`stop` contains an empty string, which would end every answer")
    if len(strings) > MAX_STOP_STRINGS or any(len(string) > MAX_STOP_LENGTH for string in strings):
        raise ValueError(f"`stop` holds at most {MAX_STOP_STRINGS} strings of {MAX_STOP_LENGTH} characters")
    tokens = [entry for entry in listed if isinstance(entry, int)] + (sampling.stop_token_ids or [])
    return Stops(strings=strings, tokens=frozenset(tokens), keep=sampling.no_stop_trim)


def answer_text(prompt: PromptRequest, segment: Segment, tokenizer: Tokenizer | None) -> str:
    """Return the segment's text without the stop token or stop string that ended it."""
    if tokenizer is None:
        return ""
    return prompt.stops.shown(tokenizer, segment)


def finish_reason(
    prompt: PromptRequest, segment: Segment, tokenizer: Tokenizer | None
) -> bodies.Stop | bodies.Length | bodies.Abort:
    match segment.finish_reason:
        case "stop":
            searched = tokenizer is not None and prompt.stops.strings
            matched = prompt.stops.matched(tokenizer.decode(segment.token_ids)) if searched else None  # type: ignore[union-attr]
            return bodies.Stop(matched=segment.token_ids[-1] if matched is None else matched)
        case "length":
            return bodies.Length(length=len(segment.token_ids))
        case "abort":
            return bodies.Abort()


def _triples(
    logprobs: Sequence[float | None], token_ids: Sequence[int], *, tokenizer: Tokenizer | None
) -> list[bodies.LogprobTriple]:
    texts = [tokenizer.decode([token]) for token in token_ids] if tokenizer else [None] * len(token_ids)
    return list(zip(logprobs, token_ids, texts, strict=True))


def _refuse_unserved(body: bodies.GenerateBody, sampling: bodies.SamplingBody) -> None:
    parts = (body, bodies.UnservedFields, "field"), (sampling, bodies.UnservedSampling, "sampling parameter")
    for part, kind, label in parts:
        for name in kind.__struct_fields__:
            if bodies.asks(getattr(part, name)):
                raise ValueError(f"{label} `{name}` is not supported")


def _repeated(value: Any, count: int, name: str, counted: str) -> tuple[Any, ...]:
    """Return the values of a list, or `count` times a value that is not a list."""
    if not isinstance(value, list):
        return (value,) * count
    if len(value) != count:
        raise ValueError(f"`{name}` has {len(value)} values for {count} {counted}")
    return tuple(value)


def _seeds(sampling: bodies.SamplingBody) -> tuple[int, ...]:
    seed = sampling.sampling_seed
    if isinstance(seed, list):
        return _repeated(seed, sampling.n, "sampling_seed", "samples")
    if seed is None:
        return tuple(random.getrandbits(63) for _ in range(sampling.n))
    return (seed,) if sampling.n == 1 else tuple(stable_seed(seed, index) for index in range(sampling.n))
