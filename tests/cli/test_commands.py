"""The commands, without starting a single process of a run."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from made_runs import penstock

from penstock.cli import preflight
from penstock.cli.refusal import Refused
from penstock.cli.train import why_not_started
from penstock.config import Config, ConfigError, TrainerConfig
from penstock.supervisor.log_files import end_of


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(f"runs_dir: {tmp_path / 'runs'}\nobserve: {{progress: false}}\n")
    return path


def test_a_wrong_key_exits_2_and_creates_nothing(config: Path, tmp_path: Path) -> None:
    result = penstock("train", config, "trainer.lerning_rate=1")
    assert result.exit_code == 2
    assert "trainer.learning_rate" in result.stderr
    assert not (tmp_path / "runs").exists()


def test_dry_run_prints_the_configuration_without_its_secrets(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", "hunter2")
    monkeypatch.setenv("PENSTOCK_ADMIN_API_KEY", "hunter2")
    result = penstock("train", config, "--dry-run", "trainer.steps=7")
    assert result.exit_code == 0
    assert yaml.safe_load(result.stdout)["trainer"]["steps"] == 7
    assert "hunter2" not in result.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("env.name=guess_numbr", "did you mean guess_number?"),
        ("env.reward=maths", "did you mean math?"),
        ("scheduler.group_filter=[zero_varianc]", "zero_variance"),
    ],
)
def test_dry_run_looks_for_what_is_named(config: Path, override: str, message: str) -> None:
    result = penstock("train", config, "--dry-run", override)
    assert result.exit_code == 2 and message in result.stderr, result.stderr


GAMES = """
class Coins:
    def __init__(self, task, limit, *, colour="red"): ...
    def reset(self, seed): ...
    def step(self, action): ...

class Length:
    def __init__(self, *, best=100): ...
    def score(self, answer, payload): ...

def prefix(answer, payload, *, letters=3): ...

class Dice(Coins):
    def __init__(self, *args, sides=6): ...
