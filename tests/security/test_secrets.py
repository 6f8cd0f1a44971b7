"""A secret comes from the environment, and stays there: no file of a run, no output and no command line shows it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import Config, ConfigError, load_config
from penstock.config.lineage import changes, lineage
from penstock.config.secret_settings import resolved
from penstock.observe import log_lines
from penstock.redaction import HIDDEN, is_secret, redacted, redacted_text
from penstock.supervisor.run_directory import publishable
from penstock.supervisor.run_journal import RunJournal
from penstock.supervisor.states import RunState

SECRET = "Planted4a7e19f2"
LITERALS: list[tuple[str, Any]] = [
    ("dump.url", f"s3://key:{SECRET}@bucket/out"),
    ("dump.url", f"s3://key:a/{SECRET}/b@bucket/out"),
    ("dump.url", f"oss://bucket/out?Signature={SECRET}"),
    ("dump.url", f"odps://p/tables/t/ds=1?access_key={SECRET}"),
    ("rollout.urls", [f"http://user:{SECRET}@127.0.0.1:8000"]),
    ("rollout.urls", [f"http://{SECRET}@127.0.0.1:8000"]),
    ("rollout.urls", ["http://127.0.0.1:1", f"http://127.0.0.1:8000/?token={SECRET}"]),
    ("observe.opentelemetry", f"https://user:{SECRET}@collector:4318"),
    ("observe.opentelemetry", f"http://{SECRET}@collector:4318"),
    ("rollout.args", ["--api-key", SECRET]),
    ("rollout.args", ["--tp", "2", f"--hf-token={SECRET}"]),
    ("rollout.args", ["--ssl-keyfile-password", SECRET]),
    ("cluster.address", f"ray://user:{SECRET}@head:10001"),
    ("data.path", f"https://user:{SECRET}@host/rows.jsonl"),
    ("env.options", {"api_key": SECRET}),
    ("env.options", {"client": {"headers": {"Authorization": SECRET}}}),
    ("env.options", {"endpoint": f"https://host/v1?sig={SECRET}"}),
    ("env.options", {"command": f"serve --tp 2 --api-key {SECRET}"}),
    ("env.options", {"command": ["serve", f"serve --api-key={SECRET}"]}),
    ("env.options", {"command": ["docker", "run", "-e", f"WANDB_KEY={SECRET}"]}),
    ("env.options", {"command": ["curl", "-H", f"X-Api-Key: {SECRET}"]}),
    ("env.options", {"wandb_key": SECRET}),
    ("env.options", {"db": {"pwd": SECRET}}),
    ("env.reward_options", {"apiKey": SECRET}),
    ("env.reward_options", {"models": [{"hf_token": SECRET}]}),
    ("env.reward_options", {"fallback": f"sk-{SECRET}{SECRET}"}),
    ("env.mixture", {"a": {"options": {"password": SECRET}}}),
    ("validation.mixture", {"a": {"reward_options": {"secret": SECRET}}}),
]

DEEPER: list[tuple[str, Any]] = [
    ("env.options", {"api_key": 4719_0000_4711}),
    ("env.options", {"login": {"password": 4711.5}}),
    ("env.options", {"secrets": {"mine": SECRET}}),
    ("env.options", {"credentials": {"user": "me", "parts": [{"value": SECRET}]}}),
    ("env.options", {"default_headers": {"X-Mine": SECRET, "Accept": "text/html"}}),
    ("env.reward_options", {"client": {"headers": {"X-Mine": 4711}}}),
]
FORMS = [
    f"sk-proj-{SECRET}{SECRET}", f"hf_{SECRET * 3}", f"ghp_{SECRET * 3}", f"github_pat_{SECRET}_{SECRET}",
    f"glpat-{SECRET}-{SECRET}", f"npm_{SECRET * 3}", f"xoxb-{SECRET}", "AKIAIOSFODNN7EXAMPLE", "ASIAIOSFODNN7EXAMPLE",
]  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(f"runs_dir: {tmp_path / 'runs'}\n")
    return path


@pytest.mark.parametrize("on_command_line", [False, True])
@pytest.mark.parametrize(("key", "value"), [*LITERALS, *DEEPER], ids=lambda value: str(value)[:40])
def test_a_literal_secret_is_refused_without_being_shown(
    file: Path, key: str, value: Any, on_command_line: bool
) -> None:
    section, _, name = key.partition(".")
    if on_command_line:
        words = [f"{key}={yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix('...' + chr(10))}"]
    else:
        words = []
        file.write_text(yaml.safe_dump({section: {name: value}}))
    with pytest.raises(ConfigError) as refused:
        load_config(file, words)
    assert str(refused.value).startswith(key) and "environment variable" in str(refused.value)
    assert SECRET not in str(refused.value) and "471" not in str(refused.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dump.url", "s3://bucket/out"),
        ("dump.url", "odps://project/tables/name/ds=20250101"),
        ("rollout.urls", ["http://127.0.0.1:8000", "http://[::1]:8001/v1"]),
        ("env.options", {"prompt": "token: {question} secret: a@b.c", "eos_token": "</s>", "max_tokens": 4}),
        ("env.options", {"api_key": "${MY_KEY}", "answer_key": "solution", "tokenizer": "mine"}),
        ("env.reward_options", {"api_key_variable": "MY_KEY", "base_url": "http://127.0.0.1:8000/v1"}),
        (
            "env.options",
            {"headers": {"Accept": "text/html", "X-Mine": "${MY_KEY}"}, "token": None, "use_cookies": True},
        ),
        ("env.options", {"command": ["serve", "--api-key", "${MY_KEY}", "--max-tokens=4"], "limit": 4}),
    ],
)
def test_what_is_no_secret_is_accepted_and_written_as_it_is(file: Path, key: str, value: Any) -> None:
    section, _, name = key.partition(".")
    file.write_text(yaml.safe_dump({section: {name: value}}))
    assert publishable(load_config(file))[section][name] == value


def test_a_reference_is_looked_up_where_it_is_needed_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", SECRET)
    options = {"api_key": "${MY_KEY}", "nested": [{"token": "${MY_KEY}"}], "text": "costs ${MY_KEY}"}
    assert resolved(options, "env.options") == {
        "api_key": SECRET,
        "nested": [{"token": SECRET}],
        "text": "costs ${MY_KEY}",
    }
    config = Config.model_validate({"env": {"options": options}})
    assert SECRET not in repr(lineage(config)) + repr(publishable(config)) + repr(config)
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(
        ConfigError, match=r"env.options.api_key names the environment variable MY_KEY, which is not set"
    ):
        resolved(options, "env.options")


@pytest.mark.parametrize(("key", "value"), LITERALS, ids=lambda value: str(value)[:40])
def test_settings_that_a_program_made_are_written_without_their_secrets(key: str, value: Any) -> None:
    section, _, name = key.partition(".")
    written = repr(redacted({section: {name: value}}))
    assert SECRET not in written and HIDDEN in written
    assert SECRET not in redacted_text(f"cannot use {value!r}")


@pytest.mark.parametrize(("key", "value"), DEEPER, ids=lambda value: str(value)[:40])
def test_no_value_below_the_name_of_a_secret_is_written(key: str, value: Any) -> None:
    written = repr(redacted({"env": {key.partition(".")[2]: value}}))
    assert SECRET not in written and "471" not in written and HIDDEN in written


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form[:10])
def test_the_keys_of_well_known_services_are_found_under_any_name(file: Path, form: str) -> None:
    assert form not in redacted_text(f"cannot use {form}: refused") and redacted({"x": [form]}) == {"x": [HIDDEN]}
    with pytest.raises(ConfigError, match=r"env\.options\.x holds a secret"):
        load_config(file, [f"env.options={{x: 'a {form} b'}}"])


def test_the_default_settings_are_written_as_they_are() -> None:
    settings = Config().model_dump(mode="json")
    assert redacted(settings) == settings


def test_the_keys_of_servers_are_in_no_file_and_no_message(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", SECRET)
    config = load_config(file)
    assert config.rollout.api_key == SECRET
    monkeypatch.setenv("PENSTOCK_API_KEY", SECRET[::-1])
    other = load_config(file)
    assert SECRET not in repr(config) + repr(publishable(config)) + repr(changes(other, config))
    file.write_text(f"rollout: {{api_key: 1234567, urls: [x], admin_api_key: '{SECRET}\n")
    with pytest.raises(ConfigError) as refused:
        load_config(file)
    assert SECRET not in str(refused.value)
    file.write_text("rollout: {api_key: 1234567}\n")
    with pytest.raises(ConfigError, match=r"rollout.api_key .* \(got a secret\)"):
        load_config(file)


def test_a_log_line_and_its_traceback_show_no_secret(tmp_path: Path) -> None:
    with log_lines.logging_to(tmp_path / "log", "test"):
        try:
            raise OSError(f"cannot connect to https://user:{SECRET}@host/?X-Amz-Signature={SECRET}")
        except OSError:
            logging.getLogger("penstock").exception("the upload with --api-key %s failed", SECRET)
    text = (tmp_path / "log").read_text()
    assert SECRET not in text and "OSError: cannot connect to https://***@host" in text


def test_the_journal_shows_no_secret(tmp_path: Path) -> None:
    journal = RunJournal.create(tmp_path, run_id="r", runtime_dir=tmp_path)
    journal.move(RunState.STARTING, actor="test")
    journal.note("given_up", error=f"GET https://u:{SECRET}@host", api_key=SECRET)
    journal.move(RunState.FAILED, actor="test", reason=f"api_key={SECRET} was refused by https://u:{SECRET}@host")
    assert SECRET not in "".join(path.read_text() for path in tmp_path.glob("*.json*"))


@pytest.mark.parametrize(
    "name", ["api_key", "apiKey", "--api-key", "hf_token", "X-Amz-Security-Token", "AWS_SECRET_ACCESS_KEY"]
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("scheme", ["Bearer", "basic", "Token", "Digest"])
@pytest.mark.parametrize("form", ["Authorization: {}", "{{'Authorization': '{}'}}", '{{"authorization": "{}"}}'])
def test_a_header_shows_no_secret_behind_its_scheme(form: str, scheme: str) -> None:
    assert SECRET not in redacted_text(form.format(f"{scheme} {SECRET}"))


@given(
    st.text(), st.sampled_from(["api_key", "password", "Authorization"]), st.sampled_from(["", "Basic ", "Bearer  "])
)
def test_a_quoted_value_is_hidden_up_to_its_closing_quote(words: str, name: str, scheme: str) -> None:
    value = f"{scheme}{words} {SECRET}"
    for text in (repr({name: value}), json.dumps({name: value}), f"{name} = {json.dumps(value)}, and more"):
        shown = redacted_text(text)
        assert SECRET not in shown and HIDDEN in shown and shown.startswith(text[:2])
    assert json.loads(redacted_text(json.dumps({name: value, "other": 1})))["other"] == 1


@pytest.mark.parametrize(
    "text",
    [
        f'curl -H "Authorization: Basic {SECRET}" http://host',
        f"sent Authorization:  Bearer   {SECRET}",
        f"--api-key 'two {SECRET}'",
        f"'--api-key', 'two {SECRET}'",
        f'password="two {SECRET}" user="me"',
        f'message="it failed with api_key={SECRET} today"',
        f"--command 'fetch --api-key {SECRET}'",
        f"note=' api_key='{SECRET}'",
    ],
)
def test_a_secret_among_other_words_is_hidden(text: str) -> None:
    assert SECRET not in redacted_text(text)


def test_a_reference_and_the_words_beside_a_quoted_secret_stay() -> None:
    assert redacted_text('api_key="${MY_KEY}"') == 'api_key="${MY_KEY}"'
    assert redacted_text('api_key="a b" user="me"') == f'api_key="{HIDDEN}" user="me"'


@pytest.mark.parametrize(
    "piece",
    [
        "://a:",
        "http://a",
        "?a&",
        "??",
        "--a",
        "---",
        "key=",
        "token: ",
        "eyJaaaaaaaaaaa-",
        "sk-",
        "a",
        "'",
        "://a:b@?key=",
        'key="',
        "key='a\\",
        "token: Bearer  ",
        "--api-key=",
        "npm_",
        'a="b=\'c=\\"',
        "api_key=' ",
    ],
)
def test_no_text_takes_long(piece: str) -> None:
    text = f"{piece * 20_000} token: sk- http://? @"
    started = time.process_time()
    redacted_text(text)
    assert time.process_time() - started < 5.0, "a pattern that tries all pairs of places takes minutes"


@pytest.mark.parametrize("name", ["max_tokens", "eos_token", "tokenizer", "answer_key", "api_key_variable", "keys"])
def test_names_of_other_things(name: str) -> None:
    assert not is_secret(name)


ENVIRONMENT = """
import hashlib
from pathlib import Path

