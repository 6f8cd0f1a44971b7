"""The server model against a reference that takes every step one by one."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import EngineModelConfig
from penstock.simulator.server_model import Request, ServerModel


@dataclass
class Arrival:
    at: float
    lengths: list[int]
    context: int = 0
    waiting: list[int] = field(default_factory=list)
    ended: dict[int, float] = field(default_factory=dict)
    versions: dict[int, list[int]] = field(default_factory=dict)


def step_by_step(
    model: EngineModelConfig, num_slots: int, arrivals: list[Arrival], updates: list[tuple[float, int, float]]
) -> None:
    """Admit, pay for the prompts, take one step; again and again."""
    time, version, active = 0.0, 0, list[list[int]]()  # [arrival, sequence, tokens left]
    held_by = 0
    line, coming, swaps = list[int](), list(range(len(arrivals))), list(updates)
    together = max(int(model.admit_share * num_slots), 1)
    for arrival in arrivals:
        arrival.waiting = list(range(len(arrival.lengths)))
    while active or line or coming:
        if not active and not line:
            time = max(time, min([arrivals[coming[0]].at, *(at for at, _, _ in swaps[:1])]))
        prompts = list[int]()
        while True:
            tokens = 0
            while swaps and swaps[0][0] <= time + 1e-9:
                _, version, seconds = swaps.pop(0)
                time += seconds
            while coming and arrivals[coming[0]].at <= time + 1e-9:
                line.append(coming.pop(0))
            while line:
                arrival = arrivals[line[0]]
                part = min(len(arrival.waiting), num_slots - len(active))
                if part == 0 or part < min(len(arrival.waiting), together):
                    break
                if prompts and model.admit_tokens is not None and sum(prompts) + arrival.context > model.admit_tokens:
                    break
                held = sum(arrivals[a].context + arrivals[a].lengths[s] for a, s, _ in active)
                fits = 0
                for sequence in arrival.waiting[:part]:
                    held += arrival.context + arrival.lengths[sequence]
                    if model.kv_tokens is not None and held > model.kv_tokens:
                        break
                    fits += 1
                if fits == 0:
                    break
                tokens += arrival.context
                prompts.append(arrival.context)
                for sequence in arrival.waiting[:fits]:
                    active.append([line[0], sequence, arrival.lengths[sequence]])
                    held_by += arrival.context
                del arrival.waiting[:fits]
                if arrival.waiting:
                    break
                line.pop(0)
            time += tokens * model.prefill_token_s
            due = [at for at, _, _ in swaps[:1]] + [arrivals[a].at for a in coming[:1]]
            if not tokens or not any(at <= time + 1e-9 for at in due):
                break
        if not active:
            continue
        time += model.step_s + model.sequence_s * len(active) + model.context_token_s * held_by
        held_by += len(active)
        for entry in list(active):
            entry[2] -= 1
            arrival = arrivals[entry[0]]
            arrival.versions.setdefault(entry[1], []).append(version)
            if entry[2] == 0:
                held_by -= arrival.context + arrival.lengths[entry[1]]
                arrival.ended[entry[1]] = time
                active.remove(entry)


def drive(
    model: EngineModelConfig, num_slots: int, arrivals: list[Arrival], updates: list[tuple[float, int, float]]
) -> tuple[list[Request], dict[int, float], ServerModel]:
    """Play the same on the model; returns the requests and when each was reported."""
    server, done = ServerModel(model, num_slots), dict[int, float]()
    requests = [Request(a.lengths, a.context, lambda request: None, key=i) for i, a in enumerate(arrivals)]
    touches: list[tuple[float, int, object]] = [(a.at, 1, r) for a, r in zip(arrivals, requests, strict=True)]
    touches += [(at, 0, (version, seconds)) for at, version, seconds in updates]
    touches.sort(key=lambda touch: touch[:2])

    def deliver(until: float) -> None:
        while server.due is not None and server.due <= until:
            due = server.due
            done.update({request.key: due for request in server.take()})  # type: ignore[misc]

    server.update(0, 0.0, 0.0)
    for at, _, touch in touches:
        deliver(at)
        if isinstance(touch, Request):
            server.submit(touch, at)
        else:
            version, seconds = touch  # type: ignore[misc]
            ended_at = server.update(version, at, seconds)
            assert ended_at >= at + seconds - 1e-9
    deliver(float("inf"))
    return requests, done, server


durations = st.floats(0.01, 2.0).map(lambda x: round(x, 3))


@st.composite
def cases(draw: st.DrawFn) -> tuple[EngineModelConfig, int, list[Arrival], list[tuple[float, int, float]]]:
    slots = draw(st.integers(1, 5))
    model = EngineModelConfig(
        step_s=draw(durations),
        sequence_s=draw(st.sampled_from([0.0, 0.037, 0.5])),
        context_token_s=draw(st.sampled_from([0.0, 0.0, 0.0021])),
        prefill_token_s=draw(st.sampled_from([0.0, 0.013])),
        kv_tokens=draw(st.sampled_from([None, None, 30, 45])),
        admit_share=draw(st.sampled_from([0.0, 0.0, 0.4, 1.0])),
        admit_tokens=draw(st.sampled_from([None, None, 5, 12])),
    )
    moments = st.floats(0.0, 30.0).map(lambda x: round(x, 3) + 1e-4)
    arrivals = [
        Arrival(at, draw(st.lists(st.integers(1, 20), min_size=1, max_size=4)), draw(st.integers(0, 10)))
        for at in sorted(draw(st.lists(moments, min_size=1, max_size=6)))
    ]
    swaps = [
        (at, number, draw(st.sampled_from([0.0, 0.7])))
        for number, at in enumerate(sorted(draw(st.lists(moments, max_size=3))), start=1)
    ]
    return model, slots, arrivals, swaps


@settings(max_examples=150, deadline=None)
@given(cases())
def test_exact_against_every_single_step(
    case: tuple[EngineModelConfig, int, list[Arrival], list[tuple[float, int, float]]],
) -> None:
    model, slots, arrivals, updates = case
    step_by_step(model, slots, arrivals, updates)
    requests, done, _ = drive(model, slots, arrivals, updates)
    for number, (arrival, request) in enumerate(zip(arrivals, requests, strict=True)):
        expected = [arrival.ended[sequence] for sequence in range(len(arrival.lengths))]
        assert request.ended == pytest.approx(expected, abs=1e-6)
        assert done[number] == pytest.approx(max(expected), abs=1e-6)
        for sequence, versions in arrival.versions.items():
            assert request.versions()[sequence] == (versions[0], versions[-1])
            for version in range(5):
                assert request.num_older(sequence, version) == sum(v < version for v in versions)


def test_a_closed_batch_takes_what_the_replica_formula_says() -> None:
    """T = sum_j d(j) (L_j - L_{j+1}), lengths descending (TailSieve)."""
    model = EngineModelConfig(step_s=0.01, sequence_s=0.003, prefill_token_s=0.0)
    lengths = [900, 700, 699, 50, 12, 1]
    (request,), done, _ = drive(model, 8, [Arrival(0.0, lengths)], [])
    pairs = zip(lengths, [*lengths[1:], 0], strict=True)
    expected = sum((0.01 + 0.003 * j) * (longer - shorter) for j, (longer, shorter) in enumerate(pairs, start=1))
    assert done[0] == pytest.approx(expected)
    assert max(request.ended) == done[0]


def test_totals_are_sums_over_steps() -> None:
    model = EngineModelConfig(step_s=1.0, sequence_s=0.5, context_token_s=0.1, prefill_token_s=0.25)
    _, done, server = drive(model, 4, [Arrival(0.0, [3, 1], context=2)], [])
    totals = server.totals(100.0)
    assert (totals.n, totals.b, totals.bb, totals.p, totals.bp, totals.pp) == (3, 4, 6, 2, 4, 4)
    assert (totals.c, totals.bc) == ((2 + 2) + 3 + 4, 2 * 4 + 3 + 4)
    assert totals.busy_s(model) == pytest.approx(done[0]) == pytest.approx(3 + 2 + 1.1 + 0.5)


def test_a_release_cuts_what_runs_and_a_resume_goes_on() -> None:
    model = EngineModelConfig(step_s=1.0, sequence_s=0.0, prefill_token_s=0.0)
    server = ServerModel(model, 2)
    server.update(7, 0.0, 0.0)
    running, waiting = (Request(lengths, 0, lambda r: None) for lengths in ([3, 10], [5]))
    server.submit(running, 0.0)
    server.submit(waiting, 0.5)
    assert server.due == pytest.approx(8.0), "the one that waits gets the slot of the first to end"
    assert server.release(4.5) == pytest.approx(5.0), "a step is never cut in two"
    assert server.due == pytest.approx(5.0)
    assert set(server.take()) == {running, waiting}
    assert (running.generated, waiting.generated) == ([3, 5], [2])
    assert running.versions()[1] == (7, 7)
    later = Request([4], 8, lambda r: None)
    server.submit(later, 6.0)
    assert server.due is None
    server.resume(9.0)
    assert server.due == pytest.approx(13.0)


def ends(model: EngineModelConfig, num_slots: int, *arrivals: Arrival) -> list[list[float]]:
    requests, _, _ = drive(model, num_slots, list(arrivals), [])
    return [request.ended for request in requests]


def test_answers_wait_for_a_share_of_whatever_slots_there_are() -> None:
    model = EngineModelConfig(step_s=1.0, sequence_s=0.0, prefill_token_s=0.0, admit_share=0.5)
    assert ends(model, 4, Arrival(0.0, [2, 4, 6, 8]), Arrival(0.0, [1] * 4))[1] == [5.0, 5.0, 6.0, 6.0]
    assert ends(model, 2, Arrival(0.0, [2, 4]), Arrival(0.0, [1] * 2))[1] == [3.0, 4.0]


def test_a_step_takes_no_more_prompt_tokens_than_its_budget() -> None:
    model = EngineModelConfig(step_s=1.0, sequence_s=0.0, prefill_token_s=0.0, admit_tokens=10)
    arrivals = [Arrival(0.0, [1], context=context) for context in (30, 4, 6, 1)]
    assert ends(model, 8, *arrivals) == [[1.0], [2.0], [2.0], [3.0]], "a long one enters alone"


def test_a_cancelled_request_frees_its_slots() -> None:
    model = EngineModelConfig(step_s=1.0, sequence_s=0.0, prefill_token_s=0.0)
    server = ServerModel(model, 1)
    first, second, third = (Request([length], 0, lambda r: None) for length in (100, 100, 3))
    for request in (first, second, third):
        server.submit(request, 0.0)
    assert server.cancel({first, second}, 5.0) == 5
    assert server.due == pytest.approx(8.0)
    assert server.take() == [third]


def test_a_sequence_that_can_never_fit_is_refused() -> None:
    server = ServerModel(EngineModelConfig(kv_tokens=10), 1)
    with pytest.raises(ValueError, match="exceeds kv_tokens"):
        server.submit(Request([9], 2, lambda r: None), 0.0)


@pytest.mark.parametrize("num_waiting", [0, 3])
def test_an_update_is_over_after_the_step_in_progress_and_its_pause(num_waiting: int) -> None:
    server = ServerModel(EngineModelConfig(step_s=1.0, sequence_s=0.0, prefill_token_s=0.0), 2)
    for length in [50, 60, *[70] * num_waiting]:
        server.submit(Request([length], 0, lambda r: None), 0.0)
    assert server.update(1, 10.5, 2.0) == pytest.approx(13.0)
    assert server.due == pytest.approx(52.0)


@pytest.mark.parametrize("given_up", ["release", "cancel"])
def test_prompts_that_were_given_up_take_nothing_of_a_later_steps_budget(given_up: str) -> None:
    model = EngineModelConfig(step_s=1.0, sequence_s=0.0, prefill_token_s=0.0, admit_tokens=12)
    server = ServerModel(model, 4)
    first, second = Request([3], 8, lambda r: None), Request([3], 9, lambda r: None)
    server.submit(first, 0.0)
    assert server.due == pytest.approx(3.0)
    if given_up == "release":
        server.release(0.0)
        assert server.take() == [first]
        server.resume(0.0)
    else:
        server.cancel({first}, 0.0)
    server.submit(second, 0.0)
    assert server.due == pytest.approx(3.0)


def test_a_release_right_after_an_update_waits_for_the_pause() -> None:
    server = ServerModel(EngineModelConfig(step_s=1.0, sequence_s=0.0, prefill_token_s=0.0), 1)
    server.submit(Request([2], 0, lambda r: None), 0.0)
    assert server.due == pytest.approx(2.0)
    server.update(1, 0.5, 2.0)
    released_at = server.release(0.5)
    assert server.due == pytest.approx(released_at) == pytest.approx(3.0)
