"""The rule language of Astra's filter (Section 3.3, eq. 10-19): parsed, checked, evaluated on rows.

    rule       = conjunction { "||" conjunction }
    conjunction = comparison { "&&" comparison }
    comparison = sum [ ("==" | "=" | "!=" | "<" | "<=" | ">" | ">=") sum ]
    sum        = product { ("+" | "-") product }
    product    = unary { ("*" | "/" | "%") unary }
    unary      = "-" unary | "$name" | number | "string" | word | None | true | false | "(" rule ")"

A bare word is a string, as the paper writes `$recompute_granularity = selective`. The signs ≠ ≤ ≥ ×
are read as != <= >= *. Operators of one line of the grammar go from left to right.

A strategy that meets any rule is dropped. The grammar's operators bind as Python's do, so the
tokens of a rule are spelt in Python's way and `ast.parse` makes the tree; nothing is ever executed.
Every part of the tree is checked against the columns of a strategy table at once: a misspelt name
or value is an error, never a rule that silently drops nothing.

Values are float64 with NaN for None (an option that is not set). None equals only None; arithmetic
with it gives None, ordering against it is false, and so is dividing by zero, row by row.
"""

import ast
import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from importlib.resources import files
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from hetplan.errors import InputError, nearest
from hetplan.files import read_bytes
from hetplan.replays.arrays import Floats

MAX_TOKENS = 300
LARGEST = 2.0**53  # whole numbers up to here are exact in float64
_TOKEN = re.compile(
    r"""(?P<name>\$[A-Za-z_][A-Za-z0-9_]*)
      | (?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
      | (?P<string>'[^'\n]*'|"[^"\n]*")
      | (?P<word>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<sign>\|\||&&|==|!=|<=|>=|[=<>+\-*/%()≠≤≥×])
      | (?P<nothing>\s+|\#.*)""",
    re.VERBOSE,
)
# How Python spells what a rule spells otherwise; a parameter is a name behind this prefix.
_PYTHON = {
    **{"&&": "and", "||": "or", "=": "==", "≠": "!=", "≤": "<=", "≥": ">=", "×": "*"},
    **{"None": "None", "true": "True", "false": "False", "True": "True", "False": "False"},
}
_PREFIX = "parameter_"
# What is missing where a character begins no token.
_MISSING = {
    "'": "another ' on the same line",
    '"': 'another " on the same line',
    "$": "$ and the name of a parameter",
    "&": "&&",
    "|": "||",
}
_COMPARISONS: dict[type[ast.cmpop], Any] = {
    ast.Lt: np.less,
    ast.LtE: np.less_equal,
    ast.Gt: np.greater,
    ast.GtE: np.greater_equal,
}
_ARITHMETIC: dict[type[ast.operator], Any] = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.Div: np.divide,
    ast.Mod: np.mod,
}

Kind = Literal["number", "string", "bool", "none"]
Mask = NDArray[np.bool_]
# Columns as a rule sees them: NaN where None, strings as indices of their words.
Table = Mapping[str, Floats]


@dataclass(frozen=True)
class Column:
    """A parameter as rules see it."""

    kind: Kind
    words: tuple[str, ...] = ()  # the vocabulary of a string column


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
class Part:
    """A part of a rule whose type is checked.

    values: on the rows of a table. words: the vocabulary of a string parameter. word: a string that
    is written down.
    """

    kind: Kind
    values: Floats
    words: tuple[str, ...] = ()
    word: str | None = None


def spelling(kind: str | None, token: str) -> str:
    """A token as Python spells it; strings in brackets, so that two of them never join."""
    if kind == "name":
        return _PREFIX + token[1:]
    if kind == "number":
        return repr(float(token))
    if kind == "string":
        return f"({token[1:-1]!a})"
    return _PYTHON.get(token, f"({token!a})" if kind == "word" else token)


