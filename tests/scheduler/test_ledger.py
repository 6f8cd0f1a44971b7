"""The conservation law, under any interleaving."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduler.ledger import FINAL, NEXT, Ledger, LedgerError
from penstock.types import EpisodeState as S


@given(st.data())
def test_any_walk_of_legal_moves_conserves_episodes(data: st.DataObject) -> None:
    ledger = Ledger()
    admitted = 0
    for group in range(data.draw(st.integers(1, 5))):
        size = data.draw(st.integers(1, 4))
        ledger.admit(group, size)
        admitted += size
    for _ in range(data.draw(st.integers(0, 60))):
        live = [number for number in range(group + 1) if number in ledger]
        if not live:
            break
        group = data.draw(st.sampled_from(live))
        member = data.draw(st.sampled_from(ledger.members(group)))
        legal = sorted(NEXT.get(ledger.state(group, member), ()))
        if legal:
            ledger.move(group, [member], data.draw(st.sampled_from(legal)))
        ledger.check()
    counts = ledger.counts()
    assert counts.pop("admitted") == admitted == sum(counts.values())


@given(st.sampled_from(list(S)), st.sampled_from(list(S)))
def test_an_illegal_move_changes_nothing(start: S, to: S) -> None:
    path = _path_to(start)
    if path is None or to in NEXT.get(start, ()) or start in FINAL:
        return
    ledger = Ledger()
    ledger.admit(0, 2)
    for state in path:
        ledger.move(0, [0], state)
    before = ledger.counts()
    with pytest.raises(LedgerError):
        ledger.move(0, [1, 0] if to in NEXT[S.PENDING] else [0], to)
    assert ledger.counts() == before
    ledger.check()


def test_a_group_leaves_when_all_its_members_have() -> None:
    ledger = Ledger()
    ledger.admit(7, 2)
    ledger.move(7, [0], S.FAILED)
    assert 7 in ledger
    ledger.move(7, [1], S.CANCELLED)
    assert 7 not in ledger
    with pytest.raises(LedgerError, match="group 7"):
        ledger.state(7, 0)


def test_a_group_sheds_what_it_does_without() -> None:
    ledger = Ledger()
    ledger.admit(7, 4)
    ledger.move(7, range(4), S.LEASED)
    ledger.move(7, [1, 3], S.READY)
    ledger.keep_members(7, [1, 3])
    assert ledger.members(7) == ledger.members(7, S.READY) == (0, 1)
    ledger.move(7, [0, 1], S.FILTERED)
    ledger.check()
    assert (ledger.count(S.FILTERED), ledger.count(S.DISCARDED_SURPLUS), 7 in ledger) == (2, 2, False)


def test_a_group_is_admitted_once() -> None:
    ledger = Ledger()
    ledger.admit(0, 1)
    with pytest.raises(LedgerError, match="already"):
        ledger.admit(0, 1)


def _path_to(goal: S) -> list[S] | None:
    """Shortest legal way from PENDING."""
    paths: dict[S, list[S]] = {S.PENDING: []}
    frontier = [S.PENDING]
    while frontier:
        state = frontier.pop(0)
        for following in NEXT.get(state, ()):
            if following not in paths:
                paths[following] = [*paths[state], following]
                frontier.append(following)
    return paths.get(goal)
