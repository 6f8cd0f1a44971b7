"""What can be known to be wrong before anything is started or written."""

from __future__ import annotations

import socket
from pathlib import Path

from penstock.config import Config
from penstock.envs.registry import resolve


class Refused(RuntimeError):
    """The configuration is valid, but this machine cannot run it as it stands."""


def check(config: Config) -> None:
    """Raises `Refused` or `ConfigError` with a remedy."""
    if config.model.path != "tiny" and not (Path(config.model.path) / "config.json").is_file():
        raise Refused(
            f"model.path: {config.model.path} is no Hugging Face model directory (no config.json in it); "
            "give one made by save_pretrained, or `tiny`"
        )
    resolve(config.env.name)
    if config.rollout.port:
        for number in range(config.rollout.servers):
            check_port(config.rollout.host, config.rollout.port + number)


def check_port(host: str, port: int) -> None:
    """Whether a server could listen there; the server itself still has the last word."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise Refused(
                f"rollout.port: cannot listen on {host}:{port} ({error.strerror}); "
                "choose another, or 0 to let the system choose"
            ) from None
