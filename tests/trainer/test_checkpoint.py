import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from made_roles import ENOUGH_S
from transformers import AutoModelForCausalLM, PreTrainedModel

from penstock.config import TrainerConfig
from penstock.model.chat import ChatTokenizer
from penstock.ports.training import SavedState, SavedStates
from penstock.samples import Sample
from penstock.ticks import heard_by
from penstock.trainer import checkpoint
from penstock.trainer.learner import Learner
from penstock.trainer.prepare import prepare

MakeLearner = Callable[[], Learner]
EXTRA = {"consumed": [1, 2, 3], "note": "plain JSON"}


def save(
    directory: Path,
    step: int,
    learner: Learner,
    extra: dict[str, Any] | None = None,
    *,
    model_dir: Path,
    keep: int = 2,
    best: int | None = None,
) -> Path:
    version = learner.policy_version
    unfinished = checkpoint.Unfinished(directory, step, policy_version=version, extra=extra or {})
    learner.write(unfinished.path)
    assert learner.is_written(ENOUGH_S)
    return unfinished.complete(model_dir=model_dir, keep=keep, best=best)


@pytest.fixture
def make_learner(make_model: Callable[[], PreTrainedModel], samples: list[Sample]) -> MakeLearner:
    def make() -> Learner:
        learner = Learner(make_model(), TrainerConfig(), max_staleness=9)
        learner.accumulate(prepare(samples)[0])
        learner.step()
        return learner

    return make


def test_a_round_trip_restores_weights_optimizer_and_state(
    make_learner: MakeLearner, model_dir: Path, tmp_path: Path, samples: list[Sample]
) -> None:
    learner, other = make_learner(), make_learner()
    learner.accumulate(prepare(samples)[0])
    learner.step()
    save(tmp_path, 2, learner, EXTRA, model_dir=model_dir)
    found = checkpoint.latest(tmp_path)
    assert not found.torn and found.newest is not None
    assert (found.newest.step, found.newest.policy_version, found.newest.state) == (2, 2, EXTRA)
    other.read(Path(found.newest.directory))
    for each in (learner, other):
        each.accumulate(prepare(samples)[0])
    assert learner.step().metrics["loss"] == other.step().metrics["loss"]
    assert all(torch.equal(a, b) for a, b in zip(learner.model.parameters(), other.model.parameters(), strict=True))


def test_a_checkpoint_is_a_model_directory(make_learner: MakeLearner, model_dir: Path, tmp_path: Path) -> None:
    learner = make_learner()
    path = save(tmp_path, 1, learner, model_dir=model_dir, keep=1)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), learner.model.parameters(), strict=True))
    assert ChatTokenizer.load(path).prompt([{"role": "user", "content": "hi"}])


