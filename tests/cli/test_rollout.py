"""`penstock rollout` and `penstock trajectories` without any process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from made_runs import make_run, note, penstock, take_step

from penstock.cli.train import policy_word
from penstock.config import Config
from penstock.observe import jsonl
from penstock.processes.layout import stages


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(
        "data: {source: seeds, eval_tasks: 9}\nenv: {name: guess_number}\nrun_id: trained"
    )
    return tmp_path / "run.yaml"


@pytest.mark.parametrize(
    ("overrides", "code", "message"),
    [
        (["dump.url=ftp://x/y"], 2, "unknown scheme ftp"),
        (["dump.url=/proc/nowhere"], 2, "dump.url: cannot write to /proc/nowhere"),
        (["dump.columns=[[a, int]]"], 2, "dump.columns.0.type"),
        (["dump.colums=[[a, string]]"], 2, "did you mean dump.columns?"),
        (["pipeline=train"], 2, "pipeline is train: `penstock train"),
        (["rollout.engine=vllm"], 2, "model.path tiny has no weights that rollout.engine vllm could load"),
        (["--checkpoint", "nothing"], 1, "no run named nothing"),
        (["policy.name=openai"], 2, "policy: name openai needs base_url"),
        (["policy={name: openai, base_url: host, model: m}"], 2, "does not begin with http:// or https://"),
        (["policy.model=teacher"], 2, "model is for name openai, not for model"),
        (
            ["policy.name=random", "dump.columns=[[token_ids, json], [logprobs, json]]"],
            2,
            "token_ids, logprobs: policy",
        ),
        (["policy.name=random", "scheduler.segment_length=8"], 2, "scheduler.segment_length counts tokens"),
        (["policy.name=random", "rollout.urls=[http://127.0.0.1:9]"], 2, "rollout.urls are servers of policy.name"),
        (["policy.name=random", "env.name=atropos", "data.eval_tasks=0"], 2, "env.name atropos trains on tokens"),
    ],
)
def test_what_cannot_work_starts_nothing(config: Path, overrides: list[str], code: int, message: str) -> None:
    runs = config.parent / "runs"
    result = penstock("rollout", config, f"runs_dir={runs}", "--runs-dir", runs, *overrides)
    assert result.exit_code == code and message in result.stderr, result.stderr
    assert not runs.exists()


def test_a_policy_without_tokens_cannot_be_trained(config: Path) -> None:
    result = penstock("train", config, f"runs_dir={config.parent / 'runs'}", "policy.name=random")
    assert result.exit_code == 2 and not (config.parent / "runs").exists()
    assert "policy.name random has no weights, tokens or log-probabilities to train with" in result.stderr


def test_the_key_of_an_endpoint_stays_in_the_environment(config: Path) -> None:
    words = ["policy.name=openai", "policy.base_url=http://h/v1", "policy.model=m", "policy.options={api_key: abc}"]
    result = penstock("rollout", config, *words)
    assert result.exit_code == 2 and "policy.options.api_key holds a secret" in result.stderr


def test_what_is_said_on_the_command_line_counts_most(config: Path) -> None:
    words = ["rollout", config, "--dry-run"]
    resolved = yaml.safe_load(penstock(*words).stdout)
    assert (resolved["pipeline"], resolved["data"]["eval_tasks"]) == ("rollout", 0)
    assert resolved["scheduler"]["group_filter"] == []
    assert resolved["run_id"] is None, "that of the file is a training run's"
    resolved = yaml.safe_load(penstock(*words, "scheduler.group_filter=[zero_variance]").stdout)
    assert [each["name"] for each in resolved["scheduler"]["group_filter"]] == ["zero_variance"]


def test_every_task_of_a_mixture_is_played(config: Path) -> None:
    rows = config.parent / "rows.jsonl"
    rows.write_text('{"question": "a"}\n{"question": "b"}\n')
    data = f"data: {{source: jsonl, path: {rows}, eval_tasks: 1}}"
    config.write_text(f"env: {{mixture: {{a.1: {{{data}}}, b: {{name: guess_number, data: {{source: seeds}}}}}}}}")
    words = ["rollout", config, "--dry-run"]
    resolved = Config.model_validate(yaml.safe_load(penstock(*words).stdout))
    assert {entry.data.eval_tasks for entry in resolved.env.mixture.values()} == {0}
    assert resolved.env.mixture["a.1"].data.source == "jsonl" and resolved.env.mixture["b"].name == "guess_number"
    assert penstock(*words, "env.mixture.b.data.eval_tasks=many").exit_code == 2
    resolved = Config.model_validate(yaml.safe_load(penstock(*words, "env.mixture.b.data.eval_tasks=3").stdout))
    assert resolved.env.mixture["b"].data.eval_tasks == 3


def test_a_configuration_says_which_command_it_is_for(config: Path) -> None:
    result = penstock("train", config, "pipeline=rollout")
    assert result.exit_code == 2 and f"`penstock rollout {config}` runs it" in result.stderr


def test_there_is_no_trainer() -> None:
    names = [spec.name for stage in stages(Config(pipeline="rollout")) for spec in stage]
    assert names == ["controller", "rollout-0", "env-0"]


def test_the_model_of_a_directory_with_weights(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert policy_word(str(tmp_path), tmp_path) == [f"model.path={tmp_path}"]


def test_a_run_without_a_whole_checkpoint(config: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    (make_run(runs / "mine", "failed") / "checkpoints" / "step_3").mkdir(parents=True)
    result = penstock("rollout", config, "--checkpoint", "mine", "--runs-dir", runs)
    assert result.exit_code == 1 and "--checkpoint mine: run mine has no complete checkpoint" in result.stderr


def test_the_table_and_the_status_count_tasks(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "mine", "running", settings={"pipeline": "rollout", "env": {"name": "x"}})
    note(run_dir, "tasks", total=40)
    for step in (10, 20):
        take_step(run_dir, step, tasks=40, episodes_total=4 * step, tokens_generated_total=100 * step)
    assert "20/40" in penstock("runs", "--runs-dir", tmp_path).stdout
    status = json.loads(penstock("status", run_dir, "--json").stdout)
    progress = status["progress"]
    assert (progress["phase"], progress["unit"], progress["step"], progress["steps"]) == ("playing", "task", 20, 40)
    assert progress["eta_seconds"] == pytest.approx(20.0, rel=0.01) and progress[
        "episodes_per_second"
    ] == pytest.approx(4.0, rel=0.01)
    shown = penstock("status", run_dir).stdout
    assert "20/40" in shown and "80 trajectories" in shown and "trajectories/s  4" in shown and "trained" not in shown


def sample(group: int, reward: float) -> dict[str, object]:
    return {
        "trajectory": f"train/{group}/0",
        "group": group,
        "episode": 0,
        "task_id": f"t/{group}",
        "policy_version_min": 3,
        "policy_version_max": 4,
        "status": "completed",
        "stop_reason": "stop",
        "reward": reward,
        "num_turns": 1,
        "prompt_tokens": 5,
        "response_tokens": 2,
        "seconds": 1.0,
        "messages": json.dumps([{"role": "user", "content": "say [b]"}, {"role": "assistant", "content": "one\ntwo"}]),
    }


@pytest.fixture
def sampled(tmp_path: Path) -> Path:
    """A run of which samples are left."""
    run_dir = make_run(tmp_path / "mine", "completed")
    (run_dir / "trajectories").mkdir()
    for group in range(5):
        jsonl.append(run_dir / "trajectories" / f"step_{group:06d}.jsonl", sample(group, reward=0.1 * (group % 3)))
    return run_dir


@pytest.mark.parametrize(
    ("words", "groups"),
    [
        ([], [4, 3, 2]),
        (["--best"], [2, 4, 1]),
        (["--worst", "-n", "1"], [3]),
        (["--group", "1"], [1]),
        (["-n", "9"], [4, 3, 2, 1, 0]),
    ],
)
def test_trajectories_are_chosen(sampled: Path, words: list[str], groups: list[int]) -> None:
    rows = json.loads(penstock("trajectories", sampled, *words, "--json").stdout)
    assert [row["group"] for row in rows] == groups
    assert rows[0]["messages"][1] == {"role": "assistant", "content": "one\ntwo"}


def test_the_branches_of_an_episode_are_shown_one_after_the_other(tmp_path: Path) -> None:
    def said(*texts: str) -> list[dict[str, str]]:
        return [{"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(texts)]

    run_dir = make_run(tmp_path / "mine", "completed")
    (run_dir / "trajectories").mkdir()
    branches = [said("ask", "one", "more", "two"), said("alone", "three"), said("ask", "one", "else", "four")]
    row = sample(4, reward=1.0) | {"messages": json.dumps(branches[-1]), "branches": json.dumps(branches)}
    jsonl.append(run_dir / "trajectories" / "step_000001.jsonl", row)
    shown = [line.strip() for line in penstock("trajectories", run_dir).stdout.splitlines()][1:-1]
    assert [" ".join(line.split()) for line in shown] == [
        "branch 1 of 3",
        "user ask",
        "assistant one",
        "user more",
        "assistant two",
        "branch 2 of 3",
        "user alone",
        "assistant three",
        "branch 3 of 3, after 2 messages of branch 1",
        "user else",
        "assistant four",
    ]
    (read,) = json.loads(penstock("trajectories", run_dir, "--json").stdout)
    assert read["branches"] == branches


def test_trajectories_are_read_as_they_were_said(sampled: Path) -> None:
    shown = penstock("trajectories", sampled, "--group", 4).stdout.splitlines()
    assert [line.rstrip() for line in shown] == [
        "train/4/0  reward 0.10  completed (stop)  version 3-4  1 turn  5 + 2 tokens  0:01  t/4",
        "  user      say [b]",
        "  assistant one",
        "            two",
        "",
    ]


def test_nothing_to_show_is_one_error(sampled: Path, tmp_path: Path) -> None:
    result = penstock("trajectories", sampled, "--group", 77)
    assert result.exit_code == 1 and "run mine has no trajectories of group 77 to show" in result.stderr
    assert penstock("trajectories", make_run(tmp_path / "new", "running")).exit_code == 1
