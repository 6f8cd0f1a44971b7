"""Traces of episodes for OpenTelemetry: one trace per episode, with a span for each generation and each tool call.

The spans are made when an episode has ended, from the times in its trajectory. A thread of the SDK sends them, from a
queue of bounded length. A collector that is slow, down or absent loses spans and costs one warning; no episode waits.
Names are those of OpenTelemetry's conventions for generative AI. Names that these do not have begin with `penstock.`.
Spans have no texts of prompts, answers and tool calls.

Only processes of runs with `observe.opentelemetry` import this module: it needs the extra `otel`.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context

from penstock.config import Config
from penstock.redaction import redacted_text
from penstock.samples import ROOT, ToolUse, Trajectory, Turn, parent_of
from penstock.types import NO_VERSION, Task

logger = logging.getLogger(__name__)

TRACES_PATH = "/v1/traces"
PROVIDER = "penstock"
END_S = 5.0
"""Time limit for the last spans to be sent when a worker ends."""
GIVE_UP_S = 1.0
"""Time limit for the thread that sends spans to give up afterwards."""
MAX_ERROR_CHARS = 500
"""Most characters of an episode's error in its span."""
SENDER = logging.getLogger(trace_exporter.__name__)
"""Logger of the library that sends spans."""
QUEUE = logging.getLogger("opentelemetry.sdk._shared_internal")
"""Logger of the queue, which warns of each span for which it has no room."""

Attributes = Mapping[str, str | int | float | bool | Sequence[str] | None]
"""Attributes of a span by name; those that are None are left out."""


class EpisodeTraces:
    """The traces of one environment worker."""

    def __init__(self, config: Config, address: str, *, run_id: str, worker: str) -> None:
        """`address`: the collector's base URL. Raises `ValueError` if the SDK refuses values of its variables."""
        self._config, self._run_id = config, run_id
        own = {"service.name": "penstock", "service.instance.id": f"{run_id}/{worker}", "penstock.run": run_id}
        resource = Resource.create().merge(Resource(own)).merge(OTELResourceDetector().detect())
        provider = TracerProvider(resource=resource, shutdown_on_exit=False, id_generator=_Ids())
        self._sender = _Sender(address)
        self._queue = BatchSpanProcessor(self._sender)
        provider.add_span_processor(self._queue)
        self._tracer = provider.get_tracer("penstock")

    def add(self, task: Task, trajectory: Trajectory) -> None:
        """Queue the spans of an ended episode. A trajectory without times of its turns has the span of the episode
        alone."""
        environment = self._config.environments.of_task(task).name
        root = self._span(
            f"invoke_agent {environment}",
            Context(),
            trajectory.started_at,
            {
                "gen_ai.operation.name": "invoke_agent",
                "gen_ai.provider.name": PROVIDER,
                "gen_ai.agent.name": environment,
                "gen_ai.request.model": self._config.model_name,
                "gen_ai.conversation.id": f"{self._run_id}/{trajectory.episode}",
                **_about(task, trajectory),
            },
        )
        if root.is_recording():
            context, turns = set_span_in_context(root, Context()), trajectory.turns
            continued_at = _first_continued(turns)
            for index, (turn, prompt_tokens) in enumerate(zip(turns, prompt_lengths(turns), strict=True)):
                if turn.started_at:
                    self._add_generation(context, trajectory, turn, prompt_tokens)
                if turn.tools is not None:
                    end = turn.tools.finished_at or continued_at.get(index, trajectory.finished_at)
                    self._add_tools(context, turn.tools, end)
        if trajectory.status == "failed":
            _fail(root, _type_of(trajectory.error), trajectory.error)
        root.end(_nanoseconds(trajectory.finished_at))

    def close(self) -> None:
        """Send what is queued, for at most `END_S`; not at all while the collector takes no spans."""
        ending = threading.Thread(target=self._queue.shutdown, name="last-spans", daemon=True)
        ending.start()
        ending.join(0.0 if self._sender.is_failing else END_S)
        if ending.is_alive():
            self._sender.shutdown()  # ends the wait for another attempt
            ending.join(GIVE_UP_S)
            if not self._sender.has_warned:
                logger.warning(
                    "observe.opentelemetry: the last spans are lost: %s takes too long", self._sender.address
                )

    def _add_generation(self, context: Context, trajectory: Trajectory, turn: Turn, prompt_tokens: int) -> None:
        """Add the span of an answer, from the request to its last token, or to the end of the episode."""
        model, versions = self._config.model_name, [each.policy_version for s in turn.segments for each in s.spans]
        counts = {"gen_ai.usage.input_tokens": prompt_tokens, "gen_ai.usage.output_tokens": len(turn.token_ids)}
        span = self._span(
            f"chat {model}",
            context,
            turn.started_at,
            {
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": PROVIDER,
                "gen_ai.request.model": model,
                "gen_ai.request.temperature": trajectory.temperature,
                "gen_ai.response.finish_reasons": [turn.segments[-1].finish_reason] if turn.segments else None,
                "penstock.generating_s": turn.generating_s if turn.answered_at else None,
                **(counts if self._config.policy.has_tokens else {}),
                **_versions(versions),
            },
            kind=SpanKind.CLIENT,
        )
        if trajectory.status == "failed" and not turn.answered_at:
            _fail(span, _type_of(trajectory.error), "the episode failed before the answer was complete")
        span.end(_nanoseconds(turn.answered_at or trajectory.finished_at))

    def _add_tools(self, context: Context, use: ToolUse, end: float) -> None:
        for call in use.calls:
            span = self._span(
                f"execute_tool {call.name}",
                context,
                use.started_at,
                {
                    "gen_ai.operation.name": "execute_tool",
                    "gen_ai.tool.name": call.name,
                    "gen_ai.tool.type": "function",
                    "gen_ai.tool.call.id": call.call_id or None,
                },
            )
            if use.error is not None:
                _fail(span, use.error)
            span.end(_nanoseconds(end))

    def _span(
        self, name: str, context: Context, start: float, attributes: Attributes, *, kind: SpanKind = SpanKind.INTERNAL
    ) -> Span:
        given = {key: value for key, value in attributes.items() if value is not None}
        return self._tracer.start_span(name, context, kind, given, start_time=_nanoseconds(start))


