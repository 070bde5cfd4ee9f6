"""The rule language of Astra's filter (Section 3.3): tokens, syntax tree and recursive-descent
parser.

    rule       = conjunction { "||" conjunction }                     left to right, && binds
    tighter conjunction = comparison { "&&" comparison }
    comparison = sum [ ("==" | "=" | "!=" | "<" | "<=" | ">" | ">=") sum ]
    sum        = product { ("+" | "-") product }
    product    = unary { ("*" | "/" | "%") unary }
    unary      = "-" unary | "$name" | number | "string" | word | None | true | false | "(" rule ")"

A bare word is a string, as the paper writes `$recompute_granularity = selective`. The signs ≠ ≤ ≥ ×
are read as != <= >= *. Nothing is evaluated here, and nothing is ever handed to Python's own
parser.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from hetplan.errors import InputError

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
