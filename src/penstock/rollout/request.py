"""Generation requests. They are checked here, before they reach the engine. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from penstock.samples import Segment

MAX_STOP_LENGTH = 256
"""Most characters of a stop string."""
LATEST_TOKENS = 4 * MAX_STOP_LENGTH + 4
"""Number of tokens that can hold a whole stop string (see `Stops.end`)."""
MAX_STOP_TOKENS = 256
"""Maximum stop tokens per request: far above any tokenizer's set, low enough not to slow a decode step."""
MAX_BIASED_TOKENS = 1024
MAX_BIAS = 100.0
MIN_TOP_P = 1e-6
"""Far below the share of the most likely token, and far above what rounds to zero in half precision's sums."""

BOUNDS = {
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "min_new_tokens": (0, inf),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 10.0),
    "top_logprobs": (0, 64),
}
"""Smallest and largest value of sampling parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 restrict nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    """Tokens with less than this share of the top token's probability are excluded (arXiv 2407.01082)."""
    stop_token_ids: frozenset[int] = frozenset()
    """Stop tokens in addition to the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    min_new_tokens: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    top_logprobs: int = 0
    """Number of most likely tokens that are reported at each position."""

    def __post_init__(self) -> None:
        if self.temperature != 0 and not 1e-3 <= self.temperature <= 100.0:
            raise ValueError(f"temperature must be 0 (greedy) or between 0.001 and 100, not {self.temperature}")
        if not MIN_TOP_P <= self.top_p <= 1.0:
            raise ValueError(f"top_p must be between {MIN_TOP_P:g} and 1, not {self.top_p}")
        for name, (lowest, highest) in BOUNDS.items():
            if not lowest <= getattr(self, name) <= highest:
                raise ValueError(f"{name} must be between {lowest} and {highest}, not {getattr(self, name)}")
        for name, most in (("stop_token_ids", MAX_STOP_TOKENS), ("logit_bias", MAX_BIASED_TOKENS)):
            if len(getattr(self, name)) > most:
                raise ValueError(f"{name} has {len(getattr(self, name))} tokens, more than the maximum of {most}")
        if not all(-MAX_BIAS <= bias <= MAX_BIAS for bias in self.logit_bias.values()):
            raise ValueError(f"each logit_bias must be between {-MAX_BIAS:g} and {MAX_BIAS:g}")

    def changed(self) -> set[str]:
        """Return the names of the parameters without their default value."""
        default = SamplingParams()
        return {name for name in self.__slots__ if getattr(self, name) != getattr(default, name)}

    @property
    def shapes_logits(self) -> bool:
        """Whether sampling needs more than temperature, top-k, top-p and min-p."""
        penalizes = self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0
        return bool(penalizes or self.logit_bias or self.min_new_tokens)


MAX_TOKEN = 2**31
"""Token ids of all models are below this number."""
MAX_SEED = 2**63
"""A seed is below this number, and not below its negative."""


class ContextExceeded(ValueError):
    """A prompt, with the tokens that it asks for, is longer than the context. Clients of the OpenAI API look for the
    words "maximum context length is"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt and `len(seeds)` samples of it. `max_new_tokens` has one limit per sample."""

    rid: str
    prompt_ids: list[int]
    params: SamplingParams
    max_new_tokens: tuple[int, ...]
    seeds: tuple[int, ...]
    """One seed per sample. A sample depends on its seed, its prompt and the weights, not on the rest of the batch."""
    ends: Callable[[Sequence[int]], bool] | None = None
    """Function that returns whether the tokens so far end the sample, for example at a stop string. The engine's thread
    calls it after every token."""
    shown: Callable[[Segment], str] | None = None
    """Function that returns the text of a sample as its client reads it, without what ended it."""
    routed_from: int | None = None
    """Position from which on the experts of each token are recorded, if the model has experts. None: none are."""

    @property
    def stops(self) -> bool:
        """Whether stop tokens or stop strings end a sample, beside the model's own tokens."""
        return bool(self.params.stop_token_ids) or self.ends is not None

    def end_in(self, token_ids: Sequence[int]) -> int | None:
        """Return the number of tokens up to the first stop token or stop string, this included; None if there is none.

        It takes seconds for a long text with many stop strings.
        """
        for length in range(1, len(token_ids) + 1 if self.stops else 1):
            latest = token_ids[max(length - LATEST_TOKENS, 0) : length]
            if latest[-1] in self.params.stop_token_ids or (self.ends is not None and self.ends(latest)):
                return length
        return None

    def check(self, *, vocab_size: int, max_context: int) -> None:
        """Raise ValueError unless a model of these dimensions can serve the request."""
        check_prompt(self.prompt_ids, vocab_size=vocab_size, max_context=max_context)
        if not self.seeds or len(self.seeds) != len(self.max_new_tokens):
            raise ValueError(f"the request has {len(self.seeds)} seeds for {len(self.max_new_tokens)} samples")
        if not all(-MAX_SEED <= seed < MAX_SEED for seed in self.seeds):
            raise ValueError(f"a seed is a whole number from {-MAX_SEED} to {MAX_SEED - 1}")
        if min(self.max_new_tokens) < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {min(self.max_new_tokens)}")
        num_tokens = len(self.prompt_ids) + max(self.max_new_tokens)
        if num_tokens > max_context:
            raise ContextExceeded(
                f"{len(self.prompt_ids)} prompt tokens and {max(self.max_new_tokens)} new tokens make {num_tokens}, "
                f"and this model's maximum context length is {max_context} tokens"
            )
        if self.routed_from is not None and not 0 <= self.routed_from <= len(self.prompt_ids):
            raise ValueError(
                f"routed_experts_start_len is {self.routed_from}, not a position of the {len(self.prompt_ids)} tokens "
                "of the prompt"
            )
        check_tokens([*self.params.stop_token_ids, *self.params.logit_bias], vocab_size)
        if self.params.top_logprobs > vocab_size:
            raise ValueError(f"top_logprobs is {self.params.top_logprobs}, but there are only {vocab_size} tokens")


def check_prompt(prompt_ids: Sequence[int], *, vocab_size: int, max_context: int) -> None:
    """Raise ValueError unless a model of these dimensions can read the prompt."""
    if not prompt_ids:
        raise ValueError("the prompt is empty")
    if len(prompt_ids) > max_context:
        raise ContextExceeded(
            f"the prompt has {len(prompt_ids)} tokens, and this model's maximum context length is {max_context} tokens"
        )
    check_tokens(prompt_ids, vocab_size)


def check_tokens(ids: Sequence[int], vocab_size: int) -> None:
    """Raise ValueError unless all these are tokens of a vocabulary of this size."""
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token < vocab_size:
            raise ValueError(f"token id {token} is outside the vocabulary of {vocab_size} tokens")
