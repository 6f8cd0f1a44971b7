"""The pictures of a run: `plots/reward.png`, `plots/timeline.png`. Drawn from its files, whatever its length or end."""

from __future__ import annotations

from pathlib import Path

from penstock.observe import jsonl, steps


def draw(run_dir: Path) -> list[Path]:
    """Draw what the run's files allow for; returns the pictures written."""
    metrics = steps.read(run_dir)
    spans = [line for line in jsonl.read(run_dir / "timeline.jsonl") if "start" in line and "end" in line]
    drawn: list[Path] = []
    if not metrics and not spans:
        return drawn
    from penstock.observe import reward_plot, timeline_plot

    (run_dir / "plots").mkdir(exist_ok=True)
    trained = [line for line in metrics if "trainer_busy_s" in line]
    if any(line.get("reward") is not None for line in trained):
        drawn.append(reward_plot.draw(run_dir / "plots" / "reward.png", trained, jsonl.read(run_dir / "events.jsonl")))
    if spans:
        drawn.append(timeline_plot.draw(run_dir / "plots" / "timeline.png", metrics, spans))
    return drawn
