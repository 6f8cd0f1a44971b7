"""Distances between versions are those in the tree that steps and restores make."""

from __future__ import annotations

from collections import deque

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.version_history import VersionHistory


@st.composite
def histories(draw: st.DrawFn) -> tuple[VersionHistory, list[tuple[int, int, int]]]:
    """A history, and its edges (version, version, optimizer steps between their weights)."""
    history, edges = VersionHistory(), []
    for version in range(1, draw(st.integers(1, 25))):
        if draw(st.booleans()) and draw(st.booleans()):
            same = draw(st.integers(0, version - 1))
            history = history.with_restored(version, weights_of=same)
            edges.append((version, same, 0))
        else:
            edges.append((version, version - 1, 1))
    return history, edges


def distances(edges: list[tuple[int, int, int]], start: int) -> dict[int, int]:
    """The number of steps from `start` to every version, by a walk over the edges."""
    found, waiting = {start: 0}, deque([start])
    while waiting:
        at = waiting.popleft()
        for left, right, steps in edges:
            for here, there in ((left, right), (right, left)):
                if here == at and there not in found:
                    found[there] = found[at] + steps
                    waiting.append(there)
    return found


@given(histories())
def test_a_distance_is_that_of_the_tree(made: tuple[VersionHistory, list[tuple[int, int, int]]]) -> None:
    history, edges = made
    newest = len(edges)
    expected = distances(edges, newest)
    assert {each: history.steps_between(each, newest) for each in range(newest + 1)} == expected
    versions = np.arange(newest + 1).reshape(1, -1)
    assert (newest - history.renumbered(versions, newest)).tolist() == [[expected[each] for each in range(newest + 1)]]


@given(histories(), st.data())
def test_the_nearest_version_of_a_range_is_found(
    made: tuple[VersionHistory, list[tuple[int, int, int]]], data: st.DataObject
) -> None:
    history, edges = made
    newest = len(edges)
    earliest = data.draw(st.integers(0, newest))
    latest = data.draw(st.integers(earliest, newest))
    expected = distances(edges, newest)
    assert history.least_steps(earliest, latest, newest) == min(expected[each] for each in range(earliest, latest + 1))


def test_a_lost_branch_is_as_old_as_its_steps() -> None:
    history = VersionHistory().with_restored(11, weights_of=5)
    assert history.steps_between(10, 11) == 5, "the numbers differ by one"
    assert history.steps_between(4, 13) == 3, "what no restore has touched keeps its age"
    assert history.steps_between(14, 13) == -1, "a version that is not made yet"
    assert history.renumbered(np.array([-1, 4, 10, 12]), 13).tolist() == [-1, 10, 6, 12]
    assert history.least_steps(0, 2**40, 13) < 0, "a worker may report anything"
