"""Every wait in the source has a deadline from `penstock.deadline`, or is listed here with its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "penstock"
MODULES = [path for path in sorted(SOURCE.rglob("*.py")) if path.name != "deadline.py"]

COVERS = {"deadline", "warn_if_stalled", "watch_swap", "holding", "spending", "_warn_if_group_stalls", "_watch_disk"}
"""Inside one of these a wait is bounded, or at least reported. `spending` is a deadline that leases pay for."""

ENDLESS_METHODS = {
    "acquire",
    "get",
    "join",
    "put",
    "recv",
    "recv_multipart",
    "read",
    "receive",
    "run_in_executor",
    "serve",
    "shield",
    "stream",
    "to_thread",
    "wait",
    "wrap_future",
}
"""Awaited, these return when somebody else has done something; but with a timeout, `asyncio.wait` is a pause."""

ONLY_IN_DEADLINE = {"timeout", "timeout_at", "wait_for"}
"""Of asyncio: what ends a wait without a word."""

LIFE = "it is the process's whole life"
COROUTINE = "what it is handed is a coroutine, whose own waits are held to this rule"
TASK = "the task's own waits are held to this rule"

LEASE = "the lease of the episode bounds its caller"
BOUNDED = "it has an end of its own"
WAKEUP = "the scheduler's own helper: one timer watches over all its waits, and reports them"

RECORDS = "it reads the pool's records, and only lets others run in between"

EXCEPTIONS = {
    "cli/env_try.py:_show_later": LEASE,
    "cluster/node_agent.py:_live": LIFE,
    "cluster/ray_launcher.py:wait": "a process may live as long as it likes",
    "compat/gateway.py:_answer": TASK,
    "compat/sglang.py:_add_bucket": COROUTINE,
    "control/sockets.py:listen": "silence of the other side is what heartbeats are for",
    "dashboard/live.py:stream": "a viewer may watch as long as it likes; a comment shows it that the server lives",
    "dashboard/serving.py:serve": LIFE,
    "dashboard/web_app.py:confirmation": "a body that does not come: its client is told",
    "dashboard/web_app.py:listen": "`penstock stop` has an end of its own",
    "envs/agents.py:paused": COROUTINE,
    "envs/worker_calls.py:awaited": COROUTINE,
    "envs/worker_pool.py:_answer_to": "callers give up in their own time, which ends the process",
    "envs/calls.py:in_thread": LEASE,
    "loop.py:train": TASK,
    "observe/recorder.py:restore": RECORDS,
    "processes/controller.py:save_last": TASK,
    "processes/controller.py:serve": LIFE,
    "processes/controller.py:work": TASK,
    "processes/env_worker.py:run": LIFE,
    "processes/bus_client.py:join": "a request to the controller, which is one",
    "processes/rank.py:serve": LIFE,
    "processes/trainer.py:serve": LIFE,
    "processes/weights_fetcher.py:_ask": "its caller has a deadline for each version",
    "rollout/generation.py:follow": TASK,
    "rollout/generator.py:all_of": COROUTINE,
    "rollout/http.py:unless_disconnected": COROUTINE,
    "rollout/runner.py:stop": BOUNDED,
    "runtime/http_server.py:listening": BOUNDED,
    "scheduler/scheduler.py:wait_until_ended": WAKEUP,
    "scheduler/evaluations.py:evaluate_tasks": WAKEUP,
    "scheduler/scheduler.py:next_assignments": WAKEUP,
    "scheduler/scheduler.py:next_batch": WAKEUP,
    "scheduler/scheduler.py:next_question": WAKEUP,
    "rollout/app.py:discard_rest": "a refused body: no process waits for its end",
    "scheduler/scheduler.py:wait_for_room": WAKEUP,
    "scheduler/wakeup.py:_wait_for": WAKEUP,
    "store/dumps/writer.py:restore": RECORDS,
    "store/dumps/writer.py:run": "its shards come from the loops, and the loops are watched",
    "supervisor/child.py:_living": LIFE,
    "supervisor/process_monitor.py:_live": "a process may live as long as it likes",
    "supervisor/process_monitor.py:_watch_health": "a process may live as long as it likes",
    "supervisor/process_monitor.py:_watch": "a process may live as long as it likes",
    "supervisor/process_monitor.py:keep": "the pause before a restart",
    "supervisor/launcher.py:__aexit__": BOUNDED,
    "supervisor/launcher.py:spawn": BOUNDED,
    "supervisor/launcher.py:sweep": BOUNDED,
    "supervisor/launcher.py:wait": "a process may live as long as it likes",
    "supervisor/supervisor.py:_live": "the whole life of the run, and of its start",
    "supervisor/supervisor.py:_rotate_logs": BOUNDED,
    "supervisor/supervisor.py:_start": "the probe for readiness has a deadline",
}
"""`module:function` of naked waits, and why they are."""


def naked_waits(path: Path) -> dict[str, list[str]]:
    """By `module:function`."""
    found: dict[str, list[str]] = {}
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.AsyncFunctionDef):
            place = f"{path.relative_to(SOURCE)}:{function.name}"
            for node in (wait for statement in function.body for wait in _naked(statement)):
                found.setdefault(place, []).append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def _naked(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return
    if isinstance(node, ast.With | ast.AsyncWith) and any(_called(item.context_expr) in COVERS for item in node.items):
        return
    if isinstance(node, ast.Await) and _is_endless(node.value):
        yield node
    if isinstance(node, ast.AsyncWith):
        for item in node.items:
            if not isinstance(item.context_expr, ast.Call):
                yield item.context_expr
    if isinstance(node, ast.AsyncFor) and _is_endless(node.iter):
        yield node.iter
    if isinstance(node, ast.Call) and _called(node) in ONLY_IN_DEADLINE and _is_asyncio(node.func):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _naked(child)


def _is_endless(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        pause = _called(value) == "wait" and any(keyword.arg == "timeout" for keyword in value.keywords)
        return _called(value) in ENDLESS_METHODS and isinstance(value.func, ast.Attribute) and not pause
    return isinstance(value, ast.Name | ast.Attribute | ast.Subscript)


def _called(call: ast.expr) -> str | None:
    if not isinstance(call, ast.Call):
        return None
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else None


def _is_asyncio(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and ast.unparse(function.value) == "asyncio"


def test_no_wait_is_naked() -> None:
    found = {place: waits for path in MODULES for place, waits in naked_waits(path).items()}
    offenders = [
        f"{place} waits outside `deadline` and `patient`: {'; '.join(waits)}"
        for place, waits in found.items()
        if place not in EXCEPTIONS
    ]
    assert not offenders, "\n".join(offenders)
    assert not EXCEPTIONS.keys() - found.keys(), "an exception without a naked wait"


@pytest.mark.parametrize(
    ("wait", "is_naked"),
    [
        ("await queue.get()", True),
        ("await event.wait()", True),
        ("await self.future", True),
        ("await asyncio.wait([task])", True),
        ("await asyncio.wait_for(work(), 1.0)", True),
        ("await asyncio.to_thread(work)", True),
        ("async with self._lock: pass", True),
        ("async with asyncio.timeout(1.0): await work()", True),
        ("async with deadline(1.0, waiter='a', resource='b', holder='c'): await queue.get()", False),
        ("with warn_if_stalled(1.0, waiter='a', resource='b', holder='c'): await event.wait()", False),
        ("async with holding(self._lock, 1.0, waiter='a', resource='b', holder='c'): pass", False),
        ("await asyncio.wait([task], timeout=1.0)", False),
        ("await asyncio.sleep(1.0)", False),
        ("await self.collect()", False),
    ],
)
def test_what_is_naked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: str, is_naked: bool) -> None:
    monkeypatch.setattr("test_waits.SOURCE", tmp_path)
    path = tmp_path / "module.py"
    path.write_text(f"async def function():\n    {wait}\n")
    assert naked_waits(path).keys() == ({"module.py:function"} if is_naked else set())
