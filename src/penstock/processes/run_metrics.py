"""Metrics of the whole run for Prometheus: one endpoint, at the controller.

The controller hears of all processes over the bus and keeps their sums, so a scrape asks no other process. Counters go
on over restarts of the controller. The names begin with `penstock_run_` for the run, `penstock_process_` for one
process; a rollout server's own endpoint has more about that server, under other names (`rollout/metrics.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from penstock.config import Config
from penstock.config.loopback import is_loopback
from penstock.control.bus import CONTROLLER
from penstock.observe.recorder import COUNTED_BY_WORKERS, Recorder
from penstock.rollout.app import ApiKeys, App
from penstock.rollout.http import Route
from penstock.runtime.http_server import CannotListen, bind, listening, url_of
from penstock.supervisor.procfs import Identity, is_alive
from penstock.supervisor.run_journal import read_state

GAUGES = {
    "step": ("step", "Latest optimizer step, or ended groups of a run without a trainer; falls after a rewind."),
    "policy_version": ("policy_version", "Latest policy version; it never falls."),
    "last_step_timestamp_seconds": ("time", "Time of the latest step."),
    "reward_std": ("reward_std", "Standard deviation of the rewards of the latest step."),
    "turns_mean": ("turns_mean", "Turns of an episode, mean of the latest step."),
    "truncated_ratio": ("truncated_share", "Share of truncated episodes of the latest step."),
    "staleness_steps_mean": ("staleness_mean", "Staleness of the trained tokens in optimizer steps, mean."),
    "staleness_steps_max": ("staleness_max", "Staleness of the trained tokens in optimizer steps, maximum."),
    "entropy_nats": ("entropy", "Entropy of the policy per token."),
    "loss": ("loss", "Loss of the latest step."),
    "gradient_norm": ("grad_norm", "Norm of the gradient before clipping."),
    "learning_rate": ("learning_rate", "Learning rate of the latest step."),
    "clipped_ratio": ("clip_fraction", "Share of tokens with a clipped ratio."),
    "effective_sample_ratio": ("ess", "Effective sample size of the tokens, as a share of their number."),
    "kl_reference_nats": ("kl_reference", "Divergence from the reference per token."),
    "kl_engine_trainer_nats": ("kl_engine_trainer", "Divergence between engine and trainer per token."),
    "groups_in_flight": ("groups_in_flight", "Groups that have started, and are in no served weights yet."),
    "groups_pending": ("groups_pending", "Groups that are admitted and have not started."),
    "oldest_wait_seconds": ("oldest_wait_s", "Longest wait of a pending group."),
    "trigger_min_samples": ("trigger_min_samples", "Samples that start an optimizer step."),
    "servers": ("num_servers", "Rollout servers that have joined."),
}
"""Name after `penstock_run_`: key in a metrics line, and help."""
TOTALS = {
    "generated_tokens": ("tokens_generated_total", "Tokens that the servers generated."),
    "cpu_seconds": ("cpu_s", "Processor time of all processes."),
    "servers_busy_seconds": ("generator_busy_s", "Time in which servers computed, summed over the servers."),
    **{
        f"worker_{name}": (f"{name}_total", f"Sum of {name} over the environment workers.")
        for name in COUNTED_BY_WORKERS
    },
}
"""Counters after `penstock_run_`: key in `Recorder.sums`, and help."""
COUNTS = {
    "episodes": ("episodes_total", "Completed episodes, trained or filtered."),
    "played_tokens": ("tokens_played_total", "Tokens of completed episodes."),
    "trained_tokens": ("tokens_trained_total", "Tokens that were trained."),
    "masked_tokens": ("tokens_masked_total", "Tokens that were too old to be trained."),
    "groups_failed": ("groups_failed", "Groups that failed in every attempt."),
    "groups_dropped": ("groups_dropped", "Groups that a filter dropped."),
    "samples_unusable": ("samples_unusable", "Samples that could not be trained."),
    "frames_dropped": ("frames_dropped", "Frames that the control bus dropped."),
}
"""Counters after `penstock_run_`: key in `Recorder.counts`, and help."""
WITH_REASON = ("groups_dropped", "samples_unusable", "frames_dropped")
OF_TAGS = {
    "reward_mean": ("reward", "Reward of the completed episodes of the latest step, mean."),
    "response_tokens_mean": ("response_length_mean", "Tokens of an answer of the latest step, mean."),
}
"""Gauges with a label for the tag of a mixture: key in a metrics line, and help."""
UP = ("ready", "degraded")


class RunMetrics(Collector):
    """Metrics of the run that `recorder` records."""

    def __init__(self, run_dir: Path, recorder: Recorder, *, facts: Mapping[str, str]) -> None:
        """`facts`: labels of `penstock_run_info`."""
        self._run_dir, self._recorder, self._facts = run_dir, recorder, facts

    def text(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics text and its content type, in the format that the `accept` header prefers."""
        encode, content_type = choose_encoder(accept)
        return encode(self), content_type

    def collect(self) -> Iterator[Metric]:
        yield _gauge("penstock_run_info", "Facts about the run; always 1.", [(self._facts, 1.0)])
        yield from self._of_run()
        yield from self._of_processes()

    def _of_run(self) -> Iterator[Metric]:
        recorder, line = self._recorder, self._recorder.latest
        sums, counts = recorder.sums(), recorder.counts()
        for name, (key, text) in GAUGES.items():
            yield _gauge(f"penstock_run_{name}", text, [({}, line.get(key))])
        for name, (key, text) in OF_TAGS.items():
            of_tags = {found.partition("/")[2]: value for found, value in line.items() if found.startswith(f"{key}/")}
            samples = [({"tag": tag}, value) for tag, value in sorted(of_tags.items())]
            yield _gauge(f"penstock_run_{name}", text, samples)
        for name, (key, text) in TOTALS.items():
            yield _counter(f"penstock_run_{name}", text, [({}, sums[key])])
        for name, (key, text) in COUNTS.items():
            by_reason = sorted(counts[key].items())
            samples = [({"reason": why} if key in WITH_REASON else {}, number) for why, number in by_reason]
            yield _counter(f"penstock_run_{name}", text, samples)
        ledger = [({"state": state}, number) for state, number in line.get("ledger", {}).items() if state != "admitted"]
        yield _gauge("penstock_run_episodes_by_state", "Admitted episodes by their state at the latest step.", ledger)
        events = [({"event": event}, number) for event, number in sorted(recorder.num_events.items())]
        yield _counter("penstock_run_events", "Events since the controller started, such as alarms.", events)
        yield from self._of_evaluation()

    def _of_evaluation(self) -> Iterator[Metric]:
        found = self._recorder.evaluation
        rewards = [({"tag": tag}, figures.get("reward")) for tag, figures in sorted(found.get("tags", {}).items())]
        yield _gauge("penstock_run_evaluation_reward_mean", "Held-out reward, mean of the latest evaluation.", rewards)
        solved = [({"k": k}, share) for k, share in found.get("pass_at", {}).items()]
        yield _gauge("penstock_run_evaluation_pass_ratio", "Tasks that one of k held-out samples solves.", solved)
        yield _gauge("penstock_run_evaluation_step", "Step of the latest evaluation.", [({}, found.get("step"))])

    def _of_processes(self) -> Iterator[Metric]:
        heard = self._recorder.processes
        labels = {name: {"process": name, "role": process.role} for name, process in heard.items()}
        since = "over all processes of this name since the controller started."
        used = [({"process": CONTROLLER, "role": CONTROLLER}, time.process_time())]
        used += [(labels[name], process.cpu_s) for name, process in heard.items()]
        yield _counter("penstock_process_cpu_seconds", f"Processor time, {since}", used)
        busy = [(labels[name], process.busy_s) for name, process in heard.items()]
        yield _counter("penstock_process_busy_seconds", f"Time of useful model compute, {since}", busy)
        beats = [(labels[name], process.heard_at) for name, process in heard.items() if process.heard_at]
        yield _gauge("penstock_process_last_heartbeat_timestamp_seconds", "Time of the latest heartbeat.", beats)
        known = (read_state(self._run_dir) or {}).get("processes", {})
        told = [({"process": name, "role": facts.get("role", "")}, facts) for name, facts in known.items()]
        up = [(each, float(facts["state"] in UP)) for each, facts in told]
        yield _gauge("penstock_process_up", "1 if the process is ready, 0 if it is starting or gone.", up)
        restarts = [(each, facts.get("restarts", 0)) for each, facts in told]
        yield _counter("penstock_process_restarts", "Restarts in this life of the run.", restarts)
        memory = [(each, _resident_bytes(facts)) for each, facts in told]
        yield _gauge(
            "penstock_process_resident_memory_bytes", "Memory of the process, if it is on this machine.", memory
        )


