"""Packing samples of unequal length: every method against enumeration, the evaluator, and what is
left when time runs out."""

from __future__ import annotations

import math
import random

import pytest

from hetplan.formulations.lengths.cp import MOST_PLACES, TOO_LARGE
from hetplan.formulations.lengths.data import LengthsData, LengthsDecision, LengthsReplica
from hetplan.formulations.lengths.evaluate import evaluate
from hetplan.formulations.lengths.exact import Search
from hetplan.formulations.lengths.family import FAMILY
from hetplan.formulations.lengths.heuristic import NO_ROOM, best_packing
from hetplan.formulations.lengths.problem import LengthsProblem
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Result, Run
from lengths.lengths_cases import oracle, random_instance
from stopping import over

CASES = 4  # instances of one seed; all seeds together have two hundred


def solved(data: LengthsData, method: str) -> Result[LengthsDecision]:
    """The result of one thread, which ends by itself."""
    return solve(FAMILY, data, method, Run(Options(threads=1)))


@pytest.mark.parametrize("seed", range(50))
def test_every_method_against_enumeration(seed: int) -> None:
    for case in range(CASES):
        data = random_instance(CASES * seed + case)
        best = oracle(data)
        exact, greedy = solved(data, "exact"), solved(data, "greedy")
        results = [exact] if case else [exact, solved(data, "cp-sat")]
        if best is None:
            assert [result.status for result in results] == ["infeasible"] * len(results)
            assert greedy.decision is None
            continue
        for result in results:
            assert result.status == "optimal"
            assert result.objective == pytest.approx(best, rel=1e-6)
            assert result.bound is not None and result.bound <= best * (1 + 1e-9)
        problem = LengthsProblem(data)
        assert problem.bound <= best
        # without the heuristic's decision to begin with, which is mostly the best one here
        search = Search(problem, Run(), math.inf, None)
        search.finish()
        assert search.best == pytest.approx(best, rel=1e-6)
        if greedy.objective is not None:
            assert greedy.objective >= best * (1 - 1e-9)
            assert greedy.bound is None


def two_replicas(**changes: object) -> LengthsReplica:
    """A replica with room for ten tokens in each of two micro-batches."""
    fields = {"name": "r", "token_seconds": 1.0, "tokens": 10, "micro_batches": 2}
    return LengthsReplica.model_validate({**fields, **changes})


TWO = LengthsData(samples=[8, 6, 4, 2], replicas=[two_replicas(), two_replicas(token_seconds=2.0)])


def test_the_evaluator_adds_up_the_prose() -> None:
    """Micro-batches of 3 + 2 and of 4 tokens: (5 + 0.5 (9 + 4) + 1) + (4 + 0.5 16 + 1), and the
    longer of the ways 2 5 + 0.25 (9 + 4) + 3 and 2 4 + 0.25 16 + 3."""
    costs = {"squared_token_seconds": 0.5, "micro_batch_seconds": 1.0}
    costs |= {"fill_token_seconds": 2.0, "fill_squared_token_seconds": 0.25}
    costs |= {"fill_micro_batch_seconds": 3.0}
    data = LengthsData(samples=[3, 2, 4], replicas=[two_replicas(**costs)])
    verdict = evaluate(data, LengthsDecision(micro_batches=[[[0, 1], [], [2]]]))
    assert verdict.objective == pytest.approx(12.5 + 13.0 + 16.25)


@pytest.mark.parametrize(
    ("batches", "violation"),
    [
        ([[[0], [1, 2]]], "micro_batches has 1 replicas, expected 2"),
        ([[[0], [1, 2]], []], "sample 3 is in 0 micro-batches, expected 1"),
        ([[[0, 3], [1, 2]], [[3]]], "sample 3 is in 2 micro-batches, expected 1"),
        ([[[0], [1, 2]], [[3, 4]]], "sample 4 does not exist, there are 4"),
        ([[[0, 2], [1]], [[3]]], "micro_batches[0][0] has 12 tokens, expected at most 10"),
        (
            [[[0], [1], [2]], [[3]]],
            "micro_batches[0] has 3 micro-batches with samples, expected at most 2",
        ),
    ],
)
def test_each_violation_is_told(batches: list[list[list[int]]], violation: str) -> None:
    verdict = evaluate(TWO, LengthsDecision(micro_batches=batches))
    assert (verdict.objective, verdict.violations) == (None, (violation,))


def test_a_packing_that_the_heuristic_misses_is_found() -> None:
    """The longest first puts 4 beside 5, and then finds no room for the 2."""
    data = LengthsData(samples=[5, 4, 3, 3, 3, 2], replicas=[two_replicas()])
    assert solved(data, "greedy").message == NO_ROOM
    assert solved(data, "exact").objective == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ([11, 2], "a sample has 11 tokens, the largest micro-batch holds 10"),
        ([9, 9, 9, 9, 9], "the samples have 45 tokens, all micro-batches hold 40"),
        ([7, 7, 7, 7, 7], "no packing of the samples into the micro-batches exists"),
    ],
)
def test_why_nothing_fits(samples: list[int], reason: str) -> None:
    data = TWO.model_copy(update={"samples": samples})
    result = solved(data, "exact")
    assert (result.status, result.message) == ("infeasible", reason)


def drawn(samples: int) -> LengthsData:
    """Lognormal lengths on three replicas at speeds 5 : 2 : 1."""
    rng = random.Random(1)
    lengths = [max(1, round(rng.lognormvariate(6, 1))) for _ in range(samples)]
    replicas = [
        two_replicas(
            token_seconds=1 / speed,
            squared_token_seconds=1e-4 / speed,
            tokens=20_000,
            micro_batches=8,
        )
        for speed in (5, 2, 1)
    ]
    return LengthsData(samples=lengths, replicas=replicas)


def test_the_heuristic_comes_close_to_the_bound() -> None:
    problem = LengthsProblem(drawn(60))
    packing = best_packing(problem, Run())
    assert packing is not None
    assert problem.bound <= packing.objective <= problem.bound * 1.0002


def test_a_stopped_search_keeps_bound_and_decision() -> None:
    result = solve(FAMILY, drawn(60), "exact", over())
    assert result.objective is not None and result.bound is not None
    assert result.bound <= result.objective
    assert result.status == "feasible"


def test_what_is_too_large_for_cp_sat_has_the_heuristics_decision() -> None:
    data = drawn(60)
    many = [one.model_copy(update={"micro_batches": 2000}) for one in data.replicas]
    assert MOST_PLACES < 60 * 3 * 2000
    result = solved(data.model_copy(update={"replicas": many}), "cp-sat")
    assert result.message == TOO_LARGE
    assert result.objective is not None and result.bound is not None
