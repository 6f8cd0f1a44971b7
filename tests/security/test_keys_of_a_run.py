"""A default run on one machine: its servers need keys, and only the run's user can read them."""

from __future__ import annotations

import json
import stat
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_training_run import RECIPE, SHORT, command, leftovers, lines, only_run

from penstock.control.runtime_files import ServerKeys
from penstock.rollout.claim import CLAIM
from penstock.supervisor.child import Child

pytestmark = [pytest.mark.integration, pytest.mark.long]

STEPS = 12
LAST_VERSION = {"new_version": "2147483647"}
GENERATE = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}


def post(url: str, path: str, body: dict[str, Any], key: str = "", **headers: str) -> int:
    headers = {"Content-Type": "application/json"} | headers | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    try:
        return int(urllib.request.urlopen(request, timeout=60).status)
    except urllib.error.HTTPError as error:
        return error.code


def get(url: str, path: str, key: str) -> bytes:
    request = urllib.request.Request(url + path, headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return bytes(reply.read())


def test_a_neighbour_without_the_keys_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PENSTOCK_API_KEY", "PENSTOCK_ADMIN_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    words = command(RECIPE, tmp_path, *SHORT, f"trainer.steps={STEPS}", "trainer.learning_rate=1e-6")
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        give_up = time.monotonic() + 120
        while not any(lines(path) for path in tmp_path.glob("*/metrics.jsonl")):
            assert run.poll() is None and time.monotonic() < give_up, run.communicate(timeout=10)[0]
            time.sleep(0.1)
        run_dir = only_run(tmp_path)
        runtime_dir = Path(json.loads((run_dir / "state.json").read_text())["runtime_dir"])
        url = json.loads((runtime_dir / "ready" / "rollout-0.json").read_text())["url"]
        keys = ServerKeys.read(runtime_dir)
        assert keys is not None and len({keys.api_key, keys.admin_api_key, ""}) == 3
        assert stat.S_IMODE(runtime_dir.stat().st_mode) == 0o700
        assert stat.S_IMODE((runtime_dir / ServerKeys.FILE).stat().st_mode) == 0o600

        for path, body in (("/update_weight_version", LAST_VERSION), ("/generate", GENERATE), ("/claim", {})):
            assert post(url, path, body) == 401
        assert post(url, "/abort_request", {"rid_prefix": "x"}) == 401
        assert post(url, "/generate", GENERATE, keys.api_key) == 200
        assert post(url, "/update_weight_version", LAST_VERSION, keys.api_key) == 401
        assert post(url, "/update_weight_version", LAST_VERSION, keys.admin_api_key) == 400, "without the claim"
        assert post(url, "/weights/forget", {}, keys.admin_api_key) == 409, "without the claim"

        ready = json.loads(get(url, "/ready", keys.api_key))
        of_run = json.loads((runtime_dir / "ready" / "rollout-0.json").read_text())["nonce"]
        child = Child(name="", run_dir=run_dir, runtime_dir=runtime_dir, run_id=run_dir.name, nonce=of_run)
        assert ready["nonce"] == child.secret("identity") != of_run
        for nonce in (ready["nonce"], of_run):
            headers = {CLAIM: nonce}
            assert post(url, "/weights/forget", {}, keys.admin_api_key, **headers) == 409, "the claim is another secret"

        in_words = [word for each in psutil.process_iter(["cmdline"]) for word in each.info["cmdline"] or ()]
        assert not any(keys.api_key in word or keys.admin_api_key in word for word in in_words)
        output, _ = run.communicate(timeout=300)
    assert run.returncode == 0, output
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["policy_version"]) == ("completed", STEPS)
    for path in (*run_dir.glob("*.*"), *run_dir.glob("logs/*")):
        if path.is_file():
            content = path.read_bytes()
            assert keys.api_key.encode() not in content and keys.admin_api_key.encode() not in content, path
    assert leftovers(run_dir) == []
