"""Episodes become traces in a collector that takes OTLP over HTTP, whatever the collector does."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from free_port import free_port
from hypothesis import given
from hypothesis import strategies as st
from otlp_collector import Span, collecting
from pydantic import ValidationError

from penstock.config import Config
from penstock.observe import episode_traces
from penstock.observe.episode_traces import EpisodeTraces, prompt_lengths
from penstock.samples import ROOT, CalledTool, Segment, ToolUse, Trajectory, Turn, VersionSpan, path_to
from penstock.types import EpisodeId, Task

TASK = Task(task_id="sums/7", tag="main", index=7)
CONFIG = Config.model_validate({"env": {"name": "guess_number"}, "model": {"path": "tiny"}})
BEGAN = 1.7e9
INTERNAL, CLIENT = 1, 3


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans are sent at once, and an attempt takes a second at most. No test hears the messages of another."""
    for each in (episode_traces.SENDER, episode_traces.QUEUE):
        monkeypatch.setattr(each, "filters", [])
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")


@contextmanager
def traces(address: str, config: Config = CONFIG) -> Iterator[EpisodeTraces]:
    opened = EpisodeTraces(config, address, run_id="first", worker="env-0")
    try:
        yield opened
    finally:
        opened.close()


def said(num_tokens: int, *versions: int, reason: str = "stop") -> Segment:
    spans = [VersionSpan(version, place, place + 1) for place, version in enumerate(versions)]
    tokens = list(range(num_tokens))
    return Segment(token_ids=tokens, logprobs=[-1.0] * num_tokens, spans=spans, finish_reason=reason)  # type: ignore[arg-type]


def played(*turns: Turn, member: int = 0, status: str = "completed", error: str | None = None) -> Trajectory:
    return Trajectory(
        episode=EpisodeId("main", 4, member, 1),
        task_id=TASK.task_id,
        turns=list(turns),
        reward=0.75,
        status=status,  # type: ignore[arg-type]
        stop_reason="terminated" if error is None else None,
        error=error,
        started_at=BEGAN,
        finished_at=BEGAN + 9,
    )


def tree(spans: Sequence[Span]) -> tuple[Span, list[Span]]:
    """Return the root and its children, in order of their start."""
    (root,) = [span for span in spans if not span.parent_id]
    children = [span for span in spans if span.parent_id]
    assert {span.trace_id for span in spans} == {root.trace_id}
    assert all(span.parent_id == root.span_id for span in children)
    return root, sorted(children, key=lambda span: (span.start, span.name))


CALLING = Turn(
    observation_ids=[1, 2, 3],
    segments=[said(2, 4, 4, reason="length"), said(3, 4, 5, 5)],
    started_at=BEGAN + 1,
    answered_at=BEGAN + 3,
    generating_s=1.5,
    tools=ToolUse(calls=[CalledTool("add"), CalledTool("find")], started_at=BEGAN + 3, finished_at=BEGAN + 4),
)
LAST = Turn(observation_ids=[9], segments=[said(1, 6)], started_at=BEGAN + 5, answered_at=BEGAN + 8, generating_s=3.0)


def test_an_episode_is_a_trace_of_its_generations_and_tool_calls() -> None:
    with collecting() as collector, traces(collector.url) as opened:
        opened.add(TASK, played(CALLING, LAST))
        root, children = tree(collector.wait_for(5))
    assert (root.name, root.kind, root.start, root.end) == ("invoke_agent guess_number", INTERNAL, BEGAN, BEGAN + 9)
    assert (
        root.attributes
        | {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": "penstock",
            "gen_ai.agent.name": "guess_number",
            "gen_ai.request.model": "tiny",
            "gen_ai.conversation.id": "first/main/4/0/1",
            "penstock.task_id": "sums/7",
            "penstock.group": 4,
            "penstock.member": 0,
            "penstock.attempt": 1,
            "penstock.status": "completed",
            "penstock.stop_reason": "terminated",
            "penstock.reward": 0.75,
            "penstock.policy_version.min": 4,
            "penstock.policy_version.max": 6,
        }
        == root.attributes
    )
    assert not any(span.is_error for span in [root, *children])
    assert root.resource["service.name"] == "penstock" and root.resource["service.instance.id"] == "first/env-0"
    first, add, find, last = children
    assert (first.name, first.kind, first.start, first.end) == ("chat tiny", CLIENT, BEGAN + 1, BEGAN + 3)
    assert first.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.temperature": 1.0,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 5,
        "penstock.generating_s": 1.5,
        "penstock.policy_version.min": 4,
        "penstock.policy_version.max": 5,
    }
    assert (last.attributes["gen_ai.usage.input_tokens"], last.attributes["gen_ai.usage.output_tokens"]) == (9, 1)
    assert [(span.name, span.kind, span.start, span.end) for span in (add, find)] == [
        ("execute_tool add", INTERNAL, BEGAN + 3, BEGAN + 4),
        ("execute_tool find", INTERNAL, BEGAN + 3, BEGAN + 4),
    ]
    assert add.attributes == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "add",
        "gen_ai.tool.type": "function",
    }


