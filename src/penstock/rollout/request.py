"""What an engine is asked for. Torch-free; checked here, before anything reaches the engine."""

from __future__ import annotations

from dataclasses import dataclass

MAX_STOP_TOKENS = 256
"""Stop tokens per request: far above any tokenizer's set, low enough that nobody can slow a decode step with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. `temperature` 0 is greedy, `top_k` 0 and `top_p` 1 restrict nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    """In addition to the model's own end-of-sequence tokens."""
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.temperature != 0 and not 1e-3 <= self.temperature <= 100.0:
            raise ValueError(f"temperature must be 0 (greedy) or between 0.001 and 100, not {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], not {self.top_p}")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k must be at least 0 (0 restricts nothing), not {self.top_k}")
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise ValueError(f"{len(self.stop_token_ids)} stop_token_ids given, at most {MAX_STOP_TOKENS} are allowed")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt and `len(seeds)` samples of it. `max_new_tokens` has one limit per sample."""

    rid: str
    prompt_ids: list[int]
    params: SamplingParams
    max_new_tokens: tuple[int, ...]
    seeds: tuple[int, ...]
    """A sample depends on its seed, the prompt and the weights, not on its neighbours in the batch."""

    def check(self, *, vocab_size: int, max_context: int) -> None:
        """Raise ValueError unless a model of these dimensions can serve the request."""
        if not self.prompt_ids:
            raise ValueError("the prompt is empty")
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
        low, high = min(self.prompt_ids), max(self.prompt_ids)
        if low < 0 or high >= vocab_size:
            raise ValueError(f"token id {low if low < 0 else high} is outside the vocabulary of {vocab_size} tokens")