def test_the_newest_are_kept_and_a_forsaken_future_is_not(
    make_learner: MakeLearner, model_dir: Path, tmp_path: Path
) -> None:
    learner = make_learner()
    for step in (5, 10, 20, 15):
        save(tmp_path, step, learner, model_dir=model_dir, keep=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", "step_15", "step_5"]


def test_the_best_is_kept_beside_the_newest(make_learner: MakeLearner, model_dir: Path, tmp_path: Path) -> None:
    learner = make_learner()
    for step, best in ((5, None), (10, 5), (15, 5), (20, 5), (25, 15)):
        save(tmp_path, step, learner, model_dir=model_dir, keep=2, best=best)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_15", "step_20", "step_25"]


def cut_weights(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def flip_bit(path: Path) -> None:
    content = bytearray((path / "learner.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "learner.pt").write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / "manifest.json").unlink(), "no manifest.json: it was never finished"),
        (lambda path: (path / "manifest.json").write_text("{"), "unreadable: JSONDecodeError"),
        (lambda path: (path / "manifest.json").write_text("[]"), "unreadable: AttributeError"),
        (lambda path: (path / "manifest.json").write_text('{"hash": "crc"}'), "unreadable: KeyError: 'crc'"),
        (lambda path: (path / "state.json").unlink(), "state.json is missing"),
        (cut_weights, "model.safetensors does not match its checksum"),
        (flip_bit, "learner.pt does not match its checksum"),
    ],
)
def test_a_torn_checkpoint_is_passed_over_with_a_reason(
    make_learner: MakeLearner, model_dir: Path, tmp_path: Path, damage: Callable[[Path], object], reason: str
) -> None:
    learner = make_learner()
    for step in (1, 2):
        save(tmp_path, step, learner, model_dir=model_dir)
    damage(tmp_path / "step_2")
    found = checkpoint.latest(tmp_path)
    assert found.newest is not None and found.newest.step == 1
    ((torn, found_reason),) = found.torn.items()
    assert Path(torn).name == "torn_step_2" and found_reason.startswith(reason)
    assert Path(torn).is_dir(), "it is set aside"
    assert not checkpoint.latest(tmp_path).torn, "and reported once"
    save(tmp_path, 3, learner, model_dir=model_dir)
    assert (tmp_path / "step_1").is_dir(), "a torn checkpoint does not count among those to keep"


def test_a_failed_save_leaves_nothing_and_hurts_nothing(
    make_learner: MakeLearner, model_dir: Path, tmp_path: Path
) -> None:
    learner = make_learner()
    save(tmp_path, 1, learner, {"a": 1}, model_dir=model_dir)
    with pytest.raises(TypeError):
        save(tmp_path, 1, learner, {"a": object()}, model_dir=model_dir)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    found = checkpoint.verify(tmp_path / "step_1")
    assert isinstance(found, SavedState) and found.state == {"a": 1}


def test_no_checkpoints_are_none(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "nowhere") == SavedStates(newest=None)
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_one").mkdir()
    assert checkpoint.verify(tmp_path / "step_1") == "no manifest.json: it was never finished"
    assert list(checkpoint.latest(tmp_path).torn) == [str(tmp_path / "step_1")]


def test_a_checkpoint_with_the_slower_checksums_is_read(
    make_learner: MakeLearner, model_dir: Path, tmp_path: Path
) -> None:
    path = save(tmp_path, 1, make_learner(), model_dir=model_dir)
    files = [each for each in path.iterdir() if each.name != "manifest.json"]
    slow = {each.name: hashlib.blake2b(each.read_bytes(), digest_size=16).hexdigest() for each in files}
    (path / "manifest.json").write_text(json.dumps({"files": slow}))
    assert isinstance(checkpoint.verify(path), SavedState)


def test_large_files_are_progress_in_parts(
    make_learner: MakeLearner, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "PART_BYTES", 1000)
    ticks: list[None] = []
    with heard_by(lambda: ticks.append(None)):
        path = save(tmp_path, 1, make_learner(), model_dir=model_dir)
    sizes = [each.stat().st_size for each in path.iterdir() if each.name != "manifest.json"]
    assert len(ticks) >= sum(-(-size // 1000) for size in sizes)


def test_every_file_is_in_the_manifest(make_learner: MakeLearner, model_dir: Path, tmp_path: Path) -> None:
    path = save(tmp_path, 1, make_learner(), model_dir=model_dir, keep=1)
    listed = json.loads((path / "manifest.json").read_text())["files"].keys()
    present = {file.name for file in path.iterdir()}
    assert listed == present - {"manifest.json"}
    assert {"model.safetensors", "config.json", "tokenizer.json", "learner.pt", "state.json"} <= present


def test_leftovers_of_a_killed_save_are_removed_by_the_next(
    make_learner: MakeLearner, model_dir: Path, tmp_path: Path
) -> None:
    for name in (".step_1.77", ".replaced_1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").touch()
    learner = make_learner()
    for note in ("first", "second"):
        path = save(tmp_path, 1, learner, {"note": note}, model_dir=model_dir, keep=1)
        found = checkpoint.verify(path)
        assert isinstance(found, SavedState) and found.state == {"note": note}
    assert list(tmp_path.iterdir()) == [path]


def test_a_checkpoint_moved_aside_by_a_killed_save_is_found(
    make_learner: MakeLearner, model_dir: Path, tmp_path: Path
) -> None:
    save(tmp_path, 1, make_learner(), EXTRA, model_dir=model_dir).rename(tmp_path / ".replaced_1")
    found = checkpoint.latest(tmp_path).newest
    assert found is not None and (found.directory, found.state) == (str(tmp_path / "step_1"), EXTRA)


def test_a_checkpoint_moved_aside_by_a_killed_save_returns(
    make_learner: MakeLearner, model_dir: Path, tmp_path: Path
) -> None:
    learner = make_learner()
    save(tmp_path, 1, learner, {"a": 1}, model_dir=model_dir).rename(tmp_path / ".replaced_1")
    with pytest.raises(TypeError):
        save(tmp_path, 1, learner, {"a": object()}, model_dir=model_dir)
    found = checkpoint.verify(tmp_path / "step_1")
    assert isinstance(found, SavedState) and found.state == {"a": 1}
