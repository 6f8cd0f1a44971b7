"""A checkpoint that is written while training goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from made_roles import ENOUGH_S, AllRoles
from made_samples import make_sample
from transformers import PreTrainedModel

from penstock.config import TrainerConfig
from penstock.model.load_policy import load_policy
from penstock.samples import Sample
from penstock.trainer import checkpoint, saving
from penstock.trainer.learner import NAME, Learner
from penstock.trainer.policy_copy import Exchange, ParityCopy
from penstock.trainer.prepare import prepare
from penstock.trainer.shards import WeightRows

ALL_ROLES = {
    "learning_rate": 1e-2,
    "warmup_steps": 0,
    "critic": {"learning_rate": 1e-2},
    "objective": {"name": "decoupled", "proximal": "snapshot", "kl_coef": 0.1},
    "canaries": {"parity_every": 1},
}


class HeldCopies:
    """Copies of states that wait until they may begin."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_begin = threading.Event()
        self._copy = saving._in_main_memory
        monkeypatch.setattr(saving, "_in_main_memory", self._copy_later)

    def _copy_later(self, *arguments: Any) -> dict[str, Any]:
        assert self.may_begin.wait(ENOUGH_S)
        return self._copy(*arguments)


def step(roles: AllRoles | Learner, samples: list[Sample]) -> dict[str, float]:
    roles.accumulate(prepare(samples, for_critic=isinstance(roles, AllRoles))[0])
    metrics = roles.step().metrics
    return {name: value for name, value in metrics.items() if name != "busy_s"}


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["whole", "lora"])
@pytest.mark.parametrize("when", ["before the next passes", "after the next passes", "beside the next step"])
def test_what_is_saved_is_the_state_at_the_beginning(
    make_model: Callable[[], PreTrainedModel],
    samples: list[Sample],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
    lora: dict[str, int] | None,
) -> None:
    """However late the copy is made: no later step is in the files of any role, and no copy that takes turns with the
    policy."""
    config = TrainerConfig.model_validate(ALL_ROLES | {"lora": lora})
    roles, other = (AllRoles(make_model, config, max_staleness=9) for _ in range(2))
    step(roles, samples)
    copies = HeldCopies(monkeypatch)
    for role in roles._all:
        role.write(tmp_path)
    if when == "before the next passes":
        copies.may_begin.set()
    if lora:  # a snapshot of adapters takes turns with the policy, which waits for the copy
        threading.Timer(0.1, copies.may_begin.set).start()
    roles.accumulate(prepare(samples, for_critic=True)[0])
    if when == "after the next passes":
        copies.may_begin.set()
    threading.Timer(0.1, copies.may_begin.set).start()
    expected = [roles.step().metrics["loss"], *(step(roles, samples)["loss"] for _ in range(2))]
    assert all(role.is_written(ENOUGH_S) for role in roles._all)
    other.read(tmp_path)
    assert [step(other, samples)["loss"] for _ in range(3)] == expected


def test_a_step_waits_for_the_copy_and_passes_do_not(
    make_model: Callable[[], PreTrainedModel], samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Learner(make_model(), TrainerConfig(), max_staleness=9)
    copies = HeldCopies(monkeypatch)
    learner.write(tmp_path)
    learner.accumulate(prepare(samples)[0])
    before = [parameter.detach().clone() for parameter in learner.model.parameters()]
    stepping = threading.Thread(target=learner.step)
    stepping.start()
    stepping.join(0.2)
    assert stepping.is_alive() and not learner.is_written()
    assert all(torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))
    copies.may_begin.set()
    stepping.join(ENOUGH_S)
    assert learner.policy_version == 1 and learner.is_written(ENOUGH_S)
    assert not all(torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))


def test_a_step_waits_until_published_weights_are_read_and_passes_do_not(
    make_model: Callable[[], PreTrainedModel], samples: list[Sample]
) -> None:
    learner = Learner(make_model(), TrainerConfig(learning_rate=1e-2, warmup_steps=0), max_staleness=9)
    before = {name: weight.clone() for name, weight in learner.named_weights().items()}
    may_read, may_end, found = threading.Event(), threading.Event(), dict[str, torch.Tensor]()

    def rest() -> None:
        assert may_end.wait(ENOUGH_S)

    def read(weights: list[WeightRows]) -> Callable[[], None]:
        assert may_read.wait(ENOUGH_S)
        found.update({name: rows.clone() for name, _, rows in weights})
        return rest

    learner.read_rows(read)
    learner.accumulate(prepare(samples)[0])
    stepping = threading.Thread(target=learner.step)
    stepping.start()
    stepping.join(0.2)
    assert stepping.is_alive() and not found
    may_read.set()
    stepping.join(ENOUGH_S)
    assert learner.policy_version == 1 and found.keys() == before.keys(), "it does not wait for the rest"
    ending = threading.Thread(target=learner.await_published)
    ending.start()
    ending.join(0.2)
    assert ending.is_alive()
    may_end.set()
    ending.join(ENOUGH_S)
    assert not ending.is_alive()
    assert all(torch.equal(found[name], weight) for name, weight in before.items())
    assert not all(torch.equal(found[name], weight) for name, weight in learner.named_weights().items())


