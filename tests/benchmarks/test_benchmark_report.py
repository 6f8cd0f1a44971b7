"""A benchmark writes the figures that it declares, also those that it could not measure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from report import Benchmark, Figures, publish

BENCHMARK = Benchmark(name="made", measures=["scheduler"], figures=["speed", "a_wait"], on_accelerator=["speed"])


def test_what_was_not_measured_is_null_and_a_spread_needs_no_declaration(tmp_path: Path) -> None:
    figures = Figures()
    figures.add("speed", [1.0, 3.0])
    figures.cell("Table", "a", "wait", [None])
    publish(BENCHMARK, figures.flat, tmp_path / "made.json", tables=figures.tables)
    found = json.loads((tmp_path / "made.json").read_text())
    assert found["figures"] == {"speed": 2.0, "speed_spread": 2.0, "a_wait": None}
    assert found["tables"] == {}


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"speed": 1.0}, "made: figures not declared: []; missing: ['a_wait']"),
        ({"speed": 1.0, "a_wait": 1.0, "b": 1.0}, "made: figures not declared: ['b']; missing: []"),
    ],
)
def test_other_figures_than_the_declared_ones_are_written_and_refused(
    figures: dict[str, float], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "made.json"
    with pytest.raises(SystemExit, match=message.replace("[", r"\[")):
        publish(BENCHMARK, figures, file)
    assert json.loads(file.read_text())["figures"] == figures, "hours of measuring are not thrown away"


@pytest.mark.parametrize("options", [{"partial": True}, {"accelerator": "one"}])
def test_a_part_of_a_benchmark_and_an_accelerator_have_fewer_figures(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        publish(BENCHMARK, {"speed": 1.0}, tmp_path / "all.json")
    publish(BENCHMARK, {"speed": 1.0}, tmp_path / "few.json", **options)
    assert json.loads((tmp_path / "few.json").read_text())["figures"] == {"speed": 1.0}


def test_code_that_has_moved_is_asked_for() -> None:
    benchmark = Benchmark(name="made", measures=["gone"], figures=["speed"])
    with pytest.raises(SystemExit, match="it measures gone, which src/penstock does not have"):
        publish(benchmark, {"speed": 1.0}, None)
