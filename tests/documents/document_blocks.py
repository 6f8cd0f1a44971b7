"""The code blocks of the project's documents."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/*.md")),
    *ROOT.glob("examples/*/*.md"),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    document: Path
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        """`docs/runs.md:12`."""
        return f"{self.document.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """The lines after `$ `; a backslash at the end of a line continues it."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


def blocks(document: Path) -> list[Block]:
    text = document.read_text()
    return [
        Block(document, text.count("\n", 0, found.start()) + 1, found[1], found[2]) for found in FENCE.finditer(text)
    ]


def all_blocks(language: str) -> list[Block]:
    return [block for document in DOCUMENTS for block in blocks(document) if block.language == language]
