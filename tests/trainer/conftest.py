from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from made_experts import write_experts_model
from made_samples import five_groups
from transformers import PreTrainedModel

from penstock.config.run_settings import TinyModelConfig
from penstock.model.load_policy import load_policy
from penstock.model.tiny import write_tiny_model
from penstock.samples import Sample

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    config = TinyModelConfig(num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, intermediate_size=48)
    write_tiny_model(directory, config, max_context=64)
    return directory


@pytest.fixture(scope="session")
def experts_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_experts_model(tmp_path_factory.mktemp("experts"))


@pytest.fixture
def make_model(model_dir: Path) -> Callable[[], PreTrainedModel]:
    return lambda: load_policy(model_dir, weights=False, seed=0)


@pytest.fixture
def samples() -> list[Sample]:
    """Five groups of four with one prompt each, lengths and rewards drawn at random; one sample has two turns."""
    return five_groups()
