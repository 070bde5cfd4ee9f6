"""Types of the rule language: what columns there are, and whether an expression makes sense over
them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal as Kinds

from hetplan.formulations.astra.search.rule_syntax import (
    Chain,
    Comparison,
    Literal,
    Name,
    Negative,
    Node,
    Source,
)
from hetplan.names import nearest

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
