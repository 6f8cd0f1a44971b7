"""What the documents tell people to write and to type is accepted."""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path

import pytest
import typer.main
from document_blocks import DOCUMENTS, ROOT, Block, all_blocks, blocks
from made_runs import penstock

from penstock.cli.main import app
from penstock.config import load_config

LANGUAGES = {"console", "yaml", "python", "text", "bash"}
"""`console` is run, `yaml` is loaded, `python` is compiled, `text` is output, `bash` needs a cluster."""
LINK = re.compile(r"\]\(([^)#]+)(?:#([^)]+))?\)")


def named(found: list[Block]) -> list[object]:
    return [pytest.param(block, id=block.where) for block in found]


def heading_anchor(heading: str) -> str:
    """As the usual hosts make it from a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip("# \n").lower()).replace(" ", "-")


def test_every_block_says_what_it_is() -> None:
    wrong = [block.where for document in DOCUMENTS for block in blocks(document) if block.language not in LANGUAGES]
    assert not wrong


def test_every_command_of_a_console_block_is_found() -> None:
    assert all(block.commands for block in all_blocks("console"))


@pytest.mark.parametrize("block", named(all_blocks("yaml")))
def test_a_configuration_is_accepted(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(block.text)
    load_config(path, [])


def test_python_is_python() -> None:
    for block in all_blocks("python"):
        try:
            ast.parse(block.text)
        except SyntaxError as error:
            pytest.fail(f"{block.where}: {error}")


@pytest.mark.parametrize("block", named(all_blocks("console") + all_blocks("bash")))
def test_commands_parse(block: Block) -> None:
    """Command, options and files exist."""
    root = typer.main.get_command(app)
    for line in block.commands or block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if "penstock" in words:
            words = words[words.index("penstock") + 1 :]
            command: object = root
            while words and hasattr(command, "commands"):
                command = command.commands[words.pop(0)]
            assert not hasattr(command, "commands"), f"{block.where}: {line}"
            command.make_context("penstock", [word for word in words if word != "&"])  # type: ignore[attr-defined]
        elif words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
        for word in words:
            if word.startswith("examples/"):
                assert (ROOT / word.partition(":")[0]).exists(), f"{block.where}: {word}"


def test_the_list_of_commands_is_complete() -> None:
    synopsis = next(block.text for block in blocks(ROOT / "README.md") if block.text.startswith("penstock train"))
    for name in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
        assert re.search(rf"\b{name}\b", synopsis), name


def test_links_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target, anchor in LINK.findall(document.read_text()):
            if "://" in target:
                continue
            path = (document.parent / target).resolve()
            assert path.exists(), f"{document.relative_to(ROOT)} links to {target}"
            if anchor:
                headings = [line for line in path.read_text().splitlines() if line.startswith("#")]
                assert anchor in map(heading_anchor, headings), f"{document.relative_to(ROOT)}: {target}#{anchor}"


def test_every_page_is_on_the_map() -> None:
    pages = {path.name for path in ROOT.glob("docs/*.md")} - {"README.md"}
    linked = {target for target, _ in LINK.findall((ROOT / "docs/README.md").read_text())}
    assert pages <= linked


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").stat().st_size <= 12_000


def test_the_environment_of_the_readme_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The class of its example, with the data and options of the configuration below it."""
    code = next(block for block in blocks(ROOT / "README.md") if block.language == "python")
    configuration = next(block for block in blocks(ROOT / "README.md") if block.language == "yaml")
    (tmp_path / "letters.py").write_text(code.text)
    rows = [{"word": "w" * length} for length in range(1, 100)]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.yaml").write_text(configuration.text)
    monkeypatch.chdir(tmp_path)
    tried = penstock("env", "try", "run.yaml", "--policy", "random")
    assert tried.exit_code == 0, tried.stdout + tried.stderr
    assert "How many letters has w" in tried.stdout


def test_files_that_the_architecture_names_exist() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", (ROOT / "ARCHITECTURE.md").read_text()))
    missing = [name for name in named if not any(ROOT.glob(f"src/penstock/**/{name}")) and not (ROOT / name).exists()]
    assert not missing