def test_calls_of_an_agent_end_when_it_sends_the_results() -> None:
    used = ToolUse(calls=[CalledTool("add", "call-1")], started_at=BEGAN + 3)
    asked = Turn(observation_ids=[1], segments=[said(1, 0)], started_at=BEGAN, answered_at=BEGAN + 3, tools=used)
    other = Turn(observation_ids=[2], segments=[said(1, 0)], started_at=BEGAN + 4, answered_at=BEGAN + 5, parent=ROOT)
    after = Turn(observation_ids=[3], segments=[said(1, 0)], started_at=BEGAN + 6, answered_at=BEGAN + 7, parent=0)
    with collecting() as collector, traces(collector.url) as opened:
        opened.add(TASK, played(asked, other, after))
        (call,) = collector.wait_for(1, name="execute_tool")
        assert (call.start, call.end, call.attributes["gen_ai.tool.call.id"]) == (BEGAN + 3, BEGAN + 6, "call-1")
        opened.add(TASK, played(asked, other))
        _, last = collector.wait_for(2, name="execute_tool")
        assert last.end == BEGAN + 9  # with the episode


def test_what_has_failed_is_marked() -> None:
    used = ToolUse(calls=[CalledTool("add")], started_at=BEGAN, finished_at=BEGAN + 1, error="ZeroDivisionError")
    broken = Turn(observation_ids=[1], segments=[said(1, 0)], started_at=BEGAN, answered_at=BEGAN, tools=used)
    unanswered = Turn(observation_ids=[1], segments=[], started_at=BEGAN + 2)
    error = "EpisodeFailure: Sums.step: ZeroDivisionError with --api-key sk-abcdefghijklmnopqrstuvw"
    with collecting() as collector, traces(collector.url) as opened:
        opened.add(TASK, played(broken, unanswered, status="failed", error=error))
        root, (chat, call, last) = tree(collector.wait_for(4))
    assert root.is_error and root.attributes["error.type"] == "EpisodeFailure"
    assert "Sums.step: ZeroDivisionError" in root.message and "sk-" not in root.message
    assert "penstock.reward" not in root.attributes and "penstock.stop_reason" not in root.attributes
    assert call.is_error and call.attributes["error.type"] == "ZeroDivisionError"
    assert not chat.is_error
    assert last.is_error and last.end == root.end and "gen_ai.response.finish_reasons" not in last.attributes


def test_an_aborted_episode_is_no_error() -> None:
    unanswered = Turn(observation_ids=[1], segments=[], started_at=BEGAN + 2)
    with collecting() as collector, traces(collector.url) as opened:
        opened.add(TASK, played(unanswered, status="aborted", error="the scheduler stopped the episode"))
        root, (chat,) = tree(collector.wait_for(2))
    assert root.attributes["penstock.status"] == "aborted" and chat.end == root.end
    assert not root.is_error and not chat.is_error


def test_a_turn_without_times_has_no_span() -> None:
    with collecting() as collector, traces(collector.url) as opened:
        opened.add(TASK, played(Turn(observation_ids=[1], segments=[said(1, 2)])))
        root, children = tree(collector.wait_for(1))
    assert children == [] and root.attributes["penstock.policy_version.max"] == 2


def test_a_policy_without_tokens_has_no_counts() -> None:
    config = Config.model_validate({"pipeline": "rollout", "policy": {"name": "random"}})
    with collecting() as collector, traces(collector.url, config) as opened:
        opened.add(TASK, played(LAST))
        _, (answer,) = tree(collector.wait_for(2))
    assert answer.name == "chat random" and not any("usage" in name for name in answer.attributes)


@given(parents=st.lists(st.integers(-1, 5), max_size=6), sizes=st.lists(st.integers(0, 9), min_size=7, max_size=7))
def test_the_prompt_of_a_turn_is_its_whole_context(parents: list[int], sizes: list[int]) -> None:
    """In any tree of turns."""
    places = [ROOT, *(min(parent, number) for number, parent in enumerate(parents))]
    turns = [
        Turn(observation_ids=[1] * size, segments=[said(1 + size % 3)], parent=parent)
        for size, parent in zip(sizes, places, strict=False)
    ]
    for index, length in enumerate(prompt_lengths(turns)):
        whole = [
            token for each in path_to(turns, index) for token in turns[each].observation_ids + turns[each].token_ids
        ]
        assert length == len(whole) - len(turns[index].token_ids)


