"""How many answers of which length fit into the memory of a server that is started by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.config import default_config
from penstock.rollout import room
from penstock.rollout.room import bytes_of_token, fitting

QWEN = {
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 1024,
}
OF_TOKEN = 2 * 4 * 28 * 8 * 128
"""Bytes in float32."""


def test_the_size_of_a_token_is_that_of_its_keys_and_values() -> None:
    assert bytes_of_token(QWEN, 4) == bytes_of_token({"text_config": QWEN}, 4) == OF_TOKEN
    old = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    assert bytes_of_token(old, 2) == 2 * 2 * 2 * 64
    assert bytes_of_token({"num_hidden_layers": "many"}, 4) == 0


@pytest.mark.parametrize(
    ("num_tokens", "fixed", "slots", "context"),
    [
        (128 * 16_384, [], 128, 16_384),
        (16_384, [], 128, 16_384),
        (8_192, [], 128, 8_192),
        (8_192, ["rollout.slots=128"], 128, 8_192),
        (16, ["rollout.slots=128", "model.max_context=16384"], 128, 16_384),
        (4, [], 128, 8),
    ],
)
def test_what_is_not_set_becomes_smaller_until_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_tokens: int, fixed: list[str], slots: int, context: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    monkeypatch.setattr(room, "free_bytes", lambda device: 4 * num_tokens * OF_TOKEN)
    config = default_config(["model.max_context=16384", "model.device=cpu", *fixed])
    found, said = fitting(config, tmp_path, fixed=[each.partition("=")[0] for each in fixed])
    assert (found.rollout.slots, found.model.max_context) == (slots, context)
    assert bool(said) == ((slots, context) != (128, 16_384))
    if said:
        assert said.startswith(f"answers of {context} tokens fit into a quarter of the free memory")
