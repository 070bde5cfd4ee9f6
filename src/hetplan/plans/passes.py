"""The passes of a pipeline in the order of each stage: how a plan file writes them, and the rules
that an order keeps.

Sets    s stages, c model chunks of each stage, m micro-batches. Chunk c of stage s is a virtual
        stage; `virtual_stages` numbers them along the model.

Passes  F, a forward pass. D, a whole backward pass. B, a backward pass that computes the gradients
        of a chunk's inputs alone. W, the pass that computes the gradients of the chunk's weights
        after it. A file writes "B3" for micro-batch 3, and "B3.1" for its pass through chunk 1.
        In a stage without any W, "B3" is a whole backward pass.

Rules   (1) A stage has for each chunk and micro-batch one F, and either one D, or one B and one W.
        (2) F comes before B or D, and B before W.
        (3) No passes of a pipeline wait for each other in a circle. F waits for F of the virtual
            stage before, B and D for B or D of the virtual stage behind, and every pass for the
            one before it in its stage.

Source of the division into B and W: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", Section 2.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import Annotated, Literal, NamedTuple, get_args

from pydantic import StringConstraints

# Named schedules with whole backward passes, on stages in order.
WholeSchedule = Literal["gpipe", "1f1b", "interleaved-1f1b"]
WHOLE_SCHEDULES: tuple[WholeSchedule, ...] = get_args(WholeSchedule)
# Named schedules with W passes; those of two chunks, which lie on the stages as a V, come second.
FLAT_SPLIT: tuple[Literal["zb-h1", "zb-h2"], ...] = ("zb-h1", "zb-h2")
FOLDED: tuple[Literal["zbv", "dualpipev", "v-half", "v-min"], ...] = (
    "zbv", "dualpipev", "v-half", "v-min",
)  # fmt: skip

PassKind = Literal["F", "B", "W", "D"]
PassText = Annotated[str, StringConstraints(pattern=r"^[FBWD][0-9]{1,7}(\.[0-9]{1,4})?$")]


class Pass(NamedTuple):
    """A pass of a micro-batch through a chunk of a stage."""

    kind: PassKind
    chunk: int
    batch: int

    @property
    def sends_gradients(self) -> bool:
        """Whether the pass computes the gradients of the chunk's inputs."""
        return self.kind in ("B", "D")

    def text(self, chunks: int) -> str:
        """The pass as a plan file writes it. chunks: number of chunks of each stage."""
        number = f"{self.batch}.{self.chunk}" if chunks > 1 else f"{self.batch}"
        return f"{self.kind}{number}"


Order = tuple[Pass, ...]  # the passes of a stage
Orders = tuple[Order, ...]  # [stage] of a pipeline


def parsed(texts: Sequence[str]) -> Order:
    """The passes of a stage from a plan file; rule (1) need not hold. In a stage without any W,
    every B becomes a D."""
    order = []
    for text in texts:
        batch, _, chunk = text[1:].partition(".")
        order.append(Pass(kind_of(text), int(chunk or 0), int(batch)))
    if any(one.kind == "W" for one in order):
        return tuple(order)
    return tuple(one._replace(kind="D") if one.kind == "B" else one for one in order)


def kind_of(text: str) -> PassKind:
    """The kind of a pass from its text."""
    kinds: dict[str, PassKind] = {"F": "F", "B": "B", "W": "W", "D": "D"}
    return kinds[text[0]]


def virtual_stages(stages: int, chunks: int, *, folded: bool) -> list[tuple[int, int]]:
    """(stage, chunk) of each virtual stage, along the model.

    folded: the odd chunks go from the last stage back to the first one, so that the model lies on
    the stages as a V. Otherwise every chunk begins at the first stage.
    """
    placed = []
    for chunk in range(chunks):
        along = range(stages)
        backwards = folded and chunk % 2 == 1
        placed += [(stage, chunk) for stage in (reversed(along) if backwards else along)]
    return placed


