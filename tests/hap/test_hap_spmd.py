"""Theories of whole programs: prices by hand, what their optima look like, and segments."""

from __future__ import annotations

from typing import Literal

import pytest

from evidence.speed.hap_theories import model
from fakes.links import measured_by_hap
from fakes.programs import two_layers
from hetplan.errors import InputError
from hetplan.formulations.hap.data import Communication, Compute, Device, HapDecision
from hetplan.formulations.hap.family import FAMILY
from hetplan.formulations.hap.pose import segmented
from hetplan.formulations.hap.pricing import theory_of
from hetplan.programs.axes import Axes
from hetplan.programs.forms import Change, Run
from hetplan.programs.links import Links, ring
from hetplan.programs.program import Writer
from hetplan.programs.work import work_of
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Run as SolverRun

V100, P100 = 3.86e12, 2.15e12
DEVICES = [Device(name="a", flops_per_second=V100), *[Device(name="b", flops_per_second=P100)] * 2]


def links(m: int = 3) -> Links:
    return measured_by_hap(m)


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


def test_experts_are_exchanged_where_their_gradients_are_large() -> None:
    """The optimum of BERT-MoE slices experts and meets their tokens by All-To-All."""
    program = model("bert-moe", 16 * 8, 8)
    devices = [Device(name="d", flops_per_second=V100)] * 8
    theory = theory_of(program, devices, ring(8, 2e9))
    result = solve(FAMILY, theory.data, "auto", SolverRun(Options(threads=1, time_limit=600)))
    assert isinstance(result.decision, HapDecision)
    used = [theory.instructions[i] for i in result.decision.program]
    ups = [x for x in used if isinstance(x, Run) and x.node.endswith("moe.up")]
    assert len(ups) == 6 and all(x.rule.output == 1 for x in ups)
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
    assert axes.bounds("project.weight", 0, [0.5, 0.2, 0.3]) == ((0, 12), (12, 18), (18, 24))
    assert axes.bounds("heads", 1, [0.5, 0.2, 0.3]) == ((0, 2), (2, 3), (3, 4))
    five = [Device(name="d", flops_per_second=1e12)] * 5
    cut = [t.instruction for t in theory_of(program, five, links(5)).data.triples]
    assert not any(name.startswith("All-Gather(project, 2)") for name in cut)
    assert any(name.startswith("All-Gather(project, 0)") for name in cut)


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


@pytest.mark.parametrize(("how", "count"), [("layer", 1), ("layer", 4), ("metis", 2)])
def test_segments_cover_the_program(how: Literal["layer", "metis"], count: int) -> None:
    """Numbered as they appear, with equal work and little that is read across; layers whole."""
    program = model("vit", 64, 8)
    found = segmented(program, count, how)
    gradients, work, crossing = found.needs_gradient(), [0.0] * count, 0
    parts: dict[str, set[int]] = {}
    for node in found.computations:
        work[node.segment] += work_of(found, node, gradients).total
        parts.setdefault(node.layer, set()).add(node.segment)
        for source in found.inputs(node):
            away = source.segment != node.segment
            assert not (source.source and away)
            crossing += source.elements if away else 0
    assert list(dict.fromkeys(node.segment for node in found.computations)) == list(range(count))
    assert max(work) <= 1.6 * sum(work) / count and crossing <= 4 * count * 64 * 196 * 768
    assert how != "layer" or all(len(numbers) == 1 for numbers in parts.values())
    with pytest.raises(InputError, match="segments"):
        segmented(program, 1000, how)
