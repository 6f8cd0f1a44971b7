"""What Prometheus reads. Everything is kept by the runner and the application anyway, and is read when it is asked for:
a request pays for two additions. A registry of its own, so that two servers in a process do not mix.

As in vLLM, a request with n samples counts n times among those that run or wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from penstock.rollout.durations import Durations
from penstock.rollout.runner import EngineRunner


class ServerMetrics(Collector):
    """Of one server. `responses`: how many by path and status."""

    def __init__(self, runner: EngineRunner, responses: Mapping[tuple[str, int], int]) -> None:
        self._runner, self._responses = runner, responses
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self, accept: str) -> tuple[bytes, str]:
        """The exposition and its content type, of what `accept` prefers."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        runner, engine = self._runner, self._runner.engine
        yield gauge("num_requests_running", "Samples being generated.", engine.num_active)
        yield gauge("num_requests_waiting", "Samples without a slot yet.", engine.num_waiting)
        yield gauge("slots", "Samples that can be generated at once.", engine.num_slots)
        yield gauge("policy_version", "Of the weights being served; -1 before the first.", runner.policy_version)
        yield gauge("paused", "1 while generation is paused.", engine.paused)
        yield gauge("released", "1 while the generation memory is released.", engine.released)
        yield gauge("alive", "0 once the engine's thread has failed.", runner.error is None)
        yield counter("generation_tokens", "Tokens generated.", runner.num_generated_tokens)
        yield counter("prompt_tokens", "Prompt tokens computed; recomputed ones count again.", runner.num_prompt_tokens)
        yield counter("weight_updates", "Weights put in place of others.", runner.num_weight_updates)
        yield counter("requests_aborted", "Requests ended before their time.", runner.num_aborted)
        yield counter("busy_seconds", "Seconds of model compute for generation.", runner.busy_s)
        yield histogram("e2e_request_latency_seconds", "From a request to its whole answer.", runner.latencies)
        yield histogram("time_to_first_token_seconds", "From a request to its first token.", runner.first_tokens)
        responses = CounterMetricFamily(
            "penstock_http_responses", "Answers, by the route's path and status.", labels=["path", "status"]
        )
        for (path, status), count in list(self._responses.items()):
            responses.add_metric([path, str(status)], count)
        yield responses


def gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"penstock_{name}", text, value=value)


def counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"penstock_{name}", text, value=value)


def histogram(name: str, text: str, durations: Durations) -> Metric:
    return HistogramMetricFamily(f"penstock_{name}", text, buckets=durations.buckets(), sum_value=durations.sum_s)
