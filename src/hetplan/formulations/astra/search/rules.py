"""Rules compiled against the columns of a strategy table and evaluated on all rows at once (Astra,
eq.
10-19).

A strategy that meets any rule is dropped. Types are checked when a rule is compiled, so that a
misspelt name or value is an error and never a rule that silently drops nothing. None (an option
that is not set) equals only None; arithmetic with it gives None, ordering against it is false; so
is dividing by zero, row by row.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from hetplan.errors import InputError
from hetplan.files import read_bytes
from hetplan.formulations.astra.search.rule_syntax import (
    Chain,
    Comparison,
    Literal,
    Name,
    Negative,
    Node,
    Source,
    parse_rule,
)
from hetplan.formulations.astra.search.rule_types import Checker, Column, column_of

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Values:
    """One column of a table. data: float64 (numbers), codes (strings) or bool; known: False where
    None (None: all)."""

    data: NDArray[np.generic]
    known: Mask | None = None


@dataclass(frozen=True)
class Rule:
    """One compiled rule. names: the columns that it reads."""

    source: Source
    tree: Node
    names: frozenset[str]
    columns: Mapping[str, Column]

    def __str__(self) -> str:
        return self.source.text

    def met(self, table: Mapping[str, Values], rows: int) -> Mask:
        """Which of the `rows` rows of `table` meet the rule."""
        return np.broadcast_to(_truth(self.tree, self, table), (rows,))


def compile_rule(source: Source, columns: Mapping[str, Column]) -> Rule:
    """Parse and type-check one rule; raises InputError with the place of the first fault."""
    tree = parse_rule(source)
    names: set[str] = set()
    kind = Checker(source, columns, names).kind(tree)
    if kind != "bool":
        raise source.error(
            "a rule must be true or false",
            column_of(tree),
            got=f"a {kind}",
            expected="a comparison",
        )
    return Rule(source, tree, frozenset(names), columns)


def rules_from_text(text: str, columns: Mapping[str, Column], *, where: str) -> list[Rule]:
    """One rule a line; `#` starts a comment outside of strings, empty lines are skipped."""
    rules = []
    for number, line in enumerate(text.splitlines(), start=1):
        bare = _without_comment(line)
        if bare.strip():
            rules.append(compile_rule(Source(bare.rstrip(), where, number), columns))
    return rules


def rules_from_file(path: str | os.PathLike[str], columns: Mapping[str, Column]) -> list[Rule]:
    """The rules of a UTF-8 text file."""
    name = os.fspath(path)
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 text at byte {error.start}", where=name) from None
    return rules_from_text(text, columns, where=name)


def default_rules(columns: Mapping[str, Column]) -> list[Rule]:
    """The paper's three examples and Megatron-LM's own constraints, as shipped in
    `default.rules`."""
    text = (files("hetplan.formulations.astra.search") / "default.rules").read_text(
        encoding="utf-8"
    )
    return rules_from_text(text, columns, where="default.rules")


def dropped(rules: Iterable[Rule], table: Mapping[str, Values], rows: int) -> Mask:
    """Which rows meet any of the rules."""
    mask = np.zeros(rows, dtype=bool)
    for rule in rules:
        mask |= rule.met(table, rows)
    return mask


def _without_comment(line: str) -> str:
    quote = ""
    for at, character in enumerate(line):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character == "#":
            return line[:at]
    return line


Operand = tuple[NDArray[np.generic] | float | str | bool | None, Mask | bool]


def _truth(node: Node, rule: Rule, table: Mapping[str, Values]) -> Mask:
    """A bool expression on all rows; an unset flag counts as false."""
    if isinstance(node, Chain):
        result = _truth(node.first, rule, table)
        for sign, operand in node.rest:
            other = _truth(operand, rule, table)
            result = result & other if sign == "&&" else result | other
        return result
    if isinstance(node, Comparison):
        return _compare(
            node.operator, _operand(node.left, rule, table), _operand(node.right, rule, table)
        )
    value, known = _operand(node, rule, table)
    return np.asarray(value, dtype=bool) & known


def _operand(node: Node, rule: Rule, table: Mapping[str, Values]) -> Operand:
    """(values, where they are known) of a number, string or bool expression."""
    match node:
        case Literal(value=value):
            return value, value is not None
        case Name(name=name):
            values, words = table[name], rule.columns[name].words
            known: Mask | bool = True if values.known is None else values.known
            return (np.array(words)[values.data.astype(np.int64)] if words else values.data), known
        case Negative(operand=operand):
            inner, known = _operand(operand, rule, table)
            return -np.asarray(inner, dtype=float), known
        case Chain(first=first, rest=rest) if rest[0][0] not in ("&&", "||"):
            return _arithmetic(
                _operand(first, rule, table), [(s, _operand(o, rule, table)) for s, o in rest]
            )
        case _:
            return _truth(node, rule, table), True


def _arithmetic(first: Operand, rest: list[tuple[str, Operand]]) -> Operand:
    """Left to right in float64: whole numbers are exact up to 2^53."""
    value, known = np.asarray(first[0], dtype=float), first[1]
    for sign, (other, other_known) in rest:
        right = np.asarray(other, dtype=float)
        known = np.logical_and(known, other_known)
        if sign in "/%":
            known = np.logical_and(known, right != 0)
            right = np.where(right == 0, 1.0, right)
        match sign:
            case "+":
                value = value + right
            case "-":
                value = value - right
            case "*":
                value = value * right
            case "/":
                value = value / right
            case "%":
                value = np.mod(value, right)
    return value, known


def _compare(operator: str, left: Operand, right: Operand) -> Mask:
    (a, a_known), (b, b_known) = left, right
    both = np.logical_and(a_known, b_known)
    if operator in ("==", "!="):
        neither = ~np.logical_or(a_known, b_known)
        same = (
            both & (np.asarray(a) == np.asarray(b))
            if a is not None and b is not None
            else np.asarray(False)
        )
        equal = np.asarray(same | neither)
        return equal if operator == "==" else ~equal
    x, y = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    ordered = {"<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal}[
        operator
    ](x, y)
    return np.asarray(ordered & both)
