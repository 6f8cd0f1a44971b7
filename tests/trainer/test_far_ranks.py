"""Ranks on several machines publish what ranks on one machine do, and a rank that dies ends the publication."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from made_samples import five_groups

from penstock.config import Config
from penstock.groups.errors import WorkerLost
from penstock.groups.role import Rank, Role
from penstock.groups.spawned import SpawnedBackend
from penstock.model.load_policy import load_policy
from penstock.processes import trainer
from penstock.processes.trainer import trainer_roles
from penstock.processes.trainer_rank import Actor
from penstock.supervisor.child import ADDRESS
from penstock.supervisor.janitor import RUNTIME_DIR
from penstock.trainer.actor_critic import ActorCritic
from penstock.trainer.prepare import prepare
from penstock.trainer.ranks import Ranks
from penstock.weights import row_transfer
from penstock.weights.publication import NotPublished, await_handle, handle_in

pytestmark = [pytest.mark.integration, pytest.mark.long]

LORA = {"rank": 2, "targets": ["q_proj"]}


@pytest.fixture(scope="module")
def saved_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with weights."""
    directory = tmp_path_factory.mktemp("model")
    load_policy(model_dir, weights=False, seed=0).save_pretrained(directory)
    return directory


class Seeded(Actor):
    """It draws the same adapters each time."""

    def __init__(self, rank: Rank, roles: Mapping[str, Any], **named: Any) -> None:
        super().__init__(rank, roles, **named)
        torch.manual_seed(0)


@contextmanager
def ranks_on(
    machines: int,
    ranks: int,
    model_dir: Path,
    directory: Path,
    settings: Mapping[str, Any] | None = None,
    *,
    worker: type[Actor] = Seeded,
) -> Iterator[tuple[ActorCritic, Config]]:
    """Yield shards that take themselves to be on so many machines. All of them have the address of this one."""
    tree = {
        "model": {"path": str(model_dir), "max_context": 64, "device": "cpu"},
        "data": {"source": "seeds"},
        "env": {"name": "guess_number", "max_new_tokens": 8},
        "trainer": {"ranks": ranks, "torch_threads": 1, "distributed": {"strategy": "fsdp"}, **(settings or {})},
    }
    if machines > 1:
        pool = {"roles": ["actor"], "nodes": machines, "slots_per_node": ranks // machines}
        tree["cluster"] = {"address": "auto", "pools": {"learn": pool}}
    config = Config.model_validate(tree)

    def start(together: Mapping[str, Role], numbers: Sequence[int]) -> SpawnedBackend:
        return SpawnedBackend(together, len(numbers))

    directory.mkdir()
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(trainer.WORKERS, "actor", worker)  # type: ignore[arg-type] # it is a dictionary
        patched.setenv(RUNTIME_DIR, str(directory))
        patched.setenv(ADDRESS, "127.0.0.1")
        roles = trainer_roles(config, start, model_dir=model_dir, weights_dir=directory / "weights")
    made = ActorCritic(roles, config.trainer)
    try:
        made.begin(0, directory / "beginning")
        yield made, config
    finally:
        made.close()


def files_in(folder: Path) -> dict[str, bytes]:
    """Return what is published there, when it is complete."""
    await_handle(folder, waiter="the test")
    return {str(file.relative_to(folder.parent)): file.read_bytes() for file in folder.parent.rglob("*.safetensors")}


@pytest.mark.parametrize(
    ("machines", "ranks", "settings"),
    [
        pytest.param(2, 2, {}, id="2 ranks"),
        pytest.param(2, 4, {}, id="4 ranks"),
        pytest.param(2, 2, {"lora": LORA}, id="adapters"),
    ],
)
def test_several_machines_publish_the_bytes_of_one(
    saved_dir: Path, tmp_path: Path, machines: int, ranks: int, settings: Mapping[str, Any]
) -> None:
    """Also while they train: what is published is the version before the step."""
    found: list[list[dict[str, bytes]]] = []
    for number in (1, machines):
        with ranks_on(number, ranks, saved_dir, tmp_path / str(number), settings) as (made, config):
            batch, _ = prepare(
                five_groups(),
                settings=config.trainer.advantages,
                for_critic=False,
                renumbered=lambda versions: versions,
                max_context=64,
                vocab_size=1000,
            )
            first = made.publish()
            made.accumulate(batch)
            made.step()
            found.append([files_in(first), files_in(made.publish())])
    one, several = found
    assert several == one
    assert one[0] and one[0].items() < one[1].items()


GATE = "gate"


class Dying(Actor):
    """Rank 1 sends some of its rows of the second version, waits at the gate (a named pipe), and dies."""

    def __init__(self, rank: Rank, roles: Mapping[str, Any], **named: Any) -> None:
        super().__init__(rank, roles, **named)
        row_transfer.BUCKET_BYTES = 1024
        if self._ranks.index == 1:
            self._ranks.send = partial(send_or_die, self._ranks, itertools.count())  # type: ignore[method-assign]


def send_or_die(ranks: Ranks, calls: Iterator[int], tensor: torch.Tensor, *, to: int, what: str) -> None:
    if what.endswith("policy_version 1") and next(calls) == 6:
        (Path(os.environ[RUNTIME_DIR]) / GATE).read_bytes()
        os.kill(os.getpid(), signal.SIGKILL)
    Ranks.send(ranks, tensor, to=to, what=what)


def test_a_rank_that_dies_ends_the_publication_and_the_version_before_stays(saved_dir: Path, tmp_path: Path) -> None:
    with ranks_on(2, 2, saved_dir, tmp_path / "run", worker=Dying) as (made, _):
        before = made.publish()
        handle = await_handle(before, waiter="the test")
        made.step()
        os.mkfifo(tmp_path / "run" / GATE)
        folder = made.publish()
        (tmp_path / "run" / GATE).write_bytes(b"")
        with pytest.raises(NotPublished, match=r"rank 0 of 2 waited .* for the rows of policy_version 1 of rank 1"):
            await_handle(folder, waiter="the test")
        assert handle_in(before) == handle and Path(handle.path).exists()
        assert not list(folder.glob("*.safetensors"))
        with pytest.raises(WorkerLost, match="rank 1: SIGKILL"):
            made.publish()
