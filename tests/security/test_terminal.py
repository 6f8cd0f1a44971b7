"""No text of a policy, a task, an environment or an error commands the terminal that shows it."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent.parent / "cli"))

from made_runs import make_run

from penstock.cli.doctor import command_of
from penstock.cli.main import app
from penstock.observe.log_lines import LINE, formatted, logging_to
from penstock.observe.notices import notice
from penstock.observe.progress import render_panel
from penstock.observe.tables import facts, listing, open_console
from penstock.observe.view import Plan, RunView
from penstock.observe.visible_text import visible, visible_json
from penstock.processes.dumping import TRAJECTORIES

HOSTILE = {
    "title of the window": ("\x1b]0;pwned\x07", r"\x1b]0;pwned\x07"),
    "clear screen": ("\x1b[2J\x1b[H", r"\x1b[2J\x1b[H"),
    "colour": ("\x1b[31mred", r"\x1b[31mred"),
    "link": ("\x1b]8;;http://evil.example\x1b\\here", r"\x1b]8;;http://evil.example\x1b\here"),
    "clipboard": ("\x1b]52;c;cm0gLXJmIH4=\x07", r"\x1b]52;c;cm0gLXJmIH4=\x07"),
    "C1 introducer": ("\x9b31m", r"\x9b31m"),
    "device control": ("\x90q\x9c", r"\x90q\x9c"),
    "carriage return": ("bad\rgood", r"bad\x0dgood"),
    "backspace": ("bad\b\b\bgood", r"bad\x08\x08\x08good"),
    "delete": ("a\x7f", r"a\x7f"),
    "null": ("a\0b", r"a\x00b"),
    "override": ("\u202egpj.exe", r"\u202egpj.exe"),
    "isolate": ("\u2066a\u2069", r"\u2066a\u2069"),
    "zero width": ("a\u200bb\u2060\ufeff", r"a\u200bb\u2060\ufeff"),
    "tags": ("\U000e0041\U000e0042", r"\U000e0041\U000e0042"),
    "filler": ("a\u3164b", r"a\u3164b"),
    "variation selectors": ("a\ufe0f\U000e0100", r"a\ufe0f\U000e0100"),
    "marks that show nothing": ("\u034f\u17b4\u180b", r"\u034f\u17b4\u180b"),
    "surrogate": ("a\ud800", r"a\ud800"),
    "line separator": ("a\u2028b", r"a\u2028b"),
}
LETTERS = "grüße, 你好\u3000— é 🙂 ∅ \\x1b"


@pytest.mark.parametrize(("text", "shown"), HOSTILE.values(), ids=HOSTILE.keys())
def test_what_a_terminal_obeys_is_shown_escaped(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert visible(shown) == shown


@given(text=st.text(alphabet=st.characters()))
def test_what_is_shown_is_visible(text: str) -> None:
    shown = visible(text)
    hidden = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    assert not [each for each in shown if unicodedata.category(each) in hidden and each not in "\n\t"]
    assert visible(shown) == shown
    plain = [each for each in text if unicodedata.category(each) not in hidden]
    assert len(shown) >= len(plain)


def test_other_text_stays_as_it_is() -> None:
    assert visible(LETTERS + "\n\t[red]a[/red]") == LETTERS + "\n\t[red]a[/red]"


def in_terminal(monkeypatch: pytest.MonkeyPatch, *parts: RenderableType) -> str:
    """Return what a terminal gets without the colours."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    console = open_console()
    console.file, console.width = io.StringIO(), 200
    console.print(*parts)
    return re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())


def is_harmless(output: str) -> bool:
    return not re.search(
        r"[^\n\t\x20-\x7e\xa0-\u200a\u2010-\u2027\u202f-\u205f\u2070-\ufdff\ufe00-\ufefe\uff00-\uffef\U00010000-\U000dffff]",
        output,
    )


