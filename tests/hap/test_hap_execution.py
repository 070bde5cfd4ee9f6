"""Programs executed on simulated devices: loss and all gradients are those of one device, in
double precision."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch", reason="programs run on torch tensors")

from evidence.speed.hap_theories import MAKERS, NETWORKS, model, theory_named  # noqa: E402
from fakes.links import measured_by_hap  # noqa: E402
from fakes.programs import drawn_program, every_rule, two_layers  # noqa: E402
from fakes.simulated import (  # noqa: E402
    Outcome,
    Values,
    agree,
    execute,
    on_devices,
    random_values,
    reference,
)
from fakes.workloads import SHAPES, cluster, small_model  # noqa: E402
from hap.shallow import shallow  # noqa: E402
from hetplan.formulations import family  # noqa: E402
from hetplan.formulations.hap.data import Device, HapData, HapDecision  # noqa: E402
from hetplan.formulations.hap.evaluate import held_bytes  # noqa: E402
from hetplan.formulations.hap.pose import pose  # noqa: E402
from hetplan.formulations.hap.pricing import theory_of  # noqa: E402
from hetplan.instances.library import library  # noqa: E402
from hetplan.profiling.workload import make_workload  # noqa: E402
from hetplan.programs.forms import Change, Run, Synchronise  # noqa: E402
from hetplan.programs.holding import form_kept, holding_of  # noqa: E402
from hetplan.programs.program import SingleProgram  # noqa: E402
from hetplan.solvers.registry import evaluate, solve  # noqa: E402
from hetplan.solvers.run import Options, Run as SolverRun  # noqa: E402
from quick import rest_wide  # noqa: E402

RATIOS = [[0.5, 0.2, 0.3]]
DEVICES = [Device(name="a", flops_per_second=2e12), *[Device(name="b", flops_per_second=1e12)] * 2]
MODELS = [name for name in MAKERS if name != "vit-24"]  # the same rules as vit


@cache
def tiny(name: str, blocks: int = 2) -> tuple[SingleProgram, Values, Outcome]:
    """A built-in program on small tensors for three devices, values, and what one device makes of
    them."""
    with shallow(blocks):
        program = model(name, 6, 3, tiny=True)
    values = random_values(program, 1)
    return program, values, reference(program, values)


@pytest.mark.parametrize("seed", rest_wide(range(4), 1))
@pytest.mark.parametrize("name", MODELS)
def test_random_programs_equal_one_device(name: str, seed: int) -> None:
    """Programs that mix all rules at random, under uneven ratios."""
    program, values, expected = tiny(name)
    theory = every_rule(program, 3)
    decision = HapDecision(program=drawn_program(theory, seed), ratios=RATIOS)
    assert evaluate(family("hap"), theory.data, decision).objective is not None
    agree(execute(theory, decision, values), expected)


@pytest.mark.parametrize("seed", rest_wide(range(3), 1))
@pytest.mark.parametrize("name", ["vit", "bert-moe"])
def test_segments_have_ratios_of_their_own(name: str, seed: int) -> None:
    program, values, expected = tiny(name)
    layers = list(dict.fromkeys(node.layer for node in program.nodes))
    at = {node.name: 3 * layers.index(node.layer) // len(layers) for node in program.nodes}
    theory = every_rule(program.with_segments(at), 3)
    assert theory.data.segments == 3
    ratios = [[0.5, 0.2, 0.3], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5]]
    decision = HapDecision(program=drawn_program(theory, seed), ratios=ratios)
    agree(execute(theory, decision, values), expected)
    kinds = [theory.instructions[i] for i in decision.program]
    assert any(isinstance(x, Change) and x.how == "Repartition" and x.source >= 0 for x in kinds)


ENTRIES = {entry.name: entry for entry in library("hap")}


# Convolutions, and experts under limited memory.
RECORDED = ("hap-vgg19-6", "hap-bert-moe-6-memory")


@pytest.mark.parametrize(
    "name", rest_wide([*RECORDED, *(n for n in NETWORKS if n not in RECORDED)], len(RECORDED))
)
def test_best_decisions_run_as_one_device_does(name: str) -> None:
    """The record's program, found for the published size, on small tensors."""
    best, data = ENTRIES[name].best_known(), ENTRIES[name].load().data
    assert best is not None and isinstance(data, HapData)
    theory = theory_named(name, tiny=True)
    assert [t.instruction for t in data.triples] == [t.instruction for t in theory.data.triples]
    values = random_values(theory.program, 11)
    decision = HapDecision.model_validate(best.decision)
    agree(execute(theory, decision, values), reference(theory.program, values))


