"""Log lines."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from penstock.observe.log_lines import LINE, Paced, formatted, logging_to, pairs

logger = logging.getLogger("penstock.somewhere")


def test_a_line_is_taken_apart_as_it_was_made() -> None:
    line = formatted("env-0", "says: all", at=1_795_400_000.0625)
    assert line == "2026-11-23T02:13:20.062Z INFO env-0: says: all"
    parsed = LINE.fullmatch(line)
    assert parsed is not None and parsed.groups() == ("2026-11-23T02:13:20.062Z", "INFO", "env-0", "says: all")
    assert LINE.fullmatch("INFO env-0: says") is None


def test_our_lines_go_to_the_file_from_info_on_and_those_of_libraries_from_warnings_on(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    with logging_to(path, "supervisor"):
        logger.info("one")
        logger.debug("two")
        logging.getLogger("httpx").info("three")
        logging.getLogger("httpx").warning("four")
    logger.info("five")
    assert [line.partition("Z ")[2] for line in path.read_text().splitlines()] == [
        "INFO supervisor: one",
        "WARNING supervisor: four",
    ]


def test_plain_values_are_shown_and_others_left_out() -> None:
    shown = pairs({"a": 1, "b": 0.12345, "c": 2e6, "d": "two words", "e": None, "f": [1], "g": {}, "h": "", "i": "x"})
    assert shown == 'a=1 b=0.1235 c=2000000 d="two words" i=x'


def test_fast_events_are_logged_once_a_second_with_the_number_left_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock")
    times = iter([0.0, 0.4, 0.9, 1.0, 5.0])
    paced = Paced(logger, now=lambda: next(times))
    assert [paced.info(f"step {number}") for number in range(5)] == [True, False, False, True, True]
    assert caplog.messages == ["step 0", "step 3 (2 before it not shown)", "step 4"]
