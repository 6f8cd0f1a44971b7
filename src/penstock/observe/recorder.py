"""The records that the controller writes: metrics (one line per step), events, and the timeline of spans and decisions.
It also writes a document of the results so far, which is updated between steps too."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from penstock.alarms import Alarms
from penstock.observe import jsonl
from penstock.observe.evaluation_results import means_of_metrics, results
from penstock.observe.jsonl import JsonLinesWriter
from penstock.observe.log_lines import Paced, pairs
from penstock.observe.summary import PLAYED, deviation, mean
from penstock.ports.group_records import GroupRecord
from penstock.ports.observer import BusySpan, Observer, Scheduling
from penstock.ports.training import LAGS
from penstock.types import NO_VERSION, EpisodeState, EpisodeSummary, LearnerState, Summaries, Task, WeightsTransport

logger = logging.getLogger(__name__)

LOGGED = ("policy_version", "reward", "loss", "staleness_mean", "episodes", "response_length_mean", "groups_in_flight")
"""Figures of a step in its log line."""
LOGGED_ELSEWHERE = ("stall", "process_totals", "checkpoint")
"""Events that another process logs itself."""
WARNINGS = (
    *("alarm", "server_lost", "weights_lost", "pool_lost", "rewound", "no_workers", "validation_skipped"),
    *("checkpoint_skipped", "checkpoint_missed", "payloads_lost", "payloads_unfetched"),
)
MAX_REASONS = 32
"""Number of drop reasons that are counted separately; further reasons are counted together."""
OTHER_REASONS = "other reasons"
MAX_GIVEN_UP = 100
"""Number of failed tasks with an event of their own, in a run that only generates; timeline.jsonl has all failed
tasks."""
COUNTED_BY_WORKERS = (
    "drifts",
    "branches",
    "off_branch_tokens",
    "manager_masked_tokens",
    "unread_calls",
    "refused_requests",
    "scored",
    "score_timeouts",
    "surplus_tokens",
    "endpoint_requests",
    "endpoint_retries",
    "endpoint_prompt_tokens",
    "endpoint_completion_tokens",
)
UNREAD_CALLS = (
    "the policy calls tools in a format that the chat template does not show, so its calls are not read: set "
    "model.tool_format to the format that the policy writes"
)
RESULTS_EVERY_S = 1.0
"""Seconds between two writes of the document of results."""
LAST_LINE_BYTES = 1 << 20
"""Bytes read to find the last line of the metrics; many times the size of a line."""
TOTALS = ("episodes_total", "reward_total", "tokens_played_total", "tokens_trained_total", "tokens_masked_total")


@dataclass(slots=True)
class Process:
    """Sums over all processes of this name since this recorder was opened."""

    role: str
    cpu_s: float = 0.0
    busy_s: float = 0.0
    counters: Counter[str] = field(default_factory=Counter)
    heard_at: float = 0.0
    """Time of the latest heartbeat, in seconds since the epoch; 0 before the first."""


class Recorder(Observer):
    """Collects figures between steps and writes them at steps. Running totals continue from the end of the file. All
    times are seconds since the epoch."""

    def __init__(
        self, run_dir: Path, *, now: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic
    ) -> None:
        """`now`: the clock of the records, in seconds since the epoch. `steady`: a clock that never jumps."""
        self._now, self._steady = now, steady
        lines = jsonl.tail(run_dir / "metrics.jsonl", LAST_LINE_BYTES)
        self._results_path = run_dir / PLAYED
        self._before: Mapping[str, Any] = {**(lines[-1] if lines else {}), **jsonl.read_json(self._results_path)}
        """The last metrics line of an earlier controller, updated with the results it recorded after that line."""
        self.latest: Mapping[str, Any] = self._before
        """The latest metrics line of the run; empty before the first."""
        self.evaluation: Mapping[str, Any] = {}
        """The latest evaluation; empty before the first under this recorder."""
        self.num_events: Counter[str] = Counter()
        """Number of events under this recorder, by name."""
        self._latest_step: int | None = self._before.get("step")
        self._step_log = Paced(logger)
        self._opened = self._logged_at = steady()
        self._logged_tokens = self._before.get("tokens_generated_total", 0.0)
        names = ("metrics.jsonl", "events.jsonl", "timeline.jsonl")
        self._metrics, self._events, self._timeline = (JsonLinesWriter(run_dir / name) for name in names)
        self.processes: dict[str, Process] = {}
        self._alarms = Alarms()
        self._finished: defaultdict[str, list[EpisodeSummary]] = defaultdict(list)
        """Completed episodes by tag, since the last step."""
        self._evaluated: dict[str, float | None] = {}
        """Results of a validation since the last step."""
        self._totals: dict[str, float] = {name: self._before.get(name, 0) for name in TOTALS}
        self._newest_version = int(self._before.get("policy_version", NO_VERSION))
        self._num_tasks: int | None = None
        """Number of tasks of the run; None if it is not known in advance."""
        self._skipped: Counter[str] = Counter(self._before.get("samples_unusable", {}))
        """Number of samples that could not be trained, by reason."""
        self._dropped: Counter[str] = Counter(self._before.get("groups_dropped", {}))
        """Number of groups that a filter dropped, by filter and reason."""
        self._updated: Mapping[WeightsTransport, int] = {}
        self.frames_dropped: Counter[str] = Counter(self._before.get("frames_dropped", {}))
        """Number of frames that the control bus dropped, by reason."""
        self._groups_failed = int(self._before.get("groups_failed", 0))
        self._latest_failure: str | None = self._before.get("latest_failure")
        self._held_out: dict[str, int] | None = None
        """Progress of a running validation: number of ended tasks, number of all tasks."""
        self._results: dict[str, Any] = {}
        """The latest document of results that was written."""
        self._results_written_at = -math.inf

    def event(self, event: str, **details: Any) -> None:
        if event not in LOGGED_ELSEWHERE:
            level = logging.WARNING if event in WARNINGS else logging.INFO
            logger.log(level, "%s: %s", event, pairs(details))
        self.num_events[event] += 1
        self._events.write({"time": self._now(), "event": event, **details})

    def updated(self, num_servers: Mapping[WeightsTransport, int]) -> None:
        self._updated = num_servers

    def set_num_tasks(self, num_tasks: int) -> None:
        """Record that the run has `num_tasks` tasks; every progress line shows the number too."""
        self._num_tasks = num_tasks
        self.event("tasks", total=num_tasks)

    def decision(self, decider: str, reason: str, inputs: Mapping[str, Any]) -> None:
        match inputs:
            case {"dropped_by": name}:
                why = f"{name}: {reason}"
                self._dropped[why if why in self._dropped or len(self._dropped) < MAX_REASONS else OTHER_REASONS] += 1
            case {"given_up": task, "group": group}:
                self._groups_failed += 1
                self._latest_failure = reason
                if self._num_tasks is not None and self._groups_failed <= MAX_GIVEN_UP:
                    self.event("given_up", task=task, group=group, reason=reason)
            case {"adapted": changes, "policy_version": version}:
                self._adapted(reason, changes, version, inputs)
            case {"promised": promised, "measured": measured}:
                self.event("judged", promised=promised, measured=measured, reason=reason)
            case {"held_out": num_tasks, "held_out_ended": num_ended}:
                self._held_out = {"ended": num_ended, "tasks": num_tasks}
        self._timeline.write({"kind": "decision", "decider": decider, "time": self._now(), "reason": reason, **inputs})

    def _adapted(self, reason: str, changes: Mapping[str, Any], version: int, inputs: Mapping[str, Any]) -> None:
        """Record changed settings with the figures of the prediction, or that a change was undone with its verdict."""
        figures = {
            name: value
            for name, value in inputs.items()
            if name not in ("adapted", "policy_version") and isinstance(value, int | float | str)
        }
        verdict = {name: figures.pop(name) for name in ("promised", "measured") if name in figures}
        if verdict:
            self.event("judged", **verdict, reason=reason)
            figures = {}
        self.event("adapted", policy_version=version, changes=changes, reason=reason, prediction=figures)

    def joined(self, name: str, role: str, *, url: str = "") -> None:
        """Record a new process; `url` is its address if it is a server."""
        self.processes.setdefault(name, Process(role)).role = role
        self.event("joined", name=name, role=role, **({"url": url} if url else {}))

    def heartbeat(
        self, name: str, *, cpu_s: float, busy_s: float, counters: Mapping[str, float], spans: Sequence[BusySpan]
    ) -> None:
        process = self.processes.setdefault(name, Process(name))
        process.heard_at = self._now()
        process.cpu_s += cpu_s
        process.busy_s += busy_s
        process.counters.update(counters)
        if counters.get("unread_calls"):
            self._alarms.update("unread_calls", UNREAD_CALLS)
            for reason in self._alarms.take():
                self.event("alarm", reason=reason)
        for span in spans:
            self._timeline.write(asdict(span))
        if self._steady() - self._results_written_at >= RESULTS_EVERY_S:
            self._write_results()

    @property
    def cpu_s(self) -> float:
        """Return the processor time of all processes that have joined, under this controller."""
        return sum(process.cpu_s for process in self.processes.values())

    def server_counters(self, prefix: str) -> dict[str, float]:
        """Return the sums over all servers of the counters with this prefix, by the rest of their names."""
        sums: Counter[str] = Counter()
        for process in self.processes.values():
            if process.role == "rollout":
                sums.update(
                    {name.removeprefix(prefix): n for name, n in process.counters.items() if name.startswith(prefix)}
                )
        return dict(sums)

    async def restore(self, records: AsyncIterable[GroupRecord]) -> None:
        """Set the totals from the groups in the pool. In a run that only generates, the pool is correct even if the
        written totals are not."""
        self._totals |= {"episodes_total": 0, "reward_total": 0.0, "tokens_played_total": 0}
        self._groups_failed = 0
        async for record in records:
            self._groups_failed += record.state == EpisodeState.FAILED
            self._add(record.episodes)

    def _add(self, episodes: Summaries) -> None:
        """Add episodes to the totals."""
        self._totals["episodes_total"] += len(episodes)
        self._totals["tokens_played_total"] += sum(episode.response_tokens for episode in episodes)
        self._totals["reward_total"] += sum(episode.reward for episode in episodes)
        self._newest_version = max([self._newest_version, *(episode.version_max for episode in episodes)])

    def _write_results(self) -> None:
        """Write the document of results so far, if it has changed."""
        self._results_written_at = self._steady()
        results = {
            "episodes_total": self._totals["episodes_total"],
            "groups_dropped": dict(self._dropped),
            "frames_dropped": dict(self.frames_dropped),
            "groups_failed": self._groups_failed,
            "latest_failure": self._latest_failure,
            "held_out": self._held_out,
        }
        if results != self._results:
            jsonl.write_json(self._results_path, results)
            self._results = results

    def group_completed(self, tag: str, episodes: Summaries) -> None:
        """Record completed episodes before any filter: the reward curve must not depend on what is trained."""
        finished = [episode.without_texts() for episode in episodes if episode.status != "failed"]
        self._finished[tag] += finished
        self._add(finished)

    def accumulated(self, counts: Mapping[str, float]) -> None:
        self._totals["tokens_trained_total"] += counts.get("tokens", 0)
        self._totals["tokens_masked_total"] += counts.get("tokens_masked_stale", 0)
        for name, count in counts.items():
            if name.startswith("skipped_"):
                self._skipped[name.removeprefix("skipped_")] += int(count)

    def stepped(self, step: int, learner: LearnerState, ledger: Mapping[str, int], scheduling: Scheduling) -> None:
        """Write the line of a step."""
        left_out = ("tokens", "busy_s", *LAGS)
        measured: dict[str, float | None] = {k: v for k, v in learner.metrics.items() if k not in left_out}
        if not learner.metrics.get("kl_tokens"):
            measured["kl_engine_trainer"] = None  # this step trained no token of the current version
        trained, masked = self._totals["tokens_trained_total"], self._totals["tokens_masked_total"]
        trainers = self._of("trainer")
        line = {
            **self._line(step),
            "policy_version": learner.policy_version,
            "tokens_trained_total": trained,
            "tokens_masked_total": masked,
            "tokens_masked_share": masked / max(trained + masked, 1.0),
            "entropy": learner.entropy,
            **measured,
            "staleness_tokens": {
                str(lag): number for lag, name in enumerate(LAGS) if (number := learner.metrics.get(name))
            },
            **self._with_earlier_lives({"trainer_busy_s": sum(each.busy_s for each in trainers)}),
            "num_trainers": len(trainers),
            **scheduling,
            **self._groups_from_outside(),
            "samples_unusable": dict(self._skipped),
            "ledger": ledger,
        }
        self._write(line)

    def progressed(self, groups: int, ledger: Mapping[str, int], scheduling: Scheduling) -> None:
        """Write a progress line unless no group has ended since the latest one. Its step is the number of ended groups.
        Its tokens are those of completed episodes, or those that an endpoint has counted."""
        if groups == self._latest_step:
            return
        played = {name: self._totals[name] for name in ("reward_total", "tokens_played_total")}
        line = self._line(groups)
        num_tokens = played["tokens_played_total"] + line["endpoint_completion_tokens_total"]
        totals = {"tasks": self._num_tasks, **played, "tokens_generated_total": num_tokens}
        self._write({**line, **totals, **scheduling, "ledger": ledger})

    def _line(self, step: int) -> dict[str, Any]:
        """Return the figures that every line has."""
        figures = _figures([episode for episodes in self._finished.values() for episode in episodes])
        for tag, episodes in self._finished.items():
            figures |= {f"{name}/{tag}": value for name, value in _figures(episodes).items()}
        return {
            "step": step,
            "time": self._now(),
            "policy_version": self._newest_version,
            "episodes_total": self._totals["episodes_total"],
            **figures,
            **self._evaluated,
            **self.sums(),
            "num_servers": len(self._of("rollout")),
            "servers_by_transport": dict(self._updated),
            "groups_dropped": dict(self._dropped),
            "frames_dropped": dict(self.frames_dropped),
        }

    def sums(self) -> dict[str, float]:
        """Return sums over all processes and all lives of the run, up to this moment."""
        servers, workers = self._of("rollout"), self._of("env")
        sums = {
            "wall_s": self._steady() - self._opened,
            "tokens_generated_total": sum(each.counters["tokens"] for each in servers),
            **{f"{name}_total": sum(each.counters[name] for each in workers) for name in COUNTED_BY_WORKERS},
            "generator_busy_s": sum(each.busy_s for each in servers),
            "cpu_s": time.process_time() + sum(process.cpu_s for process in self.processes.values()),
        }
        return self._with_earlier_lives(sums)

    def counts(self) -> dict[str, dict[str, float]]:
        """Return counts over all lives of the run, up to this moment, by what they count and by reason."""
        return {
            "groups_dropped": dict(self._dropped),
            "samples_unusable": dict(self._skipped),
            "frames_dropped": dict(self.frames_dropped),
            "groups_failed": {"": self._groups_failed},
            **{name: {"": total} for name, total in self._totals.items()},
        }

    def _write(self, line: Mapping[str, Any]) -> None:
        self._metrics.write(line)
        self._log_step(line)
        self._latest_step, self.latest = line["step"], line
        self._finished.clear()
        self._evaluated.clear()

    def _log_step(self, line: Mapping[str, Any]) -> None:
        now, tokens = self._steady(), line["tokens_generated_total"]
        speed = {"tokens_per_s": (tokens - self._logged_tokens) / max(now - self._logged_at, 1e-9)}
        figures = {name: line.get(name) for name in LOGGED}
        if self._step_log.info(f"step {line['step']}: {pairs({**figures, **speed})}"):
            self._logged_at, self._logged_tokens = now, tokens

    @property
    def totals(self) -> dict[str, float]:
        """Return figures of the run so far."""
        episodes, tokens = self._totals["episodes_total"], self._totals["tokens_trained_total"]
        return {"step": self._latest_step or 0, "episodes": episodes, "tokens_trained": tokens}

    def evaluated(
        self, when: str, step: int, tasks: Sequence[Task], played: Sequence[Summaries], *, shown: int, solved_at: float
    ) -> None:
        """Record the results of a validation; the line of the next step shows them too."""
        samples = [
            {
                "prompt": str(task.payload.get("question", task.task_id)),
                "expected": str(task.payload.get("answer", "")),
                "answer": episodes[0].text,
                "reward": episodes[0].reward,
            }
            for task, episodes in list(zip(tasks, played, strict=True))[:shown]
        ]
        found = results(tasks, played, solved_at=solved_at)
        self._held_out, self.evaluation = None, {"step": step, **found}
        self._write_results()  # first, so that no reader takes the validation for running
        self.event("evaluation", when=when, step=step, **found, samples=samples)
        of_tags = {f"eval_reward/{tag}": figures["reward"] for tag, figures in found["tags"].items()}
        self._evaluated = {"eval_step": step, "eval_reward": found["reward"], **of_tags}

    def close(self) -> None:
        """Write every process's totals, then close the files."""
        self._write_results()
        for name, process in self.processes.items():
            sums = {"role": process.role, "cpu_s": process.cpu_s, "busy_s": process.busy_s}
            self.event("process_totals", process=name, **sums, counters=dict(process.counters))
        for writer in (self._metrics, self._events, self._timeline):
            writer.close()

    def _groups_from_outside(self) -> Counter[str]:
        """Return the numbers of groups that external environments delivered, by outcome of the delivery."""
        counted: Counter[str] = Counter()
        for process in self._of("env"):
            counted.update({name: count for name, count in process.counters.items() if name.startswith("groups_")})
        return counted

    def _of(self, role: str) -> list[Process]:
        return [process for process in self.processes.values() if process.role == role]

    def _with_earlier_lives(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return `sums` plus those of the earlier lives of the run."""
        return {name: self._before.get(name, 0.0) + value for name, value in sums.items()}


def _figures(episodes: Summaries) -> dict[str, float | None]:
    """Return the figures of completed episodes for the line of a step."""
    rewards = [episode.reward for episode in episodes]
    return {
        "reward": mean(rewards),
        "reward_std": deviation(rewards),
        "episodes": len(episodes),
        "response_length_mean": mean([episode.response_tokens for episode in episodes]),
        "turns_mean": mean([episode.num_turns for episode in episodes]),
        "truncated_share": mean([float(episode.status == "truncated") for episode in episodes]),
        **{f"env/{name}": value for name, value in means_of_metrics(episodes).items()},
    }
