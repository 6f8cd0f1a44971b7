"""Sampling for a whole batch at once.

Each row draws by inverting its cumulative distribution at one uniform number that is a pure function of (seed,
position in the sequence). So a sample does not depend on its neighbours, an answer cut into segments continues
exactly where it stopped, and no generator state is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row, with 53 random bits."""
    mixed = _mix(_mix(seeds + _GOLDEN) + positions.astype(np.uint64) * _GOLDEN)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True, kw_only=True)
class RowParams:
    """Sampling parameters of the rows in a batch of n."""

    temperatures: npt.NDArray[np.float32]  # [n], 0 is greedy
    top_ps: npt.NDArray[np.float32]  # [n], 1 restricts nothing
    top_ks: npt.NDArray[np.int64]  # [n], 0 restricts nothing
    min_ps: npt.NDArray[np.float32]  # [n], 0 restricts nothing


def sample(
    logits: torch.Tensor,
    params: RowParams,
    uniform: npt.NDArray[np.float64],
    *,
    shaped: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row. Returns tokens [n] and the log-probabilities of the vocabulary [n, vocab].

    These are the policy's own at the row's temperature (of the raw logits if greedy), whatever `top_p`, `top_k` and
    `min_p` cut away and `shaped`, the logits to draw from if they are others, adds.
    """
    greedy = params.temperatures == 0
    logprobs = _log_softmax(logits, params, greedy)
    drawn = logprobs if shaped is None else _log_softmax(shaped, params, greedy)
    if greedy.all():
        tokens = drawn.argmax(dim=-1, keepdim=True)
    else:
        probs = _restrict(drawn.exp(), params)
        # float64, so that the rounding of a long sum neither hides rare tokens nor reaches excluded ones.
        cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
        threshold = cumulative[:, -1:] * _column(uniform, logits.device)
        tokens = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=logits.shape[-1] - 1)
        if greedy.any():
            tokens = torch.where(_column(greedy, logits.device), drawn.argmax(dim=-1, keepdim=True), tokens)
    return tokens.squeeze(1), logprobs


def _log_softmax(logits: torch.Tensor, params: RowParams, greedy: npt.NDArray[np.bool_]) -> torch.Tensor:
    logits = logits.float()
    if not (params.temperatures == 1).all():
        logits = logits / _column(np.where(greedy, np.float32(1), params.temperatures), logits.device)
    return torch.log_softmax(logits, dim=-1)


def _restrict(probs: torch.Tensor, params: RowParams) -> torch.Tensor:
    """Zero what top-k, then top-p, then min-p exclude, in the rows that ask for it."""
    chosen = np.flatnonzero((params.top_ps < 1) | (params.top_ks > 0) | (params.min_ps > 0))
    if not len(chosen):
        return probs
    rows = torch.from_numpy(chosen).to(probs.device)
    ranked, order = probs[rows].sort(dim=-1, descending=True)
    vocab_size = probs.shape[-1]
    limits = np.where(params.top_ks[chosen] > 0, params.top_ks[chosen], vocab_size)
    ranked[torch.arange(vocab_size, device=probs.device) >= _column(limits, probs.device)] = 0
    mass_before = ranked.cumsum(dim=-1) - ranked
    ranked[mass_before >= _column(params.top_ps[chosen], probs.device) * ranked.sum(dim=-1, keepdim=True)] = 0
    ranked[ranked < _column(params.min_ps[chosen], probs.device) * ranked[:, :1]] = 0
    probs[rows] = torch.zeros_like(ranked).scatter_(1, order, ranked)
    return probs


def _column(values: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).to(device).unsqueeze(1)
