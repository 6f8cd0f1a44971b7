"""What all tests of environments share."""

import pytest

from penstock.config import TinyModelConfig
from penstock.model.chat import ChatTokenizer
from penstock.model.tiny import write_tiny_model


@pytest.fixture(scope="session")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory, TinyModelConfig(), 512)
    return ChatTokenizer.load(directory)
