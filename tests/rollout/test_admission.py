"""Who gets the free slots."""

from __future__ import annotations

from collections.abc import Sequence

from tiny_policy import make_request

from penstock.rollout.admission import MOST_OVERTAKING, PREFILL_TOKENS, AdmissionQueue
from penstock.rollout.prefix_cache import BLOCK_TOKENS, Node, PrefixCache
from penstock.rollout.slot_rows import RunningRequest


class Unlimited:
    """Memory of which a sample takes 2 blocks per prompt token."""

    block_tokens = BLOCK_TOKENS

    def __init__(self) -> None:
        self.prefixes = PrefixCache(64)

    def needs(self, num_tokens: int, prefix: Sequence[Node]) -> tuple[int, int]:
        return 2 * num_tokens, 2 * num_tokens


def line_of(*requests: tuple[int, int], num_slots: int = 16) -> AdmissionQueue:
    """A line of requests given as (prompt tokens, samples)."""
    line = AdmissionQueue(Unlimited(), num_slots=num_slots, eos_ids=frozenset())
    for index, (num_tokens, num_samples) in enumerate(requests):
        line.add(RunningRequest(make_request(str(index), [5] * num_tokens, seeds=tuple(range(num_samples)))))
    return line


def admitted(line: AdmissionQueue, free: int, room: int = 10_000) -> list[tuple[int, list[int]]]:
    """(prompt tokens, sample indices) of what goes in."""
    return [
        (len(admission.prompt_ids), [sequence.index for sequence in admission.sequences])
        for admission in line.admit(free, room)
    ]


def test_first_come_first_served_ordered_by_length() -> None:
    line = line_of((9, 1), (3, 2), (5, 1))
    assert admitted(line, 3) == [(3, [0, 1]), (9, [0])]
    assert line.num_samples == 1
    assert admitted(line, 3) == [(5, [0])]
    assert admitted(line, 3) == []


def test_a_group_waits_for_a_whole_part_and_nobody_overtakes_it() -> None:
    line = line_of((3, 2), (4, 1))
    assert admitted(line, 1) == []
    assert admitted(line, 2) == [(3, [0, 1])]


def test_a_request_larger_than_what_is_free_is_admitted_in_parts() -> None:
    line = line_of((3, 20))
    assert admitted(line, 16) == [(3, list(range(16)))]
    assert admitted(line, 1) == []
    assert admitted(line, 2) == [(3, [16, 17])]
    assert admitted(line, 9) == [(3, [18, 19])]


def test_prompts_of_a_step_are_bounded_but_one_always_fits() -> None:
    line = line_of((PREFILL_TOKENS + 1, 1), (3, 1), (PREFILL_TOKENS, 1))
    assert [length for length, _ in admitted(line, 9)] == [PREFILL_TOKENS + 1]
    assert [length for length, _ in admitted(line, 9)] == [3]
    assert [length for length, _ in admitted(line, 9)] == [PREFILL_TOKENS]


def test_leaving_gives_back_what_never_started() -> None:
    line = AdmissionQueue(Unlimited(), num_slots=4, eos_ids=frozenset())
    running = RunningRequest(make_request("a", [5], seeds=(1, 2, 3)))
    line.add(running)
    line.admit(1, 10_000)
    assert [sequence.index for sequence in line.remove(running)] == [1, 2]
    assert line.remove(running) == []
    assert line.num_samples == 0


def test_cached_prompts_overtake_the_first_one_a_bounded_number_of_times() -> None:
    memory = Unlimited()
    line = AdmissionQueue(memory, num_slots=16, eos_ids=frozenset())
    known = [7] * 2 * BLOCK_TOKENS
    memory.prefixes.add(known)
    for rid, prompt in (("a", [5] * 9), ("b", [6] * 9), *((f"known {i}", [*known, i]) for i in range(20))):
        line.add(RunningRequest(make_request(rid, prompt)))
    order = [line.admit(1, 10_000)[0].running.request.rid for _ in range(22)]
    at_once = MOST_OVERTAKING
    assert order.index("a") == at_once and order.index("b") == 2 * at_once + 1
    assert [rid for rid in order if rid not in ("a", "b")] == [f"known {i}" for i in range(20)]


def test_a_prompt_that_was_evicted_overtakes_no_other() -> None:
    memory = Unlimited()
    line = AdmissionQueue(memory, num_slots=16, eos_ids=frozenset())
    memory.prefixes.add([7] * 2 * BLOCK_TOKENS)
    for rid, prompt in (("a", [5] * 9), ("known", [7] * 2 * BLOCK_TOKENS + [1]), ("mostly new", [7] * 90)):
        line.add(RunningRequest(make_request(rid, prompt)))
    memory.prefixes.clear()
    assert [line.admit(1, 10_000)[0].running.request.rid for _ in range(3)] == ["a", "known", "mostly new"]
