"""A learner on several ranks is the learner on one: real processes over gloo, one start of them for all checks."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rank_scenarios import (
    CPU,
    NUM_STEPS,
    RESUMED,
    ROUNDED,
    STRATEGIES,
    WAIT_S,
    every,
    of_experts,
    resumed,
    saved_of,
    settings_of,
    strategies_of,
)
from safetensors.torch import load_file

from penstock.config import ConfigError
from penstock.groups.role import Rank
from penstock.trainer import checkpoint
from penstock.trainer.ranks import Address, RankLost, Ranks

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.xdist_group("ranks")]
PROGRAM = Path(__file__).with_name("rank_scenarios.py")
SIZES = (2, 4)
SHARED = [(size, strategy) for size in SIZES for strategy in strategies_of(size)]
SPREAD = [(size, strategy) for size in SIZES for strategy in of_experts(size) if strategy.startswith("spread")]
NEAR = 1e-5
"""Of weights after steps of up to 1e-3."""
Results = dict[str, dict[str, Any]]


def each(names_of: Callable[[int], Sequence[str]]) -> list[tuple[int, str, str]]:
    """Return (size, strategy, name) of all that so many ranks play."""
    return [(size, strategy, name) for size, strategy in SHARED for name in names_of(size)]


def run_ranks(model_dir: Path, experts_dir: Path, out: Path, size: int) -> list[Results]:
    """What every rank found; the last one is killed while the others wait for it."""
    (out / f"rendezvous_{size}").mkdir()
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(PROGRAM), *map(str, (model_dir, experts_dir, out, index, size))],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stack.enter_context((out / f"rank_{index}_of_{size}.log").open("w")),
                    text=True,
                )
            )
            for index in range(size)
        ]
        for process in processes:
            stack.callback(process.kill)
        if processes[-1].stdout.readline() == "waiting\n":
            processes[-1].kill()
        for index, process in reversed(list(enumerate(processes[:-1]))):
            process.stdin.close()
            assert process.wait(2 * WAIT_S) == 0, (out / f"rank_{index}_of_{size}.log").read_text()
    return [torch.load(out / f"rank_{index}_of_{size}.pt", weights_only=False) for index in range(size)]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def alone(model_dir: Path, experts_dir: Path, out: Path) -> Results:
    return {name: run() for name, run in every(Ranks(), model_dir, experts_dir, out).items()}


class Together:
    """What ranks found, by their number; played when it is first asked for. Each number of ranks goes on from the
    checkpoints of the smaller ones."""

    def __init__(self, model_dir: Path, experts_dir: Path, out: Path) -> None:
        self._where = model_dir, experts_dir, out
        self._played: dict[int, list[Results]] = {}

    def __getitem__(self, size: int) -> list[Results]:
        for smaller in SIZES[: SIZES.index(size) + 1]:
            if smaller not in self._played:
                self._played[smaller] = run_ranks(*self._where, smaller)
        return self._played[size]


@pytest.fixture(scope="module")
def together(model_dir: Path, experts_dir: Path, out: Path, alone: Results) -> Together:
    return Together(model_dir, experts_dir, out)


def same(found: dict[str, Any], expected: dict[str, Any], *, atol: float = 3e-4) -> None:
    """Metrics of every step, and the weights after the last one: but for what rounding becomes in Adam, which makes a
    whole step of the smallest gradient."""
    for ours, theirs in zip(found["metrics"], expected["metrics"], strict=True):
        assert ours.keys() == theirs.keys()
        for name in theirs.keys() - {"busy_s"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name
    close(found["weights"], expected["weights"], atol=atol)


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, atol: float = 3e-4) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=atol)  # steps of up to 1e-2 were taken
        assert (found[name] - weight).norm() < 3e-4 * weight.norm(), name


@pytest.mark.parametrize(("size", "strategy", "name"), each(settings_of))
def test_any_partition_of_the_samples_gives_the_same_update(
    alone: Results, together: Together, name: str, strategy: str, size: int
) -> None:
    """Balanced, all of them on one rank, none at all, in calls that differ from step to step."""
    expected = alone[f"ddp/{name}"]
    assert len(expected["metrics"]) == NUM_STEPS
    same(together[size][0][f"{strategy}/{name}"], expected)


@pytest.mark.parametrize(("size", "strategy", "name"), each(lambda _: ROUNDED))
def test_bfloat16_compute_is_that_of_one_rank_but_for_rounding(
    alone: Results, together: Together, name: str, strategy: str, size: int
) -> None:
    expected, found = alone[f"ddp/rounded_{name}"]["metrics"], together[size][0][f"{strategy}/rounded_{name}"]
    assert found["trained"] == {torch.float32}
    compared = ["loss", "grad_norm", "entropy", "ratio_mean", "kl_reference", "kl_engine_trainer"]
    if name == "all_roles":
        compared += ["value_loss", "value_grad_norm"]
    for metric in compared:
        assert found["metrics"][metric] == pytest.approx(expected[metric], rel=0.03, abs=0.01), metric
    assert found["served"] == {torch.bfloat16 if "lora" in name else torch.float32}


@pytest.mark.parametrize(("size", "strategy", "name"), each(settings_of))
def test_all_ranks_say_the_same_and_one_has_the_weights(
    together: Together, name: str, strategy: str, size: int
) -> None:
    first, *others = [results[f"{strategy}/{name}"] for results in together[size]]
    for other in others:
        for ours, theirs in zip(first["metrics"], other["metrics"], strict=True):
            assert ours | {"busy_s": 0} == theirs | {"busy_s": 0}
        assert not other["weights"]


@pytest.mark.parametrize(("size", "strategy", "name"), each(saved_of))
def test_a_checkpoint_is_read_by_any_number_of_ranks(
    alone: Results, together: Together, model_dir: Path, out: Path, name: str, strategy: str, size: int
) -> None:
    expected, found = alone[f"ddp/saved/{name}"], together[size][0]
    same(found[f"{strategy}/saved/{name}"], expected)
    origins = [(origin, number) for origin in STRATEGIES for number in (1, *SIZES) if number < size]
    for origin, number in origins:
        same(found[f"{strategy}/resumed/saved_{origin}_{name}_{number}"], expected)
    for origin in strategies_of(size):
        same(resumed(Ranks(), model_dir, out / f"saved_{origin}_{name}_{size}", name, strategy), expected)


@pytest.mark.parametrize("name", saved_of(2))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_that_give_their_devices_up_between_steps_learn_the_same(
    together: Together, name: str, strategy: str
) -> None:
    for results in together[2]:
        found, expected = results[f"{strategy}/in_turns/{name}"], results[f"{strategy}/{name}"]
        for ours, theirs in zip(found["metrics"], expected["metrics"], strict=True):
            assert ours | {"busy_s": 0} == theirs | {"busy_s": 0}
        assert found["weights"].keys() == expected["weights"].keys()
        assert all(torch.equal(found["weights"][key], weight) for key, weight in expected["weights"].items())


def test_adapters_from_shards_are_those_of_replicas(together: Together, out: Path) -> None:
    assert len(together[2]) == 2
    whole, joined = (
        load_file(out / f"saved_{each}_lora_copies_2/adapter/adapter_model.safetensors") for each in STRATEGIES
    )
    assert whole
    close(joined, whole)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("role", ["learner", "critic"])
def test_every_rank_saves_what_it_alone_has(together: Together, out: Path, role: str, size: int) -> None:
    assert len(together[size]) == size
    files = {path.name for path in (out / f"saved_fsdp_critic_{size}").glob(f"{role}*")}
    assert files == {f"{role}.pt", *(f"{role}_{rank}.pt" for rank in range(1, size))}
    assert [path.name for path in (out / f"saved_ddp_critic_{size}").glob(f"{role}*")] == [f"{role}.pt"]
    if size > 2:  # the second group of ranks has what the first one has
        assert {path.name for path in (out / f"saved_hsdp_critic_{size}").glob(f"{role}*")} == {
            f"{role}.pt",
            f"{role}_1.pt",
        }


def of_all_experts() -> list[tuple[int, str, str]]:
    """Return (size, strategy, name) of all that ranks play with experts."""
    return [(size, strategy, name) for size in SIZES for strategy, names in of_experts(size).items() for name in names]


@pytest.mark.parametrize(("size", "strategy", "name"), of_all_experts())
def test_experts_learn_the_same_wherever_they_are(
    alone: Results, together: Together, name: str, strategy: str, size: int
) -> None:
    """On every rank, gathered from shards, or on ranks of their own to which tokens travel."""
    expected = alone[f"ddp/{name}"]
    assert len(expected["metrics"]) == NUM_STEPS
    first, *others = [results[f"{strategy}/{name}"] for results in together[size]]
    same(first, expected, atol=NEAR)
    assert any(".experts." in weight for weight in first["weights"])
    for other in others:
        assert [each | {"busy_s": 0} for each in other["metrics"]] == [
            each | {"busy_s": 0} for each in first["metrics"]
        ]
        assert not other["weights"]


@pytest.mark.parametrize(("size", "strategy"), SPREAD)
def test_spread_experts_are_saved_and_read_as_others(
    alone: Results, together: Together, experts_dir: Path, out: Path, strategy: str, size: int
) -> None:
    expected, found = alone["ddp/saved/experts"], together[size][0]
    same(found[f"{strategy}/saved/experts"], expected, atol=NEAR)
    for origin in RESUMED[size]:
        same(found[f"{strategy}/resumed/saved_{origin}"], expected, atol=NEAR)
    alone_again = resumed(Ranks(), experts_dir, out / f"saved_{strategy}_experts_{size}", "experts", "ddp")
    same(alone_again, expected, atol=NEAR)


def test_spread_experts_give_their_devices_up_between_steps_and_skip_bad_ones(together: Together) -> None:
    for results in together[2]:
        found, expected = results["spread/in_turns/experts"], results["spread/experts"]
        assert all(torch.equal(found["weights"][key], weight) for key, weight in expected["weights"].items())
        assert results["spread/poisoned"] == {"skipped": 1.0, "same": True}


@pytest.mark.parametrize(("size", "strategy"), [(2, "fsdp"), *SPREAD])
def test_experts_of_shards_multiply_in_the_dtype_of_the_passes(
    alone: Results, together: Together, strategy: str, size: int
) -> None:
    expected = alone["ddp/experts"]["metrics"][0]
    for results in together[size]:
        found = results[f"{strategy}/multiplied"]
        assert found["products"] == {torch.bfloat16} and found["trained"] == {torch.float32}
        for metric in ("loss", "grad_norm", "entropy", "ratio_mean"):
            assert found["metrics"][metric] == pytest.approx(expected[metric], rel=0.05, abs=0.01), metric


@pytest.mark.parametrize(("size", "strategy"), [(2, "fsdp"), *SPREAD])
def test_experts_of_shards_leave_under_the_names_of_published_models(
    together: Together, experts_dir: Path, out: Path, strategy: str, size: int
) -> None:
    expected = set(load_file(experts_dir / "model.safetensors"))
    first, *others = together[size]
    assert first[f"{strategy}/multiplied"]["published"] == expected
    assert not any(other[f"{strategy}/multiplied"]["published"] for other in others)
    assert set(load_file(out / f"saved_{strategy}_experts_{size}" / "model.safetensors")) == expected


def test_a_rank_whose_experts_get_no_token_takes_part_with_any_function(together: Together) -> None:
    for results in together[2]:
        assert len(results["crowded"]) == 6
        assert results["crowded"] == pytest.approx(dict.fromkeys(results["crowded"], 0.0), abs=1e-5)


@pytest.mark.parametrize("damage", ["missing", "torn"])
def test_a_checkpoint_without_one_of_its_shards_is_set_aside(
    together: Together, model_dir: Path, out: Path, tmp_path: Path, damage: str
) -> None:
    assert len(together[2]) == 2
    for step in (1, 2):
        unfinished = checkpoint.Unfinished(tmp_path, step, policy_version=2, extra={})
        shutil.copytree(out / "saved_fsdp_critic_2", unfinished.path, dirs_exist_ok=True)
        unfinished.complete(model_dir=model_dir, keep=2)
    shard = tmp_path / "step_2" / "learner_1.pt"
    if damage == "missing":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-1])
    found = checkpoint.latest(tmp_path)
    assert found.newest is not None and found.newest.step == 1
    ((torn, reason),) = found.torn.items()
    assert Path(torn).name == "torn_step_2" and "learner_1.pt" in reason


@pytest.mark.parametrize(("size", "strategy"), SHARED)
def test_one_rank_s_gradient_that_is_not_finite_skips_the_step_of_all(
    together: Together, strategy: str, size: int
) -> None:
    for results in together[size]:
        assert results[f"{strategy}/poisoned"] == {"skipped": 1.0, "same": True}


@pytest.mark.parametrize("size", SIZES)
def test_the_warm_start_is_the_same_too(alone: Results, together: Together, size: int) -> None:
    found, expected = together[size][0]["imitated"], alone["imitated"]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    close(found["weights"], expected["weights"])


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_that_dies_ends_the_others_wait_and_is_named(together: Together, size: int) -> None:
    """Its neighbours in gloo's ring hear of it at once. The rank between them hears of it when they leave. Gloo may
    miss that, and then this rank waits until its own deadline."""
    for index, results in enumerate(together[size][:-1]):
        lost = results["lost"]
        assert lost["error"].startswith(f"rank {index} of {size} waited")
        assert f"rank {size - 1} did not join the call" in lost["error"]
        assert lost["seconds"] < (10 if index in (0, size - 2) else WAIT_S + 10)


SILENT = """
import json, sys, torch
from pathlib import Path
from penstock.groups.role import Rank
from penstock.trainer.ranks import Address, Ranks
ranks = Ranks(Rank(1, 2))
print("ready", flush=True)
where = json.loads(sys.stdin.readline())
ranks.join(Path(where) if isinstance(where, str) else Address(**where), torch.device("cpu"))
for _ in range(int(sys.argv[1])):
    ranks.total([1.0], "add up")