def tokenize(source: Source) -> list[tuple[int, str]]:
    """(column, spelling) of every token; raises InputError at the first character that starts
    none."""
    tokens: list[tuple[int, str]] = []
    text, at = source.text, 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            expected = _MISSING.get(text[at])
            raise source.error("unexpected character", at, got=text[at], expected=expected)
        if match["number"] and float(match["number"]) > LARGEST:
            raise source.error(
                "number is too large", at, got=match.group(), expected="at most 2^53"
            )
        if not match["nothing"]:
            tokens.append((at, spelling(match.lastgroup, match.group())))
        at = match.end()
    if len(tokens) > MAX_TOKENS:
        expected = f"at most {MAX_TOKENS} names, values and signs"
        raise source.error("rule is too long", tokens[MAX_TOKENS][0], expected=expected)
    return tokens


class _Reader:
    """Reads one rule: its parts are checked against the columns and valued on a table.

    table: None for no rows, where only the check counts.
    """

    def __init__(
        self, source: Source, columns: Mapping[str, Column], table: Table | None = None
    ) -> None:
        self.source, self.columns = source, columns
        self.table = dict.fromkeys(columns, np.zeros(0)) if table is None else table
        tokens = tokenize(source)
        # Where each token begins in the rule, and in the text that Python reads.
        self.begins = [column for column, _ in tokens]
        ends = np.cumsum([len(word) + 1 for _, word in tokens]).tolist()
        self.offsets = [0, *ends[:-1]]
        self.text = " ".join(word for _, word in tokens)

    def rule(self) -> Floats:
        """The whole text: 1 where it is met."""
        try:
            tree = ast.parse(self.text, mode="eval")
        except SyntaxError as error:
            self.refuse(error.offset - 1 if error.offset else len(self.text))
        except (MemoryError, RecursionError):
            raise self.source.error("nested too deeply", 0) from None
        return self.need(tree.body, "bool")

    def column(self, offset: int) -> int:
        """The column of the rule behind an offset in Python's text."""
        return (
            len(self.source.text)
            if offset >= len(self.text)
            else self.begins[bisect_right(self.offsets, offset) - 1]
        )

    def refuse(self, offset: int) -> NoReturn:
        """Raise InputError for what the grammar does not have."""
        column = self.column(offset)
        raise self.source.error(
            "cannot be read",
            column,
            got=self.source.text[column:] or "the end of the rule",
            expected="operators between values, all brackets in pairs",
        )

    def need(self, node: ast.expr, kind: Kind) -> Floats:
        """The values of a part, which must be of that kind."""
        part = self.part(node)
        if part.kind != kind:
            expected = "a comparison" if kind == "bool" else "a number"
            column = self.column(node.col_offset)
            raise self.source.error(
                "this cannot stand here", column, got=f"a {part.kind}", expected=expected
            )
        return part.values

    def part(self, node: ast.expr) -> Part:
        """The meaning of a node of the syntax tree; raises InputError for syntax that no rule
        has."""
        match node:
            case ast.Name(id=name):
                return self.parameter(name.removeprefix(_PREFIX), self.column(node.col_offset))
            case ast.Constant(value=None):
                return Part("none", np.array(np.nan))
            case ast.Constant(value=bool() as flag):
                return Part("bool", np.array(float(flag)))
            case ast.Constant(value=float() as number):
                return Part("number", np.array(number))
            case ast.Constant(value=str() as word):
                return self.string(word, self.column(node.col_offset))
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return Part("number", -self.need(inner, "number"))
            case ast.BinOp(left=first, op=operator, right=second) if type(operator) in _ARITHMETIC:
                left, right = self.need(first, "number"), self.need(second, "number")
                if isinstance(operator, ast.Div | ast.Mod):  # by zero there is nothing to divide
                    right = np.where(right == 0, np.nan, right)
                return Part("number", np.asarray(_ARITHMETIC[type(operator)](left, right)))
            case ast.BoolOp(op=operator, values=values):
                combine = np.logical_and if isinstance(operator, ast.And) else np.logical_or
                met = reduce(combine, [self.need(value, "bool") == 1 for value in values])
                return Part("bool", np.asarray(met, dtype=np.float64))
            case ast.Compare(left=first, ops=[sign], comparators=[second]):
                return self.comparison(first, sign, second)
            case ast.Compare(comparators=[_, third, *_]):
                column = self.column(third.col_offset)
                raise self.source.error(
                    "comparisons do not chain", column, expected="&& between two comparisons"
                )
        self.refuse(node.col_offset)

    def parameter(self, name: str, column: int) -> Part:
        """`$name`."""
        if name not in self.columns:
            near = [f"${other}" for other in nearest(name, self.columns, most=2)]
            raise self.source.error(
                "unknown parameter",
                column,
                got=f"${name}",
                expected=" or ".join(near) or "one of " + ", ".join(sorted(self.columns)),
            )
        known = self.columns[name]
        return Part(known.kind, self.table[name], words=known.words)

    def string(self, word: str, column: int) -> Part:
        """A word; on its own it has no value, beside a parameter it is one of its words."""
        if word in self.columns:
            raise self.source.error(f"{word} is a parameter", column, expected=f"${word}")
        return Part("string", np.array(np.nan), word=word)

    def comparison(self, first: ast.expr, sign: ast.cmpop, second: ast.expr) -> Part:
        """Two parts of one kind, or one of them None."""
        left, right = self.part(first), self.part(second)
        kinds, column = {left.kind, right.kind}, self.column(second.col_offset)
        ordered = type(sign) in _COMPARISONS
        if (ordered and kinds != {"number"}) or len(kinds - {"none"}) > 1:
            raise self.source.error(
                "cannot be compared",
                column,
                got=f"a {left.kind} and a {right.kind}",
                expected="two numbers" if ordered else "two of one kind",
            )
        if kinds == {"string"}:
            left, right = self.coded(left, right, column), self.coded(right, left, column)
        a, b = left.values, right.values
        same = (a == b) | (np.isnan(a) & np.isnan(b))  # None equals only None, and has no order
        equal = same if isinstance(sign, ast.Eq) else ~same
        met = _COMPARISONS[type(sign)](a, b) if ordered else equal
        return Part("bool", np.asarray(met, dtype=np.float64))

    def coded(self, part: Part, other: Part, column: int) -> Part:
        """A string beside `other`: a word as its index in the other's words."""
        if part.word in other.words:
            return Part("string", np.array(float(other.words.index(part.word))))
        if part.word is not None or (part.words != other.words and other.word is None):
            raise self.source.error(
                "never has this value",
                column,
                got=part.word or "a parameter",
                expected=f"one of {', '.join(other.words)} or None"
                if other.words
                else "a parameter",
            )
        return part


