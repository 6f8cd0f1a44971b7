"""Length by class (short, medium, long: the terciles of what was observed) from text features and decoding parameters.

A multinomial logistic regression, fitted by scikit-learn on the latest observations and kept as plain matrices. The
prediction is the mean length of each class, weighted by the class's probability; before the first fit, the heuristic's.
"""

from __future__ import annotations

import importlib.util
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import numpy.typing as npt

from penstock.config import ConfigError
from penstock.scheduler.length import ngrams
from penstock.scheduler.length.features import features, text_of
from penstock.scheduler.length.heuristic import HeuristicPredictor
from penstock.types import Task

NUM_OBSERVATIONS = 4096  # latest ones, to fit on
INVERSE_REGULARISATION = 0.1
MAX_ITERATIONS = 1000

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What a fit found: log odds of each class are `inputs @ weights + bias`."""

    weights: Floats  # [d, classes]
    bias: Floats  # [classes]
    class_tokens: Floats  # [classes], mean length

    def predict(self, inputs: Floats) -> list[float]:
        """Expected lengths of [n, d] inputs."""
        odds = inputs @ self.weights + self.bias
        odds = np.exp(odds - odds.max(axis=1, keepdims=True))
        expected: list[float] = ((odds @ self.class_tokens) / odds.sum(axis=1)).tolist()
        return expected


class ClassifierPredictor:
    """Refitted every `refit_every` groups; `due` hands out the fit, `adopt` takes its result."""

    def __init__(self, *, refit_every: int, max_new_tokens: int, temperature: float) -> None:
        if importlib.util.find_spec("sklearn") is None:
            raise ConfigError(
                "scheduler.length.predictor is classifier, which needs scikit-learn: pip install 'penstock[predict]', "
                "or choose history or heuristic"
            )
        self._refit_every = refit_every
        self._decoding = [math.log1p(max_new_tokens), temperature]
        self._before = HeuristicPredictor(max_new_tokens=max_new_tokens)
        self._observations: deque[tuple[Floats, float]] = deque(maxlen=NUM_OBSERVATIONS)
        self._num_new = 0
        self._fit: Fit | None = None

    def predict(self, tasks: Sequence[Task]) -> list[float]:
        if self._fit is None or not tasks:
            return self._before.predict(tasks)
        return self._fit.predict(self._inputs([text_of(task) for task in tasks]))

    def observe(self, task: Task, lengths: Sequence[int]) -> None:
        if self._fit is None:
            self._before.observe(task, lengths)
        self._observations.append((self._inputs([text_of(task)])[0], fmean(lengths)))
        self._num_new += 1

    def due(self) -> Callable[[], object] | None:
        if self._num_new < self._refit_every:
            return None
        self._num_new = 0
        observations = tuple(self._observations)
        return lambda: fit(observations)

    def adopt(self, fitted: object) -> None:
        if not isinstance(fitted, Fit):
            raise TypeError(f"{type(fitted).__name__} is not what a fit of the classifier returns")
        self._fit = fitted

    def _inputs(self, texts: Sequence[str]) -> Floats:
        """[n, d]: counted features, decoding parameters, hashed n-grams."""
        numbers = [features(text).numbers + self._decoding for text in texts]
        return np.hstack([np.asarray(numbers), ngrams.embed(texts)])


def fit(observations: Sequence[tuple[Floats, float]]) -> Fit:
    """Pure; may run in any thread."""
    inputs = np.stack([row for row, _ in observations])
    tokens = np.asarray([length for _, length in observations])
    classes = np.searchsorted(np.quantile(tokens, [1 / 3, 2 / 3]), tokens)  # 0, 1, 2: up to, between, above
    present = np.unique(classes)
    class_tokens = np.asarray([tokens[classes == each].mean() for each in present])
    if len(present) == 1:
        return Fit(weights=np.zeros((inputs.shape[1], 1)), bias=np.zeros(1), class_tokens=class_tokens)
    weights, bias = _regression(inputs, classes)
    return Fit(weights=weights, bias=bias, class_tokens=class_tokens)


def _regression(inputs: Floats, classes: npt.NDArray[np.intp]) -> tuple[Floats, Floats]:
    """Weights and bias over raw inputs; they are standardised for the fit."""
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits  # comes with scikit-learn

    mean, deviation = inputs.mean(axis=0), inputs.std(axis=0)
    deviation[deviation < 1e-6] = 1.0  # constant inputs say nothing
    model = LogisticRegression(C=INVERSE_REGULARISATION, max_iter=MAX_ITERATIONS, random_state=0)
    with threadpool_limits(1):  # matrices this small are slower on many threads, and the cores have other work
        model.fit((inputs - mean) / deviation, classes)
    weights, bias = model.coef_.T, model.intercept_
    if weights.shape[1] == 1:  # two classes share one log odds ratio
        weights, bias = np.hstack([-weights / 2, weights / 2]), np.concatenate([-bias / 2, bias / 2])
    weights = weights / deviation[:, None]
    return weights, bias - mean @ weights
