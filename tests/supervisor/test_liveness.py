"""The liveness decider alone, on invented times."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.config import SupervisorConfig
from penstock.ports.process_launcher import Beat
from penstock.supervisor.liveness import LOOK_BEATS, Finding, Health, Liveness

SETTINGS = SupervisorConfig(silent_s=10.0, hang_s=100.0)


def look_for(seconds: float, *, doing: str = "Step", beats: bool = True, moves: bool = False) -> Finding:
    """What is found after `seconds` of looks, one per second."""
    liveness = Liveness(SETTINGS, now=0.0)
    finding = liveness.look(Beat(time=0.0, progress=0, doing=doing), now=0.0)
    for second in range(1, int(seconds) + 1):
        beat = Beat(time=float(second if beats else 0), progress=second if moves else 0, doing=doing)
        finding = liveness.look(beat, now=float(second))
    return finding


def test_silence_is_noticed_then_acted_upon() -> None:
    assert look_for(4, beats=False).health is Health.ALIVE
    assert look_for(5, beats=False) == Finding(health=Health.DEGRADED, reason="no heartbeat for 5.0 s")
    assert look_for(10, beats=False) == Finding(health=Health.HUNG, reason="no heartbeat for 10.0 s")


def test_a_process_that_never_beats_is_silent() -> None:
    liveness = Liveness(SETTINGS, now=0.0)
    findings = [liveness.look(None, now=float(second)) for second in range(11)]
    assert findings[-1].health is Health.HUNG


def test_a_long_step_is_no_silence_and_has_its_own_bound() -> None:
    assert look_for(49).health is Health.ALIVE
    assert look_for(50).health is Health.DEGRADED
    assert look_for(100) == Finding(health=Health.HUNG, reason="no progress with Step for 100.0 s")


def test_who_has_nothing_to_do_need_not_get_on() -> None:
    assert look_for(1000, doing="").health is Health.ALIVE


@given(st.integers(0, 300))
def test_who_gets_on_is_never_suspected(seconds: int) -> None:
    assert look_for(seconds, moves=True).health is Health.ALIVE


def test_another_thing_to_do_is_progress_too() -> None:
    liveness = Liveness(SETTINGS, now=0.0)
    for second in range(1000):
        beat = Beat(time=float(second), progress=0, doing="Step" if second // 40 % 2 else "Publish")
        assert liveness.look(beat, now=float(second)).health is Health.ALIVE


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20))
def test_nobody_is_held_to_account_for_what_the_supervisor_slept_through(pauses: list[float]) -> None:
    liveness, now = Liveness(SETTINGS, now=0.0), 0.0
    for num_looks, pause in enumerate(pauses, start=1):
        now += pause
        finding = liveness.look(None, now=now)
        assert finding.reason
        if finding.health is Health.HUNG:
            assert num_looks * LOOK_BEATS * SETTINGS.heartbeat_s >= SETTINGS.silent_s
