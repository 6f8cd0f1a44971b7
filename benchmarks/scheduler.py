"""The scheduler's deciders on one core: dispatch, trigger, and length predictions with their rank correlation.

Times are CPU times of the process, medians over rounds. Dispatch: a steady state of one push and one pop with 100,000
groups pending, all of them candidates. Lengths: generated prompts (`prompts.py`), predictors that have seen other
prompts of the same kinds; tau is Kendall's tau-b on prompts that none of them has seen.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count, islice
from statistics import fmean, median

from prompts import draw_lengths, make_task
from report import Benchmark, arguments, publish
from threadpoolctl import threadpool_limits

from penstock.config import DispatchConfig, LengthConfig, TriggerConfig
from penstock.scheduler.active_group import ActiveGroup
from penstock.scheduler.dispatch import DispatchPolicy
from penstock.scheduler.ledger import Ledger
from penstock.scheduler.length.predictor import LengthPredictor
from penstock.scheduler.length.trust import kendall_tau
from penstock.scheduler.length_prediction import length_predictor
from penstock.scheduler.trigger import Trigger, TriggerState
from penstock.types import Task

POLICIES = {"sjf": "", "fifo": "_fifo", "ljf": "_ljf", "probe": "_probe"}
"""Suffix of their figures."""
BENCHMARK = Benchmark(
    name="scheduler",
    measures=["scheduler"],
    figures=[
        *(f"dispatches_per_s{suffix}" for suffix in POLICIES.values()),
        "trigger_evaluations_per_s",
        *("heuristic_us", "classifier_us", "classifier_single_us"),
        *("tau_heuristic", "tau_classifier", "tau_history"),
        *("history_us", "history_single_us", "history_observe_us"),
    ],
)
NUM_PENDING = 100_000
GROUP_SIZE = 8
HISTORY_ENTRIES = 100_000
MAX_NEW_TOKENS = 4096
LEARNING_GROUPS, HELD_OUT = 4096, 1024

Example = tuple[Task, list[int]]


def cpu_s(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def dispatches_per_s(policy_name: str, *, num_dispatches: int, rounds: int) -> float:
    """One group arrives for each that leaves; a probe that leaves comes back as a rest, and both count."""
    config = DispatchConfig.model_validate({"policy": policy_name})
    policy = DispatchPolicy(config, look_ahead=NUM_PENDING)
    groups = pending_groups()
    for group in islice(groups, NUM_PENDING):
        policy.push(group)

    def turn_over() -> None:
        for group in arrivals:
            policy.push(group)
            decision = policy.pop(now=group.admitted_at, free=GROUP_SIZE, may_start=True)
            if decision is not None and decision.part == "probe":
                policy.push_rest(decision.group, int(decision.group.predicted_tokens), now=group.admitted_at)
                policy.pop(now=group.admitted_at, free=GROUP_SIZE, may_start=False)

    speeds = []
    for _ in range(rounds):
        arrivals = list(islice(groups, num_dispatches))
        per_arrival = 2 if policy_name == "probe" else 1
        speeds.append(per_arrival * num_dispatches / cpu_s(turn_over))
    return median(speeds)


def pending_groups() -> Iterator[ActiveGroup]:
    """Endless arrivals, 10,000 a second, of log-normal lengths."""
    draw, task = random.Random(0), Task(task_id="task", tag="prompt", index=0)
    ledger = Ledger()
    for number in count():
        yield ActiveGroup(
            number=number,
            task=task,
            size=GROUP_SIZE,
            ledger=ledger,
            admitted_at=number * 1e-4,
            predicted_tokens=draw.lognormvariate(6, 1),
        )


def trigger_evaluations_per_s(*, num_evaluations: int, rounds: int) -> float:
    """Counts, timeouts and waits, as a loop that evaluates on every event would see them."""
    trigger = Trigger(TriggerConfig(), group_size=GROUP_SIZE, groups_per_step=64)
    states = [
        TriggerState(num_ready=ready, num_accumulated=accumulated, waiting_since=0.0 if ready else None)
        for ready in range(12)
        for accumulated in range(0, 64, 7)
    ]

    def evaluate() -> None:
        for index in range(num_evaluations):
            trigger.decide(states[index % len(states)], now=(index % 10) * 0.1)

    return median(num_evaluations / cpu_s(evaluate) for _ in range(rounds))


def examples(start: int, count: int) -> list[Example]:
    """Prompts from `start`, each with the lengths of one group's answers."""
    draw = random.Random(start)
    drawn = []
    for index in range(start, start + count):
        task, tokens = make_task(index)
        drawn.append((task, draw_lengths(tokens, GROUP_SIZE, draw, cap=MAX_NEW_TOKENS)))
    return drawn


