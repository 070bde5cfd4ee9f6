"""The full theory of both passes: prices by hand, and how far mirroring is from it where both are
proven."""

from __future__ import annotations

import pytest

from hetplan.formulations import family
from hetplan.formulations.hap.data import Communication, Compute, Device, HapData
from hetplan.formulations.hap.spmd.forms import WHOLE
from hetplan.formulations.hap.spmd.links import Links, ring
from hetplan.formulations.hap.spmd.networks import model
from hetplan.formulations.hap.spmd.program import SingleProgram, Writer
from hetplan.formulations.hap.spmd.rules import theory_of
from hetplan.formulations.hap.spmd.two_pass import holdings, two_pass_theory
from hetplan.formulations.hap.spmd.work import summed
from hetplan.solvers.options import Options
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Run

MIXED = [
    *[Device(name="V100", flops_per_second=3.86e12)] * 2,
    *[Device(name="P100", flops_per_second=2.15e12)] * 2,
]


def layers(count: int, batch: int = 1024, width: int = 2048) -> SingleProgram:
    """Dense layers with relu between them, and a loss."""
    w = Writer("layers")
    x, labels = w.placeholder("x", (batch, width)), w.placeholder("labels", (batch,), below=width)
    for i in range(count):
        x = w.linear(f"l{i}", x, "bi,oi->bo", (width, width))
        if i < count - 1:
            x = w.apply("relu", f"r{i}", x)
    w.apply("cross-entropy", "loss", x, labels, count=batch)
    return w.finish()


def proven(data: HapData) -> float:
    """The optimum."""
    result = solve(family("hap"), data, "auto", Run(Options(threads=1, time_limit=60)))
    assert result.status == "optimal" and result.objective is not None, result.message
    return result.objective


def best(program: SingleProgram, links: Links) -> float:
    """The optimum over all ways to hold the parameters; a way whose goal cannot be reached has
    none."""
    found = []
    for held in holdings(program, len(MIXED)):
        data = two_pass_theory(program, MIXED, links, held)
        result = solve(family("hap"), data, "auto", Run(Options(threads=1, time_limit=60)))
        assert result.status in ("optimal", "infeasible"), result.message
        if result.objective is not None:
            found.append(result.objective)
    return min(found)


def whole(program: SingleProgram) -> dict[str, int]:
    """All parameters on every device."""
    return {node.name: WHOLE for node in program.parameters}


@pytest.mark.parametrize("name", ["vit", "bert-moe", "vgg19", "llama-blocks"])
def test_a_single_device_computes_everything_once(name: str) -> None:
    """The goal follows from every network, and costs all of its work on one device."""
    program = model(name, 2, 1, tiny=True)
    data = two_pass_theory(
        program, [Device(name="d", flops_per_second=1e12)], ring(1, 1e30, 0.0), whole(program)
    )
    found = solve(family("hap"), data, "dp-even")
    assert found.objective is not None
    added = sum(
        t.fixed_flops
        for t in data.triples
        if isinstance(t, Compute) and t.instruction.endswith("added Identity")
    )
    assert found.objective * 1e12 == pytest.approx(summed(program).total + added, rel=1e-9)


def test_a_network_without_cost_shares_everything() -> None:
    program = layers(1)
    free = Links(4, 1e30, 1e30, 1e30, 1e30, 1e30, latency=0.0)
    least = summed(program).total / sum(d.flops_per_second for d in MIXED)
    assert best(program, free) == pytest.approx(least, rel=1e-6)
    assert proven(theory_of(program, MIXED, free).data) == pytest.approx(least, rel=1e-6)


def test_prices_by_hand() -> None:
    """One pass each: half of what the mirrored theory asks for a collective, a third of a product's
    work."""
    program, links = layers(2, 60, 600), Links(4, 1e9, 2e9, 3e9, 4e9, 5e9, latency=1e-3)
    data = two_pass_theory(program, MIXED, links, whole(program))
    found = {t.instruction: t for t in data.triples}
    size, flops = 4.0 * 60 * 600, 2.0 * 60 * 600 * 600
    for name in ("r0", "d r0", "d l1.weight"):
        rows = 600 if name.endswith("weight") else 60
        reduce = found[f"All-Reduce({name}, All-Reduce, Identity)"]
        assert isinstance(reduce, Communication)
        assert reduce.fixed_seconds == pytest.approx(1e-3 + 4.0 * rows * 600 / 3e9)
    gather = found["All-Gather(d r0, All-Gather(1), Identity)"]
    assert isinstance(gather, Communication)
    assert (gather.fixed_seconds, gather.shared_seconds) == pytest.approx((1e-3, 4 * size / 1e9))
    weight = found["d l1.weight by l1.1(All-Gather(0), Identity) -> All-Gather(0)"]
    assert isinstance(weight, Compute)
    assert (weight.fixed_flops, weight.shared_flops) == (0.0, flops)
    assert weight.pre == ["d l1|All-Gather(0)", "r0|All-Gather(0)"]
    assert weight.post == ["d l1.weight by l1.1|All-Reduce"]
    replicated = found["d l1.weight by l1.1(Identity, Identity) -> Identity replicated"]
    assert isinstance(replicated, Compute) and replicated.fixed_flops == flops
    assert not any("d x" in t.instruction for t in data.triples), "data have no gradient"


@pytest.mark.parametrize("speed", [1.3e9, 1e10, 1e11])
def test_mirroring_loses_nothing_on_one_layer(speed: float) -> None:
    """Proven on both sides, for slow and fast networks."""
    links = ring(4, speed)
    assert best(layers(1), links) == pytest.approx(
        proven(theory_of(layers(1), MIXED, links).data), rel=2e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize(("speed", "ratio"), [(1.3e9, 0.903), (1e10, 0.9319), (1e11, 0.9906)])
def test_what_mirroring_loses_on_two_layers(speed: float, ratio: float) -> None:
    """Each pass may take another way: proven on both sides."""
    links = ring(4, speed)
    found = best(layers(2), links) / proven(theory_of(layers(2), MIXED, links).data)
    assert found == pytest.approx(ratio, abs=1e-3)
