"""A Hugging Face dataset in a directory reads no files outside of it, and fetches nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config import ConfigError
from penstock.data.table_files import HuggingFace

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("the secret\n")
    return outside / "secret.txt"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "dataset"
    path.mkdir()
    return path


def write_rows(directory: Path, features: str, **row: Any) -> None:
    (directory / "train.jsonl").write_text(json.dumps(row) + "\n")
    (directory / "README.md").write_text(f"---\ndataset_info:\n  features:\n{features}---\n")


def test_a_link_reads_no_file_outside(directory: Path, secret: Path) -> None:
    (directory / "train.txt").symlink_to(secret)
    with pytest.raises(ConfigError, match=r"train.txt leads out of the dataset .*: replace the link"):
        HuggingFace(directory, "train")


@pytest.mark.parametrize("target", ["../outside", "other"])
def test_a_folder_reads_no_file_outside(directory: Path, secret: Path, target: str) -> None:
    (directory / "other").symlink_to(secret.parent)
    (directory / "data").symlink_to(target)
    with pytest.raises(ConfigError, match="leads out of the dataset"):
        HuggingFace(directory, "train")


def test_links_of_a_hub_cache_are_read(tmp_path: Path) -> None:
    repository = tmp_path / "datasets--a--b"
    snapshot = repository / "snapshots" / "0123"
    (snapshot / "data").mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "4567").write_text('{"question": "a"}\n')
    (snapshot / "data" / "train.jsonl").symlink_to("../../../blobs/4567")
    (tmp_path / "link").symlink_to(snapshot)
    for directory in (snapshot, snapshot / "data", tmp_path / "link"):
        assert HuggingFace(directory, "train").row(0) == {"question": "a"}


def test_a_blob_of_a_hub_cache_is_no_way_out(tmp_path: Path, secret: Path) -> None:
    snapshot = tmp_path / "datasets--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (tmp_path / "datasets--a--b" / "blobs").symlink_to(secret.parent)
    (snapshot / "train.txt").symlink_to("../../blobs/secret.txt")
    with pytest.raises(ConfigError, match="leads out of the dataset"):
        HuggingFace(snapshot, "train")


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("dataset_dict.json", "splits", ["../outside"]),
        ("train/state.json", "_data_files", [{"filename": "../../outside/data.arrow"}]),
        ("train/state.json", "_data_files", [{"filename": "/outside/data.arrow"}]),
    ],
)
def test_a_saved_dataset_names_no_other_files(directory: Path, name: str, key: str, value: Any) -> None:
    rows = datasets.Dataset.from_list([{"question": "a"}])
    datasets.DatasetDict({"train": rows}).save_to_disk(str(directory))
    assert HuggingFace(directory, "train").row(0) == {"question": "a"}
    (directory / name).write_text(json.dumps({**json.loads((directory / name).read_text()), key: value}))
    with pytest.raises(ConfigError, match=r"names .*outside.*, which is not in the directory"):
        HuggingFace(directory, "train")


@pytest.mark.parametrize("scheme", ["file:", "file://", "local:", "FILE:"])
def test_a_card_names_no_address_of_a_file(directory: Path, secret: Path, scheme: str) -> None:
    (directory / "train.txt").write_text("a\n")
    card = f"---\nconfigs:\n- config_name: default\n  data_files: ['*.txt', '{scheme}{secret}']\n---\n"
    (directory / "README.md").write_text(card)
    with pytest.raises(ConfigError, match="which is not in the directory"):
        HuggingFace(directory, "train")


@pytest.mark.parametrize(
    "features",
    [
        "  - name: seen\n    dtype: image\n",
        "  - name: seen\n    list: image\n",
        "  - name: seen\n    struct:\n    - name: inner\n      dtype: image\n",
        "  - name: seen\n    list:\n    - name: inner\n      dtype: audio\n",
    ],
)
def test_a_column_fetches_no_address(directory: Path, features: str) -> None:
    value: Any = "http://127.0.0.1:9/x"
    value = {"inner": value} if "inner" in features else value
    write_rows(directory, features, seen=[value] if "list" in features else value)
    with pytest.raises(
        ConfigError, match=r"column seen of .* is of type (Image|Audio), not of plain values: remove it"
    ):
        HuggingFace(directory, "train")


def test_lists_and_structs_of_values_are_read(directory: Path) -> None:
    row = {"question": "a", "tests": [{"input": "1", "outputs": [2]}], "kind": {"level": 0.5}, "any": {"a": [None]}}
    datasets.Dataset.from_list([row]).save_to_disk(str(directory))
    assert HuggingFace(directory, "train").row(0) == row
