"""Traced models: JSON files of format `hetplan-model`, which `hetplan profile predict --factory`
writes.

A traced model is a chain of layers, whose operators were counted while a torch module ran. Sizes
are in elements of `precision` and grow linearly with the samples of a micro-batch. Equal layers
share one list of operators.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from hetplan.errors import require
from hetplan.profiling.models.operators import TRACED, Counted, Layer, Precision, Saved
from hetplan.profiling.models.zoo import ModelSpec
from hetplan.schema import Count, Date, Document, Name, NonNegative, PositiveCount, StrictModel

FORMAT = "hetplan-model"


class LayerEntry(StrictModel):
    """A layer of a traced model."""

    name: Name
    params: Count
    """Parameters that the layer owns."""
    tied_params: Count = 0
    """Parameters that belong to an earlier layer."""
    frozen: Count = 0
    """The part of `params` that is not trained."""
    frozen_tied: Count = 0
    """The same part of `tied_params`."""
    output: NonNegative
    """Elements per sample sent to the next layer."""
    saved: NonNegative
    """Elements per sample kept for the backward pass."""
    operators: Count
    """Index of its list in `operator_lists`."""


class ModelFile(Document):
    """The contents of a file with a traced model."""

    format: Literal["hetplan-model"] = "hetplan-model"
    version: Literal[1] = 1
    name: Name
    source: Name
    date: Date
    """Date of the trace."""
    sequence: PositiveCount | None = None
    """Tokens per sample; None for images."""
    precision: Precision
    layers: list[LayerEntry] = Field(min_length=1, max_length=4096)
    operator_lists: list[list[Counted]] = Field(min_length=1)

    @model_validator(mode="after")
    def _lists_are_there(self) -> Self:
        for i, layer in enumerate(self.layers):
            require(
                layer.operators < len(self.operator_lists),
                f"layers[{i}].operators is {layer.operators}, expected less than the number of "
                f"lists ({len(self.operator_lists)})",
            )
        return self

    def chain(self) -> tuple[Layer, ...]:
        """The chain of the model's layers."""
        last = len(self.layers) - 1
        return tuple(
            Layer(
                name=layer.name,
                kind=TRACED if 0 < i < last else "traced-end",
                params=layer.params,
                operators=tuple(self.operator_lists[layer.operators]),
                # a number of fewer bytes than the precision's counts as a part of an element
                output=round(layer.output),
                saved=(Saved("saved for backward", round(layer.saved), split=False),),
                tied_params=layer.tied_params,
                frozen=layer.frozen,
                frozen_tied=layer.frozen_tied,
            )
            for i, layer in enumerate(self.layers)
        )

    def without_rule(self) -> Mapping[str, int]:
        """Name of each operator that no rule describes -> number of its calls in both passes."""
        calls: Counter[str] = Counter()
        for layer in self.layers:
            operators = self.operator_lists[layer.operators]
            calls.update(op.name for op in operators if not op.ruled)
        return dict(calls.most_common())

    def spec(self) -> ModelSpec:
        """The model at the traced sequence length and without tensor parallelism."""
        layers = self.chain()

        def build(sequence: int) -> tuple[Layer, ...]:
            require(
                self.sequence is None or sequence == self.sequence,
                "was traced at another sequence length",
                where=self.name,
                got=sequence,
                expected=str(self.sequence),
            )
            return layers

        notes = []
        missing = ", ".join(f"{name} ({count})" for name, count in self.without_rule().items())
        if missing:
            notes.append(
                f"{self.name}: no rule for {missing}: counted as the memory that they move"
            )
        return ModelSpec(
            self.name,
            self.source,
            self.sequence,
            build,
            lambda tensor: tensor == 1,  # tensor parallelism does not divide traced operators
            notes=tuple(notes),
        )