@dataclass(frozen=True)
class Rule:
    """One checked rule."""

    source: Source
    columns: Mapping[str, Column]

    @property
    def names(self) -> set[str]:
        """The columns that it reads."""
        words = (word for _, word in tokenize(self.source))
        return {word.removeprefix(_PREFIX) for word in words if word.startswith(_PREFIX)}

    def met(self, table: Table, rows: int) -> Mask:
        """Which of the `rows` rows of `table` meet the rule."""
        with np.errstate(invalid="ignore"):
            met = _Reader(self.source, self.columns, table).rule() == 1
        return np.broadcast_to(met, (rows,))


def compile_rule(source: Source, columns: Mapping[str, Column]) -> Rule:
    """Parse and type-check one rule; raises InputError with the place of the first fault."""
    _Reader(source, columns).rule()
    return Rule(source, columns)


def rules_from_text(text: str, columns: Mapping[str, Column], *, where: str) -> list[Rule]:
    """One rule a line; `#` starts a comment outside of strings, empty lines are skipped."""
    return [
        compile_rule(Source(line, where, number), columns)
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]


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


def dropped(rules: Iterable[Rule], table: Table, rows: int) -> Mask:
    """Which rows meet any of the rules."""
    mask = np.zeros(rows, dtype=bool)
    for rule in rules:
        mask |= rule.met(table, rows)
    return mask
