"""Texts that would leave their place in a generated file, put into every text of a document, and
what a file's structure is without its texts."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from typing import Any

import yaml
from pydantic import BaseModel

HARMLESS = "harmless"
# Each of one line: a file may hold it.
ONE_LINE = (
    "$(touch pwned)",
    "`touch pwned`",
    "'; touch pwned #",
    '"; touch pwned #',
    "x --wrap=touch",
    "#SBATCH --wrap=touch",
    "back\\",
    "key: [value",
    "- {key: value}",
    "@PLAN@ @NOPE@ {name} {0} %s",
    "x coding: utf-7 +AAo-open('pwned','w')",
    "</script><script>alert(1)</script>",
    "' onload='alert(1)",
    "a | b | c",
    "one $ two $\\frac{",
)
# With what ends a line somewhere, or steers a terminal.
BREAKS = ("\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x85", "\u2028", "\u2029")
SEVERAL_LINES = (
    *(f"x{end}touch pwned{end}key: value{end}#SBATCH --wrap=touch" for end in BREAKS),
    'x\n"""\nimport os\n',
    "x\n",
    "x\0y",
    "\x1b[2J\x9b2J",
)
PAYLOADS = (*ONE_LINE, *SEVERAL_LINES)

Place = tuple[int | str, ...]


def places_of_texts(value: Any, *path: int | str) -> Iterator[Place]:
    """Where texts stand in a parsed document."""
    if isinstance(value, str):
        yield path
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from places_of_texts(inner, *path, key)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from places_of_texts(inner, *path, number)


def with_text(value: Any, place: Sequence[Any], text: str) -> Any:
    """The value with the text at that place: nothing is validated, as if the check of the file had
    let it pass."""
    if not place:
        return text
    first, *rest = place
    if isinstance(value, BaseModel):
        return value.model_copy(update={first: with_text(getattr(value, first), rest, text)})
    changed = value.copy()
    changed[first] = with_text(value[first], rest, text)
    return changed


def blank(text: str, payload: str) -> str:
    """A word of a file with the payload, in whatever form it has there, as it would be with
    `HARMLESS`."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in payload)
    for form in (payload, shown, " ".join(shown.split())):
        text = text.replace(form, HARMLESS)
    return text


def words_of(script: str, payload: str) -> list[str]:
    """The words and operators of a shell script without its comments, the payload blanked."""
    lexer = shlex.shlex(script, posix=True, punctuation_chars=True)
    # the shell ends a line at a line feed alone, and so does its comment
    lexer.whitespace, lexer.whitespace_split = " \t", True
    words: list[str] = []
    for word in lexer:
        # what ssh is given is a script in its turn
        words += words_of(word, payload) if word.startswith("cd ") else [blank(word, payload)]
    return words


def directives(script: str, payload: str) -> list[list[str]]:
    """The words of every directive of sbatch, which looks for them above the first command."""
    head = script.partition("\nset -euo")[0].split("\n")
    lines = [line for line in head if line.startswith("#SBATCH")]
    return [[blank(word, payload) for word in shlex.split(line)] for line in lines]


def tree_of(program: str) -> str:
    """A Python program's syntax without its constants; its encoding is read as Python does."""
    tree = ast.parse(program.encode())
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            node.value = type(node.value).__name__
    return re.sub(r"(lineno|col_offset)=\d+", "", ast.dump(tree))


def shape(value: Any) -> Any:
    """A parsed document's keys and types."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shape(inner) for inner in value]
    return type(value).__name__


def documents_of(text: str) -> list[Any]:
    """The YAML documents of a file, as YAML 1.1 reads them."""
    return list(yaml.safe_load_all(text))


class Tags(HTMLParser):
    """The tags of a page, with the names of their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, ...]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note it."""
        self.seen.append((tag, *(name for name, _ in attrs)))


def structure(name: str, text: str, payload: str) -> Any:
    """What a program makes of a file, its texts aside. name: of the file, or of the framework."""
    if name in ("megatron", "torchrun", "node.sh", "submit.sh", "attended.sh"):
        return words_of(text, payload)
    if name == "job.sbatch":
        return words_of(text, payload), directives(text, payload)
    if name in ("train.py", "torchtitan"):
        return tree_of(text)
    if name in ("deepspeed", "device-map"):
        return shape(json.loads(text))
    if name == "job.yaml":
        return [job_structure(document, payload) for document in documents_of(text)]
    if name == "hostfile":
        return text
    assert name in ("bridge", "flagscale", "accelerate"), name
    return [shape(document) for document in documents_of(text)]


def job_structure(document: Any, payload: str) -> Any:
    """The same of an object of Kubernetes, which holds a script and commands."""
    script = document.get("data", {}).get("node.sh", "")
    commands = [blank(word, payload) for words in commands_of(document) for word in words]
    return shape(document), commands, words_of(script, payload)


def commands_of(value: Any) -> Iterator[list[str]]:
    """The commands of all containers."""
    if isinstance(value, dict):
        yield from [value["command"]] if "command" in value else []
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, dict | list):
            yield from commands_of(inner)
