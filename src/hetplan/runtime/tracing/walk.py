"""Walking a graph of torch.export: every call of an ATen operator becomes operators of a
single-device program.

Values along the way are tensors of the program, constants (what depends on no input and no
parameter is computed at once), or tuples of these. An operator without a rule is written down and
stands in as data, so that one walk finds all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetplan.formulations.hap.spmd.forms import Shape
from hetplan.formulations.hap.spmd.program import Writer


class MissingRule(Exception):
    """A rule says that it does not cover a call; the text says what is missing."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of the program."""

    name: str
    shape: Shape


@dataclass(frozen=True)
class Unsupported:
    """operator: ATen's name; where: path of the module that calls it; missing: the rule that would
    be needed."""

    operator: str
    where: str
    missing: str

    def text(self) -> str:
        """One line."""
        return f"{self.operator} in {self.where}: {self.missing}"


# (walker, arguments of the ATen operator) -> Tensor, tuple of them or constant
Rule = Callable[..., Any]


@dataclass
class Walker:
    """What a rule writes to. data: values of constants, by placeholder; notes: what was left out;
    made: the shape of what the call gives."""

    writer: Writer
    unsupported: list[Unsupported] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    where: str = ""
    made: Sequence[int] = ()
    _taken: dict[str, int] = field(default_factory=dict)

    def fresh(self, name: str) -> str:
        """`name`, numbered where it is taken."""
        name = name.replace("|", "/")
        count = self._taken.get(name, 0)
        self._taken[name] = count + 1
        return name if count == 0 else self.fresh(f"{name}:{count}")

    def apply(self, kind: str, *inputs: Any, label: str | None = None, **attributes: Any) -> Tensor:
        """Write an operator; constants among the inputs become placeholders."""
        names = [self.tensor(value).name for value in inputs]
        name = self.fresh(".".join(filter(None, (self.where, label or kind))))
        self.writer.apply(kind, name, *names, **attributes)
        return Tensor(name, self.writer.shape(name))

    def tensor(self, value: Any) -> Tensor:
        """A tensor of the program; a constant is written as data."""
        if isinstance(value, Tensor):
            return value
        if value is None or isinstance(value, (int, float, bool, tuple, list)):
            raise MissingRule(f"a tensor in place of {value!r}")
        name = self.fresh(".".join(filter(None, (self.where, "constant"))))
        self.writer.placeholder(
            name, tuple(value.shape), below=None if value.is_floating_point() else 2
        )
        if not value.is_meta:  # a module without numbers gives a program without them
            self.data[name] = value.detach().clone()
        return Tensor(name, tuple(value.shape))

    def same(self, value: Tensor, note: str | None = None) -> Tensor:
        """The value itself; `note` says what was left out."""
        if note is not None:
            self.notes[note] = self.notes.get(note, 0) + 1
        return value

    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """x in another shape; nothing is written where it has it."""
        if tuple(shape) == x.shape:
            return x
        return self.apply("reshape", x, shape=tuple(int(n) for n in shape))

    def refuse(self, operator: str, missing: str, where: str | None = None) -> None:
        """Write an operator (or a parameter) down as unsupported, once."""
        entry = Unsupported(operator, where or self.where or "the module itself", missing)
        if entry not in self.unsupported:
            self.unsupported.append(entry)

    def stand_in(self, operator: str, missing: str, shape: Any) -> Any:
        """Write an operator down as unsupported; data of its shape (or shapes) takes its place."""
        self.refuse(operator, missing)
        if shape and isinstance(shape[0], list):
            return tuple(self.stand_in(operator, missing, one) for one in shape)
        name = self.fresh("unsupported")
        self.writer.placeholder(name, tuple(shape))
        return Tensor(name, tuple(shape))


def positive(d: int, rank: int) -> int:
    """A dimension counted from the front."""
    return d + rank if d < 0 else d


def scalar(value: Any) -> float | None:
    """The number that a constant of one entry, or a plain number, stands for; None for anything
    else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, Tensor) or not hasattr(value, "numel"):
        return None
    return float(value) if value.numel() == 1 else None


def numbered(path: str) -> str:
    """The path of a submodule up to its first number (`blocks.3`), or nothing."""
    parts = path.split(".")
    place = next((i for i, part in enumerate(parts) if part.isdigit()), -1)
    return ".".join(parts[: place + 1])
