"""Which of a batch's tokens are trained: those that the policy sampled, not too long ago."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from penstock.groups.batch import Batch
from penstock.trainer.packing import flatten

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """What the S tokens of a batch are, while one policy_version is trained. All [S]."""

    versions: Ints
    sampled: Bools
    """By a policy; the others are prompts and observations."""
    staleness: Ints
    """Versions between sampling and training; negative where the version is yet to be made here."""
    fresh: Bools
    """Sampled, and young enough."""
    in_loss: Bools
    """What is trained of them."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What decides it. Everything that is computed of the tokens in the loss asks here, and so finds the same."""

    max_staleness: int
    segments: Literal["all", "newest"]

    def of(self, batch: Batch, policy_version: int) -> TokenMasks:
        """For a batch from `prepare`."""
        versions, sampled = flatten(batch["versions"], np.int64), flatten(batch["loss_mask"], np.bool_)
        staleness = policy_version - versions
        fresh = sampled & (staleness >= 0) & (staleness <= self.max_staleness)
        in_loss = fresh & (versions == _newest(batch["versions"])) if self.segments == "newest" else fresh
        return TokenMasks(versions, sampled, staleness, fresh, in_loss)


def _newest(samples: Sequence[npt.ArrayLike]) -> Ints:
    """[S]: for every token the newest version among its sample's."""
    newest = [int(np.max(versions, initial=-1)) for versions in samples]
    return np.repeat(np.asarray(newest, dtype=np.int64), [np.size(versions) for versions in samples])
