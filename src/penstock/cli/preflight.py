"""What can be known to be wrong before anything is started or written."""

from __future__ import annotations

import socket
from pathlib import Path

from penstock.config import Config
from penstock.envs.registry import locate
from penstock.model.files import has_weights


class Refused(RuntimeError):
    """The configuration is valid, but this machine cannot run it as it stands."""


def check(config: Config) -> None:
    """Raises `Refused` or `ConfigError` with a remedy."""
    if config.model.path != "tiny":
        check_model(Path(config.model.path))
    locate(config.env.name)
    if config.rollout.port:
        for number in range(config.rollout.servers):
            check_port(config.rollout.host, config.rollout.port + number)


def check_model(directory: Path) -> None:
    """Whether it can be loaded at all."""
    missing = "no config.json" if not (directory / "config.json").is_file() else "no weights"
    if missing == "no config.json" or not has_weights(directory):
        raise Refused(
            f"model.path: {directory} is no Hugging Face model directory ({missing} in it); "
            "give one made by save_pretrained, or `tiny`"
        )


def check_port(host: str, port: int) -> None:
    """Whether a server could listen there; the server itself still has the last word."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise Refused(f"rollout.host: {host} cannot be resolved ({error.strerror}); use 127.0.0.1") from None
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise Refused(
                f"rollout.port: cannot listen on {host}:{port} ({error.strerror}); "
                "choose another, or 0 to let the system choose"
            ) from None
