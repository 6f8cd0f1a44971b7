from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration


def run_child(tmp_path: Path, body: str) -> subprocess.CompletedProcess[str]:
    code = f"from penstock.supervisor.child import Child\nchild = Child.from_environment()\n{body}"
    environment = {
        **os.environ,
        "PENSTOCK_RUN_ID": "r",
        "PENSTOCK_NONCE": "n",
        "PENSTOCK_RUNTIME_DIR": str(tmp_path),
    }
    words = [sys.executable, "-c", code, "--run-dir", str(tmp_path), "--name", "env-0"]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)


def message_of(tmp_path: Path) -> str:
    return str(json.loads((tmp_path / "errors" / "env-0.json").read_text())["message"])


def test_an_error_outside_of_main_is_reported_too(tmp_path: Path) -> None:
    result = run_child(tmp_path, "import no_such_module")
    assert result.returncode == 1
    assert message_of(tmp_path) == "ModuleNotFoundError: No module named 'no_such_module'"
    assert "Traceback" in result.stderr


def test_a_configuration_error_has_its_own_code_and_no_traceback(tmp_path: Path) -> None:
    main = "def main():\n    from penstock.config import ConfigError\n    raise ConfigError('no such word')"
    body = f"{main}\nchild.run(main)"
    result = run_child(tmp_path, body)
    assert result.returncode == 2
    assert result.stderr.endswith(" ERROR env-0: ends: no such word\n") and "Traceback" not in result.stderr
    assert message_of(tmp_path) == "no such word"


def test_so_has_a_run_that_cannot_go_on(tmp_path: Path) -> None:
    imports = "from penstock.scheduler.failure_budget import OutOfTasks"
    main = f"def main():\n    {imports}\n    raise OutOfTasks('no more tasks')"
    result = run_child(tmp_path, f"{main}\nchild.run(main)")
    assert result.returncode == 3 and result.stderr.endswith(" ERROR env-0: ends: no more tasks\n")


def test_the_first_leaf_of_a_group_is_named(tmp_path: Path) -> None:
    body = "def main():\n    raise ExceptionGroup('many', [ValueError('the first'), OSError()])\nchild.run(main)"
    assert run_child(tmp_path, body).returncode == 1
    assert message_of(tmp_path) == "ValueError: the first"


@pytest.mark.parametrize("error", ["OSError(28, 'No space left on device')", "ConfigError('no such word')"])
def test_a_log_without_room_keeps_no_error_from_being_reported(tmp_path: Path, error: str) -> None:
    full = "import os\nfrom penstock.config import ConfigError\nos.dup2(os.open('/dev/full', os.O_WRONLY), 2)"
    body = f"{full}\ndef main():\n    raise {error}\nchild.run(main)"
    result = run_child(tmp_path, body)
    assert result.returncode == (1 if error.startswith("OSError") else 2)
    assert message_of(tmp_path).endswith(("No space left on device", "no such word"))


def test_readiness_carries_identity_and_address(tmp_path: Path) -> None:
    run_child(tmp_path, "child.report_ready('http://127.0.0.1:1')")
    report = json.loads((tmp_path / "ready" / "env-0.json").read_text())
    assert report["nonce"] == "n" and report["url"] == "http://127.0.0.1:1" and report["pid"] > 0


def test_a_child_without_a_run_says_so() -> None:
    code = "from penstock.supervisor.child import Child; Child.from_environment([])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 1 and "penstock train" in result.stderr
