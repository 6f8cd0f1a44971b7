"""The network interface of torch's process groups."""

from __future__ import annotations

import os

import psutil


def use_interface_of(address: str) -> None:
    """Make gloo and NCCL use the network interface that has `address`.

    By default they resolve the machine's host name, which other machines may be unable to reach. Interfaces that the
    user has set in the environment are kept.
    """
    named = psutil.net_if_addrs().items()
    for interface in [name for name, held in named if address in {each.address for each in held}][:1]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
