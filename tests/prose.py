"""Sentences of Markdown pages, and what makes them hard to read: length, passive voice, inverted
word order, and what proselint complains of. Limits and pages stand in pyproject.toml under
`tool.plain-language`. `python tests/prose.py [PAGE…]` prints what fails.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TABLE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
SETTINGS: Mapping[str, Any] = TABLE["plain-language"]

IRREGULAR = (
    "done|found|given|held|kept|known|left|made|meant|met|paid|put|read|run|said|sent|set|shown|"
    "split|taken|told|thought|understood|written|drawn|chosen|built|bought|cut|lost|seen|spent"
)
# A form of `be`, perhaps an adverb, a participle. `is called`, `are needed` …
PASSIVE = re.compile(
    rf"\b(?:am|is|are|was|were|be|been|being)\s+(?:not\s+|\w+ly\s+|then\s+|also\s+)?"
    rf"(?:\w{{2,}}ed|{IRREGULAR})\b",
    re.IGNORECASE,
)
# The verb before its subject, or what a sentence speaks of before who acts.
INVERTED = [
    re.compile(pattern)
    for pattern in (
        r"^Of\b(?! course)",
        r"^(?:Beside|Behind|Under|Below|Above|Here|From|In|On|With|Among|Between)\b[^,;:]{0,70}?\s"
        r"(?:stands?|comes?|lies?|goes|follows?|belongs?|is|are)\s(?:the|an?|what|its|all|those)\b",
        r"^(?:Only|Never|Neither|Nor|Not|So)\b[^,;:]*?\b(?:is|are|was|do|does|did|has|have|can|will)"
        r"\s(?:the|an?|it|they|we|you|what|this|that)\b",
        r"^(?:What|Which|How|Why|Whether|Who)\b[^?]*,\s(?:the |an? )?[\w`.]+"
        r" (?:says?|tells?|shows?)\b",
    )
]
WORD = re.compile(r"[^\W_][\w'’./-]*")


@dataclass(frozen=True)
class Prose:
    """The sentences of a page, without code, tables, headings and addresses."""

    name: str
    sentences: tuple[str, ...]

    @classmethod
    def of(cls, name: str, text: str) -> Prose:
        """From Markdown."""
        return cls(name, tuple(sentences_of(text)))

    def lengths(self) -> list[int]:
        """Words of each sentence."""
        return [len(WORD.findall(sentence)) for sentence in self.sentences]

    def faults(self, limits: Mapping[str, float]) -> list[str]:
        """What exceeds the limits, a line each."""
        lengths = self.lengths()
        pairs = list(zip(self.sentences, lengths, strict=True))
        long = [f"{n} words: {s}" for s, n in pairs if n > limits["longest-sentence"]]
        turned = [f"inverted: {s}" for s in self.sentences if any(p.search(s) for p in INVERTED)]
        mean = sum(lengths) / max(len(lengths), 1)
        passive = [s for s in self.sentences if PASSIVE.search(s)]
        share = len(passive) / max(len(self.sentences), 1)
        found = [*long, *turned]
        if mean > limits["mean-sentence"]:
            found.append(f"sentences have {mean:.1f} words on average")
        if share > limits["passive-share"]:
            found.append(f"{share:.0%} of the sentences are passive: {' | '.join(passive)}")
        return [f"{self.name}: {fault}" for fault in found]


def sentences_of(text: str) -> Iterator[str]:
    """The sentences of paragraphs and list items; code in backticks counts as one word."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^[ \t]*\|.*$|^#.*$|^---.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`([^`]*)`", lambda code: "´" + (re.sub(r"\W+", "-", code[1]) or "it"), text)
    text = re.sub(r"[*_]{1,2}([^*_]+)[*_]{1,2}", r"\1", text)
    for paragraph in re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.)\s", text):
        line = " ".join(paragraph.split()).lstrip("-* ")
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z0-9(“\"´]|hetplan)", line):
            if len(WORD.findall(sentence)) > 2 and sentence.count("·") < 2:
                yield sentence


def complaints(prose: Prose) -> list[str]:
    """What proselint says of the sentences."""
    from proselint.checks import __register__
    from proselint.config import DEFAULT, Config
    from proselint.registry import CheckRegistry
    from proselint.tools import LintFile

    registry = CheckRegistry()
    if not registry.checks:
        registry.register_many(__register__)
    checks = {**DEFAULT["checks"], **SETTINGS["proselint"]}
    config = Config(max_errors=DEFAULT["max_errors"], checks=checks)
    text = "\n\n".join(prose.sentences) + "\n"
    results = LintFile(source=prose.name, content=text).lint(config)
    return [f"{prose.name}: {result.check_result.message}" for result in results]


def pages() -> list[Path]:
    """The pages that are held to the limits."""
    return [page for name in SETTINGS["pages"] for page in sorted(ROOT.glob(name))]


def main(arguments: Sequence[str]) -> int:
    """Print the faults of the pages named, of all without a name."""
    faults = []
    for page in map(Path, arguments) if arguments else pages():
        prose = Prose.of(page.name, page.read_text(encoding="utf-8"))
        faults += [*prose.faults(SETTINGS["limits"]), *complaints(prose)]
        lengths = prose.lengths()
        passive = sum(bool(PASSIVE.search(s)) for s in prose.sentences) / len(lengths)
        print(
            f"{page.name}: {len(lengths)} sentences, {sum(lengths) / len(lengths):.1f} words on "
            f"average, {max(lengths)} at most, {passive:.0%} passive"
        )
    print("\n".join(faults))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