def order_faults(order: Order, chunks: int, batches: int, where: str) -> Iterator[str]:
    """Every violation of rules (1) and (2) by the order of a stage, one line each."""
    first_at: dict[Pass, int] = {}
    for i, one in enumerate(order):
        text = one.text(chunks)
        if one.chunk >= chunks or one.batch >= batches:
            yield (
                f"{where}[{i}] is {text}, expected a micro-batch of 0..{batches - 1} "
                f"and a chunk of 0..{chunks - 1}"
            )
        elif one in first_at:
            yield f"{where}[{i}] is {text}, as {where}[{first_at[one]}] is"
        else:
            first_at[one] = i
    for chunk, batch in product(range(chunks), range(batches)):
        yield from faults_of_batch(first_at, Pass("F", chunk, batch), chunks, where)


def faults_of_batch(
    first_at: dict[Pass, int], forward: Pass, chunks: int, where: str
) -> Iterator[str]:
    """Every violation of rules (1) and (2) by the passes of one chunk and micro-batch.

    first_at: pass -> its place in the order.
    """
    whole, inputs, weights = (forward._replace(kind=kind) for kind in ("D", "B", "W"))
    parts = [whole] if whole in first_at else [inputs, weights]
    for excess in (inputs, weights):
        if whole in first_at and excess in first_at:
            yield (
                f"{where}[{first_at[excess]}] is {excess.text(chunks)}, which is part of "
                f"{whole.text(chunks)}, {where}[{first_at[whole]}]"
            )
    passes = [forward, *parts]
    for one in passes:
        if one not in first_at:
            yield f"{where} lacks {one.text(chunks)}"
    present = [one for one in passes if one in first_at]
    for before, after in pairwise(present):
        if first_at[before] > first_at[after]:
            yield (
                f"{where}[{first_at[after]}] is {after.text(chunks)}, "
                f"expected behind {before.text(chunks)}, {where}[{first_at[before]}]"
            )


Place = tuple[int, int]  # (stage, place in its order)


def circle(orders: Orders, chunks: int, *, folded: bool) -> str | None:
    """The passes that wait for each other in a circle as text; None where rule (3) holds. Rules
    (1) and (2) must hold."""
    stages = len(orders)
    along = virtual_stages(stages, chunks, folded=folded)
    number = {place: v for v, place in enumerate(along)}
    # (stage, what it gives, chunk, micro-batch) -> place of the pass that gives it
    given: dict[tuple[int, bool, int, int], Place] = {}
    for stage, order in enumerate(orders):
        for i, one in enumerate(order):
            if one.kind != "W":
                given[stage, one.kind == "F", one.chunk, one.batch] = stage, i

    def needed(stage: int, one: Pass) -> Place | None:
        """The place of the pass of another virtual stage that a pass waits for."""
        v = number[stage, one.chunk] + (-1 if one.kind == "F" else 1)
        if one.kind == "W" or not 0 <= v < len(along):
            return None
        other, chunk = along[v]
        return given[other, one.kind == "F", chunk, one.batch]

    done = [0] * stages  # passes of each stage that can run
    goes_on = True
    while goes_on:
        goes_on = False
        for stage, order in enumerate(orders):
            while done[stage] < len(order):
                need = needed(stage, order[done[stage]])
                if need is not None and need[1] >= done[need[0]]:
                    break
                done[stage] += 1
                goes_on = True
    stuck = [stage for stage in range(stages) if done[stage] < len(orders[stage])]
    if not stuck:
        return None
    # Each stuck stage waits for a pass of another one, so that this walk comes back to a stage.
    walk, texts, stage = list[int](), list[str](), stuck[0]
    while stage not in walk:
        one = orders[stage][done[stage]]
        need = needed(stage, one)
        assert need is not None, "a stuck stage waits for another pass"
        other, place = need
        awaited = orders[other][place].text(chunks)
        walk.append(stage)
        texts.append(f"stage {stage} at {one.text(chunks)} for {awaited} of stage {other}")
        stage = other
    return ", ".join(texts[walk.index(stage) :])
