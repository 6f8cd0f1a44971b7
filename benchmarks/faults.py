"""What a run survives, how fast it is back, and what it costs to be able to.

`detect_ms`, `<process>_recover_s`: processes of a steady run are killed, one after another. Detection ends with the
exit in the journal. A rollout server is back when it serves the current weights, an environment worker when a group
was played, the trainer with its first optimizer step, the controller with its first dispatch.

`checkpoint_share`, `supervision_cpu`: of an undisturbed run of the quickstart, without a display.

The long form: real training runs, a few at a time, with all kinds of faults in all phases, in random order. Each run
is then audited, against the word of its trainers (`run_audit`). `disturbed` counts what a run did because of the faults
of its neighbour; `reward_reached` is the held-out reward of these runs over that of undisturbed ones. Each finding is
printed at once. With `--runs` the runs are kept, with their faults and the trainers' words, and the same command goes
on after an interruption: it repeats no run that has been audited at this commit with the same plan.
"""

from __future__ import annotations

import itertools
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from lab import EXAMPLE
from random_faults import PROCESSES, VICTIMS, Fault, Injection, Phase, RunIsOver, inject, matrix
from report import Benchmark, Figures, arguments, publish, runs_dir, source_tree
from run_audit import FINDINGS, audit
from watched_run import TimedOut, WatchedRun, Word, end_earlier, wait_for

from penstock.supervisor import procfs

GROUP_SIZE, MAX_STALENESS = 8, 1
QUIET = ["observe.progress=false", "observe.plots=false"]
SHORT = [
    *QUIET,
    f"env.group_size={GROUP_SIZE}",
    f"scheduler.max_staleness={MAX_STALENESS}",
    "trainer.groups_per_step=16",
    "trainer.checkpoint_every=5",
    "supervisor.silent_s=5",
    "supervisor.ready_timeout_s=30",
    "supervisor.grace_s=4",
    "supervisor.max_restarts=1000",
    "supervisor.max_backoff_s=1",
]
"""Hangs are found soon, and no run is given up."""
BENCHMARK = Benchmark(
    name="faults",
    measures=["supervisor", "processes", "control", "store", "recovery.py", "loop.py", "system.py"],
    figures=[
        *(f"{name}_{figure}" for name in PROCESSES for figure in ("detect_ms", "recover_s")),
        *("detect_ms", "detect_worst_ms", "supervision_cpu", "checkpoint_share"),
        *("injections", *FINDINGS, "disturbed", "reward_injected", "reward_undisturbed", "reward_reached"),
        *(f"{fault}_{phase}".replace(" ", "_") for fault in Fault for phase in Phase),
        *(f"{victim}_{figure}" for victim in VICTIMS for figure in ("injections", "back_after_s")),
    ],
)
SMALL_STEPS = ["trainer.groups_per_step=8"]
"""Of the long form: between two faults a run learns less than it restarts."""
SEED = 0
STEADY_STEPS = 3
"""Optimizer steps before a kill."""
START_S, STEP_S, RECOVERED_S, RUN_S = 400.0, 240.0, 120.0, 900.0
"""Limits: for the start of a run, for an optimizer step, for a recovery, for a run after its last fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is done."""

    rounds: int
    """Kills of every process."""
    cost_steps: int
    injections: int
    """At least so many, over all runs of the long form."""
    whole_rounds: int
    """Times that every fault is put in; the others are cheap ones, since most of the time goes into restarts of
    servers, trainers and whole runs."""
    per_run: int
    steps_between: int
    """Optimizer steps from a fault to the next one: most of a run's time is its restarts, not these."""
    seeds: int
    """Of injected runs, in turn; each seed also has an undisturbed run."""
    at_a_time: int
    overrides: Sequence[str] = ()
    """Settings of all runs."""
    limit: int | None = None
    """Injections of the plan that are put in, the first ones; None: all."""

    @property
    def steps(self) -> int:
        return self.steps_between * (self.per_run + 1)


FULL = Size(
    rounds=3,
    cost_steps=420,
    injections=1000,
    whole_rounds=3,
    per_run=25,
    steps_between=6,
    seeds=2,
    at_a_time=2,
)
QUICK = Size(
    rounds=1,
    cost_steps=10,
    injections=2,
    whole_rounds=1,
    per_run=2,
    steps_between=4,
    seeds=1,
    at_a_time=2,
    overrides=["model.warm_start.steps=5", "data.eval_tasks=16", "supervisor.ready_timeout_s=180"],
)


