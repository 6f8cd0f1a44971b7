"""Files to take away: metrics as CSV or Parquet, and the timeline as trace events for Perfetto. What they are made of
must be read to its end before."""

from __future__ import annotations

import csv
import io
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from penstock.dashboard.opened_run import OpenedRun
from penstock.dashboard.series import surviving
from penstock.dashboard.timeline_index import Spans

SPANS_AT_ONCE = 4096
PIECE_BYTES = 1 << 20


def surviving_rows(run: OpenedRun) -> Iterator[tuple[list[str], Any]]:
    """Yield the lines that count, block by block: names, and values of shape (names, lines)."""
    counts = surviving(run.metrics.columns(["step"])["step"])
    place = 0
    for names, values in run.metrics.pieces():
        kept = counts[place : place + values.shape[1]]
        place += values.shape[1]
        if len(kept) and kept.any():
            yield names, values[:, : len(kept)][:, kept]


def metrics_csv(run: OpenedRun) -> Iterator[bytes]:
    """Yield the metrics as CSV: a line for each step that counts, and an empty cell where it has no number."""
    columns = run.metrics.names
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for names, values in surviving_rows(run):
        places = [names.index(column) if column in names else None for column in columns]
        for row in values.T.tolist():
            cells = ["" if place is None or row[place] != row[place] else row[place] for place in places]
            writer.writerow([int(cell) if isinstance(cell, float) and cell.is_integer() else cell for cell in cells])
        yield text.getvalue().encode()
        text.seek(0)
        text.truncate()
    yield text.getvalue().encode()


def metrics_parquet(run: OpenedRun) -> Iterator[bytes]:
    """Yield the metrics as a Parquet file."""
    import pyarrow
    import pyarrow.parquet

    columns = run.metrics.names
    schema = pyarrow.schema([(column, pyarrow.float64()) for column in columns])
    with tempfile.TemporaryFile(prefix="penstock-dashboard-") as file:
        with pyarrow.parquet.ParquetWriter(file, schema) as writer:
            for names, values in surviving_rows(run):
                known = dict(zip(names, values, strict=True))
                empty = np.full(values.shape[1], np.nan)
                arrays = [pyarrow.array(known.get(column, empty), from_pandas=True) for column in columns]
                writer.write_table(pyarrow.table(arrays, schema=schema))
        file.seek(0)
        while piece := file.read(PIECE_BYTES):
            yield piece


def trace_events(run: OpenedRun, marks: Sequence[dict[str, Any]]) -> Iterator[bytes]:
    """Yield the timeline in the trace event format, which Perfetto and Chrome show: a track for each process, and times
    in microseconds since the run began."""
    extent = run.timeline.extent or (0.0, 0.0)
    processes = {process: number for number, process in enumerate(sorted({lane[0] for lane in run.timeline.lanes}), 1)}
    named = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": process}}
        for process, number in processes.items()
    ]
    title = {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": f"run {run.run_dir.name}"}}
    yield b'{"displayTimeUnit":"ms","traceEvents":[' + msgspec.json.encode(title)
    for event in named:
        yield b"," + msgspec.json.encode(event)
    for spans in run.timeline.spans(*extent):
        yield from _trace_of(spans, processes, extent[0])
    for mark in marks:
        event = {"name": f"{mark['kind']}: {mark['text']}", "ph": "i", "s": "g", "pid": 1, "tid": 0}
        yield b"," + msgspec.json.encode(event | {"ts": (mark["time"] - extent[0]) * 1e6})
    yield b"]}"


def _trace_of(spans: Spans, processes: dict[str, int], begin: float) -> Iterator[bytes]:
    encoder = msgspec.json.Encoder()
    for first in range(0, len(spans.start), SPANS_AT_ONCE):
        part = slice(first, first + SPANS_AT_ONCE)
        columns = (spans.start[part], spans.end[part], spans.policy_version[part], spans.lane[part])
        rows = zip(*(column.tolist() for column in columns), strict=True)
        events = []
        for start, end, version, lane in rows:
            process, kind = spans.lanes[lane]
            about = {"name": kind, "ph": "X", "pid": 1, "tid": processes.get(process, 0)}
            times = {"ts": (start - begin) * 1e6, "dur": (end - start) * 1e6}
            events.append(about | times | {"args": {"policy_version": version}})
        if events:
            yield b"," + encoder.encode(events)[1:-1]
