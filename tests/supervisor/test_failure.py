from __future__ import annotations

import pytest

from penstock.ports.process_launcher import Report
from penstock.supervisor.failure import (
    Exit,
    ExitKind,
    classify,
    describe_code,
    explain,
    first_failed,
)


def exit_of(returncode: int, *, time: float = 1.0) -> Exit:
    kind = classify(returncode, "", is_out_of_memory=False)
    return Exit(time=time, returncode=returncode, kind=kind, reason=describe_code(returncode))


def test_the_earliest_failure_is_the_cause_even_if_it_ends_last() -> None:
    exits = {"controller": exit_of(1, time=2.0)}
    reports = {
        "controller": Report(time=1.9, message="the trainer does not answer"),
        "trainer-0": Report(time=1.0, message="out of memory"),
    }
    assert first_failed(exits, reports) == "trainer-0"
    assert (
        explain("trainer-0", None, reports["trainer-0"], phase="in mid-run")
        == "trainer-0 failed in mid-run: out of memory"
    )


def test_what_the_supervisor_killed_is_the_cause_of_nothing() -> None:
    exits = {
        "trainer-0": Exit(time=1.0, returncode=-9, kind=ExitKind.KILLED_BY_SUPERVISOR, reason="killed by supervisor"),
        "rank-1": exit_of(-11, time=2.0),
    }
    assert first_failed(exits, {}) == "rank-1"


def test_a_process_that_left_no_word_is_described_by_its_code() -> None:
    told = explain("rollout-0", exit_of(-11), None, phase="while starting")
    assert told == "rollout-0 failed while starting (killed by SIGSEGV)"


def test_codes_have_names() -> None:
    assert describe_code(3) == "exit code 3"
    assert describe_code(-9) == "killed by SIGKILL"
    assert describe_code(-15) == "killed by SIGTERM"


@pytest.mark.parametrize(
    ("returncode", "said", "kind"),
    [
        (0, "", "ok"),
        (1, "", "crashed"),
        (2, "unknown key a.b", "config_error"),
        (-11, "", "crashed"),
        (-9, "", "crashed"),
        (1, "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "oom_gpu"),
        (1, "OSError: [Errno 28] No space left on device: 'pool/env-0'", "disk_full"),
        (1, "OSError: [Errno 27] File too large", "disk_full"),
    ],
)
def test_an_exit_is_understood_from_its_code_and_last_words(returncode: int, said: str, kind: str) -> None:
    assert classify(returncode, said, is_out_of_memory=False) == kind


def test_only_the_kernel_s_own_count_makes_a_kill_one_for_lack_of_memory() -> None:
    assert classify(-9, "", is_out_of_memory=True) is ExitKind.OOM_HOST
    assert classify(-15, "", is_out_of_memory=True) is ExitKind.CRASHED
