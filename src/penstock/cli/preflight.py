"""What can be known to be wrong before anything is started or written."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from penstock.config import Config
from penstock.envs.registry import locate
from penstock.envs.rewards.reward import locate_reward
from penstock.model.files import has_weights, weights_bytes
from penstock.processes.layout import seating_of
from penstock.scheduler.filters import FilterChain
from penstock.scheduler.length.predictor import length_predictor
from penstock.scheduler.segments import max_trained_tokens
from penstock.supervisor.run_directory import existing_parent
from penstock.supervisor.runtime import runtime_path

CHECK_S = 30.0
MIB = 2**20
LEAST_DISK_BYTES = 256 * MIB
"""For a tiny model's checkpoints, tokens and logs."""
LEAST_MEMORY_BYTES = 32 * MIB
"""Of shared memory, for a tiny model's weights."""


class Refused(RuntimeError):
    """The configuration is valid, but this machine cannot run it as it stands."""


def check(config: Config) -> None:
    """Raises `Refused` or `ConfigError` with a remedy."""
    if config.model.path != "tiny":
        check_model(Path(config.model.path))
    if config.pipeline == "eval" and not config.validation_tasks:
        raise Refused("there are no tasks to play: data.eval_tasks and validation.tasks are 0")
    check_settings(config)
    check_packages(config)
    check_room(config)
    earlier = config.scheduler.length.learn_from
    if earlier is not None and not (Path(earlier) / "pool" / "index").is_dir():
        raise Refused(f"scheduler.length.learn_from: {earlier} is not the directory of a run: it has no pool/index")
    if config.scheduler.dispatch.policy in ("sjf", "ljf"):
        check_predictor(config)
    if config.rollout.engine != "penstock" and not config.rollout.urls:
        check_engine(config.rollout.engine, config.rollout.python or sys.executable)
    if config.dump.url is not None and config.pipeline != "eval":
        check_dump(config)
    if config.rollout.port and not config.rollout.urls and config.cluster.address is None:
        for number in range(config.rollout.servers):
            check_port(config.rollout.host, config.rollout.port + number)


def check_settings(config: Config) -> None:
    """What is the same on every machine that has the run's files: names, and seats in pools."""
    check_names(config)
    if config.cluster.address is not None:
        seating_of(config)


def check_names(config: Config) -> None:
    """Whether all that is named is there: environments, their rewards, the files of their tasks, filters of groups."""
    FilterChain(config.scheduler.group_filter)
    for name in config.environments.names:
        locate(name)
    for key, settings in config.environments.by_key.items():
        if settings.reward is not None:
            locate_reward(settings.reward)
        data = settings.data
        for name, path in (("path", data.path), ("eval_path", data.eval_path)):
            if data.has_rows and path is not None and not Path(path).exists():
                where = f"data.{name}" if key == "env" else f"{key}.data.{name}"
                raise Refused(f"{where}: there is no file {path}")


def check_dump(config: Config) -> None:
    """Whether it can be written; what cannot be is a `ConfigError`."""
    from penstock.store.dumps.targets import open_target

    open_target(config.dump).check()


def check_packages(config: Config) -> None:
    """Whether the extras that the configuration asks for are installed."""
    needed = [("trainer.lora", "peft", "lora")] if config.trainer.lora is not None else []
    packages = {"tensorboard": "tensorboardX", "wandb": "wandb"}
    needed += [("observe.trackers", packages[tracker], tracker) for tracker in config.observe.trackers]
    sources = {settings.data.source for settings in config.environments.by_key.values()}
    extras = {"reasoning_gym": ("reasoning_gym", "tasks"), "huggingface": ("datasets", "huggingface")}
    needed += [("data.source", *extras[source]) for source in sorted(sources & extras.keys())]
    rewards = {settings.reward for settings in config.environments.by_key.values()}
    libraries = {"math": ("math_verify", "math"), "judge": ("openai", "judge")}
    needed += [("env.reward", *libraries[reward]) for reward in sorted(libraries) if reward in rewards]
    needed += [("cluster.address", "ray", "ray")] if config.cluster.address is not None else []
    for key, package, extra in needed:
        if find_spec(package) is None:
            raise Refused(f"{key} needs the package {package}: pip install 'penstock[{extra}]'")


def check_room(config: Config) -> None:
    """Whether what the run is sure to write has room: weights in shared memory, and on disk the checkpoints of one that
    trains."""
    weights = 0 if config.model.path == "tiny" else weights_bytes(Path(config.model.path))
    runs_dir, published = existing_parent(Path(config.runs_dir)), runtime_path("").parent
    if config.pipeline == "train":
        checkpoints = (config.trainer.keep_checkpoints + 1) * weights + LEAST_DISK_BYTES
        remedy = "free some, set runs_dir to another disk, or lower trainer.keep_checkpoints"
        check_free("runs_dir", runs_dir, checkpoints, "checkpoints, tokens and logs", remedy)
    else:
        remedy = "free some, or set runs_dir to another disk"
        check_free("runs_dir", runs_dir, LEAST_DISK_BYTES, "tokens and logs", remedy)
    num_versions = {"train": 2, "eval": 1, "rollout": 0}[config.pipeline]
    remedy = f"free some, or mount {published} larger (in a container: --shm-size)"
    cluster = config.cluster
    elsewhere = cluster.address is not None and all(cluster.pool_of(role) for role in ("actor", "rollout"))
    versions = (0 if elsewhere else num_versions * weights) + LEAST_MEMORY_BYTES
    check_free("model", published, versions, "the weights that are served and those that come", remedy)


def check_free(key: str, directory: Path, num_bytes: int, what: str, remedy: str) -> None:
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise Refused(
            f"{key}: {what} need {num_bytes // MIB} MiB, and {directory} has {free // MIB} MiB left: {remedy}"
        )


def check_predictor(config: Config) -> None:
    """Whether lengths can be predicted as asked; a missing package or function is a `ConfigError`."""
    length_predictor(config.scheduler.length, max_new_tokens=max_trained_tokens(config), temperature=1.0)


def check_model(directory: Path) -> None:
    """Whether it can be loaded at all."""
    missing = "no config.json" if not (directory / "config.json").is_file() else "no weights"
    if not directory.is_dir():
        raise Refused(f"model.path: there is no directory {directory}; give one made by save_pretrained, or `tiny`")
    if missing == "no config.json" or not has_weights(directory):
        raise Refused(
            f"model.path: {directory} is no Hugging Face model directory ({missing} in it); "
            "give one made by save_pretrained, or `tiny`"
        )


def check_engine(engine: str, python: str) -> None:
    """Whether the environment that a foreign engine is to be started from has it."""
    remedy = "name the interpreter of an environment that has it, or give running servers as rollout.urls"
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({engine!r}) is None)"
    try:
        found = subprocess.run([python, "-c", look], capture_output=True, timeout=CHECK_S, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Refused(f"rollout.python: {python} cannot be run ({error}); {remedy}") from None
    if not found:
        raise Refused(f"rollout.python: {python} has no package {engine}; {remedy}")


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
