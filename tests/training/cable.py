"""A cable between this machine and another one, which is a network namespace, that can be cut."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys


class Cable:
    """Its names and addresses are random, because a killed test session may have left its own cables."""

    def __init__(self) -> None:
        mark, block = secrets.token_hex(4), secrets.randbelow(1 << 14)
        self.network = f"far{mark}"
        """Name of the namespace at its far end."""
        self.near, self.far = (f"10.77.{block // 64}.{block % 64 * 4 + number}" for number in (1, 2))
        self._near_end, self._far_end = f"n{mark}", f"f{mark}"

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
        self._check()

    def cut(self) -> None:
        """Nothing gets through, and no connection ends."""
        _ip("link", "set", self._near_end, "down")

    def mend(self) -> None:
        _ip("link", "set", self._near_end, "up")

    def remove(self) -> None:
        _ip("link", "del", self._near_end)
        _ip("netns", "del", self.network)

    def _check(self) -> None:
        """Connect from its far end to its near one."""
        with socket.create_server((self.near, 0)) as server:
            connect = f"import socket; socket.create_connection({server.getsockname()}, timeout=20)"
            there = ["ip", "netns", "exec", self.network, sys.executable, "-c", connect]
            tried = subprocess.run(there, check=False, capture_output=True, text=True)
        if tried.returncode:
            here = subprocess.run(["ip", "addr"], check=True, capture_output=True, text=True).stdout
            raise ConnectionError(f"{self.near} cannot be reached from {self.far}: {tried.stderr}\n{here}")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
