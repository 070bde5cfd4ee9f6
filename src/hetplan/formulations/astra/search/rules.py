"""The rule language of Astra's filter (Section 3.3, eq. 10-19): parsed, checked, evaluated on rows.

    rule       = conjunction { "||" conjunction }
    conjunction = comparison { "&&" comparison }
    comparison = sum [ ("==" | "=" | "!=" | "<" | "<=" | ">" | ">=") sum ]
    sum        = product { ("+" | "-") product }
    product    = unary { ("*" | "/" | "%") unary }
    unary      = "-" unary | "$name" | number | "string" | word | None | true | false | "(" rule ")"

A bare word is a string, as the paper writes `$recompute_granularity = selective`. The signs ≠ ≤ ≥ ×
are read as != <= >= *. Operators of one line of the grammar go from left to right.

A strategy that meets any rule is dropped. Types are checked when a rule is compiled against the
columns of a strategy table, so that a misspelt name or value is an error and never a rule that
silently drops nothing. None (an option that is not set) equals only None; arithmetic with it gives
None, ordering against it is false; so is dividing by zero, row by row. Nothing is ever handed to
Python's own parser.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal as Kinds
from typing import NoReturn

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
COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")


@dataclass(frozen=True)
class Token:
    """kind: name, number, string, word, sign or end. column: 0-based offset in the rule's text."""

    kind: str
    text: str
    column: int


@dataclass(frozen=True)
class Literal:
    """A number, a string, True, False or None."""

    value: float | str | bool | None
    column: int


@dataclass(frozen=True)
class Name:
    """`$name`, without its dollar."""

    name: str
    column: int


@dataclass(frozen=True)
class Negative:
    """Unary minus."""

    operand: Node
    column: int


@dataclass(frozen=True)
class Chain:
    """`first op next op next …`, left to right; all operators of one level (sum, product, && or
    ||)."""

    first: Node
    rest: tuple[tuple[str, Node], ...]
    column: int


@dataclass(frozen=True)
class Comparison:
    """`left op right`; `column` is the operator's."""

    left: Node
    operator: str
    right: Node
    column: int


Node = Literal | Name | Negative | Chain | Comparison


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


def tokenize(source: Source) -> list[Token]:
    """The rule's tokens with an `end` behind them; raises InputError at the first character that
    starts none."""
    text = source.text
    if len(text) > MAX_LENGTH:
        raise source.error(
            "rule is too long", MAX_LENGTH, expected=f"at most {MAX_LENGTH} characters"
        )
    tokens, at = [], 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        match = _TOKEN.match(text, at)
        if match is None:
            _refuse_character(source, at)
        kind = match.lastgroup or ""
        tokens.append(Token(kind, _ALIASES.get(match.group(), match.group()), at))
        at = match.end()
    return [*tokens, Token("end", "", len(text))]


def _refuse_character(source: Source, at: int) -> NoReturn:
    character = source.text[at]
    if character in "'\"":
        raise source.error(
            "string is not closed", at, expected=f"another {character} on the same line"
        )
    if character == "$":
        raise source.error("$ without a name", at, expected="$ and the name of a parameter")
    if character in "&|":
        raise source.error("single sign", at, got=character, expected=character * 2)
    raise source.error("unexpected character", at, got=character)


def parse_rule(source: Source) -> Node:
    """The syntax tree of one rule; raises InputError with the column of what is wrong."""
    parser = _Parser(source, tokenize(source))
    tree = parser.alternatives()
    parser.finish()
    return tree


