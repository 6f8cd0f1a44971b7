"""Import the packages of a process, torch above all: cheaply, and without a directory that another user could take."""

from __future__ import annotations

import atexit
import gc
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.own_files import check_own_directory, remove_tree

COMPILED = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable: where torch keeps compiled code. It makes this directory when it is imported."""


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Import modules in the body. They, their classes and functions stay as long as the process. So the garbage
    collector does not run meanwhile, and from then on it leaves out all
    objects that exist by the end of the body. With torch, this saves a third of the processor time that a process takes
    to start and to end."""
    keep_compiled_code_private()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def keep_compiled_code_private() -> None:
    """Let torch keep compiled code in the user's cache, unless the environment names another place. By default, torch
    uses a directory in `/tmp` with a name that any user can guess. Another user could create it first, and then make
    the import fail or put code there."""
    if COMPILED not in os.environ:
        os.environ[COMPILED] = str(_own_cache() / "torchinductor")


def _own_cache() -> Path:
    """Return a directory that only we can write to: in the user's cache if possible, else a temporary one."""
    try:
        directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_own_directory(directory)
        if os.access(directory, os.W_OK):
            return directory
    except (OSError, RuntimeError):  # there is no home, or it is not ours
        pass
    temporary = Path(tempfile.mkdtemp(prefix="penstock-cache-"))
    atexit.register(remove_tree, temporary)
    return temporary
