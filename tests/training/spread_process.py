"""A process of a run on a machine of its own: started as any other, but what tells machines apart is made up."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from penstock.supervisor import procfs, runtime

MACHINE = "SPREAD_MACHINE"
"""Environment variable: boot id of the machine that this process takes itself to be on."""
NETWORK = "SPREAD_NETWORK"
"""Environment variable: name of the network namespace it is in; without one it shares the network of the tests."""
CLONE_NEWNET = 0x40000000


def enter(network: str) -> None:
    """What this process opens from now on is there."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (Path("/run/netns") / network).open("rb") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {network}")


if __name__ == "__main__":
    if NETWORK in os.environ:
        enter(os.environ[NETWORK])
    procfs.boot_id = lambda: os.environ[MACHINE]
    runtime.runtime_dirs = lambda _: [Path(os.environ["PENSTOCK_RUNTIME_DIR"])]
    from penstock.processes.start import main

    main()
