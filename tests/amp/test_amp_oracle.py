"""The enumeration itself: against the evaluator, unpruned bijections, and what its instances
reach."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, pairwise, permutations

import pytest

from amp.cases import CASES, QUICK, SMALL, data_of, optimum_of
from amp.oracle import bijections, degrees
from hetplan.formulations.amp.data import AmpData, AmpDecision
from hetplan.formulations.amp.evaluate import evaluate
from quick import rest_wide


@pytest.mark.parametrize("case", rest_wide(CASES, len(QUICK)))
def test_the_evaluator_prices_the_optimum_alike(case: tuple[int, int | None]) -> None:
    """Two formulas written apart agree."""
    best = optimum_of(case)
    if best is not None:
        found = evaluate(data_of(case), best.decision)
        assert found.violations == ()
        assert found.objective == pytest.approx(best.objective, rel=1e-12)


def enumerate_with_evaluator(data: AmpData) -> float | None:
    """Every bijection and every cut, judged by the evaluator alone."""
    count, layers = len(data.devices), len(data.layers)
    best = None
    for pp, dp, tp, mbs, _ in degrees(data):
        for order in permutations(range(count)):
            cells = iter(order)
            placement = [[[next(cells) for _ in range(tp)] for _ in range(dp)] for _ in range(pp)]
            for inner in combinations(range(1, layers), pp - 1):
                decision = AmpDecision(
                    pipeline=pp,
                    data=dp,
                    tensor=tp,
                    micro_batch=mbs,
                    placement=placement,
                    stages=list(pairwise((0, *inner, layers))),
                )
                found = evaluate(data, decision).objective
                if found is not None and (best is None or found < best):
                    best = found
    return best


@pytest.mark.parametrize("case", rest_wide(SMALL[:30], 8))
def test_nothing_is_lost_by_symmetry(case: tuple[int, int | None]) -> None:
    best, found = optimum_of(case), enumerate_with_evaluator(data_of(case))
    assert found == (None if best is None else pytest.approx(best.objective, rel=1e-12))


@pytest.mark.parametrize(
    ("degrees", "members"),
    [((4, 4, 1), 1), ((4, 1, 4), 1), ((4, 2, 1), 12), ((6, 1, 1), 720), ((4, 2, 2), 6)],
)
def test_symmetries_leave_the_share_that_they_should(
    degrees: tuple[int, int, int], members: int
) -> None:
    """Orbits have dp! tp! members; each is met at least once."""
    assert len(list(bijections(*degrees))) == members


@pytest.mark.wide
def test_the_instances_reach_every_corner() -> None:
    """Optima of every shape, both causes of infeasibility, memory that changes the optimum, zero
    costs."""
    seen: Counter[str] = Counter()
    for case in CASES:
        data, best = data_of(case), optimum_of(case)
        if best is None:
            seen["no degrees" if not list(degrees(data)) else "no memory"] += 1
            continue
        chosen = best.decision
        shape = [chosen.pipeline > 1, chosen.data > 1, chosen.tensor > 1]
        seen["".join("pdt"[i] for i in range(3) if shape[i])] += 1
        seen["several types"] += len({device.type for device in data.devices}) > 1
        seen["free"] += best.objective == 0
        if data.memory is not None:
            relaxed = evaluate(data.model_copy(update={"memory": None}), chosen)
            assert relaxed.objective == pytest.approx(best.objective)
            seen["memory given"] += 1
    for corner in (
        "no degrees",
        "no memory",
        "",
        "p",
        "d",
        "t",
        "pd",
        "pt",
        "dt",
        "several types",
        "free",
    ):
        assert seen[corner] > 0, (corner, seen)
    assert seen["no degrees"] + seen["no memory"] < len(CASES) / 3
