"""Declared columns in, the same columns out: typed, in order, nulls kept; tokens become what was said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from played_groups import Played, chat, config, payload, said, trajectory, turn

from penstock.config import Column, Config, ConfigError, DumpConfig, load_config
from penstock.config.trajectory_dump import OTHER_NAMES, OWN_COLUMNS
from penstock.model.chat import ChatTokenizer
from penstock.samples import ROOT
from penstock.store.dumps.columns import DumpError, Row, converter
from penstock.store.dumps.trajectory_rows import FACTS, RowMaker
from penstock.store.dumps.transcript import Transcript
from penstock.store.payload_files import PayloadReader
from penstock.types import Formulation


def rows(directory: Path, settings: Config, *, step: int | None = None, **facts: Any) -> list[Row]:
    """Of one group of two, from the pool."""
    return made(directory, RowMaker(settings, chat(), columns=settings.dump.columns), step=step, **facts)


def made(directory: Path, maker: RowMaker, *, step: int | None = None, **facts: Any) -> list[Row]:
    with Played(directory) as played:
        played.play(5, **facts)
        (record,) = played.pool.get_whole_groups([5])
    assert record.ref is not None
    return maker.rows(record, PayloadReader(directory).read(record.ref), payload(record), step=step)


def test_the_default_columns(tmp_path: Path) -> None:
    first, second = rows(tmp_path, config())
    messages = [
        {"role": "user", "content": "say 5"},
        {"role": "assistant", "content": "ab"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "cd"},
    ]
    assert msgspec.json.decode(first.pop("messages")) == messages  # type: ignore[attr-defined]
    assert first.pop("branches") is None  # type: ignore[attr-defined]
    assert first == {
        "trajectory": "mine/train/5/0/0",
        "task_index": 5,
        "task_id": "t/5",
        "tag": "train",
        "group": 5,
        "episode": 0,
        "attempt": 0,
        "seed": 7,
        "mode": "rollout",
        "step": None,
        "model": "tiny",
        "policy_version_min": 3,
        "policy_version_max": 4,
        "status": "completed",
        "stop_reason": "terminated",
        "reward": 0.0,
        "num_turns": 2,
        "prompt_tokens": 13,
        "response_tokens": 6,
        "seconds": 0.0,
    }
    assert (second["trajectory"], second["reward"]) == ("mine/train/5/1/0", 1.0)


def test_columns_of_the_task_and_of_the_environment(tmp_path: Path) -> None:
    columns = [["level", "bigint"], ["won", "boolean"], ["found", "json"], ["absent", "string"], ["reward", "double"]]
    first, _ = rows(tmp_path, config(columns=columns), info={"won": True, "found": [1, {"a": None}], "unasked": 1})
    assert first == {"level": 5, "won": True, "found": [1, {"a": None}], "absent": None, "reward": 0.0}
    assert list(first) == [name for name, _ in columns]


def test_tokens_and_the_names_that_roll_has(tmp_path: Path) -> None:
    columns = [["task_idx", "bigint"], ["episode_score", "double"], ["global_step", "bigint"], ["save_content", "json"]]
    tokens = [[name, "json"] for name in ("token_ids", "loss_mask", "logprobs", "versions")]
    first, _ = rows(tmp_path, config("train", columns=[*columns, *tokens]), step=9)
    assert (first["task_idx"], first["episode_score"], first["global_step"]) == (5, 0.0, 9)
    assert first["save_content"][1] == {"role": "assistant", "content": "ab"}
    sample = trajectory(5, 0).flatten()
    assert first["token_ids"] == sample.token_ids.tolist() and first["versions"] == sample.versions.tolist()
    assert first["loss_mask"] == sample.loss_mask.tolist() and first["logprobs"] == sample.logprobs.tolist()


def test_an_episode_that_is_trained_turn_by_turn_is_one_trajectory(tmp_path: Path) -> None:
    columns = [["messages", "json"], *([name, "json"] for name in ("token_ids", "loss_mask", "logprobs", "versions"))]
    settings = config("train", columns=columns)
    whole, by_step = rows(tmp_path / "0", settings), rows(tmp_path / "1", settings, formulation="step")
    assert by_step == whole and [message["content"] for message in whole[0]["messages"]] == [
        "say 5",
        "ab",
        "more",
        "cd",
    ]


@pytest.mark.parametrize("formulation", ["branches", "step"])
def test_every_branch_of_an_episode_is_shown(tmp_path: Path, formulation: Formulation) -> None:
    """A second question after the first answer, and a conversation of its own."""
    whole = trajectory(5, 0)
    first, later = whole.turns
    other = replace(later, segments=turn([], said("ef")).segments, parent=0)
    alone = replace(turn(chat().prompt([{"role": "user", "content": "hello"}]), said("gh")), parent=ROOT)
    turns = [replace(first, parent=ROOT), replace(later, parent=0), other, alone]
    settings = config(columns=[["branches", "json"], ["messages", "json"]])
    row, _ = rows(tmp_path, settings, formulation=formulation, turns=turns)
    shown = [[message["content"] for message in each] for each in row["branches"]]
    assert shown == [["say 5", "ab", "more", "cd"], ["say 5", "ab", "more", "ef"], ["hello", "gh"]]
    assert row["messages"] == row["branches"][-1]


def test_every_name_has_its_fact() -> None:
    assert FACTS.keys() | OTHER_NAMES.keys() == OWN_COLUMNS
    assert set(OTHER_NAMES.values()) <= FACTS.keys()


@pytest.mark.parametrize(
    ("kind", "value", "kept"),
    [
        ("bigint", 3, 3),
        ("bigint", 3.0, 3),
        ("bigint", True, 1),
        ("double", 3, 3.0),
        ("boolean", 1, True),
        ("string", "a", "a"),
        ("string", [1, None], "[1,null]"),
        ("string", 1.5, "1.5"),
        ("json", {"a": [1]}, {"a": [1]}),
        *[(kind, None, None) for kind in ("bigint", "double", "boolean", "string", "json")],
    ],
)
def test_values_as_their_column_has_them(kind: Any, value: object, kept: object) -> None:
    found = converter(Column(name="it", type=kind))(value)
    assert found == kept and type(found) is type(kept)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("bigint", 1.5),
        ("bigint", "1"),
        ("bigint", 2**63),
        ("bigint", float("nan")),
        ("bigint", float("inf")),
        ("double", "x"),
        ("boolean", "yes"),
        ("boolean", [1]),
        ("json", object()),
    ],
)
def test_what_does_not_fit_is_refused_by_name(kind: Any, value: object) -> None:
    with pytest.raises(DumpError, match=f"column it is of type {kind}"):
        converter(Column(name="it", type=kind))(value)


def test_a_row_that_does_not_fit_names_its_trajectory(tmp_path: Path) -> None:
    with pytest.raises(
        DumpError, match="trajectory mine/train/5/0/0: column question is of type bigint, and 'q5' is none"
    ):
        rows(tmp_path, config(columns=[["question", "bigint"]]))


@pytest.mark.parametrize("guess", [2**63, 2**64 - 1, 1.5, "three"])
def test_a_value_of_the_environment_that_does_not_fit_is_null(tmp_path: Path, guess: object) -> None:
    settings = config(columns=[["guess", "bigint"], ["won", "boolean"]])
    maker = RowMaker(settings, chat(), columns=settings.dump.columns)
    assert made(tmp_path, maker, info={"guess": guess, "won": True}) == 2 * [{"guess": None, "won": True}]
    assert maker.num_misfits == 2
    assert maker.misfit == f"trajectory mine/train/5/0/0: column guess is of type bigint, and {guess!r} is none"


@pytest.mark.parametrize("spelling", ["columns", "COLUMNS_CONFIG", "COLUMMNS_CONFIG"])
def test_columns_are_declared_as_pairs_under_either_name(spelling: str) -> None:
    found = DumpConfig.model_validate({spelling: [["task_idx", "bigint"], ["save_content", "string"]]})
    assert [(column.name, column.type) for column in found.columns] == [
        ("task_idx", "bigint"),
        ("save_content", "string"),
    ]
    assert DumpConfig.model_validate(found.model_dump(mode="json")) == found


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            [["a", "int"]],
            r"bad value for dump\.columns\.0\.type in .*: Input should be 'bigint', 'double'.* \(got 'int'\)",
        ),
        ([["a"]], r"bad value for dump\.columns in .*: \['a'\] is not of the form \[name, type\]"),
        ([["a", "json"], ["a", "bigint"]], "settings of dump: columns names a column twice: a"),
        ([], r"bad value for dump\.columns in .*: .*at least 1 item"),
    ],
)
def test_a_wrong_declaration_is_one_error(tmp_path: Path, columns: list[Any], message: str) -> None:
    (tmp_path / "run.yaml").write_text(f"dump: {{columns: {columns}}}")
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "run.yaml")


@given(
    first=st.text(alphabet="abc <|>\n", min_size=1),
    said=st.lists(st.tuples(st.text(alphabet="xyz", min_size=1), st.text(alphabet="abc\n ")), max_size=3),
)
def test_messages_are_what_was_rendered(first: str, said: list[tuple[str, str]]) -> None:
    words: ChatTokenizer = chat()
    messages = [{"role": "user", "content": first}]
    observed = [words.prompt(messages)]
    for answer, observation in said:
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": observation})
        observed.append(words.continuation([{"role": "user", "content": observation}], ended=True))
    answers = [[*words.encode(answer), *words.eos_ids[:1]] for answer, _ in said]
    turns = [turn(ids, answer) for ids, answer in zip(observed, [*answers, []], strict=True)]
    assert Transcript(words).messages(replace(trajectory(0, 0), turns=turns).flatten()) == messages
