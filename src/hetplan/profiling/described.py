"""Model files: a chain of layers as a trace of a module counted them, for `--model FILE`.

A JSON file `hetplan-model`, written by `hetplan profile predict --factory`. Sizes are in elements
of `precision` and grow in straight lines with the samples of a micro-batch. Equal layers share one
list of operators.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, Strict, model_validator

from hetplan.errors import InputError
from hetplan.profiling.operators import Counted, Growth, Layer, Saved, Sizes
from hetplan.profiling.precision import Precision
from hetplan.profiling.profile import Date
from hetplan.profiling.recomputation import TRACED
from hetplan.profiling.zoo import ModelSpec
from hetplan.schema import (
    Count,
    Document,
    Name,
    NonNegative,
    PositiveCount,
    StrictModel,
)

FORMAT = "hetplan-model"
# (fixed, each sample's)
Line = Annotated[tuple[NonNegative, NonNegative], Strict(False)]
Product = Annotated[tuple[Line, Line, Line, Line], Strict(False)]


class OperatorEntry(StrictModel):
    """One operator of one pass. product: count, m, k, n. ruled: whether a rule says what it
    does."""

    name: Name
    backward: bool
    read: Line
    written: Line
    product: Product | None = None
    ruled: bool = True


class LayerEntry(StrictModel):
    """params, tied_params: numbers of them. output, saved: elements per sample. operators: which of
    the lists."""

    name: Name
    params: Count
    tied_params: Count = 0
    output: NonNegative
    saved: NonNegative
    operators: Count


class ModelFile(Document):
    """A traced model. samples: the micro-batches that were traced."""

    format: Literal["hetplan-model"] = "hetplan-model"
    version: Literal[1] = 1
    name: Name
    source: Name
    date: Date
    sequence: PositiveCount | None = None
    precision: Precision
    layers: list[LayerEntry] = Field(min_length=1, max_length=4096)
    operator_lists: list[list[OperatorEntry]] = Field(min_length=1)

    @model_validator(mode="after")
    def _lists_are_there(self) -> Self:
        for i, layer in enumerate(self.layers):
            if layer.operators >= len(self.operator_lists):
                raise ValueError(
                    f"layers[{i}].operators is {layer.operators}, expected less than the "
                    "number of lists "
                    f"({len(self.operator_lists)})"
                )
        return self

    def chain(self) -> tuple[Layer, ...]:
        """As layers."""
        lists = [tuple(map(_counted, entries)) for entries in self.operator_lists]
        last = len(self.layers) - 1
        return tuple(
            Layer(
                name=layer.name,
                kind=TRACED if 0 < i < last else "traced-end",
                params=layer.params,
                operators=lists[layer.operators],
                output=round(layer.output),
                saved=(Saved("saved for backward", round(layer.saved), split=False),),
                tied_params=layer.tied_params,
            )
            for i, layer in enumerate(self.layers)
        )

    def without_rule(self) -> Mapping[str, int]:
        """Operators that no rule describes, with how often they are called in both passes."""
        missing: Counter[str] = Counter()
        for layer in self.layers:
            missing.update(op.name for op in self.operator_lists[layer.operators] if not op.ruled)
        return dict(missing.most_common())

    def spec(self) -> ModelSpec:
        """As a model that can be loaded; it has no other sequence length, and no tensor
        parallelism."""
        layers, own = self.chain(), self.sequence

        def build(sequence: int) -> tuple[Layer, ...]:
            if own is not None and sequence != own:
                raise InputError(
                    "was traced at another sequence length",
                    where=self.name,
                    got=sequence,
                    expected=str(own),
                )
            return layers

        missing = ", ".join(f"{name} ({count})" for name, count in self.without_rule().items())
        note = (
            f"{self.name}: no rule for {missing}: counted as the memory that they move"
            if missing
            else ""
        )
        return ModelSpec(
            self.name,
            self.source,
            own,
            build,
            lambda tensor: tensor == 1,
            notes=tuple(filter(None, (note,))),
        )


def model_of(value: Any, *, where: str) -> ModelSpec:
    """The model in a parsed file; raises InputError."""
    return ModelFile.parsed(value, where=where).spec()


def entry(op: Counted) -> OperatorEntry:
    """An operator as the file has it."""
    product = None
    if op.product is not None:
        p = op.product
        product = (_pair(p.count), _pair(p.m), _pair(p.k), _pair(p.n))
    return OperatorEntry(
        name=op.name,
        backward=op.backward,
        read=_pair(op.read),
        written=_pair(op.written),
        product=product,
        ruled=op.ruled,
    )


def _pair(growth: Growth) -> tuple[float, float]:
    return growth.fixed, growth.each


def _counted(op: OperatorEntry) -> Counted:
    product = None if op.product is None else Sizes(*(Growth(*pair) for pair in op.product))
    return Counted(op.name, op.backward, Growth(*op.read), Growth(*op.written), product, op.ruled)
