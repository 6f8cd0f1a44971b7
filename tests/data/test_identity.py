"""A run knows its data by their content, not by their name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from made_tables import json_lines, parquet, reading

from penstock.config import Config, ConfigError
from penstock.data import identity as module
from penstock.data.identity import check_identities, fingerprint, identities


def test_changed_data_are_refused_by_name(tmp_path: Path) -> None:
    file = json_lines(tmp_path / "words.jsonl", 5)
    config = reading(file)
    before = identities(config)
    check_identities(before, config)
    file.write_text(file.read_text().replace("q3", "q9"))
    with pytest.raises(ConfigError, match=r"data \(train single_turn\): .*words.jsonl has changed since the run"):
        check_identities(before, config)


def test_a_file_is_read_once_whatever_it_is_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def reads(path: Path) -> str:
        read.append(path)
        return "hash"

    monkeypatch.setattr(module, "fingerprint", reads)
    file = json_lines(tmp_path / "words.jsonl", 5)
    assert len(identities(reading(file))) == 2 and read == [file]


def test_a_file_that_was_only_moved_or_touched_is_the_same(tmp_path: Path) -> None:
    file = parquet(tmp_path / "a.parquet", 5)
    before = fingerprint(file)
    os.utime(file, (1, 1))
    assert fingerprint(file.rename(tmp_path / "b.parquet")) == before


def test_a_directory_is_known_by_its_files_and_their_names(tmp_path: Path) -> None:
    json_lines(tmp_path / "a.jsonl", 3)
    before = fingerprint(tmp_path)
    (tmp_path / "a.jsonl").rename(tmp_path / "b.jsonl")
    assert fingerprint(tmp_path) != before


def test_of_a_large_file_parts_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WHOLE_BYTES", 100)
    monkeypatch.setattr(module, "PART_BYTES", 10)
    monkeypatch.setattr(module, "NUM_PARTS", 3)
    file = tmp_path / "large"
    file.write_bytes(bytes(1000))
    before = fingerprint(file)
    for place, is_seen in ((0, True), (500, True), (999, True), (300, False)):
        changed = bytearray(1000)
        changed[place] = 1
        file.write_bytes(changed)
        assert (fingerprint(file) != before) == is_seen, place


def test_what_makes_procedural_data(tmp_path: Path) -> None:
    def of(**data: object) -> str:
        return identities(Config.model_validate({"data": data}))["train single_turn"]["identity"]

    assert of(dataset="spell_backward") == of(dataset="spell_backward", eval_tasks=3)
    assert len({of(), of(dataset="basic_arithmetic"), of(options={"min_word_len": 4}), of(source="seeds")}) == 4


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.jsonl cannot be read"):
        identities(reading(tmp_path / "nowhere.jsonl"))
