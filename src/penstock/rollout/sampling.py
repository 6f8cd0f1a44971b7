"""Sampling for a whole batch at once.

Each row inverts its cumulative distribution at one uniform number. This number is a pure function of the seed and the
position in the sequence. So a sample does not depend on its neighbours, and an answer cut into segments continues
exactly where it stopped. No random generator keeps state.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from penstock.rollout.slot_rows import SlotSequence

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) per row, with 53 random bits."""
    mixed = _mix(_mix(seeds + _GOLDEN) + positions.astype(np.uint64) * _GOLDEN)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(
    logits: torch.Tensor,
    params: npt.NDArray[np.void],
    uniform: npt.NDArray[np.float64],
    *,
    shaped: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row. Return tokens [n] and the log-probabilities of the vocabulary [n, vocab].

    `params` [n] has the fields of `slot_rows.ROW`.
    `shaped` are the logits to draw from, if they differ from `logits`. The log-probabilities are always those of
    `logits` at the row's temperature (without temperature if greedy). `top_p`, `top_k`, `min_p` and `shaped` do not
    affect them.
    """
    greedy = params["temperature"] == 0
    logprobs = _log_softmax(logits, params, greedy)
    drawn = logprobs if shaped is None else _log_softmax(shaped, params, greedy)
    if greedy.all():
        tokens = drawn.argmax(dim=-1, keepdim=True)
    else:
        probs = _restrict(drawn.exp(), params)
        # float64, so that the rounding of a long sum neither hides rare tokens nor selects excluded ones.
        cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
        threshold = cumulative[:, -1:] * _column(uniform, logits.device)
        tokens = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=logits.shape[-1] - 1)
        if greedy.any():
            tokens = torch.where(_column(greedy, logits.device), drawn.argmax(dim=-1, keepdim=True), tokens)
    return tokens.squeeze(1), logprobs


def _log_softmax(logits: torch.Tensor, params: npt.NDArray[np.void], greedy: npt.NDArray[np.bool_]) -> torch.Tensor:
    logits = logits.float()
    if not (params["temperature"] == 1).all():
        logits = logits / _column(np.where(greedy, np.float32(1), params["temperature"]), logits.device)
    return torch.log_softmax(logits, dim=-1)


def _restrict(probs: torch.Tensor, params: npt.NDArray[np.void]) -> torch.Tensor:
    """Zero the probabilities that top-k, then top-p, then min-p exclude, in the rows that use these limits."""
    chosen = np.flatnonzero((params["top_p"] < 1) | (params["top_k"] > 0) | (params["min_p"] > 0))
    if not len(chosen):
        return probs
    rows = torch.from_numpy(chosen).to(probs.device)
    ranked, order = probs[rows].sort(dim=-1, descending=True)
    vocab_size = probs.shape[-1]
    limits = np.where(params["top_k"][chosen] > 0, params["top_k"][chosen], vocab_size)
    ranked[torch.arange(vocab_size, device=probs.device) >= _column(limits, probs.device)] = 0
    mass_before = ranked.cumsum(dim=-1) - ranked
    ranked[mass_before >= _column(params["top_p"][chosen], probs.device) * ranked.sum(dim=-1, keepdim=True)] = 0
    ranked[ranked < _column(params["min_p"][chosen], probs.device) * ranked[:, :1]] = 0
    probs[rows] = torch.zeros_like(ranked).scatter_(1, order, ranked)
    return probs


def _column(values: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).to(device).unsqueeze(1)


def shaped(logits: torch.Tensor, sequences: Sequence[SlotSequence]) -> torch.Tensor:
    """Apply penalties, biases and minimum lengths before a token is drawn.

    Return `logits` [n, vocab] unchanged, or a float32 copy in which some rows are changed. Rows that use none of them
    cost nothing. The recorded log-probabilities remain those of the unchanged policy."""
    rows = [row for row, sequence in enumerate(sequences) if sequence.shapes_logits]
    if not rows:
        return logits
    changed = logits.float().clone()
    for row in rows:
        with sequences[row].running.failing_alone():
            _shape_row(changed[row], sequences[row])
    return changed


def _shape_row(row: torch.Tensor, sequence: SlotSequence) -> None:
    """Change a row of logits [vocab] in place.

    The repetition penalty counts prompt and answer (CTRL, arXiv 1909.05858). The frequency and presence penalties count
    the answer alone (as OpenAI defines them)."""
    params, generated = sequence.params, sequence.token_ids
    if params.repetition_penalty != 1.0:
        seen = _to_device(np.unique(sequence.running.request.prompt_ids + generated), row)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.frequency_penalty or params.presence_penalty) and generated:
        ids, counts = np.unique(generated, return_counts=True)
        penalties = params.frequency_penalty * counts + params.presence_penalty
        row[_to_device(ids, row)] -= _to_device(penalties.astype(np.float32), row)
    if params.logit_bias:
        ids = np.fromiter(params.logit_bias, dtype=np.int64)
        row[_to_device(ids, row)] += _to_device(np.fromiter(params.logit_bias.values(), dtype=np.float32), row)
    if len(generated) < params.min_new_tokens and sequence.stop_ids:
        row[list(sequence.stop_ids)] = -torch.inf


def _to_device(values: np.ndarray[tuple[int, ...], np.dtype[np.generic]], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device)
