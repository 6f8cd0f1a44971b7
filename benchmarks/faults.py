"""What a run survives, how fast it is back, and what it costs to be able to.

`detect_ms`, `<process>_recover_s`: processes of a steady run are killed, one after another. Detection ends with the
exit in the journal. A rollout server is back when it serves the current weights, an environment worker when a group
was played, the trainer with its first optimizer step, the controller with its first dispatch.

`checkpoint_share`, `supervision_cpu`: of an undisturbed run of the quickstart, without a display.

The long form: real training runs, two at a time, with all kinds of faults in all phases, in random order. Each run is
then audited, against the word of its trainers (`run_audit`). `disturbed` counts what a run did because of the faults of
its neighbour; `reward_reached` is the held-out reward of these runs over that of undisturbed ones. Whatever is found
wrong is printed at once; the runs are kept, with what was put into them and what their trainers told.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from injection import PROCESSES, Injection, inject, matrix
from report import Figures, arguments, publish
from run_audit import Audit, audit
from watched_run import TimedOut, WatchedRun, Word, wait_for

from penstock.supervisor import procfs

EXAMPLE = Path(__file__).parent.parent / "examples" / "quickstart" / "run.yaml"
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
SEED = 0
NUM_INJECTIONS, NUM_RUNS, STEPS = 110, 10, 420
MOST_SEEDS = 2
QUICK_INJECTIONS, QUICK_RUNS, QUICK_STEPS = 8, 2, 60
ROUNDS, STEADY_STEPS = 3, 3
"""Kills of every process, and optimizer steps before each."""
STEP_S, RECOVERED_S, RUN_S = 240.0, 120.0, 900.0
"""Limits: for an optimizer step, for a recovery, for a run once nobody disturbs it any more."""


@dataclass(slots=True, kw_only=True)
class Survivor:
    """A run of the long form, and what it came to."""

    name: str
    injections: list[Injection]
    audit: Audit
    reward: float | None
    """Held-out, after training; None if it never got there."""


def kills(runs: Path, rounds: int, figures: Figures) -> None:
    """Every process dies `rounds` times in a steady run."""
    settings = [*SHORT, "trainer.steps=100000", "data.eval_tasks=0"]
    found: dict[str, list[tuple[float, float]]] = {}
    with WatchedRun(EXAMPLE, runs, "kills", settings) as run:
        for _ in range(rounds):
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


def costs(runs: Path, steps: int, figures: Figures) -> None:
    """What being able to survive costs a run of the quickstart that nothing happens to."""
    used: list[tuple[float, float]] = []
    with WatchedRun(EXAMPLE, runs, "quickstart", [*QUIET, f"trainer.steps={steps}"]) as run:
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


def long_form(runs: Path, num_injections: int, num_runs: int, steps: int, figures: Figures) -> None:
    """Faults at random, and what they left. Undisturbed runs are among those that are hurt, so that we would see it if
    they were disturbed; each seed has one."""
    cells = matrix()
    random.Random(SEED).shuffle(cells)
    num_seeds = min(MOST_SEEDS, num_runs // 2)
    with ThreadPoolExecutor(max_workers=2) as pool:
        hurt, undisturbed = [], []
        for number in range(num_runs):
            planned = cells[number:num_injections:num_runs]
            hurt.append(pool.submit(survive, runs, f"injected-{number}", number % num_seeds, planned, steps))
            if number < num_seeds:
                undisturbed.append(pool.submit(survive, runs, f"undisturbed-{number}", number, [], steps))
        report([future.result() for future in hurt], [future.result() for future in undisturbed], figures)


def survive(runs: Path, name: str, seed: int, planned: Sequence[Injection], steps: int) -> Survivor:
    """A run from its beginning to its last step, `planned` faults in between."""
    chance = random.Random(name)
    done: list[Injection] = []
    stuck: list[str] = []
    with WatchedRun(EXAMPLE, runs, name, [*SHORT, f"seed={seed}", f"trainer.steps={steps}"]) as run:
        try:
            for number, injection in enumerate(planned, start=1):
                if not await_step(run, number * steps // (len(planned) + 1)):
                    break
                time.sleep(chance.uniform(0, 0.5))
                inject(run, injection, chance, done)
                print(f"{name}, step {run.step}: {injection}: {injection.recover_s}", file=sys.stderr)
            status = run.await_end(seconds=RUN_S)
            stuck += [] if status == "completed" else [f"the run has {status}: {run.state.get('error')}"]
        except TimedOut as error:
            stuck.append(f"after {done[-1] if done else 'nothing'}: {error}")
        run.end()
        found = audit(run, done, group_size=GROUP_SIZE, max_staleness=MAX_STALENESS)
        found.unexplained += stuck
        reward = next((e["reward"] for e in run.events if e.get("when") == "after"), None)
        (runs / f"{name}.injections.json").write_text(json.dumps([asdict(each) for each in done], indent=1))
        (runs / f"{name}.words.json").write_text(json.dumps(run.witness.words))
    for kind, wrong in found.findings().items():
        for each in wrong:
            print(f"{name}: {kind}: {each}", file=sys.stderr)
    return Survivor(name=name, injections=done, audit=found, reward=reward)


def await_step(run: WatchedRun, step: int) -> bool:
    """Whether the run gets there, with all its processes; it may also end before."""
    wait_for(f"step {step}", lambda: run.has_ended or (run.is_whole and run.step >= step), seconds=RUN_S)
    return not run.has_ended


def report(hurt: Sequence[Survivor], undisturbed: Sequence[Survivor], figures: Figures) -> None:
    injections = [injection for survivor in hurt for injection in survivor.injections]
    totals = Counter(dict.fromkeys(hurt[0].audit.findings(), 0))
    for survivor in hurt:
        totals.update({name: len(wrong) for name, wrong in survivor.audit.findings().items()})
    figures.flat |= {"injections": len(injections), **totals}
    figures.flat["disturbed"] = sum(len(wrong) for each in undisturbed for wrong in each.audit.findings().values())
    reached = figures.add("reward_injected", [survivor.reward for survivor in hurt])
    expected = figures.add("reward_undisturbed", [survivor.reward for survivor in undisturbed])
    if reached and expected:
        figures.flat["reward_reached"] = reached[0] / expected[0]
    for (fault, phase), count in sorted(Counter((each.fault, each.hit) for each in injections).items()):
        figures.cell("Injections, by what the process was at", fault, str(phase), [count])
    for victim in sorted({injection.victim for injection in injections}):
        times = [each.recover_s for each in injections if each.victim == victim and each.recover_s is not None]
        figures.cell("Injections, by process", victim, "injections", [len(times)])
        figures.cell("Injections, by process", victim, "back_after_s", [median(times)] if times else [])


def main() -> None:
    options = arguments(__doc__.splitlines()[0] if __doc__ else "", runs="DIR where runs are made, and kept")
    runs = Path(options.runs or tempfile.mkdtemp(prefix="faults-")).absolute()
    runs.mkdir(parents=True, exist_ok=True)
    figures = Figures()
    kills(runs, 1 if options.quick else ROUNDS, figures)
    costs(runs, 110 if options.quick else 420, figures)
    if options.quick:
        long_form(runs, QUICK_INJECTIONS, QUICK_RUNS, QUICK_STEPS, figures)
    else:
        long_form(runs, NUM_INJECTIONS, NUM_RUNS, STEPS, figures)
    publish("faults", figures.flat, options.json, tables=figures.tables)


if __name__ == "__main__":
    main()
