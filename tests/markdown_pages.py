"""Fenced blocks and links of the Markdown files, for the tests that hold them to the truth."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])

_BLOCK = re.compile(
    r"(?:<!-- (?P<mark>[\w:./-]+) -->\n)?```(?P<language>\w*)\n(?P<body>.*?)```", re.DOTALL
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block; `mark`: the comment on the line before it, empty if there is none."""

    language: str
    mark: str
    body: str

    def commands(self) -> list[tuple[str, str]]:
        """Of a console block: each command (behind `$ `) with the output that it shows."""
        parts = re.split(r"^\$ (.*)\n", self.body, flags=re.MULTILINE)
        assert not parts[0], f"output before the first command: {parts[0]!r}"
        return list(zip(parts[1::2], parts[2::2], strict=True))


def blocks(page: Path, language: str = "") -> list[Block]:
    """The fenced blocks of a page, of one language if it is given."""
    found = [
        Block(match["language"], match["mark"] or "", match["body"])
        for match in _BLOCK.finditer(page.read_text(encoding="utf-8"))
    ]
    return [block for block in found if language in ("", block.language)]


def links(page: Path) -> list[str]:
    """Targets of the links that are no addresses, without anchors."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [target.partition("#")[0] for target in _LINK.findall(text)]
    return [target for target in targets if target and "://" not in target]
