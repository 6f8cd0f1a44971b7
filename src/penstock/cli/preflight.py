"""Checks that this machine can run a configuration, before a run starts any process or writes any file."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil

from penstock.cli.refusal import Refused
from penstock.config import Config, ConfigError, TrainerConfig
from penstock.config.imports import check_closed
from penstock.envs.registry import check_environment, executes_answers, needs_sandbox
from penstock.envs.rewards import dataset_rule
from penstock.envs.rewards.reward import reads_in_sandbox
from penstock.envs.rewards.reward_box import check_reward_box
from penstock.model.chat import ChatTokenizer
from penstock.model.files import (
    attention_heads,
    check_no_code,
    has_weights,
    max_positions,
    num_experts,
    num_parameters,
)
from penstock.processes.layout import slots_of
from penstock.processes.visible import has_accelerator
from penstock.rollout.openai_client import check_endpoint
from penstock.sandbox import SandboxUnavailable, confinement, select
from penstock.scheduler.filters import FilterChain
from penstock.scheduler.length_prediction import length_predictor
from penstock.supervisor import runtime
from penstock.supervisor.run_directory import existing_parent

CHECK_S = 30.0
MIB = 2**20
LEAST_DISK_BYTES = 256 * MIB
"""Disk space for a tiny model's checkpoints, tokens and logs."""
PUBLISHED = 4
"""Most versions of the weights in shared memory: those that the publisher keeps, and the next one."""
WITH_OPTIMIZER = 12
"""Bytes of a trained parameter in a checkpoint."""
TRACKERS = {name: name for name in ("wandb", "trackio", "mlflow", "swanlab")} | {"tensorboard": "tensorboardX"}
"""Package of each tracker. Its extra has the tracker's name."""
UPLOADS_TO = {"trackio": ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"), "mlflow": ("MLFLOW_TRACKING_URI",)}
"""Environment variables of which one must say where a tracker's service is. The others have a service of their own."""
OTLP = "opentelemetry.exporter.otlp.proto.http"
"""Package that sends spans; it brings the SDK."""
LEAST_MEMORY_BYTES = 32 * MIB
"""Shared memory for a tiny model's weights."""


def check(config: Config) -> None:
    """Run all checks. Raises `Refused` or `ConfigError` with a remedy."""
    if config.policy.has_tokens:
        check_policy(config)
    if config.pipeline == "eval" and not config.validation_tasks:
        raise Refused("there are no tasks to evaluate: set data.eval_tasks or validation.tasks above 0")
    check_settings(config)
    check_packages(config)
    check_sandbox(config)
    check_room(config)
    earlier = config.scheduler.length.learn_from
    if earlier is not None and not (Path(earlier) / "pool" / "index").is_dir():
        raise Refused(f"scheduler.length.learn_from: {earlier} is not the directory of a run: it has no pool/index")
    if config.scheduler.dispatch.policy in ("sjf", "ljf"):  # raises ConfigError for a missing package or function
        length_predictor(config.scheduler.length, limit=lambda task: 1, temperature=lambda task: 1.0)
    if config.rollout.engine != "penstock" and config.num_servers and not config.rollout.urls:
        check_engine(config.rollout.engine, config.rollout.python or sys.executable)
    if config.dump.url is not None and config.pipeline != "eval":
        from penstock.store.dumps.targets import open_target

        open_target(config.dump).check()
    if config.rollout.port and config.num_servers and not config.rollout.urls and config.cluster.address is None:
        for number in range(config.rollout.servers):
            check_port(config.rollout.host, config.rollout.port + number)
    if config.observe.metrics_port:
        check_port(config.observe.metrics_host, config.observe.metrics_port, prefix="observe.metrics_")
    if config.policy.name == "openai":
        check_endpoint(config.policy)


def check_policy(config: Config) -> None:
    """Check that the model can be loaded and shared as the configuration says. Raises `Refused`."""
    if config.model.path != "tiny" and config.uses_given_weights:
        ChatTokenizer.load(Path(config.model.path))
    elif config.model.path != "tiny":
        check_model(Path(config.model.path))
        check_context(Path(config.model.path), config.model.max_context)
    check_heads(config)
    check_experts(config)


def check_settings(config: Config) -> None:
    """Check settings with the same result on every machine that has the run's files. All named objects must exist and
    accept their options: environments, rewards, task files, filters. The pools must have the slots."""
    if config.pipeline == "train" and not config.policy.has_tokens:
        raise ConfigError(
            f"policy.name {config.policy.name} has no weights, tokens or log-probabilities to train with: use "
            "`penstock rollout` or `penstock eval`, or policy.name model"
        )
    FilterChain(config.scheduler.group_filter)
    for key, settings in config.environments.by_key.items():
        check_environment(key, settings)
        data = settings.data
        for name, path in (("path", data.path), ("eval_path", data.eval_path)):
            if data.has_rows and path is not None and not Path(path).exists():
                where = f"data.{name}" if key == "env" else f"{key}.data.{name}"
                raise Refused(f"{where}: there is no file {path}")
    if config.cluster.address is not None:
        slots_of(config)


def check_packages(config: Config) -> None:
    """Check that the extras that the configuration needs are installed. Raises `Refused`."""
    sources = {settings.data.source for settings in config.environments.by_key.values()}
    rewards = {settings.reward for settings in config.environments.by_key.values()}
    for is_needed, key, package, extra in (
        (config.trainer.lora is not None, "trainer.lora", "peft", "lora"),
        *((name in config.observe.trackers, "observe.trackers", TRACKERS[name], name) for name in TRACKERS),
        (config.observe.opentelemetry is not None, "observe.opentelemetry", OTLP, "otel"),
        ("reasoning_gym" in sources, "data.source", "reasoning_gym", "tasks"),
        ("huggingface" in sources, "data.source", "datasets", "huggingface"),
        ("math" in rewards, "env.reward", "math_verify", "math"),
        ("judge" in rewards, "env.reward", "openai", "judge"),
        (config.cluster.address is not None, "cluster.address", "ray", "ray"),
    ):
        if is_needed and not _is_installed(package):
            raise Refused(f"{key} needs the package {package}: pip install 'penstock[{extra}]'")
    for tracker in config.observe.trackers if config.observe.tracker_upload else ():
        variables = UPLOADS_TO.get(tracker, ())
        if variables and not any(os.environ.get(name) for name in variables):
            raise Refused(
                f"observe.tracker_upload: {tracker} does not know where to send the points: set the environment "
                f"variable {' or '.join(variables)}, or set observe.tracker_upload to false"
            )


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # a parent of the package
        return False


def check_sandbox(config: Config) -> None:
    """Check that a sandbox works here, if an environment or a reward needs one. Raises `SandboxUnavailable`, and
    `ConfigError` if a reward's sandbox would lack what the reward imports. On a cluster each environment worker finds
    out by itself. Raises `Refused` for an environment that executes answers."""
    select(config.env.sandbox)
    for key, settings in config.environments.by_key.items():
        if executes_answers(settings.name) and config.env.sandbox != "none":
            raise Refused(
                f"{key}.name {settings.name}: GEM executes or parses the answer in the environment worker, and no "
                "sandbox confines that. Use single_turn with data.source reasoning_gym, or with env.reward math or "
                "code; or set env.sandbox: none, and text of the policy can run as your user"
            )
    needing = [each for key, settings in config.environments.by_key.items() for each in needs_sandbox(key, settings)]
    if not needing or config.cluster.address is not None:
        return
    try:
        confinement()
    except SandboxUnavailable as error:
        raise SandboxUnavailable(f"{'; '.join(needing)}; and {error}") from None
    for settings in config.environments.by_key.values():
        for reward in (settings.reward, *([dataset_rule.NAME] if dataset_rule.unaudited_of(settings) else [])):
            if reward is not None and reads_in_sandbox(reward):
                check_reward_box(reward)


def check_room(config: Config) -> None:
    """Check that the run has room for what it will certainly write: weights in shared memory and, if the run trains,
    checkpoints on disk and weights of sleeping engines in main memory. Raises `Refused`."""
    is_loaded = config.policy.has_tokens and config.model.path != "tiny" and not config.uses_given_weights
    parameters = num_parameters(Path(config.model.path)) if is_loaded else 0
    runs_dir, published = existing_parent(Path(config.runs_dir)), runtime.base()
    files, remedy, checkpoints = "tokens and logs", "free some, or set runs_dir to another disk", 0
    if config.pipeline == "train":
        files, remedy = f"checkpoints, {files}", f"{remedy}, or lower trainer.keep_checkpoints"
        num_kept = config.trainer.keep_checkpoints + bool(config.validation.every)
        checkpoints = (num_kept + 1) * parameters * checkpoint_bytes(config.trainer)
    check_free("runs_dir", runs_dir, checkpoints + LEAST_DISK_BYTES, files, remedy)
    cluster = config.cluster
    elsewhere = cluster.address is not None and all(cluster.pool_of(role) for role in ("actor", "rollout"))
    num_versions = PUBLISHED if config.has_trainer and not elsewhere else 0
    if config.sends_adapters:  # only their base is large, and foreign engines load it by themselves
        num_versions = min(num_versions, int(not config.engine_serves_adapters))
    # "auto" on a machine without an accelerator is float32: this is a lower bound, as all that is counted here.
    served = {"float32": 4, "bfloat16": 2, "auto": 4 if config.model.device == "cpu" else 2}[config.model.dtype]
    remedy = f"free some, or mount {published} larger (in a container: --shm-size)"
    files = "published weights and the next ones"
    check_free("model", published, num_versions * parameters * served + LEAST_MEMORY_BYTES, files, remedy)
    keeps_weights = config.gives_devices and config.engine_serves_adapters and has_accelerator(config)
    if keeps_weights and cluster.address is None:
        check_kept_weights(config.rollout.servers, parameters * served)


def check_kept_weights(num_servers: int, num_bytes: int) -> None:
    """Check that the weights of all servers, `num_bytes` each, have room in main memory. Raises `Refused`."""
    available = psutil.virtual_memory().available
    if available < num_servers * num_bytes:
        raise Refused(
            f"rollout.servers: while the trainer has the device, each of {num_servers} engines keeps its weights in "
            f"main memory, {num_bytes // MIB} MiB, and the machine has {available // MIB} MiB left: free some, lower "
            "rollout.servers, or choose another scheduler.mode"
        )


def checkpoint_bytes(config: TrainerConfig) -> int:
    """Return the bytes of a checkpoint per parameter of the policy: weights and two moments of the optimizer in
    float32, and what critic, reference and proximal copy have."""
    policy = 4 if config.lora is not None else WITH_OPTIMIZER
    has_snapshot = config.objective.proximal == "snapshot" and config.lora is None
    copies = 4 * (("reference" in config.roles) + has_snapshot)
    return policy + copies + (WITH_OPTIMIZER if config.critic is not None else 0)


def check_free(key: str, directory: Path, num_bytes: int, files: str, remedy: str) -> None:
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        sizes = f"{num_bytes // MIB} MiB, and {directory} has {free // MIB} MiB left"
        raise Refused(f"{key}: {files} need {sizes}: {remedy}")


def check_model(directory: Path) -> None:
    """Check that a model directory has a configuration and weights, and needs no code of its own. Raises `Refused`,
    `ModelError`."""
    remedy = "set it to a directory made by save_pretrained, or to `tiny`"
    if not directory.is_dir():
        raise Refused(f"model.path: there is no directory {directory}; {remedy}")
    has_config = (directory / "config.json").is_file()
    if not has_config or not has_weights(directory):
        missing = "weights" if has_config else "config.json"
        raise Refused(f"model.path: {directory} is not a Hugging Face model directory (no {missing} in it); {remedy}")
    check_no_code(directory)  # ModelError says what a process of the run would say later
    ChatTokenizer.load(directory)


def check_context(directory: Path, max_context: int) -> None:
    """Check that the model was made for a context of this length. Raises `Refused`."""
    longest = max_positions(directory)
    if longest is not None and max_context > longest:
        raise Refused(
            f"model.max_context ({max_context}) exceeds the {longest} tokens that the model was made for (see "
            f"{directory / 'config.json'}): lower it, or extend the model there with rope_scaling"
        )


def check_heads(config: Config) -> None:
    """Check that the ranks can share the heads of the model, if they share passes. Raises `Refused`."""
    tiny = config.model.tiny
    own = config.model.path == "tiny"
    heads = (tiny.num_heads, tiny.num_kv_heads) if own else attention_heads(Path(config.model.path))
    if heads is not None and (fault := config.trainer.distributed.fault_of_heads(*heads)):
        raise Refused(fault)


def check_experts(config: Config) -> None:
    """Check that the ranks can share the experts of the model, if they are to. Raises `Refused`."""
    trainer = config.trainer
    if trainer.distributed.expert_parallel:
        own, directory = config.model.path == "tiny", Path(config.model.path)
        experts, size = (0, 0) if own else (num_experts(directory), num_parameters(directory))
        if fault := trainer.distributed.fault_of_experts(experts, ranks=trainer.ranks, num_parameters=size):
            raise Refused(fault)


def check_engine(engine: str, python: str) -> None:
    """Check that the foreign engine is installed in the environment that it will be started from. Raises `Refused`,
    and `ConfigError` if another user could have put that environment into the working directory."""
    remedy = "set it to the interpreter of an environment that has it, or set rollout.urls to running servers"
    if "/" in python and not Path(python).is_absolute():
        check_closed(Path.cwd())
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({engine!r}) is None)"
    closed = os.environ | {"PYTHONSAFEPATH": "1"}  # of an older Python, `-P` would be an error
    try:
        looked = subprocess.run([python, "-c", look], capture_output=True, timeout=CHECK_S, check=False, env=closed)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Refused(f"rollout.python: {python} cannot be run ({error}); {remedy}") from None
    if looked.returncode:
        raise Refused(f"rollout.python: {python} has no package {engine}; {remedy}")


def check_port(host: str, port: int, *, prefix: str = "rollout.") -> None:
    """Check that a server could listen on the port. It may still fail to listen later. `prefix`: of the settings
    for host and port. Raises `Refused`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise Refused(f"{prefix}host: {host} cannot be resolved ({error.strerror}); use 127.0.0.1") from None
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise Refused(
                f"{prefix}port: cannot listen on {host}:{port} ({error.strerror}); choose another, or 0 for a free one"
            ) from None