def test_no_copy_takes_its_turn_while_the_weights_are_saved(
    make_model: Callable[[], PreTrainedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Learner(make_model(), TrainerConfig(), max_staleness=9)
    copies = HeldCopies(monkeypatch)
    learner.write(tmp_path)

    def compare() -> None:
        with ParityCopy(Exchange(learner.model, learner._strategy, learner._await_copy)).placed():
            pass

    comparing = threading.Thread(target=compare)
    comparing.start()
    comparing.join(0.2)
    assert comparing.is_alive()
    copies.may_begin.set()
    comparing.join(ENOUGH_S)
    assert learner.is_written(ENOUGH_S)


def test_a_copy_that_fails_is_reported_and_stops_no_step(
    make_model: Callable[[], PreTrainedModel], samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("no room for a copy")

    monkeypatch.setattr(saving, "_in_main_memory", fail)
    learner = Learner(make_model(), TrainerConfig(), max_staleness=9)
    learner.write(tmp_path)
    step(learner, samples)
    with pytest.raises(MemoryError, match="no room for a copy"):
        learner.is_written(ENOUGH_S)


def test_an_error_in_the_last_moment_is_not_missed() -> None:
    """The thread fails between two looks at it."""
    saved = saving.saved({}, lambda _: None)
    assert saved.is_done(ENOUGH_S)

    class FailsWhenAsked:
        def join(self, timeout: float) -> None: ...

        def is_alive(self) -> bool:
            saved._error = OSError("No space left on device")
            return False

    saved._thread = FailsWhenAsked()  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space left"):
        saved.is_done()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_from_the_device_runs_beside_kernels_and_holds_what_came_before() -> None:
    values = torch.zeros(1 << 24, device=f"cuda:{torch.cuda.device_count() - 1}")
    values += 1
    found: list[torch.Tensor] = []
    saved = saving.saved({"values": values}, lambda copied: found.append(copied["values"]))
    saved.await_read()
    values += 1
    assert saved.is_done(ENOUGH_S)
    assert found[0].device.type == "cpu" and bool((found[0] == 1).all())


def test_a_kill_in_the_middle_leaves_the_checkpoint_before(model_dir: Path, tmp_path: Path) -> None:
    """The second checkpoint never ends: one of its files is a pipe, and no process reads the pipe."""
    child = subprocess.Popen(
        [sys.executable, __file__, str(model_dir), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "the second is being written\n"
    finally:
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
    assert len([path for path in tmp_path.iterdir() if path.name.startswith(".step_2.")]) == 1
    found = checkpoint.latest(tmp_path)
    assert not found.torn and found.newest is not None and found.newest.step == 1
    resumed = Learner(load_policy(model_dir, weights=False, seed=1), TrainerConfig(), max_staleness=9)
    resumed.read(Path(found.newest.directory))
    assert resumed.policy_version == 1
    assert step(resumed, own_samples())["tokens"] > 0
    unfinished = checkpoint.Unfinished(tmp_path, 2, policy_version=2, extra={})
    resumed.write(unfinished.path)
    assert resumed.is_written(ENOUGH_S)
    unfinished.complete(model_dir=model_dir, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_2"]


def own_samples() -> list[Sample]:
    return [make_sample(i, prompt=[5, 6], response=[7, 8, 9], reward=float(i % 2)) for i in range(4)]


def write_until_killed(model_dir: Path, directory: Path) -> None:
    learner = Learner(load_policy(model_dir, weights=False, seed=0), TrainerConfig(), max_staleness=9)
    for number in (1, 2):
        step(learner, own_samples())
        unfinished = checkpoint.Unfinished(directory, number, policy_version=number, extra={})
        if number == 2:
            os.mkfifo(unfinished.path / f"{NAME}.pt")
        learner.write(unfinished.path)
        if number == 1:
            assert learner.is_written(ENOUGH_S)
            unfinished.complete(model_dir=model_dir, keep=2)
    step(learner, own_samples())  # training goes on
    print("the second is being written", flush=True)
    learner.is_written(ENOUGH_S)


if __name__ == "__main__":
    write_until_killed(Path(sys.argv[1]), Path(sys.argv[2]))