class _Sender(SpanExporter):
    """Sends spans to a collector. It logs the first failure, and that it works again, in place of the messages of the
    library. There is one in a process."""

    def __init__(self, address: str) -> None:
        self.address, self._library = address, trace_exporter.OTLPSpanExporter(address.rstrip("/") + TRACES_PATH)
        self._reason = ""
        self._has_overflowed = False
        self.has_warned = False
        """Whether it has logged that spans could not be sent."""
        self.is_failing = False
        """Whether the latest spans could not be sent."""
        SENDER.addFilter(self._hear)
        QUEUE.addFilter(self._hear_queue)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._reason = ""
        try:
            result = self._library.export(spans)
        except Exception as error:  # a library of others, and spans are not worth a run
            self._reason, result = repr(error), SpanExportResult.FAILURE
        failed = result is not SpanExportResult.SUCCESS
        if failed and not self.has_warned:
            self.has_warned = True
            logger.warning(
                "observe.opentelemetry: %s takes no spans (%s). The run goes on without them: check the address, the "
                "collector, and the variables OTEL_EXPORTER_OTLP_*",
                self.address,
                self._reason,
            )
        elif self.is_failing and not failed:
            logger.info("observe.opentelemetry: %s takes spans again", self.address)
        self.is_failing = failed
        return result

    def shutdown(self) -> None:
        self._library.shutdown()  # type: ignore[no-untyped-call]

    def _hear(self, record: logging.LogRecord) -> bool:
        """Keep the library's first message about some spans as the reason of a failure, and log none."""
        self._reason = self._reason or record.getMessage()
        return False

    def _hear_queue(self, record: logging.LogRecord) -> bool:
        """Log once that the queue is full, unless the collector is the cause."""
        if not record.getMessage().startswith("Queue full"):
            return True
        if not (self.has_warned or self._has_overflowed):
            self._has_overflowed = True
            logger.warning("observe.opentelemetry: spans are lost: the queue is full (OTEL_BSP_MAX_QUEUE_SIZE)")
        return False


class _Ids(IdGenerator):
    """Random ids that leave the generator of the module `random` alone: environments may have seeded it."""

    def generate_span_id(self) -> int:
        return 1 + secrets.randbelow(2**64 - 1)

    def generate_trace_id(self) -> int:
        return 1 + secrets.randbelow(2**128 - 1)

    def is_trace_id_random(self) -> bool:
        return True


def _about(task: Task, trajectory: Trajectory) -> Attributes:
    """Return what the conventions have no names for."""
    episode, summary = trajectory.episode, trajectory.summary()
    is_whole = trajectory.status not in ("failed", "aborted")
    return {
        "penstock.task_id": trajectory.task_id,
        "penstock.tag": episode.tag,
        "penstock.purpose": task.purpose,
        "penstock.group": episode.group,
        "penstock.member": episode.episode,
        "penstock.attempt": episode.attempt,
        "penstock.status": trajectory.status,
        "penstock.stop_reason": trajectory.stop_reason,
        "penstock.reward": trajectory.reward if is_whole else None,
        "penstock.turns": len(trajectory.turns),
        "penstock.env_s": trajectory.env_s,
        "penstock.reward_s": trajectory.reward_s,
        **_versions([summary.version_min, summary.version_max]),
    }


def _versions(versions: Sequence[int]) -> Attributes:
    known = [version for version in versions if version != NO_VERSION]
    if not known:
        return {}
    return {"penstock.policy_version.min": min(known), "penstock.policy_version.max": max(known)}


def prompt_lengths(turns: Sequence[Turn]) -> list[int]:
    """Return the number of tokens before the answer of each turn, from the beginning of its context."""
    prompts, contexts = list[int](), list[int]()
    for index, turn in enumerate(turns):
        parent = parent_of(turns, index)
        prompts.append((contexts[parent] if parent != ROOT else 0) + len(turn.observation_ids))
        contexts.append(prompts[-1] + len(turn.token_ids))
    return prompts


def _first_continued(turns: Sequence[Turn]) -> dict[int, float]:
    """Return when each turn was continued for the first time. An agent then sent the results of the turn's calls."""
    found: dict[int, float] = {}
    for index, turn in enumerate(turns):
        parent = parent_of(turns, index)
        found[parent] = min(found.get(parent, turn.started_at), turn.started_at)
    return found


def _fail(span: Span, kind: str, message: str | None = None) -> None:
    """Mark a span as failed. `kind`: the type of the error."""
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, None if message is None else redacted_text(message)[:MAX_ERROR_CHARS]))


def _type_of(error: str | None) -> str:
    """Return the type with which the error of an episode begins, or else the conventions' word for others."""
    kind = (error or "").partition(":")[0]
    return kind if kind.isidentifier() else "_OTHER"


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