@pytest.mark.parametrize("text", [text for text, _ in HOSTILE.values()], ids=HOSTILE.keys())
def test_the_console_escapes_what_any_part_prints(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    table: Table = listing([text], ["n"])
    table.title = text
    table.add_row(text, "1")
    table.add_row(Text(text, style="red"), "2")
    view = RunView(plan=Plan(pipeline="train", num_steps=3))
    view.notices.append(f"[link=http://evil.example]{text}")
    view.processes[text] = "ready"
    panel = render_panel(view, Path("/runs") / text.replace("\0", ""), now=0.0)
    output = in_terminal(monkeypatch, table, facts([(text, text)]), text, panel)
    assert is_harmless(output)
    assert "[link=http://evil.example]" in output


def run_with(tmp_path: Path, text: str) -> Path:
    """Return a run in which everything that can hold text of others holds this text."""
    processes = {"controller": {"state": "exited"}, "env-0": {"state": "fatal", "reason": text}}
    run_dir = make_run(tmp_path / "a", "failed", processes=processes, error=text)
    (run_dir / "logs" / "env-0.log").write_bytes(f"{text} [red]x[/red]\n".encode(errors="surrogatepass"))
    row: dict[str, Any] = {"group": 1, "episode": 0, "reward": 1.0, "policy_version_min": 1, "policy_version_max": 1}
    row |= {"status": "failed", "stop_reason": text, "num_turns": 1, "prompt_tokens": 1, "response_tokens": 1}
    row |= {"seconds": 1.0, "task_id": text, "trajectory": f"train/1/0 {text}", "error": text}
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": f"[red]{text}"}]
    (run_dir / TRAJECTORIES).mkdir()
    line = json.dumps(row | {"messages": json.dumps(messages)})
    (run_dir / TRAJECTORIES / "step_1.jsonl").write_text(f"{line}\n")
    (run_dir / "events.jsonl").write_text(json.dumps({"event": "alarm", "time": 1.0, "reason": text}) + "\n")
    return run_dir


@pytest.mark.parametrize("text", [text for text, _ in HOSTILE.values()], ids=HOSTILE.keys())
@pytest.mark.parametrize("command", ["trajectories", "status", "logs", "stop"])
def test_commands_show_it_escaped(tmp_path: Path, command: str, text: str) -> None:
    if text.endswith("\ud800"):
        text = "a\U000e0001"  # JSON has no surrogates
    output = CliRunner().invoke(app, [command, str(run_with(tmp_path, text))]).output
    assert is_harmless(output), ascii(output)
    if command in ("trajectories", "status"):  # `logs` draws a line as its last carriage return left it
        assert visible(text) in output.replace("\n", "")


@pytest.mark.parametrize("command", ["trajectories", "status", "runs"])
def test_json_shows_it_escaped_and_stays_the_same(tmp_path: Path, command: str) -> None:
    text = "".join(text for text, _ in HOSTILE.values()).replace("\ud800", "")  # JSON has no surrogates
    runs = tmp_path / "\x9b31m\u202e"
    run_dir = run_with(runs, text)
    where = ["--runs-dir", str(runs)] if command == "runs" else [str(run_dir)]
    output = CliRunner().invoke(app, [command, *where, "--json"]).output
    assert is_harmless(output), ascii(output)
    document = json.loads(output)
    if command == "trajectories":
        assert document[0]["messages"][0]["content"] == text
    else:
        assert (str(run_dir) if command == "runs" else text) in strings(document)


def strings(value: Any) -> list[str]:
    """Return all strings of a JSON document."""
    if isinstance(value, dict | list):
        return [found for each in (value.values() if isinstance(value, dict) else value) for found in strings(each)]
    return [value] if isinstance(value, str) else []


@given(text=st.text(alphabet=st.characters()))
def test_visible_json_is_the_same_json(text: str) -> None:
    shown = visible_json(json.dumps([text], ensure_ascii=False))
    assert json.loads(shown) == [text] and visible(shown) == shown


def test_colours_of_a_log_are_left_out(tmp_path: Path) -> None:
    output = CliRunner().invoke(app, ["logs", str(run_with(tmp_path, "\x1b[31mred\x1b[0m")), "env-0"]).output
    assert output == "red [red]x[/red]\n"


def test_an_episode_in_the_terminal_is_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hostile_env.py").write_text(
        "class Hostile:\n"
        "    def __init__(self, task): pass\n"
        "    def reset(self, seed): return 'look \\x1b]0;pwned\\x07\\u202e', {}\n"
        "    def step(self, action): raise ValueError('broken \\x1b[2J' + chr(0x9b) + '31m')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    output = CliRunner().invoke(app, ["env", "try", "hostile_env:Hostile", "data.source=seeds"]).output
    assert r"look \x1b]0;pwned\x07\u202e" in output and r"broken \x1b[2J\x9b31m" in output
    assert is_harmless(output)


def test_a_refusal_is_escaped() -> None:
    result = CliRunner().invoke(app, ["train", "nowhere\x1b[2J.yaml"])
    assert result.exit_code == 2 and r"\x1b[2J" in result.output and is_harmless(result.output)


def test_log_lines_are_escaped_where_they_are_written(tmp_path: Path) -> None:
    with logging_to(tmp_path / "a.log", "env-0"):
        logging.getLogger("penstock").error("answer %s", "\x1b]0;pwned\x07\u202e")
    assert (tmp_path / "a.log").read_text().endswith("answer \\x1b]0;pwned\\x07\\u202e\n")


def test_no_message_begins_a_second_entry(tmp_path: Path) -> None:
    """Its lines stay, and so do those of a traceback."""
    forged = "hi\n2026-11-24T13:48:00.000Z ERROR supervisor: the run is damaged\r\n2026-11-24T13:48:00.000Z INFO a: b"
    with logging_to(tmp_path / "a.log", "env-0"):
        logging.getLogger("penstock").error("reward failed: %s", forged)
        try:
            raise ValueError(forged)
        except ValueError:
            logging.getLogger("penstock").exception("broken")
    for text in ((tmp_path / "a.log").read_text(), formatted("env-0", forged)):
        entries = [LINE.fullmatch(line) for line in text.splitlines()]
        assert [entry["process"] for entry in entries if entry] == ["env-0"] * (2 if "Traceback" in text else 1)
        assert "\n  2026-11-24T13:48:00.000Z ERROR supervisor: the run is damaged" in text


def test_a_notice_is_one_line() -> None:
    assert notice({"event": "alarm", "reason": "a\n! run completed\r\nb"}) == "alarm: a ! run completed b"


def test_the_command_of_a_leftover_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Process:
        def __init__(self, pid: int) -> None:
            pass

        def cmdline(self) -> list[str]:
            return ["python", "a\n/fake/run\rb", "\x1b[2J"]

    monkeypatch.setattr("penstock.cli.doctor.psutil.Process", Process)
    console = open_console()
    assert isinstance(console, Console)
    assert command_of(1) == "python a /fake/run b \x1b[2J"
    console.file = io.StringIO()
    console.print(command_of(1))
    assert console.file.getvalue() == "python a /fake/run b \\x1b[2J\n"


def test_names_of_files_of_environments_are_shown_escaped(tmp_path: Path) -> None:
    title = "\x1b]0;pwned\x07"
    (tmp_path / f"{title}.py").write_text("class (")
    (tmp_path / f"{title}a.py").write_text(f'class A:\n    "{title}"\n    def play(self, llm, seed): ...\n')
    (tmp_path / title).mkdir()
    for place in (tmp_path, tmp_path / title):
        shown = CliRunner().invoke(app, ["envs", str(place)])
        assert shown.exit_code == 0 and r"\x1b]0;pwned\x07" in shown.output and "\x1b" not in shown.output
