"""What an SPMD plan trains: a single-device program with data and first values.

A plan's program comes from `--factory module:function`, which returns a torch module with data of
its own (`batch`), a `SingleProgram` or a `ProgramModel`; without it, it is the planner's own of the
plan's model.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from hetplan.errors import InputError, UnsupportedError, require
from hetplan.plans.making import model_of
from hetplan.plans.plan import Plan
from hetplan.plans.refusals import check_own_program
from hetplan.programs.networks import program_of
from hetplan.programs.program import PLACEHOLDER, Node, SingleProgram
from hetplan.programs.proofs import read_program
from hetplan.runtime.engine.chain import check_names
from hetplan.runtime.engine.data import drawing_data
from hetplan.runtime.engine.models import called
from hetplan.runtime.job import Job
from hetplan.runtime.tracing.program import trace_samples

# a tensor does as well
Array = NDArray[Any]
Batch = Callable[[int, int, int], Mapping[str, Array]]
Initial = Callable[[str, tuple[int, ...]], Array]


@dataclass(frozen=True)
class ProgramModel:
    """A single-device program with its data and first values."""

    program: SingleProgram
    """The program of one run of the plan, on a micro-batch."""
    batch: Batch | None = None
    """(step, first, last) -> placeholder -> these rows of the global batch; None: synthetic
    data."""
    initial: Initial | None = None
    """(name, shape) -> a parameter's first values, unsplit; None: drawn ones."""


def samples_of(plan: Plan) -> int:
    """Samples of one run of the program."""
    sizes = {batch.samples for batch in plan.replicas[0].micro_batches}
    require(
        len(sizes) == 1,
        "runs of an SPMD program are of different sizes",
        where=plan.name,
        got=sorted(sizes),
        expected="equal ones",
    )
    return sizes.pop()


def planned_program(plan: Plan, model: str | None) -> SingleProgram:
    """The program of a model's name or config.json (default the plan's), for one run. Raises
    UnsupportedError."""
    made = model_of(plan, model)
    check_own_program(plan)
    check_names([layer.name for layer in made.layers], plan.workload.layers, plan.name)
    return program_of(made, samples_of(plan))


def check_samples(program: SingleProgram, plan: Plan) -> None:
    """Raise InputError unless the program's data are of one run."""
    if program.samples != samples_of(plan):
        node = placeholders(program)[0]
        raise InputError(
            f"program is not for the plan's runs: {node.name}", where=plan.name,
            got=f"shape {node.shape}", expected=f"{samples_of(plan)} samples",
        )  # fmt: skip


def placeholders(program: SingleProgram) -> list[Node]:
    """The nodes that are data."""
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
        values: dict[str, Array] = {}
        for name, node in nodes.items():
            if "below" in node.attributes:
                values[name] = draw.integers(node.attributes["below"], size=node.shape[1:])
            else:
                values[name] = draw.standard_normal(node.shape[1:])
        return values

    def batch(step: int, first: int, last: int) -> Mapping[str, Array]:
        rows = [row(step, number) for number in range(first, last)]
        return {name: np.stack([r[name] for r in rows]) for name in nodes}

    return batch


def synthetic_initial(seed: int) -> Initial:
    """First values that follow from seed and name: 1 for a norm's scale, 0 for shifts and biases,
    normal ones for all others, with a deviation by the number of inputs."""

    def initial(name: str, shape: tuple[int, ...]) -> Array:
        last = name.rpartition(".")[2]
        if last in ("scale", "shift", "bias"):
            return np.full(shape, float(last == "scale"))
        draw = np.random.default_rng((seed, zlib.crc32(name.encode())))
        return np.asarray(draw.standard_normal(shape) / np.sqrt(max(1, int(np.prod(shape[1:])))))

    return initial


def as_model(model: Any, plan: Plan) -> ProgramModel:
    """The model with data and first values.

    Raises InputError for what is no program and no module with data of its own, UnsupportedError
    for a module with operators that have no rule.
    """
    if isinstance(model, SingleProgram):
        return ProgramModel(model)
    if isinstance(model, nn.Module) and callable(getattr(model, "batch", None)):
        return traced_model(model, plan)
    if not isinstance(model, ProgramModel):
        raise InputError(
            "SPMD plans run single-device programs", got=type(model).__name__,
            expected="a SingleProgram, a ProgramModel, or a module with a method batch",
        )  # fmt: skip
    return model


def traced_model(module: Any, plan: Plan) -> ProgramModel:
    """A module as the program of one run of the plan, with its own data; the values of its
    parameters are the first ones."""
    samples = samples_of(plan)
    with drawing_data(0, 0, 0):
        traced = trace_samples(module, samples, name=plan.workload.model)
        values = traced.values(module, module.batch(0, 0, samples))
    return ProgramModel(
        traced.program,
        lambda step, first, last: traced.data(module.batch(step, first, last)),
        lambda name, _: values[name],
    )


def make_program(job: Job) -> ProgramModel:
    """The job's single-device program. Raises InputError for an unusable factory."""
    if job.factory is None:
        return ProgramModel(planned_program(job.plan, job.model))
    return as_model(called(job.factory, job.plan, seed=job.seed), job.plan)


def check_program(job: Job) -> None:
    """Raise InputError where the job's program is not for its plan, and where its options mean
    nothing for programs. The costs of a rehearsal have read the program already."""
    require(job.data is None, "SPMD programs take their data from --factory", got="--data")
    if not job.virtual:
        program = make_program(job).program
        check_samples(program, job.plan)
        read_program(job.plan, program)
    elif job.checkpoint is not None:
        raise InputError(
            "rehearsals of SPMD programs train nothing", where=job.plan.name, got="--checkpoint",
            expected="no checkpoint, or no --virtual",
        )  # fmt: skip
    require(
        job.save is None,
        "SPMD programs are not gathered",
        where=job.plan.name,
        got="--save",
        expected="--checkpoint, or a plan of another strategy",
        kind=UnsupportedError,
    )
