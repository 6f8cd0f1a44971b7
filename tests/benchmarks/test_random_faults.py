"""The long form of `faults`: how many it plans, and what it keeps of an interrupted session."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from faults import FULL, Survivor, plan
from random_faults import VICTIMS, Fault, Injection, Phase, matrix


def test_the_full_form_plans_a_thousand_faults_of_every_kind() -> None:
    planned = plan(FULL)
    assert 1000 <= sum(injection.num_faults for each in planned for injection in each) <= 1001
    assert all(len(each) <= FULL.per_run for each in planned)
    kinds = Counter((injection.victim, injection.fault, injection.aimed) for each in planned for injection in each)
    assert kinds.keys() == {(cell.victim, cell.fault, cell.aimed) for cell in matrix()}
    assert min(kinds.values()) == FULL.whole_rounds
    assert {victim for victim, *_ in kinds} == set(VICTIMS)
    assert [str(injection) for each in plan(FULL) for injection in each] == [
        str(injection) for each in planned for injection in each
    ], "a session that goes on plans the same"


def test_an_audited_run_is_taken_from_an_earlier_session_if_it_was_asked_for_the_same(tmp_path: Path) -> None:
    injection = Injection(victim="env-0", fault=Fault.KILL, aimed=Phase.RUNNING, hit=Phase.PUBLISHING, recover_s=1.5)
    survivor = Survivor(name="injected-0", injections=[injection], findings={"lost": ["group 3"]}, reward=0.5)
    file, asked = tmp_path / "survivor.json", {"code": "c", "planned": ["x"]}
    assert Survivor.read(file, asked) is None
    survivor.write(file, asked)
    assert Survivor.read(file, asked) == survivor
    assert Survivor.read(file, {**asked, "code": "d"}) is None


def test_faults_that_a_run_did_not_wait_for_are_left() -> None:
    """A fault that hits a starting process is two: the kill before it alone does not count."""
    first, twofold, last = (
        Injection(victim="env-0", fault=Fault.KILL, aimed=phase)
        for phase in (Phase.RUNNING, Phase.STARTING, Phase.PUBLISHING)
    )
    planned = [first, twofold, last]
    left = {
        done: Survivor(name="run", injections=[first] * done, findings={}, reward=None).left_of(planned)
        for done in range(5)
    }
    assert left == {0: planned, 1: [twofold, last], 2: [twofold, last], 3: [last], 4: []}
