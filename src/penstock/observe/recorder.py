"""What the controller writes down: metrics (a line per step), events, the timeline of spans and decisions, and a
document of what was played so far, which grows between steps too."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.observe import jsonl
from penstock.observe.evaluation import results
from penstock.observe.jsonl import JsonLinesWriter
from penstock.observe.summary import PLAYED
from penstock.observe.trackers import Tracker
from penstock.ports import GroupRecord
from penstock.types import NO_VERSION, BusySpan, EpisodeState, EpisodeSummary, LearnerState, Task

MAX_REASONS = 32
"""For which groups were dropped, that are counted each by itself."""
OTHER_REASONS = "other reasons"
MAX_GIVEN_UP = 100
"""Tasks of a run that only plays, that are told of each by itself; timeline.jsonl has all."""
COUNTED_BY_WORKERS = ("drifts", "scored", "score_timeouts", "surplus_tokens")
PLAYED_EVERY_S = 1.0
LAST_LINE_BYTES = 1 << 20
"""Many times what a line of the metrics takes."""


@dataclass(slots=True)
class _Process:
    """Sums of all processes of this name, since this recorder was opened."""

    role: str
    cpu_s: float = 0.0
    busy_s: float = 0.0
    counters: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Played:
    """Finished episodes of one tag."""

    rewards: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def figures(self, tag: str) -> dict[str, float | None]:
        """For the line of a step."""
        return {
            f"reward/{tag}": _mean(self.rewards),
            f"episodes/{tag}": len(self.rewards),
            f"response_length_mean/{tag}": _mean(self.lengths),
        }


class Recorder:
    """Collects between steps, writes at steps; running totals go on where the file ends. All times are seconds since
    the epoch."""

    def __init__(self, run_dir: Path, trackers: Sequence[Tracker] = ()) -> None:
        self._trackers = trackers
        lines = jsonl.tail(run_dir / "metrics.jsonl", LAST_LINE_BYTES)
        self._path = run_dir / PLAYED
        self._before: Mapping[str, Any] = {**(lines[-1] if lines else {}), **jsonl.read_json(self._path)}
        """The last line that an earlier controller wrote, and what it had played since."""
        self._latest_step: int | None = self._before.get("step")
        self._opened = time.monotonic()
        self._metrics = JsonLinesWriter(run_dir / "metrics.jsonl")
        self._events = JsonLinesWriter(run_dir / "events.jsonl")
        self._timeline = JsonLinesWriter(run_dir / "timeline.jsonl")
        self._processes: dict[str, _Process] = {}
        self._played: dict[str, _Played] = {}
        """By tag, since the last step."""
        self._evaluated: dict[str, float | None] = {}
        """What a validation found since the last step."""
        self._episodes_total = int(self._before.get("episodes_total", 0))
        self._tokens_trained = float(self._before.get("tokens_trained_total", 0.0))
        self._tokens_masked = float(self._before.get("tokens_masked_total", 0.0))
        self._newest_version = int(self._before.get("policy_version", NO_VERSION))
        self._reward_sum = float(self._before.get("reward_total", 0.0))
        self._tokens_played = int(self._before.get("tokens_played_total", 0))
        self._num_tasks: int | None = None
        """To be played, where that is known beforehand."""
        self._skipped: Counter[str] = Counter(self._before.get("samples_unusable", {}))
        """Samples that could not be trained, by reason."""
        self._dropped: Counter[str] = Counter(self._before.get("groups_dropped", {}))
        """Groups that a filter dropped, by filter and reason."""
        self._groups_failed = int(self._before.get("groups_failed", 0))
        self._latest_failure: str | None = self._before.get("latest_failure")
        self._held_out: dict[str, int] | None = None
        """Of the tasks of a validation that is being played: how many have ended, of how many."""
        self._told: dict[str, Any] = {}
        """Of what was played, the latest document."""
        self._told_at = -math.inf

    def event(self, event: str, **details: Any) -> None:
        self._events.write({"time": time.time(), "event": event, **details})

    def intends(self, num_tasks: int) -> None:
        """So many tasks are to be played; every line of progress says so too."""
        self._num_tasks = num_tasks
        self.event("tasks", total=num_tasks)

    def decision(self, decider: str, reason: str, inputs: Mapping[str, Any]) -> None:
        if "dropped_by" in inputs:
            why = f"{inputs['dropped_by']}: {reason}"
            self._dropped[why if why in self._dropped or len(self._dropped) < MAX_REASONS else OTHER_REASONS] += 1
        if "given_up" in inputs:
            self._give_up(inputs["given_up"], inputs["group"], reason)
        if "held_out" in inputs:
            self._held_out = {"ended": inputs["held_out_ended"], "tasks": inputs["held_out"]}
        self._timeline.write({"kind": "decision", "decider": decider, "time": time.time(), "reason": reason, **inputs})

    def _give_up(self, task: str, group: int, reason: str) -> None:
        """Count a group; where every task is to be played, also tell of it."""
        self._groups_failed += 1
        self._latest_failure = reason
        if self._num_tasks is not None and self._groups_failed <= MAX_GIVEN_UP:
            self.event("given_up", task=task, group=group, reason=reason)

    def joined(self, name: str, role: str, *, url: str = "") -> None:
        """`url`: where it serves, if it does."""
        self._processes.setdefault(name, _Process(role)).role = role
        self.event("joined", name=name, role=role, **({"url": url} if url else {}))

    def heartbeat(
        self, name: str, *, cpu_s: float, busy_s: float, counters: Mapping[str, float], spans: Sequence[BusySpan]
    ) -> None:
        process = self._processes.setdefault(name, _Process(name))
        process.cpu_s += cpu_s
        process.busy_s += busy_s
        process.counters.update(counters)
        for span in spans:
            self._timeline.write(
                {
                    "process": span.process,
                    "kind": span.kind,
                    "start": span.start,
                    "end": span.end,
                    "policy_version": span.policy_version,
                }
            )

        if time.monotonic() - self._told_at >= PLAYED_EVERY_S:
            self._tell_of_playing()

    def take_up(self, records: Iterable[GroupRecord]) -> None:
        """The totals of a run that only plays are those of its pool, whatever was written down of them."""
        self._episodes_total = self._tokens_played = self._groups_failed = 0
        self._reward_sum = 0.0
        for record in records:
            self._groups_failed += record.state == EpisodeState.FAILED
            self._add(record.episodes)

    def _add(self, episodes: Sequence[EpisodeSummary]) -> None:
        """To the totals of what was played."""
        self._episodes_total += len(episodes)
        self._tokens_played += sum(episode.response_tokens for episode in episodes)
        self._reward_sum += sum(episode.reward for episode in episodes)
        self._newest_version = max([self._newest_version, *(episode.version_max for episode in episodes)])

    def _tell_of_playing(self) -> None:
        """Write down what was played so far, if that is more than it was."""
        self._told_at = time.monotonic()
        document = {
            "episodes_total": self._episodes_total,
            "groups_dropped": dict(self._dropped),
            "groups_failed": self._groups_failed,
            "latest_failure": self._latest_failure,
            "held_out": self._held_out,
        }
        if document != self._told:
            jsonl.write_json(self._path, document)
            self._told = document

    def played(self, tag: str, episodes: Sequence[EpisodeSummary]) -> None:
        """Finished episodes, before any filter: the reward curve must not depend on what is trained."""
        finished = [episode for episode in episodes if episode.status != "failed"]
        played = self._played.setdefault(tag, _Played())
        played.rewards += [episode.reward for episode in finished]
        played.lengths += [episode.response_tokens for episode in finished]
        self._add(finished)

    def accumulated(self, counts: Mapping[str, float]) -> None:
        self._tokens_trained += counts.get("tokens", 0)
        self._tokens_masked += counts.get("tokens_masked_stale", 0)
        for name, count in counts.items():
            if name.startswith("skipped_"):
                self._skipped[name.removeprefix("skipped_")] += int(count)

    def stepped(
        self, step: int, learner: LearnerState, ledger: Mapping[str, int], scheduling: Mapping[str, float | None]
    ) -> None:
        """Write the line of a step."""
        measured: dict[str, float | None] = {
            name: value for name, value in learner.metrics.items() if name not in ("tokens", "busy_s")
        }
        if not learner.metrics.get("kl_tokens"):
            measured["kl_engine_trainer"] = None  # nothing comparable was trained in this step
        line = {
            **self._line(step),
            "policy_version": learner.policy_version,
            "tokens_trained_total": self._tokens_trained,
            "tokens_masked_total": self._tokens_masked,
            "tokens_masked_share": self._tokens_masked / max(self._tokens_trained + self._tokens_masked, 1.0),
            "entropy": learner.entropy,
            **measured,
            "trainer_busy_s": self._before.get("trainer_busy_s", 0.0) + self._busy_s("trainer"),
            "num_trainers": len(self._of("trainer")),
            **scheduling,
            **self._groups_from_outside(),
            "samples_unusable": dict(self._skipped),
            "ledger": ledger,
        }
        self._write(line)

    def progressed(self, groups: int, ledger: Mapping[str, int], scheduling: Mapping[str, float | None]) -> None:
        """Write the line of a moment, unless nothing has ended since the latest one; its step is the number of groups
        that have. Tokens are those of what was played to its end."""
        if groups == self._latest_step:
            return
        line = self._line(groups)
        totals = {
            "tasks": self._num_tasks,
            "reward_total": self._reward_sum,
            "tokens_played_total": self._tokens_played,
            "tokens_generated_total": self._tokens_played,
        }
        self._write({**line, **totals, **scheduling, "ledger": ledger})

    def _line(self, step: int) -> dict[str, Any]:
        """What every line has."""
        rewards = [reward for played in self._played.values() for reward in played.rewards]
        lengths = [length for played in self._played.values() for length in played.lengths]
        return {
            "step": step,
            "time": time.time(),
            "wall_s": self._before.get("wall_s", 0.0) + time.monotonic() - self._opened,
            "policy_version": self._newest_version,
            "reward": _mean(rewards),
            "episodes": len(rewards),
            "episodes_total": self._episodes_total,
            "response_length_mean": _mean(lengths),
            **{name: value for tag, played in self._played.items() for name, value in played.figures(tag).items()},
            **self._evaluated,
            "tokens_generated_total": self._before.get("tokens_generated_total", 0.0)
            + sum(process.counters["tokens"] for process in self._of("rollout")),
            **{f"{name}_total": self._total(name, of="env") for name in COUNTED_BY_WORKERS},
            "generator_busy_s": self._before.get("generator_busy_s", 0.0) + self._busy_s("rollout"),
            "cpu_s": self._before.get("cpu_s", 0.0)
            + time.process_time()
            + sum(process.cpu_s for process in self._processes.values()),
            "num_servers": len(self._of("rollout")),
            "groups_dropped": dict(self._dropped),
        }

    def _write(self, line: Mapping[str, Any]) -> None:
        self._metrics.write(line)
        self._latest_step = line["step"]
        for tracker in self._trackers:
            tracker.log(line["step"], {name: value for name, value in line.items() if isinstance(value, int | float)})
        self._played.clear()
        self._evaluated.clear()

    def evaluated(
        self,
        when: str,
        step: int,
        tasks: Sequence[Task],
        played: Sequence[Sequence[EpisodeSummary]],
        *,
        num_shown: int,
        solved_at: float,
    ) -> None:
        """The held-out tasks were played; the line of the next step says so too."""
        samples = [
            {
                "prompt": str(task.payload.get("question", task.task_id)),
                "expected": str(task.payload.get("answer", "")),
                "answer": episodes[0].text,
                "reward": episodes[0].reward,
            }
            for task, episodes in list(zip(tasks, played, strict=True))[:num_shown]
        ]
        found = results(tasks, played, solved_at=solved_at)
        self._held_out = None
        self._tell_of_playing()  # first, so that nobody takes it for one that is still being played
        self.event("evaluation", when=when, step=step, **found, samples=samples)
        of_tags = {f"eval_reward/{tag}": figures["reward"] for tag, figures in found["tags"].items()}
        self._evaluated = {"eval_step": step, "eval_reward": found["reward"], **of_tags}

    def close(self) -> None:
        """Write every process's totals, then close the files."""
        self._tell_of_playing()
        for name, process in self._processes.items():
            self.event(
                "process_totals",
                process=name,
                role=process.role,
                cpu_s=process.cpu_s,
                busy_s=process.busy_s,
                counters=dict(process.counters),
            )
        for writer in (self._metrics, self._events, self._timeline):
            writer.close()
        for tracker in self._trackers:
            tracker.close()

    def _groups_from_outside(self) -> dict[str, float]:
        """By what became of them before they were played, where programs of their own bring them."""
        counted: Counter[str] = Counter()
        for process in self._of("env"):
            counted.update({name: n for name, n in process.counters.items() if name.startswith("groups_")})
        return dict(counted)

    def _of(self, role: str) -> list[_Process]:
        return [process for process in self._processes.values() if process.role == role]

    def _total(self, name: str, *, of: str) -> float:
        """What processes of that role count, earlier lives of the run included."""
        before: float = self._before.get(f"{name}_total", 0.0)
        return before + sum(process.counters[name] for process in self._of(of))

    def _busy_s(self, role: str) -> float:
        return sum(process.busy_s for process in self._of(role))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