class Progress:
    """Tells how far all runs are together."""

    def __init__(self, total: int) -> None:
        self._total, self._num_done, self._num_kept, self._num_wrong = total, 0, 0, 0
        self._began, self._lock = time.monotonic(), threading.Lock()

    def keep(self, count: int) -> None:
        """Count injections of an earlier session."""
        with self._lock:
            self._num_kept += count

    def add(self, count: int, *, wrong: int = 0, what: str) -> None:
        with self._lock:
            self._num_done, self._num_wrong = self._num_done + count, self._num_wrong + wrong
            known, minutes = self._num_done + self._num_kept, (time.monotonic() - self._began) / 60
            left = minutes / self._num_done * max(self._total - known, 0) if self._num_done else float("nan")
            print(
                f"{known} of {self._total} injections, {self._num_wrong} findings, "
                f"{minutes:.0f} min, {left:.0f} to go. {what}",
                file=sys.stderr,
                flush=True,
            )


@dataclass(slots=True, kw_only=True)
class Survivor:
    """A run of the long form, and what it came to."""

    name: str
    injections: list[Injection]
    findings: dict[str, list[str]]
    reward: float | None
    """Held-out, after training; None if it never got there."""

    def left_of(self, planned: Sequence[Injection]) -> Sequence[Injection]:
        """Return the faults of `planned` that were not put in, because the run completed before."""
        needed = itertools.accumulate(injection.num_faults for injection in planned)
        return planned[sum(faults <= len(self.injections) for faults in needed) :]

    def write(self, file: Path, asked: object) -> None:
        file.write_text(json.dumps({"asked": asked, "survivor": asdict(self)}, indent=1))

    @classmethod
    def read(cls, file: Path, asked: object) -> Survivor | None:
        """Return the run of an earlier session; None if there is none, or it was asked for something else."""
        if not file.exists() or (tree := json.loads(file.read_text()))["asked"] != json.loads(json.dumps(asked)):
            return None
        found = tree["survivor"]
        return cls(**found | {"injections": [Injection.loads(each) for each in found["injections"]]})


def kills(runs: Path, size: Size, figures: Figures) -> None:
    """Every process dies a few times in a steady run."""
    settings = [*SHORT, *size.overrides, "trainer.steps=100000", "data.eval_tasks=0"]
    found: dict[str, list[tuple[float, float]]] = {}
    end_earlier(runs / "kills")
    with WatchedRun(EXAMPLE, runs, "kills", settings) as run:
        wait_for("the start", lambda: run.is_whole, seconds=START_S)
        for _ in range(size.rounds):
            for name in PROCESSES:
                found.setdefault(name, []).append(kill(run, name))
                print("{}: noticed after {:.3f} s, back after {:.1f} s".format(name, *found[name][-1]), file=sys.stderr)
    for name, times in found.items():
        figures.cell("Killed processes", name, "detect_ms", [1e3 * detect_s for detect_s, _ in times])
        figures.cell("Killed processes", name, "recover_s", [recover_s for _, recover_s in times])
    detected = [1e3 * detect_s for times in found.values() for detect_s, _ in times]
    figures.flat |= {"detect_ms": median(detected), "detect_worst_ms": max(detected)}


def kill(run: WatchedRun, name: str) -> tuple[float, float]:
    """Seconds until it was noticed, and until the successor worked."""
    until = run.step + STEADY_STEPS
    wait_for("a steady run", lambda: run.is_whole and run.step >= until, seconds=STEP_S)
    victim = run.identity(name)
    assert victim is not None
    killed_at = time.time()
    procfs.send(victim, signal.SIGKILL)
    back_at = wait_for(f"{name} works again", lambda: works_at(run, name, killed_at), seconds=RECOVERED_S)
    noticed = run.event_after(killed_at, event="process", name=name, state="exited")
    assert noticed is not None
    return noticed["time"] - killed_at, back_at - killed_at


