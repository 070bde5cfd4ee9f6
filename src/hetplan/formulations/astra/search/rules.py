"""The rule language of Astra's filter (Section 3.3, eq. 10-19): parsed, checked, evaluated on rows.

    rule       = conjunction { "||" conjunction }
    conjunction = comparison { "&&" comparison }
    comparison = sum [ ("==" | "=" | "!=" | "<" | "<=" | ">" | ">=") sum ]
    sum        = product { ("+" | "-") product }
    product    = unary { ("*" | "/" | "%") unary }
    unary      = "-" unary | "$name" | number | "string" | word | None | true | false | "(" rule ")"

A bare word is a string, as the paper writes `$recompute_granularity = selective`. The signs ≠ ≤ ≥ ×
are read as != <= >= *. Operators of one line of the grammar go from left to right.

A strategy that meets any rule is dropped. A rule is read in one pass: every part of it becomes an
`Expression` whose type is checked against the columns of a strategy table at once, so that a
misspelt name or value is an error and never a rule that silently drops nothing. None (an option
that is not set) equals only None; arithmetic with it gives None, ordering against it is false; so
is dividing by zero, row by row. Nothing is ever handed to Python's own parser.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from importlib.resources import files
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hetplan.errors import InputError
from hetplan.files import read_bytes
from hetplan.names import nearest

MAX_LENGTH = 10_000
MAX_NESTING = 50
_TOKEN = re.compile(
    r"""(?P<name>\$[A-Za-z_][A-Za-z0-9_]*)
      | (?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
      | (?P<string>'[^'\n]*'|"[^"\n]*")
      | (?P<word>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<sign>\|\||&&|==|!=|<=|>=|[=<>+\-*/%()≠≤≥×])""",
    re.VERBOSE,
)
_ALIASES = {"=": "==", "≠": "!=", "≤": "<=", "≥": ">=", "×": "*"}
_CONSTANTS = {"None": None, "true": True, "false": False, "True": True, "False": False}
COMPARISONS: dict[str, Any] = {
    "==": np.equal,
    "!=": np.not_equal,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
}
ARITHMETIC: dict[str, Any] = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": np.divide,
    "%": np.mod,
}

Kind = Literal["number", "string", "bool", "none"]
Mask = NDArray[np.bool_]
# The values of an expression, and where they are known (are not None).
Operand = tuple[Any, Mask | bool]


@dataclass(frozen=True)
class Column:
    """What a rule may know of a parameter."""

    kind: Kind
    words: tuple[str, ...] = ()  # the vocabulary of a string column; rows hold indices into it


@dataclass(frozen=True)
class Values:
    """One column of a table."""

    data: NDArray[np.generic]  # float64 (numbers), codes (strings) or bool
    known: Mask | None = None  # False where None; None: all are known


Table = Mapping[str, Values]


@dataclass(frozen=True)
class Source:
    """Where a rule stands, for messages: the file (or option), its line, its text."""

    text: str
    where: str = "rule"
    line: int | None = None

    def error(
        self, what: str, column: int, *, got: object = None, expected: str | None = None
    ) -> InputError:
        """An error at a place of this rule."""
        line = "" if self.line is None else f"line {self.line} "
        place = f"{self.where}: {line}column {column + 1}"
        return InputError(what, where=place, got=got, expected=expected)


@dataclass(frozen=True)
class Token:
    """A piece of a rule's text."""

    kind: str  # name, number, string, word, sign or end
    text: str
    column: int  # 0-based offset in the rule's text

    def among(self, signs: Iterable[str]) -> bool:
        """Whether this is one of those signs."""
        return self.kind == "sign" and self.text in signs


@dataclass(frozen=True)
class Expression:
    """A part of a rule whose type is checked."""

    kind: Kind
    column: int
    on: Callable[[Table], Operand]  # its values on the rows of a table
    name: str = ""  # of the parameter, where it is one
    literal: float | str | bool | None = None  # its value, where that is written down


def tokenize(source: Source) -> list[Token]:
    """The rule's tokens with an `end` behind them; raises InputError at the first character that
    starts none."""
    text = source.text
    if len(text) > MAX_LENGTH:
        expected = f"at most {MAX_LENGTH} characters"
        raise source.error("rule is too long", MAX_LENGTH, expected=expected)
    tokens, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is not None:
            sign = _ALIASES.get(match.group(), match.group())
            tokens.append(Token(match.lastgroup or "", sign, at))
        elif not text[at].isspace():
            raise _bad_character(source, at)
        at = match.end() if match is not None else at + 1
    return [*tokens, Token("end", "", len(text))]


def _bad_character(source: Source, at: int) -> InputError:
    character = source.text[at]
    if character in "'\"":
        expected = f"another {character} on the same line"
        return source.error("string is not closed", at, expected=expected)
    if character == "$":
        return source.error("$ without a name", at, expected="$ and the name of a parameter")
    if character in "&|":
        return source.error("single sign", at, got=character, expected=character * 2)
    return source.error("unexpected character", at, got=character)


class _Reader:
    """Recursive descent, one method per line of the grammar; recursion only through brackets and
    minus signs."""

    def __init__(self, source: Source, columns: Mapping[str, Column]) -> None:
        self.source, self.columns = source, columns
        self.tokens = tokenize(source)[::-1]  # the next one last
        self.depth = 0
        self.names: set[str] = set()

    @property
    def token(self) -> Token:
        return self.tokens[-1]

    def rule(self) -> Expression:
        """The whole text."""
        read = self.alternatives()
        if self.token.text == ")":
            raise self.source.error("bracket was never opened", self.token.column, got=")")
        self.refuse_chained_comparison()
        if self.token.kind != "end":
            raise self.source.error(
                "unexpected text", self.token.column, got=self.token.text, expected="an operator"
            )
        if read.kind != "bool":
            got = f"a {read.kind}"
            raise self.source.error(
                "a rule must be true or false", read.column, got=got, expected="a comparison"
            )
        return read

    def refuse_chained_comparison(self) -> None:
        """`1 < $a < 3` has a second comparison where the first one should end."""
        if self.token.among(COMPARISONS):
            expected = "&& between two comparisons"
            raise self.source.error(
                "comparisons do not chain", self.token.column, expected=expected
            )

    def alternatives(self) -> Expression:
        return self.chain(self.conjunction, ("||",), "bool", any_of)

    def conjunction(self) -> Expression:
        return self.chain(self.comparison, ("&&",), "bool", all_of)

    def sum(self) -> Expression:
        return self.chain(self.product, ("+", "-"), "number", arithmetic)

    def product(self) -> Expression:
        return self.chain(self.unary, ("*", "/", "%"), "number", arithmetic)

    def chain(
        self,
        operand: Callable[[], Expression],
        signs: tuple[str, ...],
        kind: Kind,
        combine: Callable[[Sequence[str], Sequence[Operand]], Operand],
    ) -> Expression:
        """`first sign next sign next …`, combined from left to right."""
        column, operands, between = self.token.column, [operand()], list[str]()
        while self.token.among(signs):
            between.append(self.tokens.pop().text)
            operands.append(operand())
        if not between:
            return operands[0]
        for sign, part in zip([between[0], *between], operands, strict=True):
            self.need(part, kind, sign)
            if sign in "/%" and part is not operands[0] and part.literal == 0:
                raise self.source.error("division by zero", part.column)
        return Expression(
            kind, column, lambda table: combine(between, [part.on(table) for part in operands])
        )

    def need(self, part: Expression, kind: Kind, sign: str) -> None:
        """Raise InputError where a sign cannot take what stands beside it."""
        if part.kind != kind:
            expected = "a comparison" if kind == "bool" else "a number"
            raise self.source.error(
                f"{sign} cannot take this", part.column, got=f"a {part.kind}", expected=expected
            )

    def comparison(self) -> Expression:
        left = self.sum()
        if not self.token.among(COMPARISONS):
            return left
        operator = self.tokens.pop()
        right, sign = self.sum(), operator.text
        kinds, got = {left.kind, right.kind}, f"a {left.kind} and a {right.kind}"
        if sign not in ("==", "!="):
            if kinds != {"number"}:
                raise self.source.error(f"{sign} orders numbers only", operator.column, got=got)
        elif len(kinds - {"none"}) > 1:
            raise self.source.error("cannot be compared", operator.column, got=got)
        for one, other in ((left, right), (right, left)):
            self.check_word(one, other)
        return Expression(
            "bool",
            left.column,
            lambda table: (compare(sign, left.on(table), right.on(table)), True),
        )

    def check_word(self, one: Expression, other: Expression) -> None:
        """A word that a parameter is compared with must be one of its values."""
        if one.name and isinstance(other.literal, str):
            words = self.columns[one.name].words
            if other.literal not in words:
                raise self.source.error(
                    f"${one.name} never has this value",
                    other.column,
                    got=other.literal,
                    expected=f"one of {', '.join(words)} or None",
                )

    def unary(self) -> Expression:
        if not self.token.among("-("):
            return self.atom()
        token = self.tokens.pop()
        self.depth += 1
        if self.depth > MAX_NESTING:
            expected = f"at most {MAX_NESTING} levels"
            raise self.source.error("nested too deeply", token.column, expected=expected)
        inner = self.unary() if token.text == "-" else self.alternatives()
        self.depth -= 1
        if token.text == "-":
            self.need(inner, "number", "minus")
            return Expression("number", token.column, lambda table: negative(inner.on(table)))
        self.refuse_chained_comparison()
        if self.token.text != ")":
            got = self.token.text or "the end of the rule"
            raise self.source.error("bracket is not closed", token.column, got=got, expected=")")
        self.tokens.pop()
        return inner

    def atom(self) -> Expression:
        token = self.token
        if token.kind in ("sign", "end"):
            raise self.source.error(
                "a value is missing",
                token.column,
                got=token.text or "the end of the rule",
                expected="$name, number, string, None or (",
            )
        self.tokens.pop()
        if token.kind == "name":
            return self.parameter(token)
        value: float | str | bool | None = token.text
        kind: Kind = "string"
        if token.kind == "number":
            value, kind = float(token.text), "number"
            if value > 2**53:
                got = token.text
                raise self.source.error(
                    "number is too large", token.column, got=got, expected="at most 2^53"
                )
        elif token.kind == "string":
            value = token.text[1:-1]
        elif token.text in _CONSTANTS:
            value = _CONSTANTS[token.text]
            kind = "none" if value is None else "bool"
        if isinstance(value, str) and value in self.columns:
            raise self.source.error(f"{value} is a parameter", token.column, expected=f"${value}")
        return Expression(kind, token.column, lambda _: (value, value is not None), literal=value)

    def parameter(self, token: Token) -> Expression:
        """`$name`."""
        name = token.text[1:]
        if name not in self.columns:
            near = [f"${other}" for other in nearest(name, self.columns, most=2)]
            expected = " or ".join(near) or "one of " + ", ".join(sorted(self.columns))
            raise self.source.error(
                "unknown parameter", token.column, got=f"${name}", expected=expected
            )
        self.names.add(name)
        column = self.columns[name]

        def values(table: Table) -> Operand:
            own = table[name]
            data = np.array(column.words)[own.data.astype(np.int64)] if column.words else own.data
            return data, True if own.known is None else own.known

        return Expression(column.kind, token.column, values, name=name)


def truth(operand: Operand) -> Mask:
    """A bool expression as a mask; an unset flag counts as false."""
    value, known = operand
    return np.asarray(value, dtype=bool) & known


def any_of(_: Sequence[str], operands: Sequence[Operand]) -> Operand:
    """`a || b || …`."""
    return reduce(np.logical_or, map(truth, operands)), True


def all_of(_: Sequence[str], operands: Sequence[Operand]) -> Operand:
    """`a && b && …`."""
    return reduce(np.logical_and, map(truth, operands)), True


def negative(operand: Operand) -> Operand:
    """Unary minus."""
    return -np.asarray(operand[0], dtype=float), operand[1]


def arithmetic(signs: Sequence[str], operands: Sequence[Operand]) -> Operand:
    """Left to right in float64: whole numbers are exact up to 2^53."""
    value, known = np.asarray(operands[0][0], dtype=float), operands[0][1]
    for sign, (other, other_known) in zip(signs, operands[1:], strict=True):
        right = np.asarray(other, dtype=float)
        known = np.logical_and(known, other_known)
        if sign in "/%":
            known = np.logical_and(known, right != 0)
            right = np.where(right == 0, 1.0, right)
        value = ARITHMETIC[sign](value, right)
    return value, known


def compare(sign: str, left: Operand, right: Operand) -> Mask:
    """None equals only None, and has no order."""
    (a, a_known), (b, b_known) = left, right
    both = np.logical_and(a_known, b_known)
    if a is None or b is None:
        met: Any = sign == "!="
    else:
        met = COMPARISONS[sign](np.asarray(a), np.asarray(b))
    same = np.logical_not(np.logical_or(a_known, b_known))
    return np.where(both, met, (sign == "==") & same | (sign == "!=") & ~same)


@dataclass(frozen=True)
class Rule:
    """One compiled rule."""

    source: Source
    condition: Expression
    names: frozenset[str]  # the columns that it reads

    def __str__(self) -> str:
        return self.source.text

    def met(self, table: Table, rows: int) -> Mask:
        """Which of the `rows` rows of `table` meet the rule."""
        return np.broadcast_to(truth(self.condition.on(table)), (rows,))


def compile_rule(source: Source, columns: Mapping[str, Column]) -> Rule:
    """Parse and type-check one rule; raises InputError with the place of the first fault."""
    reader = _Reader(source, columns)
    return Rule(source, reader.rule(), frozenset(reader.names))


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