def _resident_bytes(facts: Mapping[str, Any]) -> int | None:
    """Return the resident memory of a process that the supervisor knows; None if it is gone or elsewhere."""
    identity = Identity.of(facts)
    if identity is not None and identity.is_here and is_alive(identity):
        with suppress(psutil.Error):
            return int(psutil.Process(identity.pid).memory_info().rss)
    return None


Samples = Sequence[tuple[Mapping[str, str], Any]]
"""Labels and value of each sample. Unknown values are left out."""


def _gauge(name: str, text: str, samples: Samples) -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=_label_names(samples)), samples)


def _counter(name: str, text: str, samples: Samples) -> Metric:
    return _filled(CounterMetricFamily(name, text, labels=_label_names(samples)), samples)


def _label_names(samples: Samples) -> list[str]:
    return list(samples[0][0]) if samples else []


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: Samples) -> Metric:
    for labels, value in samples:
        if isinstance(value, int | float) and math.isfinite(value):
            family.add_metric(list(labels.values()), value)
    return family


@asynccontextmanager
async def metrics_endpoint(config: Config, run_dir: Path, recorder: Recorder) -> AsyncIterator[None]:
    """Serve `/metrics` for the length of the body, if `observe.metrics_port` is set. A port that is taken is an alarm,
    and the run goes on."""
    observe = config.observe
    async with AsyncExitStack() as stack:
        if observe.metrics_port is not None:
            facts = {"run_id": run_dir.name, "pipeline": config.pipeline, "model": config.model_name}
            facts["environments"] = ",".join(config.environments.names)
            metrics = RunMetrics(run_dir, recorder, facts=facts)

            async def show(request: Request) -> Response:
                text, content_type = metrics.text(request.headers.get("accept", ""))
                return Response(text, headers={"Content-Type": content_type})

            keys = ApiKeys() if is_loopback(observe.metrics_host) else ApiKeys(generation=config.rollout.api_key)
            app = App([Route("/metrics", ["GET"], show, "generation", reply=None)], keys)
            try:
                listener = stack.enter_context(bind(observe.metrics_host, observe.metrics_port))
            except CannotListen as error:
                recorder.event("alarm", reason=f"no metrics for Prometheus: {error}: set observe.metrics_port")
            else:
                await stack.enter_async_context(listening(app, listener))
                recorder.event("metrics", url=f"{url_of(observe.metrics_host, listener)}/metrics")
        yield