def works_at(run: WatchedRun, name: str, killed_at: float) -> float | None:
    """When the successor of a process that was killed did its work; None if it has not."""
    match name.partition("-")[0]:
        case "rollout":
            done = run.event_after(killed_at, event="server_back")
        case "trainer":
            back = run.event_after(killed_at, event="rewound")
            done = next((line for line in run.steps if back and line["time"] > back["time"]), None)
        case "env":
            back = run.event_after(killed_at, event="joined", name=name)
            done = run.decision_after(back["time"], "filter") if back else None
        case _:
            back = run.event_after(killed_at, event="process", name=name, state="exited")
            done = run.decision_after(back["time"], "dispatch") if back else None
    return float(done["time"]) if done else None


def costs(runs: Path, size: Size, figures: Figures) -> None:
    """What being able to survive costs a run of the quickstart that nothing happens to."""
    used: list[tuple[float, float]] = []
    steps = size.cost_steps
    end_earlier(runs / "quickstart")
    with WatchedRun(EXAMPLE, runs, "quickstart", [*QUIET, *size.overrides, f"trainer.steps={steps}"]) as run:
        while not run.has_ended:
            if run.status == "running" and STEADY_STEPS <= run.step < steps:
                used.append((time.time(), run.cpu_s()))
            time.sleep(1.0)
        run.await_end(seconds=RUN_S)
        (began, cpu_began), (ended, cpu_ended) = used[0], used[-1]
        figures.flat["supervision_cpu"] = (cpu_ended - cpu_began) / (ended - began)
        figures.flat["checkpoint_share"] = checkpoint_share(run.timeline)


def checkpoint_share(timeline: Sequence[Word]) -> float:
    """Of the time that the learner takes from the first group to its last checkpoint."""
    spans = {kind: [line for line in timeline if line.get("kind") == kind] for kind in ("train", "checkpoint")}
    saving_s = sum(span["end"] - span["start"] for span in spans["checkpoint"])
    return float(saving_s / (spans["checkpoint"][-1]["end"] - spans["train"][0]["start"]))


def plan(size: Size) -> list[list[Injection]]:
    """Return the faults of every run, in random order."""
    chance, planned = random.Random(SEED), list[Injection]()
    for number in itertools.count():
        cells = [cell for cell in matrix() if number < size.whole_rounds or cell.is_cheap]
        chance.shuffle(cells)
        while cells and sum(injection.num_faults for injection in planned) < size.injections:
            planned.append(cells.pop())
        if cells:
            break
    chance.shuffle(planned)
    return in_runs(planned[: size.limit], size)


def in_runs(planned: list[Injection], size: Size) -> list[list[Injection]]:
    """Return the faults of each run, in order."""
    return [planned[start : start + size.per_run] for start in range(0, len(planned), size.per_run)]


def long_form(runs: Path, size: Size, figures: Figures) -> None:
    """Faults at random, and what they left. Undisturbed runs are among those that are hurt, so that we would see it if
    they were disturbed; each seed has one. Faults that a run did not wait for are put into another run."""
    planned = plan(size)
    progress = Progress(sum(injection.num_faults for each in planned for injection in each))
    hurt: list[Survivor] = []
    with ThreadPoolExecutor(max_workers=size.at_a_time) as pool:
        unhurt = [
            pool.submit(survive, runs, f"undisturbed-{seed}", seed, [], size, progress)
            for seed in range(min(size.seeds, len(planned)))
        ]
        while planned:
            futures = [
                pool.submit(survive, runs, f"injected-{number}", number % size.seeds, faults, size, progress)
                for number, faults in enumerate(planned, start=len(hurt))
            ]
            made = [future.result() for future in futures]
            hurt += made
            left = [fault for faults, survivor in zip(planned, made, strict=True) for fault in survivor.left_of(faults)]
            planned = in_runs(left, size)
        report(hurt, [future.result() for future in unhurt], figures)


