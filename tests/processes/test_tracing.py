"""An environment worker opens its traces, or says at once why it cannot."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from penstock.config import Config, ConfigError
from penstock.processes.tracing import tracing
from penstock.supervisor.child import Child

TRACED = Config.model_validate({"observe": {"opentelemetry": "http://127.0.0.1:9"}})


@pytest.fixture
def child(tmp_path: Path) -> Child:
    return Child(name="env-0", run_dir=tmp_path, runtime_dir=tmp_path, run_id="first", nonce="nonce")


async def test_a_run_without_traces_needs_no_package(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "penstock.observe.episode_traces", None)
    async with tracing(Config(), child) as trace:
        assert trace is None


async def test_a_machine_without_the_package_is_told(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "penstock.observe.episode_traces", None)
    with pytest.raises(ConfigError, match=r"observe.opentelemetry: .*: pip install 'penstock\[otel\]' on this machine"):
        async with tracing(TRACED, child):
            raise AssertionError("it opened")


async def test_an_episode_that_cannot_be_traced_ends_nothing(
    child: Child, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*given: object) -> None:
        raise KeyError("a field")

    monkeypatch.setattr("penstock.observe.episode_traces.EpisodeTraces.add", fail)
    async with tracing(TRACED, child) as trace:
        assert trace is not None
        for _ in range(2):
            trace(None, None)  # type: ignore[arg-type]
    assert len([record for record in caplog.records if "traces no more" in record.message]) == 1


async def test_a_variable_that_the_sdk_refuses_is_told(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    with pytest.raises(
        ConfigError, match=r"observe.opentelemetry: max_export_batch_size .*: check the variables OTEL_\*"
    ):
        async with tracing(TRACED, child):
            raise AssertionError("it opened")
