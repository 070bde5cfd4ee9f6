"""Node lists as Slurm writes them: `gpu[01-04,07],login1`, `rack[1-2]n[01-04]`.

A name may have several brackets, as names of several dimensions have; they stand for all
combinations, of which the last bracket changes first (`scontrol show hostnames`).
"""

import re
from itertools import product

from hetplan.errors import InputError, require
from hetplan.profiling.hardware.hosts import MOST_HOSTS, check_number_of_hosts

# the commas outside of brackets
OUTER_COMMA = re.compile(r",(?![^\[]*\])")
# one entry: text without brackets, and lists in brackets
ENTRY = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]+\])+")
PIECE = re.compile(r"[^\[\]]+|\[[^\[\]]+\]")
RANGE = re.compile(r"^\s*(\d{1,11})(?:-(\d{1,11}))?\s*$")


def node_names(text: str, *, where: str) -> list[str]:
    """The names that a node list stands for, each once. Raises InputError. where: the place of the
    list, for messages."""
    names: list[str] = []
    for entry in filter(None, map(str.strip, OUTER_COMMA.split(text))):
        if not ENTRY.fullmatch(entry):
            raise InputError("not usable", where=where, got=text, expected="such as gpu[01-04,07]")
        parts = [numbers_of(piece, where) for piece in PIECE.findall(entry)]
        count = len(names)
        for part in parts:
            count = max(count, 1) * len(part)
            check_number_of_hosts(count, where)
        names += ["".join(combination) for combination in product(*parts)]
        check_number_of_hosts(len(names), where)
    require(names, "no node", where=where, got=text, expected="such as gpu[01-04]")
    return list(dict.fromkeys(names))


def numbers_of(piece: str, where: str) -> list[str]:
    """The texts that a piece of an entry stands for: itself, or the numbers of its brackets."""
    if not piece.startswith("["):
        return [piece]
    numbers = [
        number for part in piece[1:-1].split(",") for number in numbers_of_range(part, where)
    ]
    check_number_of_hosts(len(numbers), where)
    return numbers


def numbers_of_range(text: str, where: str) -> list[str]:
    """The numbers of a range such as `01-04`, with as many digits as its first number."""
    match = RANGE.match(text)
    numbers = range(0)
    if match is not None:
        first, last = match[1], match[2] or match[1]
        numbers = range(int(first), int(last) + 1)
    if match is None or not 1 <= len(numbers) <= MOST_HOSTS:
        raise InputError(
            "not a range",
            where=where,
            got=text,
            expected=f"such as 01-04, rising, at most {MOST_HOSTS} nodes",
        )
    return [f"{number:0{len(match[1])}d}" for number in numbers]