class Keyed:
    def __init__(self, task, *, api_key):
        Path({trace!r}).write_text(hashlib.sha256(api_key.encode()).hexdigest())
        self._key = api_key

    def reset(self, seed):
        return "a", {{}}

    def step(self, action):
        if {fails}:
            raise OSError("GET https://agent:" + self._key + "@host/v1?token=" + self._key + " failed")
        return "", float(action[:1] == "a"), True, False, {{}}
"""
SETTINGS = """
model: {{max_context: 32, tiny: {{num_layers: 1, hidden_size: 16}}}}
data: {{source: seeds, eval_tasks: 2}}
env: {{name: "keyed.py:Keyed", options: {{api_key: "${{MY_KEY}}"}}, group_size: 2, max_new_tokens: 2, workers: 1,
      max_attempts: 1}}
trainer: {{steps: 2, groups_per_step: 2}}
scheduler: {{group_filter: []}}
observe: {{trackers: [tensorboard], progress: false}}
dump: {{url: "file://{out}"}}
runs_dir: {runs}
"""
VARIABLES = ("MY_KEY", "PENSTOCK_API_KEY", "PENSTOCK_ADMIN_API_KEY", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY")


def shown(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


def command_lines(run: psutil.Process) -> Iterator[str]:
    for process in [run, *run.children(recursive=True)]:
        try:
            yield " ".join(process.cmdline())
        except psutil.Error:
            continue


@pytest.mark.integration
@pytest.mark.long
@pytest.mark.parametrize("fails", [False, True], ids=["completes", "fails"])
def test_a_run_with_secrets_leaves_none_behind(tmp_path: Path, fails: bool) -> None:
    trace, runs = tmp_path / "trace", tmp_path / "runs"
    (tmp_path / "keyed.py").write_text(ENVIRONMENT.format(trace=str(trace), fails=fails))
    (tmp_path / "run.yaml").write_text(SETTINGS.format(out=tmp_path / "out", runs=runs))
    environment = os.environ | dict.fromkeys(VARIABLES, SECRET)
    if not fails:
        environment["PENSTOCK_ADMIN_API_KEY"] = SECRET + "2"
    words = [sys.executable, "-m", "penstock.cli.main", "train", str(tmp_path / "run.yaml")]
    run = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    seen: set[str] = set()
    limit = time.monotonic() + 200
    while run.poll() is None and time.monotonic() < limit:
        seen.update(command_lines(psutil.Process(run.pid)))
        time.sleep(0.05)
    said = run.communicate(timeout=10)[0]
    assert (run.returncode == 0) != fails, said
    assert trace.exists(), "the environment was made with its key"
    (run_dir,) = runs.iterdir()
    assert "${MY_KEY}" in (run_dir / "config.yaml").read_text() and any("penstock.processes" in line for line in seen)
    assert SECRET not in said and not shown(runs) and not any(SECRET in line for line in seen)
    for command in (["status", str(run_dir)], ["status", str(run_dir), "--json"], ["logs", str(run_dir)]):
        answer = subprocess.run(
            [*words[:3], *command], env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        assert SECRET not in answer.stdout + answer.stderr


@pytest.mark.long
@pytest.mark.integration
def test_a_target_that_is_out_of_reach_is_refused_without_its_keys(file: Path) -> None:
    pytest.importorskip("s3fs")
    keys = {"AWS_ACCESS_KEY_ID": SECRET, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_EC2_METADATA_DISABLED": "true"}
    proxy = {"AWS_ENDPOINT_URL": f"http://user:{SECRET}@127.0.0.1:1", "AWS_MAX_ATTEMPTS": "1"}
    words = [sys.executable, "-m", "penstock.cli.main", "train", str(file), "dump.url=s3://bucket/out"]
    done = subprocess.run(
        words, env=os.environ | keys | proxy, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2 and "dump.url" in done.stderr, done.stderr
    assert SECRET not in done.stdout + done.stderr
