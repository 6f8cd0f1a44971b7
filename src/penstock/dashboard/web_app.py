"""The HTTP server of the dashboard: routes, errors, and the headers that keep foreign text from acting.

It only reads run directories. Each answer that takes time is computed in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.dashboard import exports
from penstock.dashboard.access import Access, NoAccess, cookie_header
from penstock.dashboard.decision_pages import Filter
from penstock.dashboard.groups import MAX_ROWS, BadQuery, UnknownGroup
from penstock.dashboard.live import Hubs, encoded, in_thread
from penstock.dashboard.log_pages import log_page
from penstock.dashboard.opened_run import MOST_SERIES, OpenedRun, OpenedRuns, partly
from penstock.dashboard.predictions import measured, prediction_of
from penstock.dashboard.renderers import RendererError, Renderers, rendered
from penstock.dashboard.served_runs import ServedRuns
from penstock.dashboard.trajectory_pages import UnknownEpisode
from penstock.supervisor.known_runs import LOST, UNKNOWN, UNREADABLE, has_ended, status_of
from penstock.supervisor.run_journal import read_state
from penstock.supervisor.states import RunState

logger = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
CONTROL = frozenset(("POST", "PUT", "PATCH", "DELETE"))
MOST_POINTS = 20_000
MOST_DECISIONS = 1000
MOST_LOG_LINES = 5000
MAX_BODY_BYTES = 4096
BODY_S = 10.0
"""Time limit for the body of a request to arrive."""
STOP_S, STOP_LOOK_S = 5.0, 0.1
"""Time for `penstock stop` to refuse, and seconds between two looks. If it still runs then, the run is stopping."""

Answer = dict[str, Any]


class JsonResponse(Response):
    """An answer in JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encoded(content)


def error(message: str, status: int) -> Response:
    """Return an error in the form of all errors."""
    return JsonResponse({"error": {"message": message}}, status)


