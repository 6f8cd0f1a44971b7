"""A cable between this machine and another one, which is a network namespace, that can be cut."""

from __future__ import annotations

import os
import subprocess


class Cable:
    """One for each process of the tests, one after the other."""

    def __init__(self) -> None:
        pid = os.getpid()
        self.network = f"far{pid}"
        """Name of the namespace at its far end."""
        self.near, self.far = (f"10.77.{pid % 250}.{number}" for number in (1, 2))
        self._near_end, self._far_end = f"n{pid}", f"f{pid}"

    def make_network(self) -> None:
        _ip("netns", "add", self.network)

        # servers there listen on ports that were chosen here: connections there must not take them before
        _ip("netns", "exec", self.network, "sysctl", "-q", "-w", "net.ipv4.ip_local_port_range=10000 30000")

    def lay(self) -> None:
        _ip("link", "add", self._near_end, "type", "veth", "peer", "name", self._far_end, "netns", self.network)
        _ip("addr", "add", f"{self.near}/30", "dev", self._near_end)
        _ip("-n", self.network, "addr", "add", f"{self.far}/30", "dev", self._far_end)
        for device in ("lo", self._far_end):
            _ip("-n", self.network, "link", "set", device, "up")
        self.mend()

    def cut(self) -> None:
        """Nothing gets through, and no connection ends."""
        _ip("link", "set", self._near_end, "down")

    def mend(self) -> None:
        _ip("link", "set", self._near_end, "up")

    def remove(self) -> None:
        _ip("link", "del", self._near_end)
        _ip("netns", "del", self.network)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
