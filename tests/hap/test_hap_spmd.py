"""Theories of whole programs: prices by hand, and synthesised programs executed against a single
device."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache

import numpy as np
import pytest

from hap.spmd_cases import two_layers
from hetplan.errors import InputError
from hetplan.formulations.hap.data import Communication, Compute, Device, HapDecision
from hetplan.formulations.hap.family import FAMILY
from hetplan.formulations.hap.first import greedy_program
from hetplan.formulations.hap.problem import compile_problem
from hetplan.formulations.hap.spmd.axes import Axes
from hetplan.formulations.hap.spmd.execute import Outcome, execute, random_values, reference
from hetplan.formulations.hap.spmd.instructions import Change, Run, Synchronise
from hetplan.formulations.hap.spmd.links import Links, measured_by_hap, ring
from hetplan.formulations.hap.spmd.models import makers, model
from hetplan.formulations.hap.spmd.operators.base import Array
from hetplan.formulations.hap.spmd.program import SingleProgram, Writer
from hetplan.formulations.hap.spmd.rules import Theory, theory_of
from hetplan.formulations.hap.theory import reduce_theory
from hetplan.solvers.options import Options
from hetplan.solvers.registry import evaluate, solve
from hetplan.solvers.run import Run as SolverRun

V100, P100 = 3.86e12, 2.15e12
DEVICES = [Device(name="a", flops_per_second=V100), *[Device(name="b", flops_per_second=P100)] * 2]


def links(m: int = 3) -> Links:
    return measured_by_hap(m)


@cache
def tiny(name: str, m: int = 3) -> tuple[SingleProgram, Mapping[str, Array], Outcome]:
    """A built-in program on small tensors, values, and what one device makes of them."""
    program = model(name, 2 * m, m, tiny=True)
    values = random_values(program, 1)
    return program, values, reference(program, values)


def agree(found: Outcome, expected: Outcome) -> None:
    """Loss and all gradients, relative to the largest gradient."""
    assert found.loss == pytest.approx(expected.loss, rel=1e-10)
    assert set(found.gradients) == set(expected.gradients)
    largest = max(float(np.abs(g).max()) for g in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        assert found.gradients[name].shape == gradient.shape
        assert float(np.abs(found.gradients[name] - gradient).max()) <= 1e-10 * largest, name


def random_program(theory: Theory, seed: int) -> list[int]:
    """A program whose triples are the cheapest at random prices: other rules every time."""
    draw = random.Random(seed)
    reduced = reduce_theory(compile_problem(theory.data))
    prices = [draw.random() ** 3 for _ in theory.data.triples]
    return greedy_program(reduced, lambda step: prices[step.index])


def test_reference_gradients_are_slopes() -> None:
    """Of whole networks, along random directions."""
    for name in ("vit", "bert-moe", "llama-blocks", "gpt2"):
        program, _, found = tiny(name)
        draw = np.random.default_rng(0)
        directions = {p.name: draw.normal(size=p.shape) for p in program.parameters}
        for copy, owner in program.copies.items():
            directions[copy] = directions[owner]
        step = 1e-6

        def at(
            sign: float,
            directions: dict[str, Array] = directions,
            name: str = name,
            step: float = step,
        ) -> float:
            program, values, _ = tiny(name)
            moved = {
                n: v + sign * step * directions[n] if n in directions else v
                for n, v in values.items()
            }
            return reference(program, moved).loss

        slope = sum(float((g * directions[n]).sum()) for n, g in found.gradients.items())
        assert (at(1) - at(-1)) / (2 * step) == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize("name", list(makers()))
def test_random_programs_equal_one_device(name: str) -> None:
    """Programs that mix all rules at random, under uneven ratios."""
    if name == "vit-24":
        pytest.skip("the same rules as vit")
    program, values, expected = tiny(name)
    theory = theory_of(program, DEVICES, links(), all_dimensions=True)
    for seed in range(2 if name == "vgg19" else 6):
        order = random_program(theory, seed)
        decision = HapDecision(program=order, ratios=[[0.5, 0.2, 0.3]])
        assert evaluate(FAMILY, theory.data, decision).objective is not None
        agree(execute(theory, decision, values), expected)


def test_random_programs_use_every_kind_of_instruction() -> None:
    seen: set[str] = set()
    for name in ("bert-moe", "vgg19"):
        theory = theory_of(tiny(name)[0], DEVICES, links(), all_dimensions=True)
        for seed in range(12):
            for i in random_program(theory, seed):
                instruction = theory.instructions[i]
                seen.add("Run" if isinstance(instruction, Run) else instruction.how)
                if (
                    isinstance(instruction, Run)
                    and instruction.way.output == -2
                    and instruction.way.shared
                ):
                    seen.add("reduction")
    assert seen >= {
        "Run", "reduction", "All-Reduce", "Reduce-Scatter", "All-Gather", "Grouped-Broadcast", "All-To-All",
        "Slice", "All-Gather factors",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["vit", "bert-moe"])
def test_segments_have_ratios_of_their_own(name: str) -> None:
    program, values, expected = tiny(name)
    layers = list(dict.fromkeys(node.layer for node in program.nodes))
    split = program.with_segments(
        {n.name: min(2, layers.index(n.layer) // 5) for n in program.nodes}
    )
    theory = theory_of(split, DEVICES, links(), all_dimensions=True)
    assert theory.data.segments == 3
    moved = 0
    for seed in range(6):
        order = random_program(theory, seed)
        ratios = [[0.5, 0.2, 0.3], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5]]
        agree(execute(theory, HapDecision(program=order, ratios=ratios), values), expected)
        kinds = [theory.instructions[i] for i in order]
        moved += sum(
            isinstance(x, Change) and x.how == "Repartition" and x.source >= 0 for x in kinds
        )
    assert moved > 0


# the records of the library are executed without being solved again (test_hap_library.py)
SLOW = [
    n if n in ("vgg19", "llama-blocks") else pytest.param(n, marks=pytest.mark.slow)
    for n in makers()
]


@pytest.mark.parametrize("name", SLOW)
def test_synthesised_programs_of_published_sizes_equal_one_device(name: str) -> None:
    """The optimum and the baselines for the published size, executed on the same operators with
    small tensors."""
    devices = [Device(name="V100", flops_per_second=V100)] * 2 + [
        Device(name="P100", flops_per_second=P100)
    ] * 4
    large = theory_of(model(name, 64 * 6, 6), devices, ring(6, 1.3e9))
    program, values, expected = tiny(name, 6)
    small = theory_of(program, devices, ring(6, 1.3e9))
    assert [t.instruction for t in large.data.triples] == [
        t.instruction for t in small.data.triples
    ]
    for method in ("auto", "dp-proportional"):
        result = solve(FAMILY, large.data, method, SolverRun(Options(threads=1, time_limit=60)))
        assert result.decision is not None
        agree(execute(small, result.decision, values), expected)
        if method == "auto":
            assert result.bound is not None and result.gap is not None and result.gap < 0.01


def test_prices_by_hand() -> None:
    """FLOPs of the operator with the gradients it needs, bytes of every collective and its
    mirror."""
    b, i, o, m = 60, 600, 300, 3
    theory = theory_of(two_layers(b), DEVICES, Links(m, 1e9, 2e9, 3e9, 4e9, 5e9, latency=1e-3))
    found = {t.instruction: t for t in theory.data.triples}
    # data has no gradient: forward and the weight's
    run = found["first(All-Gather(0), Identity)"]
    assert isinstance(run, Compute) and (run.fixed_flops, run.shared_flops) == (
        0,
        2 * 2 * b * i * o,
    )
    replicated = found["first(Identity, Identity)"]
    assert isinstance(replicated, Compute) and (
        replicated.fixed_flops,
        replicated.shared_flops,
    ) == (
        4 * b * i * o,
        0,
    )
    second = found["second(All-Gather(1), All-Gather(1))"]
    assert (
        isinstance(second, Compute)
        and second.shared_flops == 3 * 2 * b * o * o
        and not second.pre[0].endswith("(0)")
    )
    size = 4.0 * b * o
    expected = {
        "All-Reduce(first)": (2 * (1e-3 + size / 3e9), 0.0),
        "Reduce-Scatter(first, 0)": (2e-3, m * size / 4e9 + m * size / 1e9),
        "All-Gather(first, 0)": (2e-3, m * size / 4e9 + m * size / 1e9),
        "Grouped-Broadcast(first, 1)": (2 * (m * 1e-3 + size / 2e9), 0.0),
        "All-To-All(first, 0, 1)": (2e-3, 2 * m * size / 5e9),
        "All-Reduce gradient(first.weight)": (1e-3 + 4.0 * i * o / 3e9, 0.0),
        "All-Gather factors gradient(second.weight)": (2e-3, m * 2 * size / 1e9),
    }
    for name, (fixed, shared) in expected.items():
        triple = found[name]
        assert isinstance(triple, Communication), name
        assert (triple.fixed_seconds, triple.shared_seconds) == pytest.approx((fixed, shared)), name


def test_sufficient_factors_pay_for_small_batches() -> None:
    """A batch of 6 and weights of 4000 x 4000: the optimum gathers factors or slices the weights;
    restricted to slices of the batch it gathers factors, and both are exact."""
    program = two_layers(6, 400, 400)
    values = random_values(program, 0)
    theory = theory_of(program, DEVICES, links())
    kept = [
        i for i, x in enumerate(theory.instructions)
        if not (isinstance(x, Run) and (x.way.output != 0 or not x.way.shared) and x.node != "loss")
    ]  # fmt: skip
    data = theory.data.model_copy(update={"triples": [theory.data.triples[i] for i in kept]})
    result = solve(FAMILY, data, "auto", SolverRun(Options(threads=1)))
    assert isinstance(result.decision, HapDecision) and result.status == "optimal"
    decision = HapDecision(
        program=[kept[i] for i in result.decision.program], ratios=result.decision.ratios
    )
    used = [theory.instructions[i] for i in decision.program]
    assert sum(isinstance(x, Synchronise) and "factors" in x.how for x in used) == 2
    agree(execute(theory, decision, values), reference(program, values))


def test_experts_are_exchanged_where_their_gradients_are_large() -> None:
    """The optimum of BERT-MoE slices experts and meets their tokens by All-To-All."""
    program = model("bert-moe", 16 * 8, 8)
    devices = [Device(name="d", flops_per_second=V100)] * 8
    theory = theory_of(program, devices, ring(8, 2e9))
    result = solve(FAMILY, theory.data, "auto", SolverRun(Options(threads=1, time_limit=60)))
    assert isinstance(result.decision, HapDecision)
    used = [theory.instructions[i] for i in result.decision.program]
    ups = [x for x in used if isinstance(x, Run) and x.node.endswith("moe.up")]
    assert len(ups) == 6 and all(x.way.output == 1 for x in ups)
    swaps = [x.tensor for x in used if isinstance(x, Change) and x.how == "All-To-All"]
    assert sum("moe" in tensor for tensor in swaps) == 12


def test_axes_keep_slices_of_one_dimension_together() -> None:
    """768 columns of 12 heads are cut between heads; too few heads for the devices are not cut at
    all."""
    w = Writer("heads")
    x, labels = w.placeholder("x", (8, 5, 16)), w.placeholder("labels", (8, 5), below=24)
    y = w.linear("project", x, "bsh,oh->bso", (24, 16))
    y = w.apply("reshape", "split", y, shape=(8, 5, 4, 6))
    y = w.apply("permute", "heads", y, order=(0, 2, 1, 3))
    y = w.apply("permute", "back", w.apply("rotary", "turned", y), order=(0, 2, 1, 3))
    y = w.apply("reshape", "merged", y, shape=(8, 5, 24))
    w.apply("cross-entropy", "loss", y, labels, count=40)
    program = w.finish()
    axes = Axes(program)
    assert axes.lengths("project.weight", 0, [0.5, 0.2, 0.3]) == [12, 6, 6]
    assert axes.lengths("heads", 1, [0.5, 0.2, 0.3]) == [2, 1, 1]
    five = [Device(name="d", flops_per_second=1e12)] * 5
    cut = [t.instruction for t in theory_of(program, five, links(5)).data.triples]
    assert not any(name.startswith("All-Gather(project, 2)") for name in cut)
    assert any(name.startswith("All-Gather(project, 0)") for name in cut)


def test_tied_parameters_are_copies_whose_gradients_add_up() -> None:
    program, _, expected = tiny("gpt2")
    assert dict(program.copies) == {"table#2": "table"}
    assert "table#2" not in expected.gradients


def test_programs_that_are_none_are_refused() -> None:
    w = Writer("bad")
    x = w.placeholder("x", (4, 5))
    with pytest.raises(InputError, match="unknown tensor"):
        w.apply("relu", "y", "z")
    with pytest.raises(InputError, match="unknown operator"):
        w.apply("sort", "y", x)
    w.apply("relu", "y", x)
    with pytest.raises(InputError, match="name of a tensor"):
        w.apply("relu", "y", x)
    with pytest.raises(InputError, match="scalar loss"):
        w.finish()
    with pytest.raises(InputError, match="unknown program"):
        model("alexnet", 4, 2)
