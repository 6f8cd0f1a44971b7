from collections.abc import Callable, Iterator

import pytest
from transformers import PreTrainedModel

from penstock.config import ConfigError
from penstock.trainer.warm_start import Imitation, warm_start


def demonstrations() -> Iterator[tuple[list[int], list[int]]]:
    """Repeat the prompt's token, then stop. There are few, so several steps need them again."""
    for token in range(10, 30):
        yield [2, token, 3, token, 4], [0, 0, 0, 1, 1]


def test_imitation_lowers_the_loss(make_model: Callable[[], PreTrainedModel]) -> None:
    first = warm_start(Imitation(make_model()).step, demonstrations, steps=1, batch_size=20, learning_rate=1e-2)
    result = warm_start(Imitation(make_model()).step, demonstrations, steps=30, batch_size=20, learning_rate=1e-2)
    assert result["steps"] == 30
    assert first["loss"] == pytest.approx(4.6, abs=0.3)  # log of the vocabulary: an untrained policy
    assert result["loss"] < 0.6 * first["loss"]
    assert result["seconds"] > 0


def test_data_without_a_task_to_demonstrate_are_refused(make_model: Callable[[], PreTrainedModel]) -> None:
    with pytest.raises(ConfigError, match=r"model.warm_start: there is no task to demonstrate"):
        warm_start(Imitation(make_model()).step, lambda: iter([]), steps=1, batch_size=2, learning_rate=1e-3)


def test_no_steps_change_nothing(make_model: Callable[[], PreTrainedModel]) -> None:
    result = warm_start(Imitation(make_model()).step, demonstrations, steps=0, batch_size=2, learning_rate=1e-3)
    assert result["steps"] == 0