class _Parser:
    """Recursive descent, one method per line of the grammar; recursion only through brackets and
    minus signs."""

    def __init__(self, source: Source, tokens: list[Token]) -> None:
        self.source, self.tokens, self.at, self.depth = source, tokens, 0, 0

    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    def next(self) -> Token:
        token = self.token
        self.at += 1
        return token

    def finish(self) -> None:
        if self.token.text == ")":
            raise self.source.error("bracket was never opened", self.token.column, got=")")
        if self.token.text in COMPARISONS:
            raise self.source.error(
                "comparisons do not chain", self.token.column, expected="&& between two comparisons"
            )
        if self.token.kind != "end":
            raise self.source.error(
                "unexpected text", self.token.column, got=self.token.text, expected="an operator"
            )

    def alternatives(self) -> Node:
        return self._chain(self.conjunction, ("||",))

    def conjunction(self) -> Node:
        return self._chain(self.comparison, ("&&",))

    def comparison(self) -> Node:
        left = self.sum()
        if self.token.kind == "sign" and self.token.text in COMPARISONS:
            operator = self.next()
            return Comparison(left, operator.text, self.sum(), operator.column)
        return left

    def sum(self) -> Node:
        return self._chain(self.product, ("+", "-"))

    def product(self) -> Node:
        return self._chain(self.unary, ("*", "/", "%"))

    def _chain(self, operand: Callable[[], Node], operators: tuple[str, ...]) -> Node:
        column = self.token.column
        first: Node = operand()
        rest: list[tuple[str, Node]] = []
        while self.token.kind == "sign" and self.token.text in operators:
            sign = self.next().text
            rest.append((sign, operand()))
        return Chain(first, tuple(rest), column) if rest else first

    def unary(self) -> Node:
        token = self.next()
        if token.text in ("-", "(") and token.kind == "sign":
            self.depth += 1
            if self.depth > MAX_NESTING:
                raise self.source.error(
                    "nested too deeply", token.column, expected=f"at most {MAX_NESTING} levels"
                )
            inner = self.unary() if token.text == "-" else self.alternatives()
            self.depth -= 1
            if token.text == "-":
                return Negative(inner, token.column)
            self._close(token)
            return inner
        return self._atom(token)

    def _close(self, opened: Token) -> None:
        if self.token.text in COMPARISONS:
            raise self.source.error(
                "comparisons do not chain", self.token.column, expected="&& between two comparisons"
            )
        if self.token.kind == "sign" and self.token.text == ")":
            self.next()
            return
        got = self.token.text or "the end of the rule"
        raise self.source.error("bracket is not closed", opened.column, got=got, expected=")")

    def _atom(self, token: Token) -> Node:
        match token.kind:
            case "name":
                return Name(token.text[1:], token.column)
            case "number":
                value = float(token.text)
                if not abs(value) <= 2**53:
                    raise self.source.error(
                        "number is too large", token.column, got=token.text, expected="at most 2^53"
                    )
                return Literal(value, token.column)
            case "string":
                return Literal(token.text[1:-1], token.column)
            case "word":
                named = {"None": None, "true": True, "false": False, "True": True, "False": False}
                return Literal(named.get(token.text, token.text), token.column)
        got = token.text or "the end of the rule"
        raise self.source.error(
            "a value is missing", token.column, got=got, expected="$name, number, string, None or ("
        )


Kind = Kinds["number", "string", "bool", "none"]


@dataclass(frozen=True)
class Column:
    """What a rule may know of a parameter. words: the vocabulary of a string column (rows hold
    indices into it)."""

    kind: Kind
    words: tuple[str, ...] = ()


def column_of(node: Node) -> int:
    return column_of(node.left) if isinstance(node, Comparison) else node.column


@dataclass(frozen=True)
class Checker:
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
                    raise self.source.error(
                        f"{word} is a parameter", node.column, expected=f"${word}"
                    )
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
            near = nearest(name, self.columns, most=2)
            expected = (
                " or ".join(f"${n}" for n in near)
                if near
                else "one of " + ", ".join(sorted(self.columns))
            )
            raise self.source.error(
                "unknown parameter", node.column, got=f"${name}", expected=expected
            )
        self.names.add(name)
        return self.columns[name].kind

    def _need(self, node: Node, wanted: Kind, sign: str) -> None:
        kind = self.kind(node)
        if kind != wanted:
            expected = "a comparison" if wanted == "bool" else "a number"
            raise self.source.error(
                f"{sign} cannot take this", column_of(node), got=f"a {kind}", expected=expected
            )

    def _comparison(self, node: Comparison) -> Kind:
        left, right = self.kind(node.left), self.kind(node.right)
        if node.operator in ("==", "!="):
            if "none" not in (left, right) and left != right:
                raise self.source.error(
                    "cannot be compared", node.column, got=f"a {left} and a {right}"
                )
            for one, other in ((node.left, node.right), (node.right, node.left)):
                if (
                    isinstance(one, Name)
                    and isinstance(other, Literal)
                    and isinstance(other.value, str)
                ):
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
