"""Two roles. Each rank has one object of each. A driver may call the marked methods on all ranks at once."""

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
    """Has the true weights, equal on all ranks."""

    def __init__(self, rank: Rank, num_features: int, seed: int) -> None:
        self.weights = np.random.default_rng(seed).normal(size=num_features)

    @remote_method(dispatch={"batch": Shard()}, collect=concat)
    def label(self, batch: Batch) -> Batch:
        """Label this rank's part of the rows. The driver gets all rows."""
        return batch.union(Batch({"y": batch["x"] @ self.weights}))


class Student:
    """Learns the weights."""

    def __init__(self, rank: Rank, num_features: int, learning_rate: float) -> None:
        self.weights, self.learning_rate = np.zeros(num_features), learning_rate

    @remote_method(dispatch={"batch": Shard()})
    def gradient(self, batch: Batch) -> tuple[Weights, float]:
        """Return the sums of the gradient and of the squared error over this rank's rows, without rows of padding. The
        driver gets a list with one result for each rank."""
        errors = np.where(batch.is_padding, 0.0, batch["x"] @ self.weights - batch["y"])
        return errors @ batch["x"], float(errors @ errors)

    @remote_method(dispatch={"gradient": Broadcast()})
    def step(self, gradient: Weights) -> None:
        """Take the same step on all ranks."""
        self.weights -= self.learning_rate * gradient
