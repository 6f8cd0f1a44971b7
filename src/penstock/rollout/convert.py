"""Between the wire and the engine: a JSON body becomes a GenerateRequest, segments become replies."""

from __future__ import annotations

import itertools
import random
from typing import Protocol

from penstock.rollout import wire
from penstock.rollout.request import GenerateRequest, SamplingParams
from penstock.types import Segment, stable_seed

_rids = (f"request-{number}" for number in itertools.count())


class Tokenizer(Protocol):
    """What `text` needs."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: list[int]) -> str: ...


def read_request(body: wire.GenerateBody, tokenizer: Tokenizer | None) -> GenerateRequest:
    """Raises ValueError for whatever cannot be served."""
    if body.stream:
        raise ValueError("streaming is not served: leave out `stream`")
    sampling = body.sampling_params
    _refuse_unserved(sampling)
    return GenerateRequest(
        rid=body.rid or next(_rids),
        prompt_ids=_prompt_ids(body, tokenizer),
        params=SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=max(sampling.top_k, 0),
            stop_token_ids=frozenset(sampling.stop_token_ids or ()),
            ignore_eos=sampling.ignore_eos,
        ),
        max_new_tokens=_per_sample(sampling.max_new_tokens, sampling.n, "max_new_tokens"),
        seeds=_seeds(sampling),
    )


def write_replies(
    request: GenerateRequest,
    segments: list[Segment],
    *,
    with_logprobs: bool,
    tokenizer: Tokenizer | None,
    latency_s: float,
) -> list[wire.GenerateReply]:
    """One reply per sample."""
    replies = []
    for index, segment in enumerate(segments):
        ids = segment.token_ids
        triples: list[wire.LogprobTriple] = [(x, token, None) for x, token in zip(segment.logprobs, ids, strict=True)]
        meta = wire.MetaInfo(
            id=request.rid if len(segments) == 1 else f"{request.rid}_{index}",
            finish_reason=_finish_reason(segment),
            prompt_tokens=len(request.prompt_ids),
            completion_tokens=len(ids),
            weight_version=str(segment.spans[-1].policy_version) if segment.spans else "",
            weight_versions=[wire.WeightSpan(str(version), start, end) for version, start, end in segment.spans],
            output_token_logprobs=triples if with_logprobs else None,
            e2e_latency=latency_s,
        )
        text = tokenizer.decode(ids) if tokenizer else ""
        replies.append(wire.GenerateReply(text=text, output_ids=ids, meta_info=meta))
    return replies


def _finish_reason(segment: Segment) -> wire.Stop | wire.Length | wire.Abort:
    match segment.finish_reason:
        case "stop":
            return wire.Stop(matched=segment.token_ids[-1])
        case "length":
            return wire.Length(length=len(segment.token_ids))
        case "abort":
            return wire.Abort()


def _prompt_ids(body: wire.GenerateBody, tokenizer: Tokenizer | None) -> list[int]:
    if (body.input_ids is None) == (body.text is None):
        raise ValueError("give exactly one of `input_ids` and `text`")
    if body.input_ids is not None:
        return body.input_ids
    if tokenizer is None:
        raise ValueError("this server has no tokenizer: give `input_ids` instead of `text`")
    return tokenizer.encode(body.text or "")


def _refuse_unserved(sampling: wire.SamplingBody) -> None:
    for name, neutral in wire.NEUTRAL.items():
        value = getattr(sampling, name)
        if value is not None and value != neutral:
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