class Dashboard:
    """What the routes share."""

    def __init__(self, runs: ServedRuns) -> None:
        self.runs = runs
        self.opened = OpenedRuns()
        self.hubs = Hubs(self.opened)
        self.renderers = Renderers()
        self._stopping: set[asyncio.Task[None]] = set()

    def run_dir(self, request: Request) -> Path:
        """Return the directory of the run that a request names. Raises 404."""
        run_id = request.path_params["run"]
        run_dir = self.runs.find(run_id)
        if run_dir is None:
            raise HTTPException(404, f"there is no run {run_id}")
        return run_dir

    def open(self, request: Request) -> OpenedRun:
        """Return the readers of the run that a request names. Raises 404."""
        return self.opened.open(self.run_dir(request))

    def routes(self) -> list[BaseRoute]:
        """Return all routes."""
        of_runs: dict[str, Callable[[Request], Response]] = {
            "/status": self.status,
            "/settings": self.settings,
            "/names": self.names,
            "/series": self.series,
            "/evaluations": self.evaluations,
            "/prediction": self.prediction,
            "/timeline": self.timeline,
            "/decisions": self.decisions,
            "/adaptations": self.adaptations,
            "/logs/{process}": self.logs,
            "/groups": self.groups,
            "/groups/{group}": self.group,
            "/groups/{group}/episodes/{episode}": self.episode,
            "/export/metrics.csv": self.metrics_csv,
            "/export/metrics.parquet": self.metrics_parquet,
            "/export/trace.json": self.trace_json,
        }
        return [
            Route("/api/runs", self._first(self.all_runs)),
            *(Route(f"/api/runs/{{run}}{path}", self._first(endpoint)) for path, endpoint in of_runs.items()),
            Route("/api/runs/{run}/live", self.live),
            Route("/api/runs/{run}/stop", self.stop, methods=["POST"]),
            Route("/renderers/{name}", self.renderer),
            Route("/api/{rest:path}", not_found),
            Mount("/", StaticFiles(directory=STATIC, html=True)),
        ]

    def _first(self, endpoint: Callable[[Request], Response]) -> Callable[[Request], Response]:
        """Return an endpoint during which the background pauses."""

        def answer(request: Request) -> Response:
            with self.opened.requests:
                return endpoint(request)

        return answer

    def all_runs(self, request: Request) -> Response:
        """Answer the list of runs."""
        return JsonResponse({"runs": self.runs.rows(), "may_control": request.scope["may_control"]})

    def status(self, request: Request) -> Response:
        """Answer the status of a run."""
        return JsonResponse(self.open(request).status())

    def settings(self, request: Request) -> Response:
        """Answer the settings of a run."""
        return JsonResponse({"settings": self.open(request).settings()})

    def names(self, request: Request) -> Response:
        """Answer the names of the series."""
        run = self.open(request)
        return JsonResponse({"names": run.names(), **partly(run.metrics.indexed)})

    def series(self, request: Request) -> Response:
        """Answer series in buckets."""
        run, given = self.open(request), request.query_params
        known = set(run.names())
        names: list[str] = []
        for value in given.getlist("names"):
            names += [value] if value in known else [name for name in value.split(",") if name]
        names = list(dict.fromkeys(names))
        if not names or len(names) > MOST_SERIES:
            raise HTTPException(400, f"names: give 1 to {MOST_SERIES} names, as /names lists them")
        unknown = [name for name in names if name not in known] if known and run.metrics.indexed >= 1 else []
        if len(unknown) == len(names):
            raise HTTPException(400, f"names: this run has no series {', '.join(unknown)[:200]}: /names lists all")
        x = given.get("x", "step")
        if x not in known | {"step", "time"}:
            raise HTTPException(400, f"x is {x!r}: give step, time or the name of a series")
        points = whole(given.get("points"), "points", 800, most=MOST_POINTS)
        begin, end = real(given.get("from"), "from"), real(given.get("to"), "to")
        found = run.series(names, x=x, points=points, begin=begin, end=end)
        return JsonResponse(
            {
                "x": found.x.tolist(),
                "times": found.times.tolist(),
                "series": {
                    name: {"mean": curve.mean.tolist(), "min": curve.min.tolist(), "max": curve.max.tolist()}
                    for name, curve in found.curves.items()
                },
                "num_steps": found.num_steps,
                "unknown": unknown,
                **partly(run.metrics.indexed),
            }
        )

    def evaluations(self, request: Request) -> Response:
        """Answer the evaluations."""
        return JsonResponse({"evaluations": self.open(request).events.evaluations()})

    def adaptations(self, request: Request) -> Response:
        """Answer the changes of settings that controllers made."""
        return JsonResponse({"adaptations": self.open(request).events.adaptations()})

    def prediction(self, request: Request) -> Response:
        """Answer what a simulation predicted of the run, and what the run has measured."""
        run = self.open(request)
        run.catch_up(run.metrics)
        found = {"prediction": prediction_of(run.run_dir), "measured": measured(run.metrics)}
        return JsonResponse(found | partly(run.metrics.indexed))

    def timeline(self, request: Request) -> Response:
        """Answer the spans of a window of time."""
        run, given = self.open(request), request.query_params
        begin, end = real(given.get("from"), "from"), real(given.get("to"), "to")
        if begin is not None and end is not None and begin > end:
            raise HTTPException(400, f"from ({begin}) is after to ({end})")
        width = whole(given.get("width"), "width", 1200, most=10_000)
        return JsonResponse(run.window(begin, end, width=width))

    def decisions(self, request: Request) -> Response:
        """Answer a page of decisions."""
        run, given = self.open(request), request.query_params
        group = None if not given.get("group") else whole(given["group"], "group", 0, most=1 << 62)
        wanted = Filter(decider=given.get("decider") or None, group=group, text=given.get("text") or None)
        before = None if not given.get("before") else whole(given["before"], "before", 0, most=1 << 62)
        limit = whole(given.get("limit"), "limit", 100, most=MOST_DECISIONS)
        found = run.decisions(wanted, before=before, limit=limit)
        is_complete = run.timeline.indexed >= 1
        deciders = {name: count if is_complete else None for name, count in run.timeline.deciders.items()}
        return JsonResponse({"decisions": found.decisions, "before": found.before, "deciders": deciders})

    def logs(self, request: Request) -> Response:
        """Answer a page of a log."""
        given, run_dir, process = request.query_params, self.run_dir(request), request.path_params["process"]
        before = None if not given.get("before") else whole(given["before"], "before", 0, most=1 << 62)
        num_lines = whole(given.get("lines"), "lines", 200, most=MOST_LOG_LINES)
        try:
            return JsonResponse(log_page(run_dir, process, before=before, num_lines=num_lines))
        except FileNotFoundError:
            raise HTTPException(404, f"run {run_dir.name} has no log of {process}") from None

    def groups(self, request: Request) -> Response:
        """Answer a page of the groups."""
        run, given = self.open(request), request.query_params
        offset = whole(given.get("offset"), "offset", 0, most=1 << 40)
        limit = whole(given.get("limit"), "limit", 50, most=MAX_ROWS)
        chosen = {name: given.get(name) or "" for name in ("text", "status", "tag")}
        try:
            page = run.groups.page(sort=given.get("sort") or "newest", offset=offset, limit=limit, **chosen)
        except BadQuery as problem:
            raise HTTPException(400, str(problem)) from None
        return JsonResponse(page)

    def group(self, request: Request) -> Response:
        """Answer a group: its row, its members and the latest decisions about it, the oldest first. `decisions_before`
        asks `/decisions` for those before them; null if these are all."""
        run, number = self.open(request), number_in_path(request, "group")
        try:
            found = run.groups.group(number)
        except UnknownGroup as problem:
            raise HTTPException(404, str(problem)) from None
        page = run.decisions(Filter(group=number), before=None, limit=MOST_DECISIONS)
        return JsonResponse({**found, "decisions": page.decisions[::-1], "decisions_before": page.before})

    def episode(self, request: Request) -> Response:
        """Answer a trajectory. With `render=1`, a Python renderer adds its text."""
        run = self.open(request)
        group, episode = (number_in_path(request, name) for name in ("group", "episode"))
        try:
            found = run.trajectories.episode(group, episode)
        except (UnknownGroup, UnknownEpisode) as problem:
            raise HTTPException(404, str(problem)) from None
        path, text = self.renderers.find(found["row"]["tag"]), None
        if path is not None and path.suffix == ".py" and request.query_params.get("render"):
            try:
                text = rendered(path, found)
            except RendererError as problem:
                raise HTTPException(500, str(problem)) from None
        return JsonResponse({**found, "renderer": path.name if path is not None else None, "rendered": text})

    def renderer(self, request: Request) -> Response:
        """Send the JavaScript of a renderer."""
        path = self.renderers.script(request.path_params["name"])
        if path is None:
            raise HTTPException(404, "there is no such renderer")
        return FileResponse(path, media_type="text/javascript")

    async def live(self, request: Request) -> Response:
        """Stream what is new in a run."""
        run_dir = await in_thread(self.run_dir, request)
        return StreamingResponse(self.hubs.stream(run_dir), media_type="text/event-stream")

    def metrics_csv(self, request: Request) -> Response:
        """Send the metrics as CSV."""
        run = self.open(request)
        run.finish_reading(run.metrics)
        return StreamingResponse(exports.metrics_csv(run), media_type="text/csv", headers=saved_as(run, "metrics.csv"))

    def metrics_parquet(self, request: Request) -> Response:
        """Send the metrics as Parquet."""
        run = self.open(request)
        run.finish_reading(run.metrics)
        headers, kind = saved_as(run, "metrics.parquet"), "application/vnd.apache.parquet"
        return StreamingResponse(exports.metrics_parquet(run), media_type=kind, headers=headers)

    def trace_json(self, request: Request) -> Response:
        """Send the timeline as trace events."""
        run = self.open(request)
        run.finish_reading(run.timeline)
        marks = run.events.marks(-math.inf, math.inf)
        headers = saved_as(run, "trace.json")
        return StreamingResponse(exports.trace_events(run, marks), media_type="application/json", headers=headers)

    async def stop(self, request: Request) -> Response:
        """Stop a run as `penstock stop` does."""
        run_dir = await in_thread(self.run_dir, request)
        confirmed = await confirmation(request)
        if confirmed != run_dir.name:
            raise HTTPException(
                400, f"confirm the stop of run {run_dir.name} by its id: {{'confirm': '{run_dir.name}'}}"
            )
        if (status := await in_thread(ended_as, run_dir)) is not None:
            return error(f"run {run_dir.name} has ended already: {status}", 409)
        refused = await stop_run(run_dir, self._stopping)
        return error(refused, 409) if refused else JsonResponse({"stopping": run_dir.name}, 202)


