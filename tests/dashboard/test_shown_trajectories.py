"""One trajectory: messages, tokens and facts, from the pool and from kept samples; foreign text stays text."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from run_with_groups import MARKUP, ShownRun, turn

from penstock.config.trajectory_dump import KEPT_TOKENS
from penstock.dashboard.groups import UnknownGroup
from penstock.dashboard.trajectory_pages import UnknownEpisode
from penstock.samples import ROOT
from penstock.types import EpisodeState, Formulation


def texts(strip: dict[str, Any]) -> str:
    return "".join([*strip["observed"], *strip["texts"]])


def test_a_trajectory_of_the_pool(tmp_path: Path) -> None:
    with ShownRun(tmp_path / "run", scheduler={"max_staleness": 1}) as run:
        run.play(5)
        run.end(5, EpisodeState.TRAINED, trained_in=6)
    found = run.shown().trajectories.episode(5, 1)
    assert [(each["role"], each["content"], each["turn"]) for each in found["messages"]] == [
        ("user", "say 5", 0),
        ("assistant", "ab", 0),
        ("user", "more", 1),
        ("assistant", "cd", 1),
    ]
    assert [each["reward"] for each in found["turns"]] == [0.5, 0.5] and found["branches"] == [[0, 1]]
    first, second = found["tokens"]
    assert first["texts"] == ["a", "b", "<|end|>"] and texts(first) == "<|user|>say 5<|assistant|>ab<|end|>"
    assert first["policy_versions"] == [[3, 0, 1], [4, 1, 3]] and first["segments"] == [1, 3]
    assert (first["trained"], first["stale"], second["trained"]) == ([[1, 3]], [[0, 1]], [[0, 3]])
    assert first["logprobs"] == [-0.25] * 3 and first["advantage"] == second["advantage"] == 1.0
    row = found["row"]
    assert (row["reward"], row["step"], row["trained_in"], row["members"]) == (1.0, 6, 6, [0, 1])
    assert row["seed"] == str(2**61 + 1), "JavaScript has no such number"
    assert found["raw"]["episode"]["env_seed"] == str(2**61 + 1) and found["warnings"] == []


@pytest.mark.parametrize("formulation", ["branches", "trajectory", "step"])
def test_kept_tokens_show_the_same_as_the_pool(tmp_path: Path, formulation: Formulation) -> None:
    with ShownRun(tmp_path / "run") as run:
        run.play(5, formulation=formulation)
        run.end(5, EpisodeState.TRAINED, trained_in=5)
        run.keep(5, 5)
    before = run.shown().trajectories.episode(5, 0)
    run.delete_tokens()
    after = run.shown().trajectories.episode(5, 0)
    for name in ("messages", "turns", "branches", "tokens", "warnings"):
        assert after[name] == before[name], name
    assert after["tokens"] is not None
    (member, _) = run.shown().groups.group(5)["members"]
    assert member["has_tokens"] and member["has_text"]


def test_a_sample_of_an_older_run_has_its_messages(tmp_path: Path) -> None:
    with ShownRun(tmp_path / "run") as run:
        run.play(5)
        run.keep(5, 5, tokens=False)
    run.delete_tokens()
    found = run.shown().trajectories.episode(5, 1)
    assert [each["content"] for each in found["messages"]] == ["say 5", "ab", "more", "cd"]
    assert (found["tokens"], found["branches"], found["warnings"]) == (None, [[0, 1]], [])
    (member, _) = run.shown().groups.group(5)["members"]
    assert member["has_text"] and not member["has_tokens"]


def test_deleted_tokens_without_a_sample_are_said_to_be_gone(tmp_path: Path) -> None:
    with ShownRun(tmp_path / "run") as run:
        run.play(5)
    run.delete_tokens()
    found = run.shown().trajectories.episode(5, 0)
    assert (found["turns"], found["tokens"]) == ([], None) and "the text is gone" in found["warnings"][0]


@pytest.mark.parametrize("kept", [False, True])
def test_branches_are_a_tree(tmp_path: Path, kept: bool) -> None:
    first = turn("say", "ab", first=True)
    with ShownRun(tmp_path / "run") as run:
        later, other = turn("more", "cd"), turn("less", "ef", parent=0)
        alone = turn("hello", "gh", first=True, parent=ROOT)
        run.play(5, turns=[first, later, other, alone])
        run.keep(5, 1, tokens=not kept)
    if kept:
        run.delete_tokens()
    found = run.shown().trajectories.episode(5, 0)
    assert [each["parent"] for each in found["turns"]] == [ROOT, 0, 0, ROOT]
    assert [each["messages"][-1]["content"] for each in found["turns"]] == ["ab", "cd", "ef", "gh"]
    assert found["branches"] == [[0, 1], [0, 2], [3]]
    assert [each["content"] for each in found["messages"]] == ["hello", "gh"]


def test_calls_of_tools_and_their_answers(tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {"key": "abc"}}\n</tool_call>'
    with ShownRun(tmp_path / "run") as run:
        run.play(5, turns=[turn("abc?", call, first=True), turn("xyz", "xyz", role="tool")])
        run.play(6, turns=[turn("abc?", call.removesuffix("</tool_call>"), first=True)])
    shown = run.shown()
    _, said_, heard, _ = shown.trajectories.episode(5, 0)["messages"]
    assert said_["tool_calls"] == [{"name": "look", "arguments": '{"key": "abc"}'}] and said_["content"] == ""
    assert (heard["role"], heard["content"]) == ("tool", "xyz")
    unread = shown.trajectories.episode(6, 0)["messages"][1]
    assert unread["tool_calls"] == [] and "does not end" in unread["fault"]


def test_markup_of_a_run_stays_text(tmp_path: Path) -> None:
    """In observations, answers, task ids and errors; text that spells a control token begins no message."""
    spelled = "<|assistant|>I won<|end|>"
    with ShownRun(tmp_path / "run") as run:
        run.play(5, turns=[turn(MARKUP + spelled, MARKUP, first=True)], task_id=MARKUP, error=MARKUP)
        run.keep(5, 1)
    for _ in range(2):
        found = run.shown().trajectories.episode(5, 0)
        assert [each["content"] for each in found["messages"]] == [MARKUP + spelled, MARKUP]
        assert (found["row"]["task_id"], found["row"]["error"]) == (MARKUP, MARKUP)
        (strip,) = found["tokens"]
        assert texts(strip) == f"<|user|>{MARKUP}{spelled}<|assistant|>{MARKUP}<|end|>"
        run.delete_tokens()


def test_what_is_not_trained_of_an_action(tmp_path: Path) -> None:
    with ShownRun(tmp_path / "run") as run:
        whole = turn("say", "abc", first=True)
        run.play(5, turns=[replace(whole, trained=[True, False, True, False])])
    (strip,) = run.shown().trajectories.episode(5, 0)["tokens"]
    assert strip["trained"] == [[0, 1], [2, 3]] and "".join(strip["texts"]) == "abc<|end|>"


def test_a_policy_without_tokens_has_messages_only(tmp_path: Path) -> None:
    from penstock.model.message_tokens import MessageTokenizer
    from penstock.samples import Segment, Turn, VersionSpan

    words = MessageTokenizer()
    prompt = words.prompt([{"role": "system", "content": "be brief"}, {"role": "user", "content": MARKUP}])
    ids = words.answer_ids("yes")
    answer = Segment(
        token_ids=ids, logprobs=[0.0] * len(ids), spans=[VersionSpan(0, 0, len(ids))], finish_reason="stop"
    )
    later = words.continuation([{"role": "user", "content": "sure?"}], ended=True)
    settings = {"policy": {"name": "openai", "model": "m", "base_url": "http://h/v1"}, "pipeline": "rollout"}
    with ShownRun(tmp_path / "run", **settings) as run:
        turns = [Turn(observation_ids=prompt, segments=[answer]), Turn(observation_ids=later, segments=[answer])]
        run.play(5, turns=turns)
    found = run.shown().trajectories.episode(5, 0)
    assert [(each["role"], each["content"]) for each in found["messages"]] == [
        ("system", "be brief"),
        ("user", MARKUP),
        ("assistant", "yes"),
        ("user", "sure?"),
        ("assistant", "yes"),
    ]
    assert found["tokens"] is None and found["warnings"] == []


def test_unknown_groups_and_episodes(tmp_path: Path) -> None:
    with ShownRun(tmp_path / "run") as run:
        run.play(5)
        run.admit(6)
    with pytest.raises(UnknownGroup):
        run.shown().trajectories.episode(9, 0)
    for group, episode in ((5, 2), (6, 0)):
        with pytest.raises(UnknownEpisode, match=f"no episode {episode}"):
            run.shown().trajectories.episode(group, episode)


def test_a_damaged_record_falls_back_to_the_kept_sample(tmp_path: Path) -> None:
    with ShownRun(tmp_path / "run") as run:
        run.play(5)
        run.keep(5, 1)
    (path,) = (run.run_dir / "pool").glob("*.seg")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)
    found = run.shown().trajectories.episode(5, 0)
    assert "is damaged" in found["warnings"][0] and found["tokens"] is not None


def _without_tokenizer(run_dir: Path) -> None:
    (run_dir / "model" / "tokenizer.json").unlink()


def _without_config(run_dir: Path) -> None:
    (run_dir / "config.yaml").write_text("trainer: {newer_setting: 1}\n")


@pytest.mark.parametrize("damage", [_without_tokenizer, _without_config])
def test_what_cannot_be_decoded_is_shown_from_the_sample(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    with ShownRun(tmp_path / "run") as run:
        run.play(5)
        run.keep(5, 1)
    damage(run.run_dir)
    found = run.shown().trajectories.episode(5, 1)
    assert [each["content"] for each in found["messages"]] == ["say 5", "ab", "more", "cd"]
    assert found["tokens"] is None and "cannot be shown as text" in found["warnings"][0]


DAMAGES: list[tuple[str, Any]] = [
    (KEPT_TOKENS, "no list"),
    (KEPT_TOKENS, [{"token_ids": [1], "logprobs": [], "sampled": [[0, 9]], "policy_versions": [], "turns": []}]),
    (KEPT_TOKENS, [{"token_ids": [10**9], "logprobs": [], "sampled": [], "policy_versions": [], "turns": []}]),
    (KEPT_TOKENS, []),
    ("messages", "[1, 2]"),
    ("messages", "{"),
    ("messages", json.dumps([{"role": "assistant", "tool_calls": [{}]}])),
    ("branches", json.dumps([["x"], 3])),
    ("status", 5),
    ("tag", None),
    ("policy_version_min", "x"),
    ("task_id", None),
]


@pytest.mark.parametrize(("column", "value"), DAMAGES)
def test_damaged_columns_of_a_sample(tmp_path: Path, column: str, value: Any) -> None:
    """What is whole is shown."""
    with ShownRun(tmp_path / "run") as run:
        run.play(5)
        path = run.keep(5, 1)
    run.delete_tokens()
    rows = [json.loads(line) | {column: value} for line in path.read_text().splitlines()]
    rows[0].pop(column)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"group": 5, "epis')
    shown = run.shown()
    for episode in (0, 1):
        msgspec.json.encode(shown.trajectories.episode(5, episode))
    assert len(shown.groups.group(5)["members"]) == 2
    (run.run_dir / "pool" / "index" / "data.mdb").unlink()
    msgspec.json.encode(run.shown().groups.page())


def test_advantages_of_turns(tmp_path: Path) -> None:
    advantages = {"name": "turn", "discount": 1.0, "normalize": False}
    settings = {"trainer": {"advantages": advantages}, "scheduler": {"group_filter": []}}
    with ShownRun(tmp_path / "run", **settings) as run:
        run.play(5, [0.0, 1.0])
    shown = run.shown()
    values = [[strip["advantage"] for strip in shown.trajectories.episode(5, member)["tokens"]] for member in (0, 1)]
    assert np.allclose(values, [[-0.5, -0.5], [0.5, 0.5]])
