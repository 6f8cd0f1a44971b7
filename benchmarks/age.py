"""Whether a result is older than the code that it measures, by the history in git."""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

GIT_S = 30.0
SHOWN = 12
"""Digits of a commit."""


class CannotTell(RuntimeError):
    """The history that would say is not here."""


@dataclass(frozen=True, slots=True)
class History:
    """The history of the checkout that `root` is in."""

    root: Path

    def remark(self, measured: Collection[str], paths: Sequence[str]) -> str:
        """Return what a reader of figures must know that were `measured` at these commits, on code in `paths`; nothing
        if the code is still the same."""
        try:
            changed = self._last_change(paths)
            older = [commit for commit in measured if self._has_changed_since(commit, paths)]
        except CannotTell as error:
            return f"Cannot tell whether these figures are older than the code: {error}."
        if not older:
            return ""
        at = ", ".join(f"`{commit[:SHOWN]}`" for commit in older)
        return f"**Older than the code**: measured at {at}, code last changed at `{changed[:SHOWN]}`."

    def _last_change(self, paths: Sequence[str]) -> str:
        if self._git("rev-parse", "--is-shallow-repository") != "false":
            raise CannotTell("the history here is cut short")
        if missing := [path for path in paths if not (self.root / path).exists()]:
            raise CannotTell(f"{', '.join(missing)} is not here")
        return self._git("log", "-1", "--format=%H", "--", *paths)

    def _has_changed_since(self, commit: str, paths: Sequence[str]) -> bool:
        """Figures of a tree that differed from its commit count as those of the commit."""
        since = commit.removesuffix("-dirty")
        return self._git("rev-list", "--max-count=1", "HEAD", f"^{since}", "--", *paths) != ""

    def _git(self, *words: str) -> str:
        """Return what git says. Raises `CannotTell`."""
        try:
            done = subprocess.run(["git", *words], cwd=self.root, capture_output=True, text=True, timeout=GIT_S)
        except (OSError, subprocess.SubprocessError) as error:
            raise CannotTell("git cannot be asked") from error
        if done.returncode:
            raise CannotTell("this is no clone, or it does not have the commit")
        return done.stdout.strip()