@pytest.mark.parametrize("variable", ["OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"])
def test_the_standard_variables_hold(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Basic abc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://elsewhere:1")
    monkeypatch.setenv(variable, "mine" if variable == "OTEL_SERVICE_NAME" else "service.name=mine")
    with collecting() as collector, traces(f"{collector.url}/") as opened:
        opened.add(TASK, played(LAST))
        (span, *_) = collector.wait_for(2)
        assert collector.headers[0]["authorization"] == "Basic abc"
    assert span.resource["service.name"] == "mine"
    assert span.resource["telemetry.sdk.name"] == "opentelemetry"


def test_a_sampler_leaves_out_whole_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    with collecting() as collector:
        with traces(collector.url) as opened:
            for member in range(100):
                opened.add(TASK, played(LAST, member=member))
        roots = [span.trace_id for span in collector.spans if not span.parent_id]
        assert 0 < len(roots) < 100
        assert sorted(span.trace_id for span in collector.spans if span.parent_id) == sorted(roots)


def test_environments_keep_their_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    with collecting() as collector, traces(collector.url) as opened:
        random.seed(7)
        state = random.getstate()
        opened.add(TASK, played(CALLING, LAST))
        assert random.getstate() == state


def until(condition: Callable[[], object]) -> None:
    limit = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_collector_that_is_down_costs_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "64")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "32")
    port = free_port()
    with caplog.at_level(logging.INFO), traces(f"http://127.0.0.1:{port}") as opened:
        opened.add(TASK, played(LAST))
        until(lambda: opened._sender.is_failing)
        for _ in range(200):
            opened.add(TASK, played(CALLING, LAST))
        assert len(opened._queue._batch_processor._queue) <= 64
        with collecting(port) as collector:
            collector.wait_for(1)
            until(lambda: "takes spans again" in caplog.text)
    (failure,) = warnings(caplog)
    assert failure.startswith(f"observe.opentelemetry: http://127.0.0.1:{port} takes no spans (")


def test_a_queue_that_is_full_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    with collecting() as collector:
        collector.delayed.clear()
        with traces(collector.url) as opened:
            for _ in range(9):
                opened.add(TASK, played(CALLING, LAST))
            collector.delayed.set()
    assert warnings(caplog) == ["observe.opentelemetry: spans are lost: the queue is full (OTEL_BSP_MAX_QUEUE_SIZE)"]


@pytest.mark.parametrize("status", [404, 503])
def test_a_collector_that_refuses_spans_is_named(status: int, caplog: pytest.LogCaptureFixture) -> None:
    with collecting() as collector:
        collector.status = status
        with traces(collector.url) as opened:
            opened.add(TASK, played(LAST))
            until(lambda: warnings(caplog))
    (failure,) = warnings(caplog)
    assert collector.url in failure and "check the address" in failure


def test_a_collector_that_hangs_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(episode_traces, "END_S", 0.1)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")
    with collecting() as collector:
        collector.delayed.clear()
        with traces(collector.url) as opened:
            opened.add(TASK, played(LAST))
        assert warnings(caplog) == [f"observe.opentelemetry: the last spans are lost: {collector.url} takes too long"]


def test_the_last_spans_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    with collecting() as collector:
        with traces(collector.url) as opened:
            opened.add(TASK, played(CALLING, LAST))
            assert collector.spans == []
        assert len(collector.spans) == 5


@pytest.mark.parametrize(
    ("address", "fault"),
    [
        ("collector:4318", "is not the address of a collector, such as http://localhost:4318"),
        ("grpc://collector:4317", "is not the address of a collector"),
        ("http://", "is not the address of a collector"),
        ("", "is not the address of a collector"),
        ("http://collector:4318/v1/traces", "leave out /v1/traces"),
    ],
)
def test_an_address_that_is_none_is_refused(address: str, fault: str) -> None:
    with pytest.raises(ValidationError, match=fault):
        Config.model_validate({"observe": {"opentelemetry": address}})


@pytest.mark.parametrize(
    "address", ["http://collector:4318", "https://cloud.example.com/api/public/otel", "http://[::1]:4318/"]
)
def test_an_address_may_have_a_path(address: str) -> None:
    assert Config.model_validate({"observe": {"opentelemetry": address}}).observe.opentelemetry == address
