import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.run_settings import TinyModelConfig
from penstock.model.files import ModelError, copy_companions, has_weights, max_positions, num_parameters
from penstock.model.load_policy import CPU, hollow_policy, load_policy, resolve_device, resolve_dtype
from penstock.model.tiny import write_tiny_model


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path, TinyModelConfig(num_layers=1, hidden_size=16), max_context=64)
    return tmp_path


def random_policy(model_dir: Path, seed: int) -> torch.Tensor:
    model = load_policy(model_dir, weights=False, seed=seed)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_random_weights_follow_the_seed_and_leave_the_callers_state_alone(model_dir: Path) -> None:
    before = torch.get_rng_state()
    assert torch.equal(random_policy(model_dir, 1), random_policy(model_dir, 1))
    assert not torch.equal(random_policy(model_dir, 1), random_policy(model_dir, 2))
    assert torch.equal(before, torch.get_rng_state())


def test_saved_weights_come_back(model_dir: Path, tmp_path: Path) -> None:
    model = load_policy(model_dir, weights=False, seed=3)
    assert not has_weights(model_dir)
    saved = tmp_path / "saved"
    model.save_pretrained(saved)
    copy_companions(model_dir, saved)
    assert has_weights(saved)
    again = load_policy(saved, weights=True)
    assert num_parameters(saved) == sum(parameter.numel() for parameter in again.parameters())
    assert not again.training
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def headed(header: str) -> bytes:
    return len(header).to_bytes(8, "little") + header.encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 16,
        headed("[]"),
        headed('{"a":'),
        headed('{"a": {"shape": [-5]}}'),
        headed('{"a": {"shape": [Infinity]}}'),
        headed("[" * 100_000),
    ],
)
def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model.safetensors is no safetensors file"):
        num_parameters(tmp_path)


def test_weights_that_are_not_there_are_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"cannot be read"):
        num_parameters(tmp_path)


def test_only_the_weights_of_the_model_count(tmp_path: Path) -> None:
    """Some repositories hold the same weights in a second format."""
    for name in ("model-1.safetensors", "model-2.safetensors", "consolidated.safetensors"):
        (tmp_path / name).write_bytes(headed('{"a": {"shape": [2, 3]}, "__metadata__": {"format": "pt"}}'))
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert num_parameters(tmp_path) == 12


def test_missing_weights_directories_and_names_are_one_clear_error(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no weights"):
        load_policy(model_dir, weights=True)
    with pytest.raises(ModelError, match="nowhere does not exist"):
        load_policy(tmp_path / "nowhere", weights=True)
    with pytest.raises(ModelError, match="unknown dtype 'float31'"):
        resolve_dtype("float31", CPU)
    with pytest.raises(ModelError, match="unknown device 'abacus'"):
        resolve_device("abacus")


def test_a_hollow_policy_has_the_shape_of_one_and_takes_no_memory(model_dir: Path) -> None:
    policy, hollow = load_policy(model_dir, weights=False), hollow_policy(model_dir)
    assert not hollow.training
    for held in ("named_parameters", "named_buffers"):
        expected, found = dict(getattr(policy, held)()), dict(getattr(hollow, held)())
        assert {name: (each.shape, each.dtype) for name, each in found.items()} == {
            name: (each.shape, each.dtype) for name, each in expected.items()
        }
        assert all(each.is_meta for each in found.values())


def test_accelerators_compute_in_bfloat16_by_default() -> None:
    found = [resolve_dtype(name, torch.device(kind)) for name in ("auto", "float32") for kind in ("cuda", "cpu")]
    assert found == [torch.bfloat16, torch.float32, torch.float32, torch.float32]


def test_an_unknown_architecture_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_policy(tmp_path, weights=False)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"max_position_embeddings": 512}, 512),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 256}}, 256),
        ({"max_position_embeddings": 512, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 2048),
        (
            {
                "max_position_embeddings": 2048,
                "rope_parameters": {"factor": 4.0, "original_max_position_embeddings": 512},
            },
            2048,
        ),
        ({"max_position_embeddings": 512, "rope_scaling": None, "rope_parameters": {"rope_theta": 1e4}}, 512),
    ],
)
def test_the_longest_context_is_that_of_the_configuration(
    tmp_path: Path, config: dict[str, Any], expected: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert max_positions(tmp_path) == expected
