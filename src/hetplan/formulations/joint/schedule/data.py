"""A pipeline whose order of passes is to be chosen: its passes, messages and memory.

Sets    s stages, each of which does one pass at a time; v virtual stages, the parts of the model in
        their order, each on one stage; m micro-batches; p ports.
Data    seconds of every forward pass F, of every backward pass of inputs B and of weights W, or of
        both as one pass D; messages of activations from v to v + 1 and of gradients back, each with
        the ports that it holds; bytes kept from F to B and from B to W, the room of each stage.
Decide  for every stage, the order of its passes.
Min     seconds until every stage has done its last pass and the work behind that (`tails`).

A stage may hold several virtual stages, which are its chunks. They are numbered from 0 in the order
of the model. `Pass` is written as "F0", or "F0.1" where the stage has several chunks: kind,
micro-batch, chunk.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hetplan.errors import InputError
from hetplan.plans.passes import Pass as WrittenPass, PassKind

SPLIT: tuple[PassKind, ...] = ("F", "B", "W")
WHOLE: tuple[PassKind, ...] = ("F", "D")
TEXT = re.compile(r"([FBWD])(\d+)(?:\.(\d+))?")
Table = Sequence[Sequence[float]]  # [V][M]


class Pass(NamedTuple):
    """One pass of a micro-batch through a virtual stage."""

    kind: PassKind
    virtual: int  # virtual stage
    micro: int  # micro-batch


Order = Sequence[Sequence[Pass]]  # [S] the passes of each stage, first to last


class Message(NamedTuple):
    """A message between two stages."""

    seconds: float = 0.0  # in which it holds its ports
    latency: float = 0.0  # seconds after these that hold no port
    ports: tuple[tuple[int, float], ...] = ()  # (port, share of the seconds for which it is held)

    @property
    def lasts(self) -> float:
        """Seconds from the message's start until its receiver has it."""
        return self.seconds + self.latency


NOTHING = Message()


