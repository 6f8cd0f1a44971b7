"""Two roles. Each of them is one object on every rank; what a driver may call on all of them at once is marked."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.groups.batch import Batch
from penstock.groups.collect import concat
from penstock.groups.intent import Broadcast, Shard
from penstock.groups.method import remote_method
from penstock.groups.role import Rank

Weights = npt.NDArray[np.float64]


class Teacher:
    """Knows the weights; every rank the same."""

    def __init__(self, rank: Rank, num_features: int, seed: int) -> None:
        self.weights = np.random.default_rng(seed).normal(size=num_features)

    @remote_method(dispatch={"batch": Shard()}, collect=concat)
    def label(self, batch: Batch) -> Batch:
        """Each rank its share of the rows; the driver gets all of them."""
        return batch.union(Batch({"y": batch["x"] @ self.weights}))


class Student:
    """Learns them."""

    def __init__(self, rank: Rank, num_features: int, learning_rate: float) -> None:
        self.weights, self.learning_rate = np.zeros(num_features), learning_rate

    @remote_method(dispatch={"batch": Shard()})
    def gradient(self, batch: Batch) -> tuple[Weights, float]:
        """Sums over this rank's rows, of the gradient and of the squared error; rows that only fill a share up do not
        count. The driver gets one for each rank."""
        errors = np.where(batch.is_padding, 0.0, batch["x"] @ self.weights - batch["y"])
        return errors @ batch["x"], float(errors @ errors)

    @remote_method(dispatch={"gradient": Broadcast()})
    def step(self, gradient: Weights) -> None:
        """All ranks alike."""
        self.weights -= self.learning_rate * gradient