print("silent", flush=True)
sys.stdin.read()
"""
NUM_CALLS = 300


@pytest.mark.parametrize("between_machines", [False, True])
def test_a_rank_that_lives_but_does_not_come_is_waited_for_until_the_deadline(
    tmp_path: Path, between_machines: bool
) -> None:
    """No file of a directory in which ranks meet grows with their calls."""
    ranks = Ranks(Rank(0, 2), timeout_s=10.0)
    words = [sys.executable, "-c", SILENT, str(NUM_CALLS)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as silent:
        assert silent.stdout.readline() == "ready\n"
        address = ranks.listen("127.0.0.1") if between_machines else None
        silent.stdin.write(json.dumps(dataclasses.asdict(address) if address else str(tmp_path)) + "\n")
        silent.stdin.flush()
        ranks.join(address or tmp_path, CPU)
        ranks.total([1.0], "add up")
        sizes = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
        assert len(sizes) == (0 if between_machines else 3)
        for _ in range(1, NUM_CALLS):
            ranks.total([1.0], "add up")
        assert silent.stdout.readline() == "silent\n"
        assert {file.name: file.stat().st_size for file in tmp_path.iterdir()} == sizes
        with pytest.raises(RankLost, match=r"rank 0 of 2 waited 1\d\S* s to add up with the other ranks; rank 1 did"):
            ranks.total([1.0], "add up")
        silent.kill()


def test_a_rank_that_comes_alone_gives_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = Address(host="127.0.0.1", port=closed.getsockname()[1])
    for rendezvous in (address, tmp_path, tmp_path / "gone"):
        with pytest.raises(RankLost, match=f"rank 1 of 2 waited up to 0.5 s for the other ranks at {rendezvous}: "):
            Ranks(Rank(1, 2), timeout_s=0.5).join(rendezvous, CPU)


@pytest.mark.parametrize(
    ("backend", "why"), [("nccl", "needs an accelerator: use gloo on the CPU"), ("hccl", "needs torch_npu")]
)
def test_a_backend_that_cannot_work_is_refused(backend: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"trainer.distributed.backend {backend} .*{why}"):
        Ranks(Rank(0, 2)).join(Address(host="127.0.0.1", port=1), CPU, backend)


@pytest.mark.parametrize("named", [None, "theirs"])
def test_ranks_use_the_interface_of_the_address_that_other_ranks_know(
    monkeypatch: pytest.MonkeyPatch, named: str | None
) -> None:
    """An interface in the environment is kept."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(variable, named or "")
        if named is None:
            monkeypatch.delenv(variable)
    (loopback,) = [name for name, held in psutil.net_if_addrs().items() if "127.0.0.1" in {a.address for a in held}]
    with pytest.raises(RankLost):
        Ranks(Rank(1, 2), timeout_s=0.5).join(Address(host="127.0.0.1", port=1), CPU, address="127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == (named or loopback)
    assert os.environ["NCCL_SOCKET_IFNAME"] == (named or f"={loopback}")
