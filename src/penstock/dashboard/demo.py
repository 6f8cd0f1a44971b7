"""A small recorded run, so that one sees something at once.

It is a mixture of two environments, trained for 60 steps with `scheduler.tuning: auto`. `python -m
penstock.dashboard.demo RUN_DIR` packs another run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZIP_DEFLATED, ZipFile

RECORDED = Path(__file__).parent / "demo.zip"
LEFT_OUT = ("checkpoints", "plots", ".dashboard", ".lock", "lock.mdb")
"""Files and folders of a run that are not packed: the dashboard does not show them, or makes them."""
OF_A_MACHINE = ("host", "start_ticks", "boot_id", "pid_namespace", "runtime_dir")
"""Fields that say where a run was recorded."""


@contextmanager
def demo_run() -> Iterator[Path]:
    """Yield the directory of the recorded run, which is removed after the body."""
    with TemporaryDirectory(prefix="penstock-demo-") as directory:
        with ZipFile(RECORDED) as archive:
            archive.extractall(directory)
        (run_dir,) = Path(directory).iterdir()
        yield run_dir


def pack(run_dir: Path, target: Path) -> None:
    """Pack a run that has ended, without its checkpoints and without what belongs to the machine."""
    run_dir = run_dir.absolute()
    with ZipFile(target, "w", ZIP_DEFLATED, compresslevel=9) as archive:
        for path in sorted(run_dir.rglob("*")):
            inside = path.relative_to(run_dir)
            if path.is_file() and not set(LEFT_OUT) & set(inside.parts):
                archive.writestr(str(Path(run_dir.name) / inside), _without_machine(path, run_dir))


def _without_machine(path: Path, run_dir: Path) -> bytes:
    content = path.read_bytes()
    if path.name in ("state.json", "events.jsonl"):
        lines = [_without_fields(json.loads(line)) for line in content.splitlines()]
        return b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    return content.replace(f"{run_dir.parent}/".encode(), b"") if path.suffix == ".log" else content


def _without_fields(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_fields(each) for key, each in value.items() if key not in OF_A_MACHINE}
    return [_without_fields(each) for each in value] if isinstance(value, list) else value


if __name__ == "__main__":
    pack(Path(sys.argv[1]), RECORDED)
