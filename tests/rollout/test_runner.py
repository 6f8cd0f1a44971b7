"""The engine's thread seen from asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from tiny_policy import Held, make_engine, make_request, run, score, until, weights

from penstock.rollout.generator import EngineDead, GenerationFailed, Increment, ScoredToken, Stopped
from penstock.rollout.runner import EngineRunner
from penstock.rollout.slot_engine import Finished, SlotEngine

LONG = 90


async def test_concurrent_requests_get_their_own_answers(runner: EngineRunner) -> None:
    requests = [make_request(f"r{i}", [3 + i], seeds=(i, i + 1)) for i in range(12)]
    answers = await asyncio.gather(*(runner.generate(request) for request in requests))
    for request, segments in zip(requests, answers, strict=True):
        expected = run(make_engine(), request)[request.rid]
        assert [segment.token_ids for segment in segments] == [segment.token_ids for segment in expected]
    assert runner.engine.num_generated_tokens == 12 * 2 * 8
    assert runner.meter.busy_s > 0
    assert {span.kind for span in runner.meter.drain()} == {"generate"}


async def test_bad_requests_never_reach_the_engine(runner: EngineRunner) -> None:
    with pytest.raises(ValueError, match="outside the vocabulary"):
        await runner.generate(make_request("a", [10**6]))
    first = asyncio.create_task(runner.generate(make_request("a", [5], max_new_tokens=LONG)))
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="already being served"):
        await runner.generate(make_request("a", [5]))
    assert len((await first)[0].token_ids) == LONG


async def test_abort_and_cancellation_end_a_request(runner: EngineRunner, held: Held) -> None:
    aborted = asyncio.create_task(runner.generate(make_request("a", [5], max_new_tokens=LONG)))
    cancelled = asyncio.create_task(runner.generate(make_request("b", [5], max_new_tokens=LONG)))
    await until(lambda: runner.engine.num_active)
    assert runner.abort("a")
    assert not runner.abort("unknown")
    cancelled.cancel()
    segment = (await aborted)[0]
    assert segment.finish_reason == "abort"
    assert len(segment.token_ids) < LONG
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    # The rid is free again at once, and the next answer is whole.
    held.let_go.set()
    assert len((await runner.generate(make_request("b", [5])))[0].token_ids) == 8


async def test_abort_all(runner: EngineRunner, held: Held) -> None:
    tasks = [asyncio.create_task(runner.generate(make_request(f"r{i}", [5], max_new_tokens=LONG))) for i in range(6)]
    await until(lambda: runner.engine.num_active)
    assert runner.abort_all() == 6
    assert {segments[0].finish_reason for segments in await asyncio.gather(*tasks)} == {"abort"}


async def test_weights_are_replaced_while_requests_run(runner: EngineRunner, held: Held) -> None:
    task = asyncio.create_task(runner.generate(make_request("a", [5], max_new_tokens=LONG)))
    await until(lambda: runner.engine.num_active)
    await runner.load_weights(weights(1), 3)
    assert runner.policy_version == 3
    held.let_go.set()
    spans = (await task)[0].spans
    assert [span.policy_version for span in spans] == [0, 3]
    assert spans[-1].end == LONG
    with pytest.raises(ValueError, match="not newer"):
        await runner.load_weights(weights(1), 3)
    assert "update_weights" in {span.kind for span in runner.meter.drain()}


async def test_non_finite_weights_fail_requests_and_leave_the_engine_alive(runner: EngineRunner) -> None:
    await runner.load_weights({name: tensor * float("nan") for name, tensor in weights(0).items()}, 1)
    with pytest.raises(GenerationFailed, match="not finite"):
        await runner.generate(make_request("a", [5]))
    await runner.load_weights(weights(1), 2)
    assert len(await runner.generate(make_request("a", [5]))) == 1


async def test_a_crash_of_the_engine_fails_everyone(engine: SlotEngine) -> None:
    runner = EngineRunner(engine, process="rollout-0")
    runner.start()
    del engine.model.lm_head
    outcomes = await asyncio.gather(
        *(runner.generate(make_request(f"r{i}", [5])) for i in range(3)), return_exceptions=True
    )
    assert {type(outcome) for outcome in outcomes} == {EngineDead}
    assert isinstance(runner.error, AttributeError)
    for call in (runner.generate(make_request("late", [5])), runner.load_weights(weights(1), 1)):
        with pytest.raises(EngineDead, match="lm_head"):
            await call
    await runner.stop()


async def test_stop_fails_what_is_pending(engine: SlotEngine, held: Held) -> None:
    runner = EngineRunner(engine, process="rollout-0")
    runner.start()
    task = asyncio.create_task(runner.generate(make_request("a", [5], max_new_tokens=LONG)))
    await until(lambda: runner.engine.num_active)
    await runner.stop()
    with pytest.raises(Stopped, match="shutting down"):
        await task


async def test_a_released_engine_answers_at_once_and_serves_again_after_resuming(
    runner: EngineRunner, held: Held
) -> None:
    request = make_request("a", [5], max_new_tokens=LONG)
    (whole,) = run(make_engine(), request)["a"]
    running = asyncio.create_task(runner.generate(request))
    await until(lambda: runner.engine.num_active)
    await runner.release()
    await runner.release()
    assert running.done(), "the answer comes before the release is reported"
    (part,) = running.result()
    assert (part.finish_reason, part.token_ids) == ("abort", whole.token_ids[: len(part.token_ids)])
    async with asyncio.timeout(60):
        early = await runner.generate(make_request("b", [5], max_new_tokens=LONG, seeds=(1, 2, 3)))
    assert [(segment.token_ids, segment.spans, segment.finish_reason) for segment in early] == [([], [], "abort")] * 3
    await runner.load_weights(weights(0), 1)
    await runner.resume()
    await runner.resume()
    held.let_go.set()
    (again,) = await runner.generate(make_request("a", [5], max_new_tokens=LONG))
    assert again.token_ids == whole.token_ids and {span.policy_version for span in again.spans} == {1}


async def test_steps_are_accounted_for(runner: EngineRunner) -> None:
    await runner.generate(make_request("a", [5, 6, 7], max_new_tokens=5, seeds=(1, 2)))
    costs = runner.costs.counters()
    assert {name: costs[f"cost_{name}"] for name in ("nn", "nb", "np", "nc", "bb", "bp", "pp")} == {
        "nn": 5,
        "nb": 8,
        "np": 3,
        "nc": 2 * (3 + 4 + 5 + 6),
        "bb": 16,
        "bp": 0,
        "pp": 9,
    }
    assert costs["cost_ny"] == pytest.approx(runner.meter.busy_s)
    assert costs["cost_by"] < 2 * costs["cost_ny"] and costs["cost_py"] < 3 * costs["cost_ny"]


async def test_growth_is_told_token_by_token_before_the_end(runner: EngineRunner) -> None:
    heard: dict[int, list[int]] = {0: [], 1: []}
    logprobs: dict[int, list[float]] = {0: [], 1: []}
    calls = 0

    def hear(grown: list[Increment]) -> None:
        nonlocal calls
        calls += 1
        for index, token_ids, values, _, _ in grown:
            heard[index] += token_ids
            logprobs[index] += values

    request = make_request("a", [5], max_new_tokens=(3, 12), seeds=(1, 2))
    segments = await runner.generate(request, hear)
    assert [heard[0], heard[1]] == [segment.token_ids for segment in segments]
    assert [logprobs[0], logprobs[1]] == [segment.logprobs for segment in segments]
    assert calls == 12


async def test_prompts_are_scored_between_steps(runner: EngineRunner) -> None:
    running = asyncio.create_task(runner.generate(make_request("a", [5], max_new_tokens=LONG)))
    assert len((await runner.score([5, 6, 7])).tokens) == 2
    with pytest.raises(ValueError, match="outside the vocabulary"):
        await runner.score([10**6])
    assert len((await running)[0].token_ids) == LONG


async def test_prompts_are_scored_a_part_after_every_step(
    runner: EngineRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, all_asked = list[str](), threading.Event()
    scoring, step = runner.engine.scoring, runner.engine.step

    def note_parts(prompt_ids: list[int], *, num_top: int) -> Iterator[list[ScoredToken]]:
        for part in scoring(prompt_ids, num_top=num_top):
            order.append("score")
            yield part

    def note_step() -> list[Finished]:
        all_asked.wait(60)
        order.append("step")
        return step()

    monkeypatch.setattr("penstock.rollout.slot_engine.SCORED_PLACES", 4)
    monkeypatch.setattr(runner.engine, "scoring", note_parts)
    monkeypatch.setattr(runner.engine, "step", note_step)
    generating = asyncio.create_task(runner.generate(make_request("a", [5], max_new_tokens=LONG)))
    scores = [asyncio.create_task(runner.score(list(range(2, 11)))) for _ in range(3)]
    await asyncio.sleep(0)
    all_asked.set()
    first, *others = await asyncio.gather(*scores)
    await generating
    expected = score(make_engine(), list(range(2, 11)))
    assert [token.logprob for token in first.tokens] == pytest.approx(expected, abs=1e-5)
    assert (first.versions, others) == ((0, 0), [first, first])
    assert order.count("score") == 6
    together = order[order.index("score") : len(order) - order[::-1].index("score")]
    assert "score score" not in " ".join(together), "no two parts without a step in between"


async def test_who_gives_up_is_not_scored(runner: EngineRunner) -> None:
    given_up = asyncio.create_task(runner.score([5, 6]))
    await asyncio.sleep(0)
    given_up.cancel()
    assert len((await runner.score([5, 6, 7])).tokens) == 2