async def confirmation(request: Request) -> str:
    """Return the run that the body of a request confirms. Raises 400, 408 and 413."""
    body = b""
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise HTTPException(413, f"the body has more than {MAX_BODY_BYTES} bytes")
    except TimeoutError:
        raise HTTPException(408, f"the body did not arrive within {BODY_S:g} s") from None
    with suppress(msgspec.DecodeError):
        given = msgspec.json.decode(body)
        if isinstance(given, dict) and isinstance(given.get("confirm"), str):
            return str(given["confirm"])
    raise HTTPException(400, "the body must be {'confirm': RUN}")


async def stop_run(run_dir: Path, running: set[asyncio.Task[None]]) -> str | None:
    """Start `penstock stop` for a run. Return why it refuses; None if the run is stopping. The command ends with the
    run, and a dashboard beside a training soon after, so the answer does not wait for it."""
    had_ended = await in_thread(is_ending, run_dir)
    words = [sys.executable, "-P", "-m", "penstock.cli.main", "stop", str(run_dir)]
    command = await asyncio.create_subprocess_exec(
        *words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    refusals: list[str] = []

    async def listen() -> None:
        assert command.stderr is not None
        told = await command.stderr.read()
        await command.wait()
        if command.returncode:
            refusals.append(told.decode(errors="replace").strip().removeprefix("error: "))
            logger.warning("penstock stop %s: %s", run_dir.name, refusals[-1])

    task = asyncio.create_task(listen())
    running.add(task)
    task.add_done_callback(running.discard)
    limit = time.monotonic() + STOP_S
    while not task.done() and time.monotonic() < limit:
        if not had_ended and await in_thread(is_ending, run_dir):
            break
        await asyncio.wait([task], timeout=STOP_LOOK_S)
    return refusals[0] if refusals else None


def ended_as(run_dir: Path) -> str | None:
    """Return the final state of a run, as its supervisor wrote it; None without one. A lost run has none, so that
    `penstock stop` can end what is left of it."""
    status = status_of(run_dir, read_state(run_dir) or {})
    return status if has_ended(status) and status not in (LOST, UNKNOWN, UNREADABLE) else None


def is_ending(run_dir: Path) -> bool:
    """Return whether a run is stopping or has ended, as its supervisor wrote."""
    return (read_state(run_dir) or {}).get("status") not in (RunState.PENDING, RunState.STARTING, RunState.RUNNING)


def not_found(request: Request) -> Response:
    """Answer that there is no such route."""
    return error(f"there is no {request.url.path}", 404)


def saved_as(run: OpenedRun, name: str) -> dict[str, str]:
    """Return the header with the name of a downloaded file."""
    run_id = re.sub(r"[^\w.-]", "_", run.run_dir.name, flags=re.ASCII)
    return {"Content-Disposition": f'attachment; filename="{run_id}-{name}"'}


def whole(text: str | None, name: str, default: int, *, most: int) -> int:
    """Return a parameter as a whole number from 0 to `most`. Raises 400."""
    if text is None or text == "":
        return default
    if not text.isascii() or not text.isdigit() or int(text[:20]) > most:
        raise HTTPException(400, f"{name} is {text[:40]!r}: give a whole number up to {most}")
    return int(text)


def number_in_path(request: Request, name: str) -> int:
    """Return a number that is a part of the path. Raises 404."""
    try:
        return whole(request.path_params[name], name, -1, most=1 << 62)
    except HTTPException:
        raise HTTPException(404, f"there is no {name} {request.path_params[name][:40]!r}") from None


def real(text: str | None, name: str) -> float | None:
    """Return a parameter as a finite number; None if it is not given. Raises 400."""
    if text is None or text == "":
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) < 1e15:
        raise HTTPException(400, f"{name} is {text[:40]!r}: give a number")
    return value


