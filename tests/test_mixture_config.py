"""What an entry of a mixture leaves open is filled in; what makes no sense is refused with its place."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.config import Config, ConfigError, load_config

MIXTURE: dict[str, Any] = {
    "data": {"source": "reasoning_gym", "dataset": "spell_backward", "options": {"min_word_len": 3}, "eval_tasks": 9},
    "env": {
        "options": {"prompt": "{question}"},
        "max_turns": 3,
        "mixture": {
            "game": {"name": "guess_number", "weight": 3, "data": {"source": "seeds"}},
            "sums": {"max_new_tokens": 8, "data": {"dataset": "basic_arithmetic"}},
            "spell": {"eval_temperature": 1.0},
        },
    },
    "validation": {"mixture": {"sums": {"data": {"eval_tasks": 5}}, "hard": {"max_turns": 1}}},
}


def load(tmp_path: Path, tree: dict[str, Any], *overrides: str) -> Config:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    return load_config(tmp_path / "run.yaml", overrides)


def test_entries_are_made_whole(tmp_path: Path) -> None:
    environments = load(tmp_path, MIXTURE).environments
    game, sums, spell = (environments.train[tag] for tag in ("game", "sums", "spell"))
    assert (game.options, game.max_turns, game.weight) == ({}, 3, 3)
    assert (game.data.source, game.data.options, game.data.eval_tasks) == ("seeds", {}, 9)
    assert (sums.name, sums.options, sums.max_new_tokens) == ("single_turn", {"prompt": "{question}"}, 8)
    assert (sums.data.dataset, sums.data.options) == ("basic_arithmetic", {})
    assert spell.data.options == {"min_word_len": 3}


def test_validation_falls_back_to_what_is_trained_under_the_same_tag(tmp_path: Path) -> None:
    environments = load(tmp_path, MIXTURE).environments
    assert list(environments.eval) == ["sums", "hard"] and "validation.mixture.hard" in environments.by_key
    sums, hard = environments.eval["sums"], environments.eval["hard"]
    assert (sums.max_new_tokens, sums.data.dataset, sums.data.eval_tasks) == (8, "basic_arithmetic", 5)
    assert (hard.max_turns, hard.max_new_tokens, hard.data.dataset) == (1, 64, "spell_backward")


def test_a_configuration_that_was_written_down_means_the_same(tmp_path: Path) -> None:
    config = load(tmp_path, MIXTURE)
    assert load(tmp_path, config.model_dump(mode="json")) == config


def test_one_environment_has_one_tag(tmp_path: Path) -> None:
    environments = load(tmp_path, {"env": {"name": "some.module:Maze", "max_turns": 2}}).environments
    assert list(environments.train) == list(environments.eval) == ["Maze"] and list(environments.by_key) == ["env"]
    assert environments.find("anything").max_turns == 2


def test_overrides_reach_into_a_mixture(tmp_path: Path) -> None:
    config = load(tmp_path, MIXTURE, "env.mixture.sums.max_new_tokens=5", "data.eval_tasks=2")
    assert config.environments.train["sums"].max_new_tokens == 5
    assert config.environments.train["game"].data.eval_tasks == 2


def test_files_are_looked_for_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "maze.py").write_text("")
    tree = {"env": {"mixture": {"maze": {"name": "maze.py:Maze"}, "other": {}}}}
    assert load(tmp_path, tree).environments.names == [f"{tmp_path / 'maze.py'}:Maze", "single_turn"]


@pytest.mark.parametrize(
    ("other", "is_refused"),
    [
        ({}, False),
        ({"eval_tasks": 9}, True),
        ({"eval_tasks": 1}, True),
        ({"eval_path": "apart.jsonl"}, True),
        ({"path": "other.jsonl", "eval_tasks": 1}, False),
    ],
)
def test_nobody_trains_on_what_another_one_holds_out(tmp_path: Path, other: dict[str, Any], is_refused: bool) -> None:
    rows = {"source": "jsonl", "path": "rows.jsonl", "eval_tasks": 5}
    tree = {"env": {"mixture": {"one": {"data": rows}, "two": {"data": rows | other}}}}
    with pytest.raises(ConfigError, match=r"data\.path rows\.jsonl: .* holds out") if is_refused else nullcontext():
        load(tmp_path, tree)
    load(tmp_path, tree, "validation.tasks=0")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "env.mixture.sums.max_turn=1",
            "unknown key env.mixture.sums.max_turn .*did you mean env.mixture.sums.max_turns",
        ),
        ("env.mixture.sums.zzz=1", "unknown key env.mixture.sums.zzz .*valid keys of env.mixture.sums: name"),
        ("env.mixture.sums.weight=0", "bad value for env.mixture.sums.weight on the command line"),
        ("env.mixture.sums.max_new_tokens=512", r"env.mixture.sums.max_new_tokens \(512\) must be smaller than"),
        ("env.mixture.a/b={}", "the tag 'a/b' is not a name"),
        ("env.mixture.sums=3", "bad value for env.mixture.sums"),
        ("env.mixture.sums.data.source=jsonl", "data.source jsonl needs data.path"),
        ("env.mixture.sums.data.mode=sample", "mode is for rows of jsonl, parquet, huggingface, not for source reason"),
        ("env.mixture.sums.data.split=dev", "split is for source huggingface"),
        ("validation.samples=4", r"validation.samples \(4\) would all be the same answer to sums"),
        ("validation.tasks=-1", "data.source reasoning_gym of sums has no end"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_place(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, MIXTURE, override)


def test_each_entry_gets_a_source_of_tasks_that_fits_its_environment() -> None:
    settings = {
        "env": {"mixture": {"words": {"name": "single_turn"}, "numbers": {"name": "guess_number"}}},
        "validation": {"mixture": {"numbers": {"name": "single_turn"}}},
    }
    environments = Config.model_validate(settings).environments
    assert {tag: entry.data.source for tag, entry in environments.train.items()} == {
        "words": "reasoning_gym",
        "numbers": "seeds",
    }
    assert environments.eval["numbers"].data.source == "reasoning_gym"
