"""What a run needs, and what would fit: counted from the model's configuration alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config import Config, ConfigError
from penstock.processes.memory_plan import Plan, Planner, changed, planned

GIB = 2**30
EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "memory"


def config(**settings: Any) -> Config:
    """A model of eight billion parameters."""
    tree: dict[str, Any] = {
        "model": {"path": str(EXAMPLE / "qwen3-8b"), "max_context": 8192, "device": "cpu"},
        "env": {"max_new_tokens": 8000},
        "rollout": {"slots": 16},
        "trainer": {},
    }
    for name, value in settings.items():
        tree[name] = tree.get(name, {}) | value
    return Config.model_validate(tree)


def plan_of(wanted: Config, gib: int = 80, num_devices: int = 0) -> Plan:
    device = torch.device("cuda")
    return Planner(wanted, Path(wanted.model.path), device, gib * GIB, num_devices).plan()


def test_a_replica_of_eight_billion_parameters_fits_nowhere_and_shards_would() -> None:
    wanted = config(trainer={"ranks": 2, "distributed": {"strategy": "ddp"}, "canaries": {"parity_every": None}})
    plan = plan_of(wanted)
    (actor, server) = plan.needs
    assert actor.who == "actor" and actor.count == 2 and server.who == "rollout server"
    assert actor.parts["weights, gradients, moments"] == pytest.approx(147e9, rel=0.01)
    assert not plan.fits and plan.tensors > plan.capacity
    assert "trainer.distributed.strategy=fsdp" in plan.remedies
    again = plan_of(changed(wanted, plan.remedies))
    assert again.fits and not again.remedies


def test_what_is_named_is_the_first_that_fits() -> None:
    wanted = config(
        model={"path": str(EXAMPLE / "qwen3-8b"), "max_context": 2048, "device": "cpu"},
        env={"max_new_tokens": 2000},
        trainer={"ranks": 8, "tokens_per_microbatch": 32_768, "activation_checkpointing": False},
    )
    plan = plan_of(wanted)
    assert not plan.fits
    assert plan.remedies == ["trainer.tokens_per_microbatch=2048"]


def keys_and_values(plan: Plan) -> int:
    (found,) = [size for part, size in plan.needs[1].parts.items() if part.startswith("keys and values")]
    return found


OF_TOKEN = 36 * 2 * 8 * 128 * 2


def test_answers_of_a_server_with_blocks_share_what_its_weights_leave() -> None:
    eight = config(rollout={"slots": 8}, trainer={"ranks": 8})
    many = changed(eight, ["rollout.slots=512"])
    plan = plan_of(many)
    left = plan.capacity - plan.needs[1].parts["weights"]
    assert plan.fits and keys_and_values(plan) == pytest.approx(left / 2, rel=1e-3)
    assert keys_and_values(plan_of(eight)) == 8 * 8192 * OF_TOKEN, "no more than the slots can use"
    assert not plan_of(many, gib=17).fits, "one answer must fit"


def test_servers_without_blocks_are_told_how_many_slots_fit() -> None:
    wanted = config(rollout={"slots": 128}, trainer={"ranks": 16, "activation_checkpointing": True})
    plan = plan_of(changed(wanted, ["model.dtype=float32"]))
    assert not plan.fits
    (words,) = plan.remedies
    name, _, slots = words.partition("=")
    assert name == "rollout.slots" and 8 <= int(slots) < 128
    assert keys_and_values(plan) == 128 * 8192 * OF_TOKEN * 2


def test_processes_that_share_a_device_are_added_up() -> None:
    wanted = config(trainer={"ranks": 1, "lora": {"rank": 8}, "activation_checkpointing": True})
    apart, together = plan_of(wanted, num_devices=2), plan_of(wanted, num_devices=1)
    assert together.largest == sum(need.total for need in together.needs) > apart.largest
    in_turns = changed(wanted, ["scheduler.max_staleness=0", "scheduler.mode=colocated"])
    assert plan_of(in_turns, num_devices=1).largest == apart.largest


def test_larger_groups_of_shards_are_tried_before_adapters() -> None:
    wanted = config(trainer={"ranks": 4, "distributed": {"shard_ranks": 2}, "activation_checkpointing": True})
    plan = plan_of(wanted)
    assert not plan.fits and plan.remedies == ["trainer.distributed.shard_ranks=null"]


def test_activations_are_recomputed_where_nothing_else_is_said_and_they_must_be() -> None:
    few = {"model": {"max_context": 2048}, "env": {"max_new_tokens": 2000}}
    small, large = (
        plan_of(config(**few, trainer={"ranks": 8, "tokens_per_microbatch": tokens})) for tokens in (2048, 32_768)
    )
    assert small.fits and not any("recomputed" in part for part in small.needs[0].parts)
    assert large.fits and any("recomputed" in part for part in large.needs[0].parts)


def test_moments_wait_in_main_memory_before_more_devices_are_asked_for() -> None:
    wanted = config(trainer={"ranks": 2}, rollout={"slots": 4})
    plan = plan_of(wanted, gib=72)
    assert not plan.fits
    assert "trainer.offload=[activations,optimizer]" in plan.remedies
    assert not any("ranks" in word for word in plan.remedies)
    assert plan_of(changed(wanted, plan.remedies), gib=72).fits


def test_foreign_engines_have_settings_of_their_own() -> None:
    plan = plan_of(config(rollout={"engine": "vllm"}, trainer={"ranks": 8}))
    assert [need.who for need in plan.needs] == ["actor"]


SHARING = {"trainer": {"lora": {"rank": 8}, "activation_checkpointing": True, "tokens_per_microbatch": 8192}}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_takes_what_the_trainer_of_its_device_leaves(engine: str) -> None:
    wanted = config(rollout={"engine": engine}, **SHARING)
    plan = plan_of(wanted, num_devices=1)
    actor, server = plan.needs
    assert plan.fits and server.who == f"rollout server ({engine})" and server.parts["weights"] > 16e9
    found, share = plan.engine_words
    assert found == {"vllm": "--gpu-memory-utilization", "sglang": "--mem-fraction-static"}[engine]
    left = (plan.capacity - actor.total - 2**30) / plan.capacity
    assert float(share) == pytest.approx(left * (1.0 if engine == "vllm" else 0.85), abs=0.011)
    assert plan_of(wanted, num_devices=2).engine_words == [], "it has a device of its own"
    of_two = plan_of(changed(wanted, ["rollout.args=[--tp, '2']", "trainer.ranks=2"]), num_devices=2)
    assert of_two.engine_words and of_two.needs[1].parts["weights"] == server.parts["weights"] // 2
    servers = plan_of(changed(wanted, ["rollout.servers=2"]), num_devices=1)
    assert servers.largest == actor.total + 2 * server.total and servers.fits
    assert not plan_of(changed(wanted, ["rollout.servers=4"]), num_devices=1).fits


def test_what_the_user_gives_an_engine_is_counted_and_not_changed() -> None:
    fits, does_not = (
        plan_of(config(rollout={"engine": "vllm", "args": [f"--gpu-memory-utilization={share}"]}, **SHARING), 80, 1)
        for share in (0.4, 0.9)
    )
    assert fits.fits and fits.engine_words == []
    assert fits.needs[1].parts["--gpu-memory-utilization 0.4 in rollout.args"] == int(0.4 * 80 * GIB)
    assert not does_not.fits and does_not.tensors > does_not.capacity


def test_an_engine_without_room_beside_the_trainer_may_take_turns() -> None:
    wanted = config(rollout={"engine": "vllm"}, **SHARING)
    plan = plan_of(wanted, gib=32, num_devices=1)
    assert not plan.fits and plan.engine_words == []
    assert plan.remedies == ["scheduler.mode=colocated", "scheduler.max_staleness=0"]
    in_turns = plan_of(changed(wanted, plan.remedies), gib=32, num_devices=1)
    assert in_turns.fits and in_turns.engine_words == [] and [need.who for need in in_turns.needs] == ["actor"]


def test_the_tiny_policy_fits_into_this_machine() -> None:
    plan = planned(Config())
    assert plan.fits and plan.device.startswith(("cpu", "cuda"))
    assert json.loads(json.dumps(plan.plain()))["fits"] is True


def test_a_device_that_is_not_there_is_named() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match="finds no such device"):
        planned(config(model={"path": str(EXAMPLE / "qwen3-8b"), "max_context": 8192, "device": "cuda"}))
