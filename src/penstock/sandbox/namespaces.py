"""The backend that confines with Linux namespaces alone, where bubblewrap is missing (Linux 5.14 or newer)."""

from __future__ import annotations

import marshal
import platform
from pathlib import Path

from penstock.sandbox import seccomp
from penstock.sandbox.launch import INIT, MASKED, READ_ONLY_BYTES, SIZED, WORK, Launch, Plan, compiled, is_loose

SETUP = compiled("namespace_setup.py")
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}


def command(plan: Plan, launch: Launch) -> list[str]:
    """Return the command line that starts the init of a box."""
    links = {str(path): str(path.readlink()) for path in plan.read_only if path.is_symlink()}
    program = seccomp.program(shares_user=plan.slot_uid is None)
    spec = {
        "uid": plan.uid,
        "unshares_user": plan.slot_uid is None,
        "network": plan.network,
        "links": links,
        "binds": [str(path) for path in plan.read_only if str(path) not in links],
        "texts": plan.texts,
        "loose": [*filter(is_loose, plan.texts)],
        "read_only_bytes": READ_ONLY_BYTES,
        "sized": [*SIZED],
        "stays": plan.stays,
        "work_bytes": plan.limits.work_bytes,
        "masked": [path for path in MASKED if Path(path).exists()],
        "seccomp": program,
        "pivot_root": PIVOT_ROOT[platform.machine()],
    }
    files = [str(launch.text(content)) for content in (marshal.dumps(spec), INIT)]
    return [*launch.python(SETUP), *files, *launch.arguments(plan, WORK)]
