"""Classifier predictor: the class of a length (short, medium, long) from text features and decoding parameters.

The classes are the terciles of the observed lengths. The model is a multinomial logistic regression. scikit-learn fits
it on the latest observations, and the predictor keeps it as plain matrices. A prediction averages the mean lengths of
the classes, weighted by their probabilities. Before the first fit, the heuristic predicts.
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
from penstock.scheduler.length import embedding
from penstock.scheduler.length.features import digest, features, text_of
from penstock.scheduler.length.predictor import HeuristicPredictor, LengthPredictor, Limit
from penstock.types import Task

NUM_OBSERVATIONS = 4096  # number of latest observations that a fit uses
TAG_BUCKETS = 8
INVERSE_REGULARISATION = 0.1
MAX_ITERATIONS = 1000

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The result of a fit. The log odds of each class are `inputs @ weights + bias`."""

    weights: Floats  # [d, classes]
    bias: Floats  # [classes]
    class_tokens: Floats  # [classes], mean length

    def predict(self, inputs: Floats) -> list[float]:
        """Return the expected lengths for `inputs`, [n, d]."""
        odds = inputs @ self.weights + self.bias
        odds = np.exp(odds - odds.max(axis=1, keepdims=True))
        expected: list[float] = ((odds @ self.class_tokens) / odds.sum(axis=1)).tolist()
        return expected


class ClassifierPredictor(LengthPredictor):
    """A classifier that is fitted again every `refit_every` groups. `due` returns the fit; `adopt` takes its result."""

    def __init__(self, *, refit_every: int, limit: Limit, temperature: Callable[[Task], float]) -> None:
        if importlib.util.find_spec("sklearn") is None:
            raise ConfigError(
                "scheduler.length.predictor is classifier, which needs scikit-learn: pip install 'penstock[predict]', "
                "or choose history or heuristic"
            )
        self._refit_every = refit_every
        self._limit, self._temperature = limit, temperature
        self._before = HeuristicPredictor(limit=limit)
        self._observations: deque[tuple[Floats, float]] = deque(maxlen=NUM_OBSERVATIONS)
        self._num_new = 0
        self._fit: Fit | None = None

    def predict(self, tasks: Sequence[Task]) -> list[float]:
        if self._fit is None or not tasks:
            return self._before.predict(tasks)
        expected = self._fit.predict(self._inputs(tasks))
        return [min(float(self._limit(task)), tokens) for task, tokens in zip(tasks, expected, strict=True)]

    def observe(self, task: Task, lengths: Sequence[int]) -> None:
        if self._fit is None:
            self._before.observe(task, lengths)
        self._observations.append((self._inputs([task])[0], fmean(lengths)))
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

    def _inputs(self, tasks: Sequence[Task]) -> Floats:
        """Return counted features, decoding parameters, the tag and hashed n-grams, [n, d]."""
        texts = [text_of(task) for task in tasks]
        numbers = [
            [*features(text).numbers, math.log1p(self._limit(task)), self._temperature(task), *_bucket(task.tag)]
            for task, text in zip(tasks, texts, strict=True)
        ]
        return np.hstack([np.asarray(numbers), embedding.ngrams(texts)])


def _bucket(tag: str) -> list[float]:
    """Return a vector with a one at the place of a hash of the tag."""
    place = digest(tag)[0] % TAG_BUCKETS
    return [float(place == each) for each in range(TAG_BUCKETS)]


def fit(observations: Sequence[tuple[Floats, float]]) -> Fit:
    """Fit the classifier to pairs (inputs [d], tokens). Pure: it may run in any thread."""
    inputs = np.stack([row for row, _ in observations])
    tokens = np.asarray([length for _, length in observations])
    classes = np.searchsorted(np.quantile(tokens, [1 / 3, 2 / 3]), tokens)  # 0, 1, 2: short, medium, long
    present = np.unique(classes)
    class_tokens = np.asarray([tokens[classes == each].mean() for each in present])
    if len(present) == 1:
        return Fit(weights=np.zeros((inputs.shape[1], 1)), bias=np.zeros(1), class_tokens=class_tokens)
    weights, bias = _regression(inputs, classes)
    return Fit(weights=weights, bias=bias, class_tokens=class_tokens)


def _regression(inputs: Floats, classes: npt.NDArray[np.intp]) -> tuple[Floats, Floats]:
    """Return weights and bias over raw inputs. The fit itself uses standardised inputs."""
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits  # comes with scikit-learn

    mean, deviation = inputs.mean(axis=0), inputs.std(axis=0)
    deviation[deviation < 1e-6] = 1.0  # constant inputs carry no information
    model = LogisticRegression(C=INVERSE_REGULARISATION, max_iter=MAX_ITERATIONS, random_state=0)
    with threadpool_limits(1):  # small matrices are slower on many threads, and the cores have other work
        model.fit((inputs - mean) / deviation, classes)
    weights, bias = model.coef_.T, model.intercept_
    if weights.shape[1] == 1:  # two classes share one log odds ratio
        weights, bias = np.hstack([-weights / 2, weights / 2]), np.concatenate([-bias / 2, bias / 2])
    weights = weights / deviation[:, None]
    return weights, bias - mean @ weights
