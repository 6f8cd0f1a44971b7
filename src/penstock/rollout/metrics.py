"""Metrics of a rollout server for Prometheus.

The runner and the application already keep the values, so a generation request costs only two observations. The metrics
are collected on each scrape. They belong to one server, so two servers in one process stay separate.

As in vLLM, a request with n samples counts n times among the running or waiting requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from penstock.rollout.runner import EngineRunner


class ServerMetrics(Collector):
    """Metrics of one server. `responses` counts responses by path and status."""

    def __init__(self, runner: EngineRunner, responses: Mapping[tuple[str, int], int]) -> None:
        self._runner, self._responses = runner, responses

    def text(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics text and its content type, in the format that the `accept` header prefers."""
        encode, content_type = choose_encoder(accept)
        return encode(self), content_type

    def collect(self) -> Iterator[Metric]:
        runner, engine = self._runner, self._runner.engine
        yield gauge("num_requests_running", "Samples being generated.", engine.num_active)
        yield gauge("num_requests_waiting", "Samples without a slot yet.", engine.num_waiting)
        yield gauge("slots", "Samples that can be generated at once.", engine.num_slots)
        yield gauge("policy_version", "Version of the served weights; -1 before the first.", engine.policy_version)
        yield gauge("paused", "1 while generation is paused.", engine.paused)
        yield gauge("released", "1 while memory is released.", bool(engine.released))
        yield gauge("alive", "0 once the engine's thread has failed.", runner.error is None)
        yield counter("generation_tokens", "Generated tokens.", engine.num_generated_tokens)
        yield counter("prompt_tokens", "Computed prompt tokens; recomputed ones count again.", runner.num_prompt_tokens)
        yield counter("prompt_tokens_reused", "Prompt tokens with keys and values reused.", runner.num_reused_tokens)
        yield gauge("cached_tokens", "Tokens in the prefix cache.", engine.num_cached)
        yield gauge("kv_tokens", "Tokens that can have keys and values at one time.", engine.num_kv_tokens)
        yield gauge("kv_tokens_free", "Those that running samples leave.", engine.num_free_tokens)
        yield counter(
            "samples_put_back", "Running samples put back into the queue for lack of memory.", engine.num_put_back
        )
        yield counter("cached_tokens_evicted", "Tokens that the prefix cache evicted.", engine.num_evicted)
        yield counter("weight_updates", "Weight updates that took effect.", runner.num_weight_updates)
        yield counter("requests_aborted", "Requests that ended early.", runner.num_aborted)
        yield counter("busy_seconds", "Seconds of model compute for generation.", runner.meter.busy_s)
        yield from runner.latencies.collect()
        yield from runner.first_tokens.collect()
        labels = ["path", "status"]
        responses = CounterMetricFamily("penstock_http_responses", "Responses by route path and status.", labels=labels)
        for (path, status), count in list(self._responses.items()):
            responses.add_metric([path, str(status)], count)
        yield responses


def gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"penstock_{name}", text, value=value)


def counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"penstock_{name}", text, value=value)
