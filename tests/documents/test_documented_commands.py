"""The commands of the documents are run, in their order, each page in a directory of its own."""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from document_blocks import DOCUMENTS, ROOT, blocks
from free_port import free_port

pytestmark = [pytest.mark.integration, pytest.mark.long]

PAGES = [page for page in DOCUMENTS if any(block.language == "console" for block in blocks(page))]
SHORT = ["trainer.steps=12", "data.eval_tasks=8"]
FEW_SANDBOXES = ["model.warm_start.steps=2", "scheduler.group_filter=[]", "trainer.steps=2", "data.eval_tasks=2"]
SHORTER = {
    "quickstart": ["model.warm_start.steps=60"],
    "adaptive": ["model.warm_start.steps=20"],
    "frameworks": ["trainer.steps=1", "trainer.groups_per_step=1", "data.eval_tasks=0"],
    "guess_number": ["model.warm_start.steps=5", "trainer.steps=3"],
    "simulate": ["simulator.steps=4", "trainer.groups_per_step=32"],
    "shell_sandbox": FEW_SANDBOXES,
    "python_tool": FEW_SANDBOXES,
}
"""More overrides for single examples. Two of them open a sandbox for every episode and every demonstration. After a
short warm start all rewards of a group are equal, so their groups are not filtered."""
LONGEST = {ROOT / "docs/runs.md", ROOT / "docs/simulation.md", ROOT / "examples/guess_number/README.md"}
"""The commands of these pages are too long for CI: those of one page take between one and two minutes."""
LIMIT_S = 300.0
ELSEWHERE = ("make ", "git ", "pytest")
"""What other tests run."""


class Reader:
    """Types the commands of one page."""

    def __init__(self, directory: Path, finished: Path) -> None:
        """`finished`: a directory for a finished run, which the pages share; it is made when the first one needs it."""
        self.directory, self._finished = directory, finished
        self.environment = {**os.environ, "PENSTOCK_API_KEY": ""}
        self.environment.pop("PENSTOCK_API_KEY")
        (directory / "examples").symlink_to(ROOT / "examples")

    def run_id(self) -> str:
        """The newest real run; a copy of a finished one where there is none."""
        files = [
            path for path in (self.directory / "runs").glob("*/state.json") if "-simulated" not in path.parent.name
        ]
        runs = sorted(files, key=lambda path: path.stat().st_mtime)
        if not runs:
            self._copy_finished()
            return self.run_id()
        return runs[-1].parent.name

    def _copy_finished(self) -> None:
        with self._finished.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self._finished.exists():
                self.type("penstock train examples/quickstart/run.yaml")
                made = self.directory / "runs" / self.run_id()
                shutil.copytree(made, self._finished / made.name)
                return
        shutil.copytree(self._finished, self.directory / "runs", dirs_exist_ok=True)

    def step(self) -> int:
        """The last one of which there is a checkpoint."""
        found = (self.directory / "runs" / self.run_id() / "checkpoints").glob("step_*")
        return max(int(path.name.partition("_")[2]) for path in found)

    def type(self, line: str) -> None:
        line = line.replace("RUN", self.run_id()) if "RUN" in line else line
        line = line.replace("STEP", str(self.step())) if "STEP" in line else line
        words = shlex.split(line, comments=True)
        if words[0] == "penstock":
            words = [sys.executable, "-m", "penstock.cli.main", *words[1:]]
        elif words[0] == "python":
            words[0] = sys.executable
        if "train" in words:
            words += [*SHORT[1:], "trainer.steps=100000"] if "--detach" in words else SHORT
        for example, settings in SHORTER.items():
            if {"train", "simulate", "plan"} & set(words) and f"examples/{example}/run.yaml" in words:
                words += settings
        if "--port" in words:
            words[words.index("--port") + 1] = str(free_port())
        if {"serve", "resume", "dashboard"} & set(words):
            self._begin_and_end(words, line)
            return
        done = subprocess.run(
            words, cwd=self.directory, env=self.environment, capture_output=True, text=True, timeout=LIMIT_S
        )
        found = done.returncode == 1 and "doctor" in words  # what other tests left is no failure of the command
        assert done.returncode == 0 or found, f"{line}\n{done.stdout}\n{done.stderr}"
        if "--detach" in words and "env_file" not in line:
            self._wait_for_steps(line)

    def _wait_for_steps(self, line: str) -> None:
        """Until the run has something to show."""
        run_dir = self.directory / "runs" / self.run_id()
        give_up = time.monotonic() + LIMIT_S
        while not ((run_dir / "metrics.jsonl").exists() and (run_dir / "metrics.jsonl").stat().st_size):
            assert time.monotonic() < give_up, f"{line}\n{(run_dir / 'state.json').read_text()}"
            time.sleep(0.1)

    def _begin_and_end(self, words: list[str], line: str) -> None:
        """Of what goes on for ever: until it serves, or trains, and then Ctrl-C."""
        with (self.directory / "output").open("w+") as output:
            process = subprocess.Popen(
                words, cwd=self.directory, env=self.environment, stdout=output, stderr=subprocess.STDOUT
            )
            give_up = time.monotonic() + LIMIT_S
            while not (self._trains() if "resume" in words else self._serves(words)):
                said = (self.directory / "output").read_text()
                assert process.poll() is None and time.monotonic() < give_up, f"{line}\n{said}"
                time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            assert process.wait(LIMIT_S) in (0, 130), (self.directory / "output").read_text()

    def _serves(self, words: list[str]) -> bool:
        port, path = words[words.index("--port") + 1], "api/runs" if "dashboard" in words else "health"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _trains(self) -> bool:
        state = self.directory / "runs" / self.run_id() / "state.json"
        return '"running"' in state.read_text()

    def leave(self) -> None:
        """Stop the runs that still run."""
        for run in (self.directory / "runs").glob("*"):
            words = [sys.executable, "-m", "penstock.cli.main", "stop", run.name, "--now"]
            subprocess.run(words, cwd=self.directory, capture_output=True, timeout=LIMIT_S)


@pytest.fixture
def reader(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[Reader]:
    base = tmp_path_factory.getbasetemp()
    session = base if worker_id == "master" else base.parent  # which all workers of this session have in common
    reader = Reader(tmp_path, session / "finished-run")
    yield reader
    reader.leave()


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=str(page.relative_to(ROOT)), marks=[pytest.mark.longest] if page in LONGEST else [])
        for page in PAGES
    ],
)
def test_a_pages_commands_work(page: Path, reader: Reader) -> None:
    for block in blocks(page):
        for line in block.commands if block.language == "console" else []:
            if not line.startswith(ELSEWHERE):
                reader.type(line)