def survive(runs: Path, name: str, seed: int, planned: Sequence[Injection], size: Size, progress: Progress) -> Survivor:
    """A run from its beginning to its last step, `planned` faults in between; one of an earlier session, if there
    is one that was asked for the same."""
    settings = [*SHORT, *SMALL_STEPS, *size.overrides, f"seed={seed}", f"trainer.steps={size.steps}"]
    asked = {"code": source_tree(), "settings": settings, "planned": [str(injection) for injection in planned]}
    file = runs / f"{name}.survivor.json"
    if (earlier := Survivor.read(file, asked)) is not None:
        progress.keep(len(earlier.injections))
        return earlier
    end_earlier(runs / name)
    done: list[Injection] = []
    with WatchedRun(EXAMPLE, runs, name, settings) as run:
        stuck = inject_all(run, name, planned, done, size, progress)
        run.end()
        found = audit(run, done, group_size=GROUP_SIZE, max_staleness=MAX_STALENESS)
        found.unexplained += stuck
        reward = next((e["reward"] for e in run.events if e.get("when") == "after"), None)
        (runs / f"{name}.words.json").write_text(json.dumps(run.witness.words))
    findings = found.findings()
    for kind, wrong in findings.items():
        for each in wrong:
            print(f"{name}: {kind}: {each}", file=sys.stderr)
    progress.add(0, wrong=sum(map(len, findings.values())), what=f"{name} is audited")
    survivor = Survivor(name=name, injections=done, findings=findings, reward=reward)
    survivor.write(file, asked)
    return survivor


def inject_all(
    run: WatchedRun, name: str, planned: Sequence[Injection], done: list[Injection], size: Size, progress: Progress
) -> list[str]:
    """Put the `planned` faults in, add them to `done`, and await the run's end. Return what kept it from that."""
    chance = random.Random(name)
    try:
        for number, injection in enumerate(planned, start=1):
            if not await_step(run, number * size.steps_between):
                break
            time.sleep(chance.uniform(0, 0.5))
            known = len(done)
            inject(run, injection, chance, done)
            said = f"{name}, step {run.step}: {injection}: back after {injection.recover_s or 0.0:.1f} s"
            progress.add(len(done) - known, what=said)
        status = run.await_end(seconds=RUN_S)
    except RunIsOver:
        status = run.status
    except TimedOut as error:
        return [f"after {done[-1] if done else 'nothing'}: {error}"]
    return [] if status == "completed" else [f"the run has {status}: {run.state.get('error')}"]


def await_step(run: WatchedRun, step: int) -> bool:
    """Whether the run gets there, with all its processes; it may also end before."""
    wait_for(f"step {step}", lambda: run.has_ended or (run.is_whole and run.step >= step), seconds=RUN_S)
    return not run.has_ended


def report(hurt: Sequence[Survivor], undisturbed: Sequence[Survivor], figures: Figures) -> None:
    injections = [injection for survivor in hurt for injection in survivor.injections]
    totals = {kind: sum(len(survivor.findings[kind]) for survivor in hurt) for kind in FINDINGS}
    figures.flat |= {"injections": len(injections), **totals}
    figures.flat["disturbed"] = sum(len(wrong) for each in undisturbed for wrong in each.findings.values())
    figures.add("reward_injected", [survivor.reward for survivor in hurt])
    figures.add("reward_undisturbed", [survivor.reward for survivor in undisturbed])
    reached, expected = figures.flat["reward_injected"], figures.flat["reward_undisturbed"]
    figures.add("reward_reached", [reached / expected if expected else None])
    counts = Counter((each.fault, each.hit) for each in injections)
    for fault, phase in itertools.product(Fault, Phase):
        figures.cell("Injections, by what the process was at", fault, str(phase), [counts[fault, phase]])
    for victim in VICTIMS:
        times = [each.recover_s for each in injections if each.victim == victim and each.recover_s is not None]
        figures.cell("Injections, by process", victim, "injections", [len(times)])
        figures.cell("Injections, by process", victim, "back_after_s", [median(times)] if times else [])


def main() -> None:
    options = arguments(
        __doc__.splitlines()[0] if __doc__ else "",
        runs="DIR where runs are made, and kept",
        injections="NUMBER of those that are planned, the first ones",
        only="PART, kills, costs or long_form",
    )
    size = QUICK if options.quick else FULL
    if options.injections:
        size = replace(size, limit=int(options.injections))
    runs = runs_dir(Path(options.runs or tempfile.mkdtemp(prefix="faults-")), quick=options.quick)
    runs.mkdir(parents=True, exist_ok=True)
    figures = Figures()
    for part in (kills, costs, long_form):
        if options.only in (None, part.__name__):
            part(runs, size, figures)
    partial = options.only is not None
    publish(BENCHMARK, figures.flat, options.json, tables=figures.tables, partial=partial)


if __name__ == "__main__":
    main()
