"""What changes a row's logits before a token is drawn: penalties, biases, a least length.

Rows that ask for none of it cost nothing. The log-probabilities that are recorded stay those of the policy itself.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch

from penstock.rollout.rows import Sequence


def shaped(logits: torch.Tensor, sequences: Many[Sequence]) -> torch.Tensor:
    """`logits` [n, vocab] themselves, or a float32 copy in which some rows are changed."""
    rows = [row for row, sequence in enumerate(sequences) if sequence.shapes_logits]
    if not rows:
        return logits
    changed = logits.float().clone()
    for row in rows:
        _shape(changed[row], sequences[row])
    return changed


def _shape(row: torch.Tensor, sequence: Sequence) -> None:
    """In place, [vocab]. Repetition concerns prompt and answer (CTRL, arXiv 1909.05858), frequency and presence the
    answer alone (as OpenAI defines them)."""
    params, generated = sequence.params, sequence.token_ids
    if params.repetition_penalty != 1.0:
        seen = _tensor(np.unique(sequence.running.request.prompt_ids + generated), row)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.frequency_penalty or params.presence_penalty) and generated:
        ids, counts = np.unique(generated, return_counts=True)
        penalties = params.frequency_penalty * counts + params.presence_penalty
        row[_tensor(ids, row)] -= _tensor(penalties.astype(np.float32), row)
    if params.logit_bias:
        ids = np.fromiter(params.logit_bias, dtype=np.int64)
        row[_tensor(ids, row)] += _tensor(np.fromiter(params.logit_bias.values(), dtype=np.float32), row)
    if len(generated) < params.min_new_tokens and sequence.stop_ids:
        row[list(sequence.stop_ids)] = -torch.inf


def _tensor(values: np.ndarray[tuple[int, ...], np.dtype[np.generic]], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device)