class Guard:
    """Checks who asks, and adds the security headers to every answer."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        access = self._access
        extra = dict(HEADERS)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in extra.items():
                    headers[name] = value
            await send(message)

        try:
            verdict = access.check(scope, controls=scope["method"] in CONTROL)
        except NoAccess as refusal:
            await error(str(refusal), 403)(scope, receive, send_with_headers)
            return
        scope["may_control"] = verdict != "open"
        if verdict == "by key":
            extra["Set-Cookie"] = cookie_header(access)
            if scope["path"] == "/" and scope["method"] == "GET":
                await RedirectResponse("/", 303)(scope, receive, send_with_headers)
                return
        await self._app(scope, receive, send_with_headers)


async def on_http_error(request: Request, refusal: Exception) -> Response:
    """Answer an error of a route."""
    assert isinstance(refusal, HTTPException)
    if request.url.path.startswith("/api/"):
        return error(refusal.detail, refusal.status_code)
    return error("there is no such page", refusal.status_code)


async def on_unreadable(request: Request, problem: Exception) -> Response:
    """Answer that a file cannot be read."""
    if isinstance(problem, FileNotFoundError):
        return error(f"the files are gone: {problem}", 404)
    if isinstance(problem, PermissionError):
        return error(f"the files may not be read: {problem}", 403)
    return error(f"the files cannot be read: {problem}", 500)


async def on_defect(request: Request, problem: Exception) -> Response:
    """Answer a defect of the dashboard; the log of the server has its traceback."""
    return error("internal error: the terminal of the dashboard says more", 500)


def make_app(dashboard: Dashboard, access: Access) -> ASGIApp:
    """Return the application."""
    handlers: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
        HTTPException: on_http_error,
        OSError: on_unreadable,
        Exception: on_defect,
    }
    app = Starlette(routes=dashboard.routes(), exception_handlers=handlers)
    return Guard(app, access)