def taught(name: str, lessons: Sequence[Example]) -> LengthPredictor:
    """A predictor that has observed `lessons`."""
    config = LengthConfig.model_validate({"predictor": name, "max_entries": HISTORY_ENTRIES})
    predictor = length_predictor(config, limit=lambda task: MAX_NEW_TOKENS, temperature=lambda task: 1.0)
    for task, lengths in lessons:
        predictor.observe(task, lengths)
    fit = predictor.due()
    if fit is not None:
        predictor.adopt(fit())
    return predictor


def predict_us(predictor: LengthPredictor, tasks: Sequence[Task], *, batch: int) -> float:
    """Microseconds per task, `batch` tasks a call."""
    batches = [tasks[start : start + batch] for start in range(0, len(tasks), batch)]
    return median(cpu_s(partial(predictor.predict, part)) / len(part) * 1e6 for part in batches)


def tau(predictor: LengthPredictor, held_out: Sequence[Example]) -> float:
    predicted = predictor.predict([task for task, _ in held_out])
    return kendall_tau([(tokens, fmean(lengths)) for tokens, (_, lengths) in zip(predicted, held_out, strict=True)])


def lengths() -> dict[str, float]:
    """Cost and worth of each predictor; the history's cost with all its entries."""
    lessons, held_out = examples(0, LEARNING_GROUPS), examples(LEARNING_GROUPS, HELD_OUT)
    tasks = [task for task, _ in held_out]
    heuristic, classifier, history = (taught(name, lessons) for name in ("heuristic", "classifier", "history"))
    figures = {
        "heuristic_us": predict_us(heuristic, tasks, batch=1),
        "classifier_us": predict_us(classifier, tasks, batch=256),
        "classifier_single_us": predict_us(classifier, tasks, batch=1),
        "tau_heuristic": tau(heuristic, held_out),
        "tau_classifier": tau(classifier, held_out),
        "tau_history": tau(history, held_out),
    }
    fillers = filler_groups(tasks)

    def observe() -> None:
        for task, lengths in fillers:
            history.observe(task, lengths)

    observe_s = cpu_s(observe)
    return {
        **figures,
        "history_us": predict_us(history, tasks, batch=32),
        "history_single_us": predict_us(history, tasks, batch=1),
        "history_observe_us": observe_s / HISTORY_ENTRIES * 1e6,
    }


def filler_groups(tasks: Sequence[Task]) -> list[Example]:
    """As many as the history may keep, so that it is full; their texts differ in a serial number at least."""
    fillers = []
    for index in range(HISTORY_ENTRIES):
        text = f"{tasks[index % len(tasks)].payload['question']} ({index * 7919 % 1000003})"
        task = Task(task_id=f"filler/{index}", tag="prompt", index=index, payload={"question": text})
        fillers.append((task, [1 + index * 31 % MAX_NEW_TOKENS] * GROUP_SIZE))
    return fillers


def main() -> None:
    options = arguments(__doc__.partition("\n")[0])
    rounds, num_dispatches = (2, 20_000) if options.quick else (5, 50_000)
    figures = {
        f"dispatches_per_s{suffix}": dispatches_per_s(name, num_dispatches=num_dispatches, rounds=rounds)
        for name, suffix in POLICIES.items()
    }
    figures["trigger_evaluations_per_s"] = trigger_evaluations_per_s(num_evaluations=num_dispatches, rounds=rounds)
    with threadpool_limits(1):
        figures |= lengths()
    publish(BENCHMARK, figures, options.json)


if __name__ == "__main__":
    main()
