"""The rule language of Astra's filter (Section 3.3, eq. 10-19): rules are parsed, checked, and
evaluated on all rows of a table of strategies at once. A strategy that meets any rule is dropped.

    rule       = conjunction { "||" conjunction }
    conjunction = comparison { "&&" comparison }
    comparison = sum [ ("==" | "=" | "!=" | "<" | "<=" | ">" | ">=") sum ]
    sum        = product { ("+" | "-") product }
    product    = unary { ("*" | "/" | "%") unary }
    unary      = "-" unary | "$name" | number | "string" | word | None | true | false | "(" rule ")"

A word without $ or quotation marks is a string, as the paper writes
`$recompute_granularity = selective`. The signs ≠ ≤ ≥ × stand for != <= >= *. Operators in one line
of the grammar are evaluated from left to right.

The operators have the same precedence as in Python. So the tokens of a rule are translated to
Python, and `ast.parse` makes the syntax tree; no rule is ever executed as Python. Every node of the
tree is checked against the columns of the table when the rule is read. A misspelt name or value is
thereby an error, and never a rule that silently drops nothing.

Values are float64, with NaN for None (an option that is not set). None equals only None.
Arithmetic with None and division by zero give None. An order comparison with None is false.
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

MAX_TOKENS = 300  # the most tokens of a rule
LARGEST = 2.0**53  # the largest number; whole numbers up to it are exact in float64
_TOKEN = re.compile(
    r"""(?P<name>\$[A-Za-z_][A-Za-z0-9_]*)
      | (?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
      | (?P<string>'[^'\n]*'|"[^"\n]*")
      | (?P<word>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<sign>\|\||&&|==|!=|<=|>=|[=<>+\-*/%()≠≤≥×])
      | (?P<nothing>\s+|\#.*)""",
    re.VERBOSE,
)
# Token of a rule -> Python's token, where it is another one or a word that is no string.
_PYTHON = {
    **{"&&": "and", "||": "or", "=": "==", "≠": "!=", "≤": "<=", "≥": ">=", "×": "*"},
    **{"None": "None", "true": "True", "false": "False", "True": "True", "False": "False"},
}
_PREFIX = "parameter_"  # $name becomes the Python name parameter_name
# Character that begins no token -> the text that an error expects in its place.
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
# Name of a column -> its values on the rows: NaN for None, numbers of their words for strings.
Table = Mapping[str, Floats]


@dataclass(frozen=True)
class Column:
    """A column that rules may name, as $name."""

    kind: Kind
    words: tuple[str, ...] = ()  # the values of a string column

    @property
    def values(self) -> str:
        """Its values for people, such as `number` or `p2p, a2a`."""
        if self.kind == "bool":
            return "true, false"
        return ", ".join(self.words) or self.kind


@dataclass(frozen=True)
class Source:
    """The text of a rule, and its place for error messages."""

    text: str
    where: str = "rule"  # the file or the option that has the rule
    line: int | None = None  # number of its line in a file

    def error(
        self, what: str, column: int, *, got: object = None, expected: str | None = None
    ) -> InputError:
        """The error at a place of this rule. column: number of the character, from 0."""
        line = "" if self.line is None else f"line {self.line} "
        place = f"{self.where}: {line}column {column + 1}"
        return InputError(what, where=place, got=got, expected=expected)


@dataclass(frozen=True)
class Part:
    """The checked meaning of a node of the syntax tree."""

    kind: Kind
    values: Floats  # on the rows of a table
    words: tuple[str, ...] = ()  # the values of a string column
    word: str | None = None  # a string that stands in the rule's text


def spelling(kind: str | None, token: str) -> str:
    """The Python text of a token. Strings get brackets, since Python would join two of them.

    kind: the name of the token's group in `_TOKEN`.
    """
    if kind == "name":
        return _PREFIX + token[1:]
    if kind == "number":
        return repr(float(token))
    if kind == "string":
        return f"({token[1:-1]!a})"
    if token in _PYTHON:
        return _PYTHON[token]
    if kind == "word":
        return f"({token!a})"
    return token


def tokenize(source: Source) -> list[tuple[int, str]]:
    """(column, Python text) of every token. Raises InputError at the first character that begins no
    token."""
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
    """Reads one rule: checks its nodes against the columns, and evaluates them on a table."""

    def __init__(
        self, source: Source, columns: Mapping[str, Column], table: Table | None = None
    ) -> None:
        """table: None where the rule is only checked, on no rows."""
        self.source, self.columns = source, columns
        self.table = dict.fromkeys(columns, np.zeros(0)) if table is None else table
        tokens = tokenize(source)
        self.text = " ".join(word for _, word in tokens)  # the Python text
        self.begins = [column for column, _ in tokens]  # where each token begins in the rule
        ends = np.cumsum([len(word) + 1 for _, word in tokens]).tolist()
        self.offsets = [0, *ends[:-1]]  # where each token begins in the Python text

    def rule(self) -> Floats:
        """The values of the whole rule: 1 on rows that meet it, else 0."""
        try:
            tree = ast.parse(self.text, mode="eval")
        except SyntaxError as error:
            # Python counts from 1; 0 or None names no place
            self.refuse(error.offset - 1 if error.offset else len(self.text))
        except (MemoryError, RecursionError):
            raise self.source.error("nested too deeply", 0) from None
        return self.need(tree.body, "bool")

    def column(self, offset: int) -> int:
        """The place in the rule of the token at an offset in the Python text."""
        if offset >= len(self.text):
            return len(self.source.text)
        token = bisect_right(self.offsets, offset) - 1
        return self.begins[token]

    def refuse(self, offset: int) -> NoReturn:
        """Raise InputError for syntax that the grammar does not have. offset: in the Python
        text."""
        column = self.column(offset)
        raise self.source.error(
            "cannot be read",
            column,
            got=self.source.text[column:] or "the end of the rule",
            expected="operators between values, all brackets in pairs",
        )

    def need(self, node: ast.expr, kind: Kind) -> Floats:
        """The values of a node. Raises InputError where it is of another kind."""
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
                if isinstance(operator, ast.Div | ast.Mod):  # division by zero gives None
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
        """The meaning of `$name`. Raises InputError where there is no such column."""
        if name not in self.columns:
            near = [f"${other}" for other in nearest(name, self.columns, most=2)]
            raise self.source.error(
                "unknown parameter",
                column,
                got=f"${name}",
                expected=" or ".join(near) or "one of " + ", ".join(sorted(self.columns)),
            )
        named = self.columns[name]
        return Part(named.kind, self.table[name], words=named.words)

    def string(self, word: str, column: int) -> Part:
        """The meaning of a string. It has a value only in a comparison, see `coded`. Raises
        InputError for the name of a column, which lacks its $."""
        if word in self.columns:
            raise self.source.error(f"{word} is a parameter", column, expected=f"${word}")
        return Part("string", np.array(np.nan), word=word)

    def comparison(self, first: ast.expr, sign: ast.cmpop, second: ast.expr) -> Part:
        """The meaning of a comparison. Raises InputError where the two sides are of different
        kinds and neither is None, and where others than numbers are ordered."""
        left, right = self.part(first), self.part(second)
        kinds = {left.kind, right.kind}
        column = self.column(second.col_offset)
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
        if ordered:
            met = _COMPARISONS[type(sign)](a, b)
        else:
            both_none = np.isnan(a) & np.isnan(b)
            equal = (a == b) | both_none
            met = equal if isinstance(sign, ast.Eq) else ~equal
        return Part("bool", np.asarray(met, dtype=np.float64))

    def coded(self, part: Part, other: Part, column: int) -> Part:
        """One side of a comparison of strings. A string in the rule's text gets as its value the
        number of this word among the words of the column on the other side."""
        if part.word in other.words:
            return Part("string", np.array(float(other.words.index(part.word))))
        is_unknown_word = part.word is not None
        two_columns = part.word is None and other.word is None
        differ_in_words = two_columns and part.words != other.words
        if is_unknown_word or differ_in_words:
            expected = "a parameter"
            if other.words:
                expected = f"one of {', '.join(other.words)} or None"
            raise self.source.error(
                "never has this value", column, got=part.word or "a parameter", expected=expected
            )
        return part


@dataclass(frozen=True)
class Rule:
    """A checked rule."""

    source: Source
    columns: Mapping[str, Column]  # name -> column, of all columns that rules may name

    @property
    def names(self) -> set[str]:
        """The names of the columns that the rule reads."""
        words = (word for _, word in tokenize(self.source))
        return {word.removeprefix(_PREFIX) for word in words if word.startswith(_PREFIX)}

    def met(self, table: Table, rows: int) -> Mask:
        """[rows] whether each row of a table meets the rule. rows: their number."""
        with np.errstate(invalid="ignore"):
            met = _Reader(self.source, self.columns, table).rule() == 1
        return np.broadcast_to(met, (rows,))


def compile_rule(source: Source, columns: Mapping[str, Column]) -> Rule:
    """The checked rule of a text. Raises InputError with the place of the first fault."""
    _Reader(source, columns).rule()
    return Rule(source, columns)


def rules_from_text(text: str, columns: Mapping[str, Column], *, where: str) -> list[Rule]:
    """The rules of a text with one rule in each line. A `#` outside of strings begins a comment;
    lines without a rule are skipped. where: the file or option of the text, for errors."""
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
    """[rows] whether each row of a table meets any of the rules. rows: their number."""
    mask = np.zeros(rows, dtype=bool)
    for rule in rules:
        mask |= rule.met(table, rows)
    return mask
