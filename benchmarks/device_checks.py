"""All checks that need an accelerator, in slices of at most eight minutes, each with results of its own.

    python benchmarks/device_checks.py --device cuda

Each slice is a benchmark on the device, or the tests that are marked `cuda`. What it found goes to
`benchmarks/results/<benchmark>-<shape>-<card>.json`, and what it printed to `benchmarks/device_checks/<slice>.log`. A
slice that has ended well at this commit is left out when the script runs again, so that a lent device which goes away
costs one slice. `--only` names slices. `--dry-run` plays them on the CPU, in their quick forms, and keeps nothing.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from hardware import accelerator_name
from report import commit, environment

HERE = Path(__file__).parent
LIMIT_S = 480.0
TESTS = HERE.parent / "tests"
MARKED = (
    "trainer/test_packed_attention.py",
    "processes/test_serving.py",
    "processes/test_trainer.py",
    "rollout/test_cuda_graphs.py",
    "rollout/test_engine.py",
    "trainer/test_forward.py",
    "trainer/test_learner.py",
    "trainer/test_offload.py",
    "trainer/test_saving.py",
    "weights/test_live_weights.py",
    "weights/test_tensor_payload.py",
)
"""Tests with cases for a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """One check."""

    name: str
    benchmark: str | None = None
    """None for tests."""
    options: Sequence[str] = ()
    wanted: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Figures that matter, with the least and the largest good value."""
    needs: str | None = None
    """A package without which the slice is left out."""


NEAR = (0.9, 1.1)
MOST, MISSED = float("inf"), ": MISSED"
SLICES = [
    Slice(name="tests"),
    Slice(name="learner", benchmark="learner"),
    Slice(
        name="shapes-0.6b",
        benchmark="learner_shapes",
        options=["--shape", "Qwen3-0.6B"],
        wanted={"compiled_flops_share": (0.35, MOST), "planned_vs_measured_peak": NEAR},
    ),
    Slice(
        name="shapes-1.7b",
        benchmark="learner_shapes",
        options=["--shape", "Qwen3-1.7B"],
        wanted={"long_peak_gb": (0.0, 60.0), "long_planned_vs_measured_peak": NEAR},
    ),
    Slice(
        name="shapes-4b",
        benchmark="learner_shapes",
        options=["--shape", "Qwen3-4B"],
        wanted={"compiled_flops_share": (0.45, MOST), "planned_vs_measured_peak": NEAR},
    ),
    Slice(name="engine", benchmark="engine"),
    Slice(name="weights", benchmark="weights"),
    Slice(name="vs_trl", benchmark="vs_trl", options=["--trl-python", sys.executable], needs="trl"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", metavar="DEVICE")
    parser.add_argument("--only", nargs="+", choices=[each.name for each in SLICES], metavar="SLICE", default=[])
    parser.add_argument("--dry-run", action="store_true", help="play all slices on the CPU, in their quick forms")
    options = parser.parse_args()
    chosen = [each for each in SLICES if not options.only or each.name in options.only]
    if options.dry_run:
        with TemporaryDirectory() as directory:
            sys.exit(run_all(chosen, "cpu", "cpu", results=Path(directory), logs=Path(directory), quick=True))
    device = torch.device(options.device)
    if device.type == "cpu" or not torch.get_device_module(device).is_available():
        sys.exit(f"--device {options.device}: torch finds no such accelerator here; --dry-run plays all on the CPU")
    card = str(accelerator_name(device)).removeprefix("NVIDIA ").split()[0].lower()
    logs = HERE / "device_checks"
    sys.exit(run_all(chosen, options.device, card, results=HERE / "results", logs=logs, quick=False))


def run_all(chosen: Sequence[Slice], device: str, card: str, *, results: Path, logs: Path, quick: bool) -> int:
    """Run the slices that have not ended well at this commit. Return the number of those that did not end well now, or
    missed a figure."""
    logs.mkdir(exist_ok=True)
    present, num_bad = commit(), 0
    for each in chosen:
        done, log = logs / f"{each.name}.done", logs / f"{each.name}.log"
        if each.needs is not None and find_spec(each.needs) is None:
            print(f"{each.name:12} left out: {each.needs} is not installed")
            continue
        if done.exists() and done.read_text() == present:
            print(f"{each.name:12} done already at this commit")
            continue
        began = time.monotonic()
        code = run(words_of(each, device, results / f"{stem_of(each)}-{card}.json", quick=quick), log)
        where = "" if quick else f"; {log}"
        print(f"{each.name:12} {_ending(code)} after {time.monotonic() - began:.0f} s{where}")
        shown = [] if quick else figures_of(each, log)  # what a CPU does in a quick form is not what is wanted
        print("".join(f"             {line}\n" for line in shown), end="", flush=True)
        num_bad += code != 0 or any(MISSED in line for line in shown)
        if code == 0:
            done.write_text(present)  # also if a figure is not what is wanted: it is measured
        else:
            print(log.read_text(errors="replace")[-2000:])
    return num_bad


def stem_of(each: Slice) -> str:
    shape = each.name.removeprefix("shapes") if each.benchmark == "learner_shapes" else ""
    return f"{each.benchmark}{shape}"


def words_of(each: Slice, device: str, file: Path, *, quick: bool) -> list[str]:
    """Return the command of a slice."""
    if each.benchmark is None:
        places = [str(TESTS / place) for place in MARKED]
        return [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            *([] if quick else ["-m", "cuda"]),
            *places[: 1 if quick else None],
        ]
    script = str(HERE / f"{each.benchmark}.py")
    return [sys.executable, script, "--device", device, "--json", str(file), *each.options, *["--quick"] * quick]


def run(words: Sequence[str], log: Path) -> int | None:
    """Run a command for at most `LIMIT_S`, and end all that it started. Return its exit code; None if it took too
    long."""
    with log.open("wb") as written:
        process = subprocess.Popen(
            words, stdout=written, stderr=written, env=environment(), cwd=HERE.parent, start_new_session=True
        )
        try:
            return process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def figures_of(each: Slice, log: Path) -> list[str]:
    """Return the figures that matter, as lines with what is wanted."""
    printed = [line.split() for line in log.read_text(errors="replace").splitlines()]
    values = {words[0]: words[1] for words in printed if len(words) == 2}
    lines = []
    for name, (least, most) in each.wanted.items():
        value = float(values.get(name, "nan"))
        wanted = f"between {least:g} and {most:g}" if most < MOST else f"at least {least:g}"
        lines.append(f"{name} {value:.3g}, wanted {wanted}{'' if least <= value <= most else MISSED}")
    return lines


def _ending(code: int | None) -> str:
    if code is None:
        return f"TOOK MORE than {LIMIT_S:g} s"
    return "ended well" if code == 0 else f"FAILED with {code}"


if __name__ == "__main__":
    main()
