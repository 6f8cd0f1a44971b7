"""What an engine is asked for. Torch-free; checked here, before anything reaches the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

MAX_STOP_TOKENS = 256
"""Stop tokens per request: far above any tokenizer's set, low enough that nobody can slow a decode step with them."""
MAX_BIASED_TOKENS = 1024
MAX_BIAS = 100.0
MAX_TOP_LOGPROBS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. `temperature` 0 is greedy, `top_k` 0 and `top_p` 1 restrict nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest one are out (arXiv 2407.01082)."""
    stop_token_ids: frozenset[int] = frozenset()
    """In addition to the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    min_new_tokens: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    top_logprobs: int = 0
    """How many of the likeliest tokens are told at every place."""

    def __post_init__(self) -> None:
        if self.temperature != 0 and not 1e-3 <= self.temperature <= 100.0:
            raise ValueError(f"temperature must be 0 (greedy) or between 0.001 and 100, not {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], not {self.top_p}")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k must be at least 0 (0 restricts nothing), not {self.top_k}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1], not {self.min_p}")
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise ValueError(f"{len(self.stop_token_ids)} stop_token_ids given, at most {MAX_STOP_TOKENS} are allowed")
        if self.min_new_tokens < 0:
            raise ValueError(f"min_new_tokens must be at least 0, not {self.min_new_tokens}")
        for name in ("frequency_penalty", "presence_penalty"):
            if not -2.0 <= getattr(self, name) <= 2.0:
                raise ValueError(f"{name} must be in [-2, 2], not {getattr(self, name)}")
        if not 0.01 <= self.repetition_penalty <= 10.0:
            raise ValueError(f"repetition_penalty must be in [0.01, 10], not {self.repetition_penalty}")
        if len(self.logit_bias) > MAX_BIASED_TOKENS:
            raise ValueError(f"logit_bias names {len(self.logit_bias)} tokens, at most {MAX_BIASED_TOKENS} are allowed")
        if not all(-MAX_BIAS <= bias <= MAX_BIAS for bias in self.logit_bias.values()):
            raise ValueError(f"logit_bias must be in [-{MAX_BIAS:g}, {MAX_BIAS:g}]")
        if not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise ValueError(f"at most {MAX_TOP_LOGPROBS} top log-probabilities are told, not {self.top_logprobs}")

    @property
    def shapes_logits(self) -> bool:
        """Whether drawing needs more than temperature, top-k, top-p and min-p."""
        return bool(
            self.frequency_penalty
            or self.presence_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.min_new_tokens
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt and `len(seeds)` samples of it. `max_new_tokens` has one limit per sample."""

    rid: str
    prompt_ids: list[int]
    params: SamplingParams
    max_new_tokens: tuple[int, ...]
    seeds: tuple[int, ...]
    """A sample depends on its seed, the prompt and the weights, not on its neighbours in the batch."""
    ends: Callable[[Sequence[int]], bool] | None = None
    """Asked after every token whether the tokens so far end the sample, as a stop string does. Called from the engine's
    thread."""

    def check(self, *, vocab_size: int, max_context: int) -> None:
        """Raise ValueError unless a model of these dimensions can serve the request."""
        check_prompt(self.prompt_ids, vocab_size=vocab_size, max_context=max_context)
        if not self.seeds or len(self.seeds) != len(self.max_new_tokens):
            raise ValueError(f"{len(self.seeds)} seeds for {len(self.max_new_tokens)} samples")
        if min(self.max_new_tokens) < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {min(self.max_new_tokens)}")
        num_tokens = len(self.prompt_ids) + max(self.max_new_tokens)
        if num_tokens > max_context:
            raise ValueError(
                f"{len(self.prompt_ids)} prompt tokens and {max(self.max_new_tokens)} new ones make {num_tokens}, "
                f"more than the context of {max_context} tokens"
            )
        _check_tokens([*self.params.stop_token_ids, *self.params.logit_bias], vocab_size)
        if self.params.top_logprobs > vocab_size:
            raise ValueError(f"{self.params.top_logprobs} top log-probabilities of {vocab_size} tokens")


def check_prompt(prompt_ids: Sequence[int], *, vocab_size: int, max_context: int) -> None:
    """Raise ValueError unless a model of these dimensions can read the prompt."""
    if not prompt_ids:
        raise ValueError("the prompt is empty")
    if len(prompt_ids) > max_context:
        raise ValueError(f"{len(prompt_ids)} prompt tokens are more than the context of {max_context} tokens")
    _check_tokens(prompt_ids, vocab_size)


def _check_tokens(ids: Sequence[int], vocab_size: int) -> None:
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token < vocab_size:
            raise ValueError(f"token id {token} is outside the vocabulary of {vocab_size} tokens")
