"""A result that is older than the code it measures is told from one that is not, by a history made for it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from age import History


class Repository:
    """A repository with two measured folders."""

    def __init__(self, root: Path) -> None:
        self.root, self.history = root, History(root)
        root.mkdir()
        self.git("init", "--quiet", "--initial-branch", "main")

    def git(self, *words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(["git", *identity, *words], cwd=self.root, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def commit(self, file: str, text: str) -> str:
        (self.root / file).parent.mkdir(exist_ok=True)
        (self.root / file).write_text(text)
        self.git("add", ".")
        self.git("commit", "--quiet", "--message", f"{file}: {text}")
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository")


def test_figures_are_older_once_what_they_measure_has_changed(repository: Repository) -> None:
    measured = repository.commit("engine/a.py", "1")
    repository.commit("trainer/b.py", "1")
    assert repository.history.remark([measured], ["engine"]) == ""
    changed = repository.commit("engine/a.py", "2")
    repository.commit("trainer/b.py", "2")
    said = f"measured at `{measured[:12]}`, code last changed at `{changed[:12]}`."
    assert repository.history.remark([measured], ["engine"]) == f"**Older than the code**: {said}"
    assert repository.history.remark([f"{measured}-dirty"], ["engine"]).startswith("**Older than the code**")
    assert repository.history.remark([changed], ["engine"]) == ""
    assert repository.history.remark([changed, measured], ["engine"]).endswith(said)


def test_a_change_on_a_branch_counts_from_its_merge_on(repository: Repository) -> None:
    repository.commit("engine/a.py", "1")
    repository.git("switch", "--quiet", "--create", "other")
    repository.commit("engine/b.py", "1")
    repository.git("switch", "--quiet", "main")
    measured = repository.commit("engine/a.py", "2")
    assert repository.history.remark([measured], ["engine"]) == ""
    repository.git("merge", "--quiet", "other")
    assert repository.history.remark([measured], ["engine"]).startswith("**Older than the code**")


def test_without_the_history_it_cannot_tell(repository: Repository, tmp_path: Path) -> None:
    measured = repository.commit("engine/a.py", "1")
    repository.commit("engine/a.py", "2")
    repository.git("clone", "--quiet", "--depth", "1", f"file://{repository.root}", str(tmp_path / "shallow"))
    (tmp_path / "bare").mkdir()
    cannot = "Cannot tell whether these figures are older than the code: "
    shallow = History(tmp_path / "shallow").remark([measured], ["engine"])
    assert shallow == f"{cannot}the history here is cut short."
    without = History(tmp_path / "bare").remark([measured], ["engine"])
    assert without == f"{cannot}this is no clone, or it does not have the commit."
    for unknown in ("f" * 40, "unknown"):
        assert repository.history.remark([unknown], ["engine"]).startswith(cannot)
    assert repository.history.remark([measured], ["elsewhere"]) == f"{cannot}elsewhere is not here."