@pytest.mark.parametrize("name", rest_wide(SHAPES, 3))
def test_programs_of_all_shapes_run_on_uneven_devices(name: str) -> None:
    """The planner's models, under the ratios of a plan."""
    posed = pose(make_workload(small_model(**SHAPES[name]), cluster(), 8))
    values = random_values(posed.theory.program, 3)
    expected = reference(posed.theory.program, values)
    for method in ("auto", "dp-proportional"):
        run = SolverRun(Options(threads=1, time_limit=600))
        result = solve(family("hap"), posed.theory.data, method, run)
        assert isinstance(result.decision, HapDecision)
        agree(execute(posed.theory, result.decision, values), expected)


def test_factors_are_gathered_where_that_is_optimal() -> None:
    """A batch of 6 and weights of 400 x 400, restricted to slices of the batch."""
    program = two_layers(6, 400, 400)
    theory = theory_of(program, DEVICES, measured_by_hap(3))
    kept = [
        i for i, x in enumerate(theory.instructions)
        if not isinstance(x, Run) or (x.rule.output == 0 and x.rule.shared) or x.node == "loss"
    ]  # fmt: skip
    data = theory.data.model_copy(update={"triples": [theory.data.triples[i] for i in kept]})
    result = solve(family("hap"), data, "auto", SolverRun(Options(threads=1)))
    assert isinstance(result.decision, HapDecision) and result.status == "optimal"
    chosen = [kept[i] for i in result.decision.program]
    used = [theory.instructions[i] for i in chosen]
    assert sum(isinstance(x, Synchronise) and "factors" in x.how for x in used) == 2
    decision = HapDecision(program=chosen, ratios=result.decision.ratios)
    values = random_values(program, 0)
    agree(execute(theory, decision, values), reference(program, values))


def test_a_tied_parameter_can_count_as_whole() -> None:
    """One that operators read in several ways is held whole, so that whatever fits by the theory's
    bytes fits as it is held."""
    program, _, _ = tiny("gpt2")
    holding = replace(holding_of(program, element_bytes=4), tied_whole=True)
    links = measured_by_hap(3)
    theory = theory_of(program, DEVICES, links, holding=holding, device_bytes=[1e12] * 3)
    clashes = 0
    for seed in range(12):
        decision = HapDecision(program=drawn_program(theory, seed), ratios=[[1 / 3] * 3])
        decided = theory.decided(decision)
        clashing = [owner for owner, forms in decided.readings.items() if len(forms) > 1]
        clashes += len(clashing)
        assert all(decided.shards[owner].dimension is None for owner in clashing)
        if not set(clashing) <= set(program.copies.values()):
            continue  # one operator runs in two ways, each of which is counted
        counted = held_bytes(theory.data, decision)
        # in whole units one device may take more than its ratio says, the others then take less
        assert sum(decided.bytes(holding)) <= sum(counted) * (1 + 1e-9)
    assert clashes >= 5


@pytest.mark.parametrize("name", ["vgg19", "bert-moe", "gpt2"])
def test_devices_hold_what_is_counted(name: str) -> None:
    """Of random programs under uneven ratios: entries of every tensor and of every parameter,
    device by device."""
    program, values, _ = tiny(name, blocks=6)  # of which each has a few collectives
    holding = holding_of(program, element_bytes=4)
    links = measured_by_hap(3)
    theory = theory_of(program, DEVICES, links, holding=holding, device_bytes=[1e9] * 3)
    seen: set[str] = set()
    for seed in range(4):
        decision = HapDecision(program=drawn_program(theory, seed), ratios=RATIOS)
        decided = theory.decided(decision)

        def kept(machine: Any, order: list[Any] = decided.order) -> tuple[int, int]:
            tensors = 0
            for instruction in order:
                machine.forward(instruction)
                form = form_kept(instruction)
                if form is not None:
                    seen.add("Run" if isinstance(instruction, Run) else instruction.how)
                    if form[0] in holding.saved:
                        tensors += machine.values[instruction.after].numel()
            return 4 * tensors, 16 * sum(p.numel() for p in machine.parameters.values())

        expected = np.array(on_devices(decided, values, kept))
        assert decided.saved(holding.saved) == pytest.approx(expected[:, 0], rel=1e-12), seed
        assert decided.bytes(holding) == pytest.approx(expected.sum(axis=1), rel=1e-12), seed
        # the instance counts the same where slices are not rounded; copies of a parameter are
        # counted once
        total = np.array(held_bytes(theory.data, decision))
        assert total == pytest.approx(expected.sum(axis=1), rel=0.35)
        assert total.sum() == pytest.approx(expected.sum(), rel=0.15)
    assert {"Run", "All-Reduce", "All-Gather"} <= seen
