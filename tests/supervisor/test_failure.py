from __future__ import annotations

from pathlib import Path

from penstock.supervisor.failure import Exit, Report, describe_code, explain, root_cause, tail


def test_the_earliest_failure_is_the_cause_even_if_it_ends_last() -> None:
    exits = {"controller": Exit(time=2.0, returncode=1)}
    reports = {
        "controller": Report(time=1.9, message="the trainer does not answer"),
        "trainer-0": Report(time=1.0, message="out of memory"),
    }
    cause = root_cause(exits, reports)
    assert cause.name == "trainer-0" and cause.exit is None
    message = explain(cause, phase="in mid-run", log=Path("/no/such/log"))
    assert message.startswith("trainer-0 failed in mid-run: out of memory")


def test_a_process_that_left_no_word_is_described_by_its_code() -> None:
    cause = root_cause({"rollout-0": Exit(time=1.0, returncode=-11)}, {})
    assert "rollout-0 failed while starting (killed by SIGSEGV)" in explain(
        cause, phase="while starting", log=Path("/no/such/log")
    )


def test_codes_have_names() -> None:
    assert describe_code(3) == "exit code 3"
    assert describe_code(-9) == "killed by SIGKILL, perhaps for lack of memory"
    assert describe_code(-15) == "killed by SIGTERM"


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("".join(f"line {i}\n" for i in range(10_000)))
    assert tail(log, 2) == ["line 9998", "line 9999"]
    assert tail(tmp_path / "none.log") == []