@dataclass(frozen=True, kw_only=True)
class PassProblem:
    """A pipeline of S stages and V virtual stages with M micro-batches."""

    place: tuple[int, ...]  # [V] the stage of each virtual stage
    forward: Table  # [V][M] seconds of F
    backward: Table  # [V][M] seconds of B; of D where `weight` is empty
    weight: Table = ()  # [V][M] seconds of W; (): backward passes are whole
    kept: Table = ()  # [V][M] bytes kept from the begin of F until the end of B or D; (): none
    kept_for_weight: Table = ()  # [V][M] bytes kept from the end of B until the end of W; (): none
    # [S] bytes that a stage may keep at the same time; None: as many as it likes
    room: tuple[float, ...] | None = None
    activations: Sequence[Sequence[Message]] = ()  # [V - 1][M] from v to v + 1; (): no time
    gradients: Sequence[Sequence[Message]] = ()  # [V - 1][M] from v + 1 to v; (): no time
    tails: tuple[float, ...] = ()  # [S] seconds of work behind a stage's last pass; (): none
    kinds: tuple[int, ...] = ()  # [M] micro-batches of one kind are alike; (): all are
    # Whether a message moves only when its receiver does nothing else: it begins after the pass
    # before the one that needs it. Otherwise it begins when it is computed.
    receiver_waits: bool = True

    def __post_init__(self) -> None:
        """Raise InputError where a table has another shape than the problem."""
        V, M, S = len(self.place), self.micros, self.stages
        if set(self.place) != set(range(S)):
            raise InputError("stages are left out", where="place", got=self.place)
        rows = {"forward": V, "backward": V, "weight": V, "kept": V, "kept_for_weight": V}
        rows |= {"activations": V - 1, "gradients": V - 1}
        for name, count in rows.items():
            table = getattr(self, name)
            if not table and name not in ("forward", "backward"):
                continue
            shape = [len(row) for row in table]
            if shape != [M] * count:
                rows_of = f"{count} rows of {M} entries"
                raise InputError("wrong shape", where=name, got=shape, expected=rows_of)
        for name, count in (("room", S), ("tails", S), ("kinds", M)):
            values = getattr(self, name)
            if values and len(values) != count:
                got, due = len(values), f"{count} entries"
                raise InputError("wrong length", where=name, got=got, expected=due)

    @property
    def micros(self) -> int:
        """M."""
        return len(self.forward[0]) if self.forward else 0

    @cached_property
    def stages(self) -> int:
        """S."""
        return max(self.place, default=-1) + 1

    @property
    def kinds_of_passes(self) -> tuple[PassKind, ...]:
        """The kinds of passes that every micro-batch has on every virtual stage."""
        return SPLIT if self.weight else WHOLE

    @cached_property
    def passes(self) -> tuple[Pass, ...]:
        """All passes."""
        return tuple(
            Pass(kind, v, m)
            for kind in self.kinds_of_passes
            for v in range(len(self.place))
            for m in range(self.micros)
        )

    def seconds(self, one: Pass) -> float:
        """Seconds of a pass, without its message."""
        table = {"F": self.forward, "B": self.backward, "D": self.backward, "W": self.weight}
        return table[one.kind][one.virtual][one.micro]

    def message(self, one: Pass) -> Message:
        """The message that a pass needs."""
        v, m = one.virtual, one.micro
        if one.kind == "F" and v > 0 and self.activations:
            return self.activations[v - 1][m]
        if one.kind in ("B", "D") and v + 1 < len(self.place) and self.gradients:
            return self.gradients[v][m]
        return NOTHING

    def bytes_before_backward(self, v: int, m: int) -> float:
        """Bytes kept from a forward pass until the backward pass of inputs, or the whole one."""
        return self.kept[v][m] if self.kept else 0.0

    def bytes_before_weight(self, v: int, m: int) -> float:
        """Bytes kept from a backward pass of inputs until that of weights."""
        return self.kept_for_weight[v][m] if self.kept_for_weight else 0.0

    def tail(self, stage: int) -> float:
        """Seconds of work behind a stage's last pass."""
        return self.tails[stage] if self.tails else 0.0

    def kind(self, micro: int) -> int:
        """The kind of a micro-batch."""
        return self.kinds[micro] if self.kinds else 0

    @cached_property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """[S] the virtual stages of each stage, in the order of the model."""
        return tuple(
            tuple(v for v, stage in enumerate(self.place) if stage == s) for s in range(self.stages)
        )

    def text(self, one: Pass) -> str:
        """A pass as a plan file writes it, such as "F0" or "F0.1"."""
        chunks = self.chunks[self.place[one.virtual]]
        written = WrittenPass(one.kind, chunks.index(one.virtual), one.micro)
        return written.text(len(chunks))

    def texts(self, order: Order) -> list[list[str]]:
        """An order as a plan file writes it: for each stage the texts of its passes."""
        return [[self.text(one) for one in of_stage] for of_stage in order]

    def read(self, texts: Sequence[Sequence[str]]) -> Order:
        """The order that `texts` writes. Raises InputError for a text that is no pass of its
        stage."""
        return [list(self._read_stage(s, of_stage)) for s, of_stage in enumerate(texts)]

    def _read_stage(self, s: int, texts: Sequence[str]) -> Iterator[Pass]:
        for i, text in enumerate(texts):
            match = TEXT.fullmatch(text)
            place = f"passes[{s}][{i}]"
            if match is None:
                raise InputError("no pass", where=place, got=text, expected="such as F0 or F0.1")
            chunk = int(match[3] or 0)
            chunks = self.chunks[s] if s < self.stages else ()
            if chunk >= len(chunks):
                due = f"one of {len(chunks)} chunks"
                raise InputError("unknown chunk", where=place, got=text, expected=due)
            kind: PassKind = match[1]  # type: ignore[assignment]
            yield Pass(kind, chunks[chunk], int(match[2]))


def sender(problem: PassProblem, one: Pass) -> Pass | None:
    """The pass whose result a pass needs; None for forward passes of the first virtual stage."""
    kind, v, m = one
    if kind == "W":
        return Pass("B", v, m)
    if kind == "F":
        return Pass("F", v - 1, m) if v > 0 else None
    if v + 1 < len(problem.place):
        return Pass(kind, v + 1, m)
    return Pass("F", v, m)
