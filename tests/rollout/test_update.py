"""Updates that come in parts: repeated, incomplete, abandoned, renamed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import pytest
import torch
from tiny_policy import Held, make_engine, make_handle, make_request, print_of, receive_seed, until, weights

import penstock.rollout.update as update_module
from penstock.rollout.generator import Conflict
from penstock.rollout.request import SamplingParams
from penstock.rollout.runner import EngineRunner
from penstock.rollout.update import MAX_VERSION, WeightsUpdate
from penstock.types import NO_VERSION
from penstock.weights.shared_memory import fingerprint

PARTS = [dict(list(weights(3).items())[start::2]) for start in (0, 1)]


@pytest.fixture
def update(runner: EngineRunner) -> WeightsUpdate:
    return WeightsUpdate(runner, receive_seed, fingerprint)


def holds(runner: EngineRunner, seed: int) -> bool:
    return equals(runner, weights(seed))


def equals(runner: EngineRunner, expected: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.equal(parameter, expected[name]) for name, parameter in runner.engine.parameters().items())


async def test_what_is_not_whole_is_not_served(update: WeightsUpdate, runner: EngineRunner) -> None:
    await update.add(PARTS[0], policy_version=5)
    with pytest.raises(Conflict, match=f"lacks {len(PARTS[1])} weights, the first is {min(PARTS[1])}"):
        await update.commit(5)
    await update.add(PARTS[1])
    with pytest.raises(Conflict, match=r"staged fingerprint .* is not another"):
        await update.commit(5, fingerprint="another")
    assert holds(runner, 0) and runner.policy_version == 0
    await update.commit(5)
    assert holds(runner, 3)


async def test_a_part_of_a_newer_version_replaces_what_was_staged(update: WeightsUpdate) -> None:
    await update.add(PARTS[0], policy_version=5)
    with pytest.raises(Conflict, match="starts over"):
        await update.add(PARTS[1], policy_version=6)
    with pytest.raises(Conflict, match="commit of policy_version 5, but policy_version 6 is staged"):
        await update.commit(5)
    with pytest.raises(Conflict, match="lacks"):
        await update.commit(6)
    await update.abort()
    with pytest.raises(Conflict, match="nothing is staged"):
        await update.commit(6)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"nothing": torch.zeros(1)}, "weight nothing is unknown to the model"),
        ({"model.norm.weight": torch.zeros(3)}, r"model.norm.weight has shape \(3,\) instead of \(32,\)"),
    ],
)
async def test_weights_the_model_does_not_have_are_refused_when_they_come(
    update: WeightsUpdate, tensors: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        await update.add(tensors)
    assert update.staged is None


async def test_another_dtype_and_tied_names_are_no_obstacle(update: WeightsUpdate, runner: EngineRunner) -> None:
    given = {name: tensor.double() for name, tensor in weights(3).items()}
    staged = await update.add(given | {"lm_head.weight": given["model.embed_tokens.weight"]})
    await update.finish(staged)
    assert holds(runner, 3) and runner.policy_version == 1


async def test_a_sender_that_starts_over_is_not_mixed_with_itself(update: WeightsUpdate, runner: EngineRunner) -> None:
    old = await update.add(PARTS[0], policy_version=4)
    never = f"{len(PARTS[1])} weights did not arrive, the first is {min(PARTS[1])}"
    with pytest.raises(Conflict, match=never):
        await update.add(PARTS[0], policy_version=5)
    with pytest.raises(Conflict, match="starts over"):
        await update.add(PARTS[0])
    renamed = update.staged
    assert renamed is not None and renamed is not old and set(update.missing(renamed)) == set(PARTS[1])
    whole = await update.add(PARTS[1], policy_version=5)
    assert whole is renamed and not update.missing(whole)
    with pytest.raises(Conflict, match="no longer open"):
        await update.finish(old)
    await update.finish(whole)
    assert holds(runner, 3) and runner.policy_version == 5


async def test_a_bracket_is_served_at_its_end_or_not_at_all(update: WeightsUpdate, runner: EngineRunner) -> None:
    assert await update.finish(await update.open()) is None
    bracket = await update.open()
    assert await update.add(PARTS[0]) is bracket
    update.spoil(None, "a reason")
    with pytest.raises(Conflict, match=f"lacks {len(PARTS[1])} weights.* part of it was refused: a reason"):
        await update.finish(bracket)
    assert not update.is_open(bracket) and holds(runner, 0)
    bracket = await update.open()
    update.spoil("g", "a reason")
    with pytest.raises(Conflict, match="a reason"):
        await update.finish(bracket)
    bracket = await update.open()
    update.spoil("g", "what came again")
    for number in (0, 1, 0):
        assert await update.add(PARTS[number]) is bracket
    await update.rename(8)
    assert holds(runner, 0) and runner.policy_version == 0
    await update.finish(bracket)
    assert holds(runner, 3) and runner.policy_version == 8


async def test_what_a_bracket_does_not_bring_stays_as_it_is(update: WeightsUpdate, runner: EngineRunner) -> None:
    bracket = await update.open()
    await update.add(PARTS[0])
    served = await update.finish(bracket)
    expected = weights(0) | PARTS[0]
    assert served == (1, fingerprint(expected)) and equals(runner, expected)


async def test_nobodys_weights_complete_no_update(update: WeightsUpdate, runner: EngineRunner) -> None:
    await update.forget()
    bracket = await update.open()
    await update.add(PARTS[0])
    with pytest.raises(Conflict, match="lacks"):
        await update.finish(bracket)
    assert runner.policy_version == NO_VERSION


async def test_parts_of_two_senders_never_meet(update: WeightsUpdate, runner: EngineRunner) -> None:
    await update.add(PARTS[0], sender="a")
    await refused(
        "group 'a' has an open update: commit it first, or drop it with /weights/abort",
        lambda: update.add(PARTS[1], sender="b"),
        lambda: update.add(PARTS[1]),
    )
    await update.finish(await update.add(PARTS[1], sender="a"))
    assert holds(runner, 3)


async def refused(message: str, *calls: Callable[[], Awaitable[object]]) -> None:
    for call in calls:
        with pytest.raises(Conflict, match=message):
            await call()


async def test_a_bracket_is_its_first_senders(update: WeightsUpdate, runner: EngineRunner) -> None:
    bracket = await update.open()
    await update.rename(5)
    await update.add(PARTS[0], sender="a")
    await refused(
        "group 'a' has an open update",
        lambda: update.add(PARTS[1], sender="b"),
        lambda: update.begin(make_handle(5), bracket=bracket),
    )
    await update.begin(make_handle(6))
    assert not update.is_open(bracket)
    await refused(
        "another client has an open update",
        lambda: update.add(PARTS[1], sender="a"),
    )
    await refused("no longer open", lambda: update.begin(make_handle(7), bracket=bracket))
    assert (await update.commit(6)).fingerprint == print_of("1")
    assert holds(runner, 1)


async def test_a_bracket_may_bring_a_handle(update: WeightsUpdate, runner: EngineRunner) -> None:
    bracket = await update.open()
    for version in (4, 5):
        await update.begin(make_handle(version), bracket=bracket)
    assert update.is_open(bracket) and holds(runner, 0)
    await refused("another client", lambda: update.add(PARTS[0], sender="a"))
    assert await update.finish(bracket) == (5, print_of("1"))


async def test_a_commit_serves_what_its_caller_means(update: WeightsUpdate, runner: EngineRunner) -> None:
    await update.begin(make_handle(5, path="1"))
    await update.begin(make_handle(5, path="2"))
    await refused("staged fingerprint", lambda: update.commit(5, fingerprint=print_of("1")))
    assert holds(runner, 0)
    await update.commit(5, fingerprint=print_of("2"))
    await refused(
        f"5 is served already, with fingerprint {print_of('2')}", lambda: update.commit(5, fingerprint=print_of("1"))
    )


@pytest.mark.parametrize("began", [False, True])
async def test_what_a_group_left_behind_goes_with_it(update: WeightsUpdate, runner: EngineRunner, began: bool) -> None:
    await runner.pause("in_place")
    bracket = await update.open() if began else None
    staged = await update.add(PARTS[0], sender="a")
    assert staged is bracket or not began
    await update.drop("b")
    assert update.is_open(staged) and runner.engine.paused
    await update.drop("a")
    assert update.staged is None and holds(runner, 0)
    await until(lambda: not runner.engine.paused)
    bracket = await update.open()
    await update.drop("b")
    assert not update.is_open(bracket), "nobody had sent anything"
    await update.begin(make_handle(1))
    await update.drop("a")
    assert update.staged is not None


async def test_a_version_has_a_bound_however_it_comes(update: WeightsUpdate, runner: EngineRunner) -> None:
    beyond = MAX_VERSION + 1
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: update.begin(make_handle(beyond)),
        lambda: update.add(PARTS[0], policy_version=beyond),
        lambda: update.rename(beyond),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"at most {MAX_VERSION}, not {beyond}"):
            await call()
    bracket = await update.open()
    with pytest.raises(ValueError, match="at most"):
        await update.rename(beyond)
    await update.finish(bracket)
    runner.engine.policy_version = MAX_VERSION - 1
    await update.rename(MAX_VERSION)
    whole = await update.add(weights(3))
    with pytest.raises(ValueError, match=f"at most {MAX_VERSION}, not {beyond}"):
        await update.finish(whole)
    assert runner.policy_version == MAX_VERSION and holds(runner, 0)


async def test_whoever_takes_over_finds_neither_a_pause_nor_released_memory(
    update: WeightsUpdate, runner: EngineRunner
) -> None:
    await runner.release()
    await runner.pause("in_place")
    await update.forget()
    assert not runner.engine.paused and not runner.engine.released
    await update.begin(make_handle(0))
    assert (await update.commit(0)).policy_version == 0
    (segment,) = await runner.generate(make_request("a", [5], max_new_tokens=3))
    assert len(segment.token_ids) == 3


async def test_a_lease_that_ends_takes_its_pause_with_it(
    update: WeightsUpdate, runner: EngineRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update_module, "LEASE_S", 0.0)
    await runner.pause("in_place")
    bracket = await update.open()
    await until(lambda: not runner.engine.paused)
    assert not update.is_open(bracket) and holds(runner, 0)


async def test_a_lease_that_ends_leaves_the_pauses_of_others(
    update: WeightsUpdate, runner: EngineRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update_module, "LEASE_S", 0.0)
    for pause_first in (True, False):
        if pause_first:
            await runner.pause("in_place")
        bracket = await update.open()
        await runner.continue_generation()
        await runner.pause("in_place")
        await until(lambda bracket=bracket: not update.is_open(bracket))  # type: ignore[misc]
        await runner.score([1, 2])
        assert runner.engine.paused
        await runner.continue_generation()


async def test_a_new_name_holds_from_the_next_token_on_and_never_goes_back(
    update: WeightsUpdate, runner: EngineRunner, held: Held
) -> None:
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    running = asyncio.create_task(runner.generate(make_request("a", [5], max_new_tokens=80, params=params)))
    await until(lambda: runner.engine.num_generated_tokens > 5)
    await update.rename(0)
    await update.rename(4)
    held.let_go.set()
    (segment,) = await running
    assert [span.policy_version for span in segment.spans] == [0, 4] and segment.spans[-1].end == 80
    with pytest.raises(Conflict, match="policy_version 3 is older than 4"):
        await update.rename(3)
    await update.begin(make_handle(5))
    await update.commit(5)
    await update.rename(6)
    assert (await update.commit(6)).policy_version == 6


async def test_nothing_has_no_name() -> None:
    runner = EngineRunner(make_engine(policy_version=NO_VERSION), process="rollout-0")
    runner.start()
    with pytest.raises(Conflict, match="no weights have been loaded yet"):
        await WeightsUpdate(runner, receive_seed, fingerprint).rename(3)
    await runner.stop()


async def test_rows_are_read_between_steps(runner: EngineRunner) -> None:
    rows = await runner.first_rows("model.norm.weight", 3)
    await runner.load_weights({name: torch.zeros_like(tensor) for name, tensor in weights(0).items()}, 1)
    assert rows.tolist() == [1.0, 1.0, 1.0]
