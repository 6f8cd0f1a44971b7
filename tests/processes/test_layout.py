"""Which processes there are, where those of the trainer compute, and which is told what."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config import default_config
from penstock.processes.layout import TrainerNode, host_of, places, stages, takes_turns, trainer_nodes
from penstock.supervisor.child import Child


def test_only_who_controls_the_servers_is_told_the_key_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ADMIN_API_KEY", "rule")
    specs = [spec for stage in stages(default_config([])) for spec in stage]
    told = {spec.role: spec.env["PENSTOCK_ADMIN_API_KEY"] for spec in specs}
    assert told == {"controller": "rule", "rollout": "rule", "trainer": "", "env": ""}


@pytest.mark.parametrize("given", [{}, {"PENSTOCK_API_KEY": "play", "PENSTOCK_ADMIN_API_KEY": "rule"}])
@pytest.mark.parametrize("cluster", [[], ["cluster.address=auto"]])
def test_servers_of_a_run_have_keys(monkeypatch: pytest.MonkeyPatch, given: dict[str, str], cluster: list[str]) -> None:
    for name in ("PENSTOCK_API_KEY", "PENSTOCK_ADMIN_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, key in given.items():
        monkeypatch.setenv(name, key)
    specs = {spec.role: spec.env for stage in stages(default_config(cluster)) for spec in stage}
    (generation,) = {env["PENSTOCK_API_KEY"] for env in specs.values()}
    admin = {role: env["PENSTOCK_ADMIN_API_KEY"] for role, env in specs.items()}
    assert admin.pop("env") == admin.pop("trainer") == "", "workers and the trainer do not control servers"
    (control,) = set(admin.values())
    assert len({generation, control, ""}) == 3
    if given:
        assert (generation, control) == ("play", "rule")


def test_keys_of_servers_that_run_already_are_not_made_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", "play")
    config = default_config(["cluster.address=auto", "rollout.urls=[http://10.0.0.1:1]"])
    told = [spec.env for stage in stages(config) for spec in stage]
    assert {(env["PENSTOCK_API_KEY"], env["PENSTOCK_ADMIN_API_KEY"]) for env in told} == {("play", "")}


@pytest.mark.parametrize(
    ("judge", "expected"),
    [
        (["reference"], {"actor": ["actor"], "critic": ["critic"], "reference": ["reference"]}),
        (["critic"], {"actor": ["actor"], "reference": ["reference"], "critic": ["critic"]}),
    ],
)
def test_the_last_processes_of_the_trainer_are_those_that_are_elsewhere(
    judge: list[str], expected: dict[str, list[str]]
) -> None:
    pools = {"judge": {"roles": judge}, "learn": {"roles": ["actor"], "nodes": 2, "slots_per_node": 3}}
    given = ["trainer.critic={}", "scheduler.group_filter=[]", "trainer.objective.kl_coef=0.1", "trainer.ranks=2"]
    given += ["trainer.split=[critic, reference]", f"cluster.pools={pools}"]
    alone, config = default_config(given), default_config([*given, "cluster.address=auto"])
    assert list(places(config).items()) == list(expected.items())
    nodes = [TrainerNode("learn", range(3)), TrainerNode("learn", range(3, 4)), TrainerNode("judge", range(4, 6))]
    assert trainer_nodes(config) == nodes
    assert trainer_nodes(alone) == [TrainerNode(None, range(6))], "without a cluster all are on this machine"


def test_the_trainer_and_its_ranks_are_restarted_together() -> None:
    def sets(*given: str) -> dict[str, str]:
        specs = [spec for stage in stages(default_config(list(given))) for spec in stage]
        return {spec.name: spec.restart_set for spec in specs if spec.restart_set}

    split = ["trainer.critic={}", "scheduler.group_filter=[]", "trainer.split=[critic]"]
    assert sets() == {}, "a single rank lives in the trainer"
    assert sets("trainer.ranks=2") == dict.fromkeys(["trainer-0", "rank-0", "rank-1"], "trainer-0")
    assert sets(*split) == dict.fromkeys(["trainer-0", "rank-1"], "trainer-0")


def test_processes_listen_on_their_machines_address(tmp_path: Path) -> None:
    places = {"name": "rollout-0", "run_dir": tmp_path, "runtime_dir": tmp_path, "run_id": "run", "nonce": ""}
    config = default_config(["rollout.host=localhost"])
    assert host_of(Child(**places), config) == "localhost"  # type: ignore[arg-type]
    assert host_of(Child(**places, address="10.0.0.1"), config) == "10.0.0.1"  # type: ignore[arg-type]


TURNS = ["scheduler.mode=colocated", "scheduler.max_staleness=0"]
TOGETHER, APART = {"a": {"roles": ["actor", "rollout"]}}, {"a": {"roles": ["actor"]}, "b": {"roles": ["rollout"]}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], False),
        (TURNS, True),
        ([*TURNS, "cluster.address=auto", f"cluster.pools={TOGETHER}"], True),
        ([*TURNS, "cluster.address=auto", f"cluster.pools={APART}"], False),
    ],
)
def test_servers_take_turns_with_a_trainer_that_is_where_they_are(given: list[str], expected: bool) -> None:
    assert takes_turns(default_config(given)) is expected


@pytest.mark.parametrize("given", [["rollout.engine=vllm"], ["rollout.engine=sglang", *TURNS], TURNS])
def test_engines_of_others_start_before_the_trainer_takes_memory(given: list[str]) -> None:
    names = [[spec.name for spec in stage] for stage in stages(default_config(given))]
    apart = [["controller"], ["rollout-0"], ["trainer-0"], ["env-0"]]
    assert names == ([["controller"], ["rollout-0", "trainer-0"], ["env-0"]] if given == TURNS else apart)


@pytest.mark.parametrize("engine", ["penstock", "vllm", "sglang"])
def test_environments_of_atropos_connect_before_the_rest_is_ready(engine: str) -> None:
    words = ["env.name=atropos", "data.eval_tasks=0", "validation.tasks=0", f"rollout.engine={engine}"]
    first, second, *later = stages(default_config(words))
    names = {spec.name for stage in [second, *later] for spec in stage}
    assert [spec.name for spec in first] == ["controller"] and "env-0" in {spec.name for spec in second}
    assert names == {"rollout-0", "trainer-0", "env-0"}