"""


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["env.name=games.py:Coins", "env.options={limit: 3, color: blue}"],
            "env.options.color: Coins (games.py, line 2) has no such option; did you mean env.options.colour?",
        ),
        (
            ["env.name=games.py:Coins", "env.options={limit: 3, xyz: 1}"],
            "env.options.xyz: Coins (games.py, line 2) has no such option; its options are limit, colour",
        ),
        (["env.name=games.py:Coins"], "env.options: Coins (games.py, line 2) needs limit: set env.options.limit"),
        (["env.options.style=kind"], "env.options.style: SingleTurn (single_turn.py, line "),
        (
            ["env.mixture.a={name: games.py:Coins, options: {limit: 3, limits: 4}}"],
            "env.mixture.a.options.limits: Coins (games.py, line 2) has no such option; did you mean "
            "env.mixture.a.options.limit?",
        ),
        (
            ["validation.mixture.a={name: games.py:Coins}"],
            "validation.mixture.a.options: Coins (games.py, line 2) needs limit",
        ),
        (
            ["env.reward=games.py:Length", "env.reward_options.beast=1"],
            "env.reward_options.beast: Length (games.py, line 7) has no such option; did you mean "
            "env.reward_options.best?",
        ),
        (
            ["env.reward=games.py:prefix", "env.reward_options.payload=1"],
            "env.reward_options.payload: prefix (games.py, line 11) has no such option; its options are letters",
        ),
        (
            ["env.reward=broken.py:prefix"],
            "broken.py cannot be read: SyntaxError: '(' was never closed (broken.py, line 2)",
        ),
    ],
)
def test_a_misfitting_option_is_found_before_anything_starts(
    config: Path, tmp_path: Path, overrides: list[str], message: str
) -> None:
    (tmp_path / "games.py").write_text(GAMES)
    (tmp_path / "broken.py").write_text("\ndef prefix(")
    result = penstock("train", config, *overrides)
    assert result.exit_code == 2 and message in result.stderr, result.stderr
    assert not (tmp_path / "runs").exists()


def test_fitting_options_are_accepted(config: Path, tmp_path: Path) -> None:
    (tmp_path / "games.py").write_text(GAMES)
    fitting = ["env.name=games.py:Coins", "env.options={limit: 3, colour: blue}", "env.reward=games.py:prefix"]
    assert penstock("train", config, "--dry-run", *fitting, "env.reward_options.letters=2").exit_code == 0
    assert penstock("train", config, "--dry-run", "env.name=games.py:Dice", "env.options.sides=3").exit_code == 0


@pytest.mark.parametrize(
    ("overrides", "source"),
    [
        ([], "reasoning_gym"),
        (["env.name=guess_number"], "seeds"),
        (["env.name=games.py:Coins", "env.options.limit=3"], "seeds"),
        (["env.name=guess_number", "data.dataset=chain_sum"], "reasoning_gym"),
        (["env.name=guess_number", "data.source=reasoning_gym"], "reasoning_gym"),
    ],
)
def test_dry_run_shows_the_source_of_tasks_that_fits_the_environment(
    config: Path, tmp_path: Path, overrides: list[str], source: str
) -> None:
    (tmp_path / "games.py").write_text(GAMES)
    result = penstock("train", config, "--dry-run", *overrides)
    assert yaml.safe_load(result.stdout)["data"]["source"] == source


@pytest.mark.parametrize(
    ("override", "code", "word"),
    [
        ("model.path=/no/such/model", 1, "/no/such/model"),
        ("model.path=/no/such/model", 1, "there is no directory"),
        ("model.path=/", 1, "no config.json"),
        ("env.name=singel_turn", 2, "single_turn"),
        ("env.reward=maths", 2, "did you mean math?"),
        ("trainer={ranks: 4, distributed: {context_ranks: 3}}", 2, "context_ranks (3) does not divide ranks (4)"),
        ("trainer={ranks: 3, distributed: {context_ranks: 3}}", 1, "3 ranks cannot share the 4 attention heads"),
        ("trainer={ranks: 2, distributed: {strategy: fsdp, expert_parallel: true}}", 1, "the model has no experts"),
        ("trainer={ranks: 2, distributed: {strategy: ddp, expert_parallel: true}}", 2, "is for strategy fsdp"),
        ("env.reward=nowhere.py:Reward", 2, "there is no"),
    ],
)
def test_what_cannot_run_here_is_refused_before_anything_is_created(
    config: Path, tmp_path: Path, override: str, code: int, word: str
) -> None:
    result = penstock("train", config, override)
    assert result.exit_code == code
    assert word in result.stderr
    assert not (tmp_path / "runs").exists()


def test_a_busy_port_is_named(config: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = penstock("train", config, f"rollout.port={port}")
    assert result.exit_code == 1
    assert f"127.0.0.1:{port}" in result.stderr
    assert not (tmp_path / "runs").exists()


def test_a_failure_before_the_first_process_is_recorded(config: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "mine"
    run_dir.mkdir(parents=True)
    (run_dir / "pool").write_text("a file where a folder belongs")
    result = penstock("train", config, "run_id=mine")
    assert result.exit_code == 1
    assert "pool" in result.stderr
    assert "failed" in penstock("status", "mine", "--runs-dir", tmp_path / "runs").stdout
    again = penstock("train", config, "run_id=mine")
    assert again.exit_code == 1 and "exists already" in again.stderr


def test_envs_are_listed() -> None:
    assert "single_turn" in penstock("envs").stdout


def test_help_needs_nothing_heavy() -> None:
    code = "import sys, penstock.cli.main; print([m for m in ('pydantic', 'aiohttp', 'numpy') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.integration
def test_a_detached_run_outlives_the_command_that_started_it(config: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "mine"
    run_dir.mkdir(parents=True)
    (run_dir / "pool").write_text("a file where a folder belongs")
    words = ["train", str(config), "run_id=mine", "--detach"]
    result = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", *words], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert f"run mine started in {run_dir}" in result.stdout
    log = run_dir / "logs" / "supervisor.log"
    give_up = time.monotonic() + 120
    while "pool" not in log.read_text():
        assert time.monotonic() < give_up, log.read_text()
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("overrides", "code", "message"),
    [
        (["data.source=jsonl", "data.path=nowhere.jsonl"], 1, "data.path: there is no file nowhere.jsonl"),
        (["scheduler.length.learn_from=nowhere"], 1, "nowhere is not the directory of a run"),
        (["scheduler.dispatch.policy=sjf", "scheduler.length.embedding=no_such:thing"], 2, "cannot be imported"),
    ],
)
def test_what_is_missing_is_said_before_anything_starts(
    config: Path, tmp_path: Path, overrides: list[str], code: int, message: str
) -> None:
    result = penstock("train", config, *overrides)
    assert result.exit_code == code and message in result.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("override", "package", "remedy"),
    [
        ("trainer.lora.rank=8", "peft", "trainer.lora needs the package peft: pip install 'penstock[lora]'"),
        ("observe.trackers=[wandb]", "wandb", "pip install 'penstock[wandb]'"),
        ("observe.trackers=[tensorboard]", "tensorboardX", "pip install 'penstock[tensorboard]'"),
        ("observe.trackers=[mlflow]", "mlflow", "pip install 'penstock[mlflow]'"),
        (
            "observe.opentelemetry=http://localhost:4318",
            "opentelemetry.exporter.otlp.proto.http",
            "needs the package opentelemetry.exporter.otlp.proto.http: pip install 'penstock[otel]'",
        ),
        ("seed=0", "reasoning_gym", "data.source needs the package reasoning_gym: pip install 'penstock[tasks]'"),
    ],
)
def test_a_missing_package_is_named_before_anything_starts(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, package: str, remedy: str
) -> None:
    installed = preflight.find_spec
    monkeypatch.setattr(preflight, "find_spec", lambda name: None if name == package else installed(name))
    result = penstock("train", config, override)
    assert result.exit_code == 1 and remedy in " ".join(result.stderr.split())
    assert not (tmp_path / "runs").exists()


def test_a_tracker_that_has_no_place_to_send_to_is_refused(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "find_spec", lambda name: name)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    result = penstock("train", config, "observe.trackers=[mlflow]", "observe.tracker_upload=true")
    said = " ".join(result.stderr.split())
    assert result.exit_code == 1 and "mlflow does not know where to send the points" in said
    assert "MLFLOW_TRACKING_URI" in said and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("full", "message"),
    [("disk", "runs_dir: checkpoints, tokens and logs need 256 MiB"), ("shm", "the next ones need 32 MiB")],
)
def test_too_little_room_is_said_before_anything_starts(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str, message: str
) -> None:
    usage = shutil.disk_usage(tmp_path)
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(preflight.runtime, "base", lambda: tmp_path / "shm")
    is_full = {"disk": lambda path: path == tmp_path, "shm": lambda path: path == tmp_path / "shm"}[full]
    free = {True: usage._replace(free=1), False: usage._replace(free=2**40)}
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: free[is_full(path)])
    result = penstock("train", config)
    assert result.exit_code == 1 and message in result.stderr and str(tmp_path) in result.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("pipeline", "num_versions"), [("train", 4), ("eval", 0), ("rollout", 0)])
def test_only_training_needs_room_for_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipeline: str, num_versions: int
) -> None:
    needed: dict[str, int] = {}
    monkeypatch.setattr(preflight, "num_parameters", lambda directory: 2**39)
    monkeypatch.setattr(preflight, "check_free", lambda key, directory, size, *words: needed.update({key: size}))
    settings = {"pipeline": pipeline, "runs_dir": str(tmp_path), "model": {"path": str(tmp_path)}}
    preflight.check_room(Config.model_validate(settings))
    expected = 3 * 12 * 2**39 if pipeline == "train" else 0  # two checkpoints and the next one
    assert needed["runs_dir"] - preflight.LEAST_DISK_BYTES == expected
    assert needed["model"] // 2**40 == num_versions, "bfloat16"


@pytest.mark.parametrize(
    ("mode", "left", "is_refused"), [("colocated", 5, True), ("colocated", 6, False), ("one_step_off", 0, False)]
)
def test_engines_that_keep_their_weights_in_main_memory_need_room_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, left: int, is_refused: bool
) -> None:
    monkeypatch.setattr(preflight, "num_parameters", lambda directory: 2**30)
    monkeypatch.setattr(preflight, "check_free", lambda *_: None)
    monkeypatch.setattr(preflight.psutil, "virtual_memory", lambda: SimpleNamespace(available=left * 2**30))
    config = Config.model_validate(
        {
            "model": {"path": str(tmp_path), "device": "cuda"},
            "rollout": {"engine": "vllm", "servers": 3},
            "trainer": {"lora": {"rank": 2}},
            "scheduler": {"mode": mode, "max_staleness": int(mode != "colocated")},
        }
    )
    told = "each of 3 engines keeps its weights in main memory, 2048 MiB, .* 5120 MiB left"
    with pytest.raises(Refused, match=told) if is_refused else nullcontext():
        preflight.check_room(config)


@pytest.mark.parametrize(
    ("trainer", "size"),
    [
        ({}, 12),
        ({"lora": {"rank": 4}}, 4),
        ({"critic": {}}, 24),
        ({"objective": {"name": "decoupled", "proximal": "snapshot", "kl_coef": 0.1}}, 20),
    ],
)
def test_a_checkpoint_has_all_that_a_run_goes_on_with(trainer: dict[str, Any], size: int) -> None:
    assert preflight.checkpoint_bytes(TrainerConfig.model_validate(trainer)) == size


def test_nothing_is_asked_of_a_dump_that_an_evaluation_never_writes(tmp_path: Path) -> None:
    settings = {"data": {"source": "seeds"}, "env": {"name": "guess_number"}, "dump": {"url": "ftp://x/y"}}
    preflight.check(Config.model_validate({"pipeline": "eval", "runs_dir": str(tmp_path), **settings}))
    with pytest.raises(ConfigError, match="unknown scheme ftp"):
        preflight.check(Config.model_validate({"pipeline": "rollout", "runs_dir": str(tmp_path), **settings}))


@pytest.mark.integration
def test_a_detached_run_that_is_refused_says_one_sentence(config: Path, tmp_path: Path) -> None:
    logs = tmp_path / "runs" / "mine" / "logs"
    logs.mkdir(parents=True)
    (logs / "supervisor.log").write_text("error: long ago\n")
    (logs.parent / "lineage.json").write_text("{}")
    result = penstock("train", config, "run_id=mine", "--detach")
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        f"error: {logs.parent} holds a run without its state.json: choose another run_id, or move it away"
    ]


def test_the_refusal_is_found_among_what_others_write(tmp_path: Path) -> None:
    log = tmp_path / "supervisor.log"
    log.write_text("error: long ago\n")
    begun = end_of(log)
    with log.open("a") as file:
        file.write("step 1\nerror: run mine is already being supervised\nstep 2\n")
    assert why_not_started("mine", log, begun) == "run mine is already being supervised"
    log.write_text("error: long ago\nTraceback\n")
    assert why_not_started("mine", log, begun).splitlines()[0] == "run mine did not start"
    assert "long ago" not in why_not_started("mine", log, begun)
