"""A real run that trains while 10,000 malformed frames and 10,000 malformed requests arrive at its sockets."""

from __future__ import annotations

import http.client
import itertools
import json
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
import zmq
from frame_mutations import bad_messages, identities
from malformed_requests import Malformed, malformed
from test_training_run import RECIPE, SHORT, command, had_their_groups, leftovers, lines, only_run

from penstock.control.runtime_files import ServerKeys
from penstock.supervisor.run_status import status

pytestmark = [pytest.mark.integration, pytest.mark.long]

NUM_FRAMES = NUM_REQUESTS = 10_000
ENDLESS, MORE_STEPS = 100_000, 4
FRAMES_PER_IDENTITY = 50
LEGAL_HERE = (b"REFUSE", b'"prompt_token_ids": [64]')
"""A text that only the chat template of another test refuses, and a token that only its vocabulary lacks."""
SENDERS = 4


def test_a_run_completes_among_malformed_frames_and_requests(tmp_path: Path) -> None:
    """It trains all the while, stops with a checkpoint, and completes after a resume."""
    words = command(RECIPE, tmp_path, *SHORT, "data.eval_tasks=8", f"trainer.steps={ENDLESS}")
    opened = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with opened as run, ExitStack() as stack:
        stack.callback(run.kill)
        give_up = time.monotonic() + 120
        while not any(lines(path) for path in tmp_path.glob("*/metrics.jsonl")):
            assert run.poll() is None and time.monotonic() < give_up, run.communicate(timeout=10)[0]
            time.sleep(0.1)
        run_dir = only_run(tmp_path)
        runtime_dir = Path(json.loads((run_dir / "state.json").read_text())["runtime_dir"])
        with ThreadPoolExecutor(SENDERS) as senders:
            frames = senders.submit(send_frames, runtime_dir)
            requests = senders.submit(send_requests, run_dir, runtime_dir)
            assert frames.result(timeout=300) == NUM_FRAMES
            answers = requests.result(timeout=300)
        assert run.poll() is None, "it trained all the while"
        document = status(run_dir)
        run.send_signal(signal.SIGINT)
        output = run.communicate(timeout=300)[0]
    assert sum(answers.values()) == NUM_REQUESTS
    assert {code: number for code, number in answers.items() if not 400 <= code < 500} == {}
    assert [each["name"] for each in document["processes"] if each["restarts"]] == []
    assert document["frames_dropped"]["content"] > 1000 and document["frames_dropped"]["identity"] > 1000
    assert json.loads((run_dir / "state.json").read_text())["status"] == "stopped", output
    complete(run_dir)
    assert leftovers(run_dir) == []


def complete(run_dir: Path) -> None:
    """Resume the run for a few steps. Every episode is accounted for once."""
    steps = max(int(path.name.removeprefix("step_")) for path in (run_dir / "checkpoints").glob("step_*")) + MORE_STEPS
    words = [sys.executable, "-m", "penstock.cli.main", "resume", str(run_dir), f"trainer.steps={steps}"]
    resumed = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", steps)
    ledger = summary["ledger"]
    assert ledger.pop("admitted") == sum(ledger.values()) and ledger["failed"] == 0
    assert had_their_groups(steps, ledger)


def send_frames(runtime_dir: Path) -> int:
    """Send the frames as a process of the same user, under many identities. Return their number."""
    context, names, num_sent = zmq.Context(), identities(0), 0
    messages = bad_messages(NUM_FRAMES, 0)
    while batch := list(itertools.islice(messages, FRAMES_PER_IDENTITY)):
        with context.socket(zmq.DEALER) as raw:
            raw.setsockopt(zmq.IDENTITY, next(names))
            raw.setsockopt(zmq.LINGER, 20_000)
            raw.connect(f"ipc://{runtime_dir}/control.sock")
            for parts in batch:
                raw.send_multipart(parts)
                num_sent += 1
    context.term()
    return num_sent


def send_requests(run_dir: Path, runtime_dir: Path) -> dict[int, int]:
    """Send the requests to the rollout server, with and without its keys. Return the number of each status."""
    url = json.loads((runtime_dir / "ready" / "rollout-0.json").read_text())["url"]
    keys = ServerKeys.read(runtime_dir)
    assert keys is not None
    request = urllib.request.Request(f"{url}/openapi.json", headers={"Authorization": f"Bearer {keys.api_key}"})
    schema: dict[str, Any] = json.loads(urllib.request.urlopen(request, timeout=60).read())
    vocab_size = json.loads((run_dir / "model" / "config.json").read_text())["vocab_size"]
    odd = malformed(schema, 2 * NUM_REQUESTS, 0, vocab_size=vocab_size, max_context=64)
    given = itertools.islice((each for each in odd if is_malformed(each)), NUM_REQUESTS)
    tokens = itertools.cycle(["", keys.api_key, keys.admin_api_key])
    counts: dict[int, int] = {}
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    for each, token in zip(given, tokens, strict=False):
        code = send(connection, each, token)
        counts[code] = counts.get(code, 0) + 1
    connection.close()
    return counts


def is_malformed(each: Malformed) -> bool:
    return not any(legal in (each.body or b"") for legal in LEGAL_HERE)


def send(connection: http.client.HTTPConnection, each: Malformed, token: str) -> int:
    """Send one request and return the status of its answer."""
    own = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    headers = {name: value.encode("latin-1") for name, value in (own | each.headers).items()}
    try:
        connection.request(each.method, quote(each.path, safe="/%"), each.body, headers)  # type: ignore[arg-type]
        response = connection.getresponse()
        response.read()
    except (http.client.HTTPException, ConnectionError):  # the server closed the connection after its answer
        connection.close()
        connection.request(each.method, quote(each.path, safe="/%"), each.body, headers)  # type: ignore[arg-type]
        response = connection.getresponse()
        response.read()
    return response.status
