"""How ranks hold the parameters of an SPMD program: as the operators that read them want them.

One that operators read in different ways (a tied embedding, sliced in one place and whole in
another) is held whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetplan.formulations.hap.spmd.axes import Bounds
from hetplan.formulations.hap.spmd.forms import WHOLE, Form
from hetplan.formulations.hap.spmd.instructions import Run
from hetplan.formulations.hap.spmd.operators import size
from hetplan.formulations.hap.spmd.program import PARAMETER
from hetplan.runtime.spmd_decision import Reading


@dataclass(frozen=True)
class Shard:
    """How a parameter is held: whole (dimension None), or each rank its range of a dimension.

    joined_apart: held whole, while some operator has a slice of its gradient.
    """

    name: str
    shape: tuple[int, ...]
    dimension: int | None = None
    bounds: Bounds = ()
    joined_apart: bool = False

    def entries(self, rank: int) -> int:
        """How many of them a rank holds."""
        if self.dimension is None:
            return size(self.shape)
        first, last = self.bounds[rank]
        return size(self.shape) // self.shape[self.dimension] * (last - first)


def shards_of(reading: Reading) -> dict[str, Shard]:
    """How every parameter (copies by the name of what they copy) is held."""
    program, axes, ratios = reading.theory.program, reading.theory.axes, reading.decision.ratios
    ways: dict[str, set[tuple[Form, Bounds]]] = {}
    for instruction in reading.order:
        if not isinstance(instruction, Run):
            continue
        node = program.node(instruction.node)
        for source, form in zip(program.inputs(node), instruction.way.inputs, strict=True):
            if source.kind == PARAMETER:
                row = ratios[node.segment]
                cut = () if form == WHOLE else axes.bounds(source.name, form, row)
                owner = program.copies.get(source.name, source.name)
                ways.setdefault(owner, set()).add((form, cut))
    found: dict[str, Shard] = {}
    for node in program.parameters:
        read = ways.get(node.name, set())
        form, cut = next(iter(read), (WHOLE, ()))
        if node.name in program.copies:
            continue
        if len(read) == 1 and form != WHOLE:
            found[node.name] = Shard(node.name, node.shape, form, cut)
        else:
            apart = any(form != WHOLE for form, _ in read)
            found[node.name] = Shard(node.name, node.shape, joined_apart=apart)
    return found
