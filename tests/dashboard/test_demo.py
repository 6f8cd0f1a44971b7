"""The recorded run that comes with the package."""

from __future__ import annotations

import json
from pathlib import Path
from zipfile import ZipFile

from shown_run import dashboard_of, make_run

from penstock.dashboard.demo import demo_run, pack


async def test_the_demo_shows_a_run_that_learns() -> None:
    with demo_run() as run_dir:
        async with dashboard_of(run_dir.parent) as dashboard:
            (row,) = (await dashboard.get("runs"))["runs"]
            assert row["status"] == "completed" and row["step"] == 60
            status = await dashboard.get(f"runs/{row['id']}/status")
            assert status["warnings"] == [] and set(status["tags"]) == {"game", "words"}
            assert not any("checkpoint" in each["command"] for each in status["next"]), "no checkpoint is packed"
            evaluations = (await dashboard.get(f"runs/{row['id']}/evaluations"))["evaluations"]
            assert evaluations[-1]["reward"] > evaluations[0]["reward"] + 0.3
            adaptations = (await dashboard.get(f"runs/{row['id']}/adaptations"))["adaptations"]
            tuned = [each for each in adaptations if each["outcome"]]
            assert tuned and all(each["prediction"] for each in tuned)
            assert tuned[0]["outcome"]["reason"].startswith("kept")
            assert (await dashboard.get(f"runs/{row['id']}/timeline"))["spans"]
            assert (await dashboard.get(f"runs/{row['id']}/decisions"))["decisions"]
    assert not run_dir.exists()


def test_what_is_packed_names_no_machine(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "runs", "recorded")
    (run_dir / "checkpoints" / "step_1").mkdir(parents=True)
    (run_dir / "checkpoints" / "step_1" / "weights").write_text("large")
    (run_dir / "logs" / "trainer-0.log").write_text(f"saved {run_dir}/checkpoints/step_1\n")
    pack(run_dir, tmp_path / "demo.zip")
    with ZipFile(tmp_path / "demo.zip") as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    assert {Path(name).name for name in texts} >= {"state.json", "events.jsonl", "timeline.jsonl", "config.yaml"}
    assert not any("checkpoints" in name for name in texts)
    assert not any(str(tmp_path) in text or "boot_id" in text for text in texts.values())
    assert "supervisor" in json.loads(texts["recorded/state.json"])
