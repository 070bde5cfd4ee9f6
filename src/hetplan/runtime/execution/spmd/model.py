"""What an SPMD plan trains: a single-device program, its first parameters, and its data.

`--factory module:function` of an SPMD plan returns a `SingleProgram` or a `ProgramModel`; without
it the program is the planner's own of the plan's model.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetplan.errors import InputError
from hetplan.formulations.hap.spmd.networks import program_of
from hetplan.formulations.hap.spmd.program import PLACEHOLDER, Node, SingleProgram
from hetplan.profiling.models import load_model
from hetplan.runtime.plan import Plan

Array = NDArray[Any]  # a tensor does as well
Batch = Callable[[int, int, int], Mapping[str, Array]]
Initial = Callable[[str, tuple[int, ...]], Array]


@dataclass(frozen=True)
class ProgramModel:
    """program: of one run of the plan (its micro-batch). batch: (step, first, last) -> placeholder
    -> these rows of the global batch. initial: (name, shape) -> a parameter's first values,
    unsplit. Left out: synthetic ones."""

    program: SingleProgram
    batch: Batch | None = None
    initial: Initial | None = None


def samples_of(plan: Plan) -> int:
    """Samples of one run of the program."""
    batches = plan.replicas[0].micro_batches
    sizes = {batch.samples for batch in batches}
    if len(sizes) != 1:
        raise InputError(
            "runs of an SPMD program are of different sizes", where=plan.name,
            got=sorted(sizes), expected="equal ones",
        )  # fmt: skip
    return sizes.pop()


def planned_program(plan: Plan, model: str | None) -> SingleProgram:
    """The program of a model's name or config.json (default the plan's), for one run. Raises
    UnsupportedError."""
    workload = plan.workload
    made = load_model(
        model or workload.model, sequence=workload.sequence, precision=workload.precision
    )
    names = [layer.name for layer in made.layers]
    for k, (name, expected) in enumerate(zip_longest(names, workload.layers)):
        if name != expected:
            what = f"model does not match the plan: layer {k}"
            raise InputError(what, where=plan.name, got=name, expected=str(expected))
    return program_of(made, samples_of(plan))


def check_samples(program: SingleProgram, plan: Plan) -> None:
    """Raise InputError unless the program's data are of one run."""
    samples = samples_of(plan)
    for node in placeholders(program):
        if not node.shape or node.shape[0] != samples:
            raise InputError(
                f"program is not for the plan's runs: {node.name}", where=plan.name,
                got=f"shape {node.shape}", expected=f"{samples} samples",
            )  # fmt: skip


def placeholders(program: SingleProgram) -> list[Node]:
    """The data."""
    return [node for node in program.nodes if node.kind == PLACEHOLDER]


def synthetic_batch(program: SingleProgram, seed: int) -> Batch:
    """Rows that follow from seed, step and number alone: tokens that can be learnt, or drawn
    values.

    A text is an arithmetic sequence modulo the vocabulary, its labels the next tokens.
    """
    nodes = {node.name: node for node in placeholders(program)}
    texts = nodes.keys() == {"tokens", "labels"} and nodes["tokens"].shape == nodes["labels"].shape

    def row(step: int, number: int) -> dict[str, Array]:
        draw = np.random.default_rng((seed, step, number))
        if texts:
            below, length = nodes["tokens"].attributes["below"], nodes["tokens"].shape[1]
            text = (draw.integers(below) + np.arange(length + 1) * draw.integers(1, 4)) % below
            return {"tokens": text[:-1], "labels": text[1:]}
        return {name: drawn(draw, node) for name, node in nodes.items()}

    def batch(step: int, first: int, last: int) -> Mapping[str, Array]:
        rows = [row(step, number) for number in range(first, last)]
        return {name: np.stack([r[name] for r in rows]) for name in nodes}

    return batch


def drawn(draw: np.random.Generator, node: Node) -> Array:
    """One sample of a placeholder."""
    if "below" in node.attributes:
        return np.asarray(draw.integers(node.attributes["below"], size=node.shape[1:]))
    return draw.standard_normal(node.shape[1:])


def synthetic_initial(seed: int) -> Initial:
    """First values from seed and name: norms' scales 1, shifts and biases 0, others normal by their
    inputs."""

    def initial(name: str, shape: tuple[int, ...]) -> Array:
        last = name.rpartition(".")[2]
        if last == "scale":
            return np.ones(shape)
        if last in ("shift", "bias"):
            return np.zeros(shape)
        draw = np.random.default_rng((seed, zlib.crc32(name.encode())))
        fan = max(1, int(np.prod(shape[1:])))
        return np.asarray(draw.standard_normal(shape) / np.sqrt(fan))

    return initial
