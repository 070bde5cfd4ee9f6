"""Rules compiled against the columns of a strategy table and evaluated on all rows at once (Astra, eq.
10-19).

A strategy that meets any rule is dropped. Types are checked when a rule is compiled, so that a misspelt name
or value is an error and never a rule that silently drops nothing. None (an option that is not set) equals
only None; arithmetic with it gives None, ordering against it is false; so is dividing by zero, row by row.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal as Kinds

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

Kind = Kinds["number", "string", "bool", "none"]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Column:
    """What a rule may know of a parameter. words: the vocabulary of a string column (rows hold indices into
    it)."""

    kind: Kind
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Values:
    """One column of a table. data: float64 (numbers), codes (strings) or bool; known: False where None (None:
    all)."""

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
    kind = _Checker(source, columns, names).kind(tree)
    if kind != "bool":
        raise source.error(
            "a rule must be true or false", _column(tree), got=f"a {kind}", expected="a comparison"
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
    """The paper's three examples and Megatron-LM's own constraints, as shipped in `default.rules`."""
    text = (files("hetplan.formulations.astra.search") / "default.rules").read_text(encoding="utf-8")
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


def _column(node: Node) -> int:
    return _column(node.left) if isinstance(node, Comparison) else node.column


@dataclass(frozen=True)
class _Checker:
    """Types of expressions; collects the names that are read."""

    source: Source
    columns: Mapping[str, Column]
    names: set[str]

    def kind(self, node: Node) -> Kind:
        match node:
            case Literal(value=None):
                return "none"
            case Literal(value=bool()):
                return "bool"
            case Literal(value=str(word)):
                if word in self.columns:
                    raise self.source.error(f"{word} is a parameter", node.column, expected=f"${word}")
                return "string"
            case Literal():
                return "number"
            case Name(name=name):
                return self._name(node, name)
            case Negative(operand=operand):
                self._need(operand, "number", "minus")
                return "number"
            case Chain(first=first, rest=rest):
                wanted: Kind = "bool" if rest[0][0] in ("&&", "||") else "number"
                for sign, operand in [(rest[0][0], first), *rest]:
                    self._need(operand, wanted, sign)
                    if (
                        sign in "/%"
                        and operand is not first
                        and isinstance(operand, Literal)
                        and operand.value == 0
                    ):
                        raise self.source.error("division by zero", operand.column)
                return wanted
            case Comparison():
                return self._comparison(node)

    def _name(self, node: Name, name: str) -> Kind:
        if name not in self.columns:
            near = difflib.get_close_matches(name, self.columns, n=2, cutoff=0.5)
            expected = (
                " or ".join(f"${n}" for n in near) if near else "one of " + ", ".join(sorted(self.columns))
            )
            raise self.source.error("unknown parameter", node.column, got=f"${name}", expected=expected)
        self.names.add(name)
        return self.columns[name].kind

    def _need(self, node: Node, wanted: Kind, sign: str) -> None:
        kind = self.kind(node)
        if kind != wanted:
            expected = "a comparison" if wanted == "bool" else "a number"
            raise self.source.error(
                f"{sign} cannot take this", _column(node), got=f"a {kind}", expected=expected
            )

    def _comparison(self, node: Comparison) -> Kind:
        left, right = self.kind(node.left), self.kind(node.right)
        if node.operator in ("==", "!="):
            if "none" not in (left, right) and left != right:
                raise self.source.error("cannot be compared", node.column, got=f"a {left} and a {right}")
            for one, other in ((node.left, node.right), (node.right, node.left)):
                if isinstance(one, Name) and isinstance(other, Literal) and isinstance(other.value, str):
                    words = self.columns[one.name].words
                    if other.value not in words:
                        raise self.source.error(
                            f"${one.name} never has this value",
                            other.column,
                            got=other.value,
                            expected=f"one of {', '.join(words)} or None",
                        )
        elif (left, right) != ("number", "number"):
            raise self.source.error(
                f"{node.operator} orders numbers only", node.column, got=f"a {left} and a {right}"
            )
        return "bool"


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
        return _compare(node.operator, _operand(node.left, rule, table), _operand(node.right, rule, table))
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
            return _arithmetic(_operand(first, rule, table), [(s, _operand(o, rule, table)) for s, o in rest])
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
            both & (np.asarray(a) == np.asarray(b)) if a is not None and b is not None else np.asarray(False)
        )
        equal = np.asarray(same | neither)
        return equal if operator == "==" else ~equal
    x, y = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    ordered = {"<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal}[operator](x, y)
    return np.asarray(ordered & both)
