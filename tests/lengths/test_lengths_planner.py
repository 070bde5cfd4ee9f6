"""Costs of a plan for samples of unequal length against its own replay, the three ways to form
micro-batches, and lengths from files and publications."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes.workloads import cluster
from hetplan.errors import InputError
from hetplan.planner.lengths.costs import Batch, PlanCosts, fitted
from hetplan.planner.lengths.drawn import LONGEST, planned_lengths
from hetplan.planner.lengths.packing import balanced, in_shares, packed, padded
from hetplan.planner.lengths.rows import BalancedRows
from hetplan.planner.lengths.samples import Lengths, open_lengths, published, read_lengths
from hetplan.plans.making import new_plan, with_inputs
from hetplan.plans.plan import Plan
from hetplan.profiling.inputs.inputs import Inputs
from hetplan.profiling.models.model import load_model
from hetplan.profiling.profiles.predict import predict
from hetplan.profiling.workload import Workload, make_workload
from hetplan.replays.replay import StageReplayer
from hetplan.solvers.run import Run

LENGTH, OTHER = 64, 128  # tokens
BATCH = 8  # samples


@cache
def workload_of(sequence: int, memory_gib: float | None = None) -> Workload:
    """gpt2 on two V100 and two T4, perhaps with less memory."""
    kinds = ("V100-SXM2-16GB", "T4")
    changes: dict[str, Any] = {}
    if memory_gib is not None:
        changes["devices"] = {name: {"memory_gib": memory_gib} for name in kinds}
    model, machines = load_model("gpt2", sequence=sequence), cluster(**changes)
    profile = predict(
        model, machines, micro_batches=[1, 2, 4], tensor_degrees=[1, 2], date="2026-01-01"
    )
    return make_workload(model, machines, BATCH, profile=profile)


def replica(devices: list[list[int]], cuts: list[int], count: int, samples: int) -> dict[str, Any]:
    """A replica whose stage j has the layers between two cuts on `devices[j]`."""
    bounds = zip([0, *cuts], [*cuts, 14], strict=True)
    stages = [
        {"layers": [cut], "devices": [group], "tensor_shares": [1.0] * len(group)}
        for cut, group in zip(bounds, devices, strict=True)
    ]
    return {"stages": stages, "micro_batches": [{"count": count, "samples": samples}]}


ONE_EACH = [replica([[d]], [], 2, 1) for d in range(4)]
PLANS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "four stages": ([replica([[0], [1], [2], [3]], [3, 7, 10], 4, 2)], {}),
    "unequal replicas": ([replica([[0], [1]], [7], 3, 2), replica([[2], [3]], [5], 1, 2)], {}),
    "tensor ranks": ([replica([[0, 1], [2, 3]], [8], 4, 2)], {}),
    "gpipe": ([replica([[0], [2]], [8], 8, 1)], {"schedule": "gpipe"}),
    "split backward passes": ([replica([[0], [2]], [8], 4, 2)], {"schedule": "zb-h1"}),
    "ZeRO 1": (ONE_EACH, {"zero": 1}),
    "ZeRO 2": (ONE_EACH, {"zero": 2}),
    "ZeRO 3": (ONE_EACH, {"zero": 3}),
}


def plan_of(name: str, memory_gib: float | None = None) -> Plan:
    """A plan for samples of LENGTH tokens."""
    replicas, fields = PLANS[name]
    return new_plan(workload_of(LENGTH, memory_gib), replicas, name=name, **fields)


def costs_of(name: str, longest: int = OTHER, memory_gib: float | None = None) -> PlanCosts:
    """The costs of a plan."""
    workloads = workload_of(LENGTH, memory_gib), workload_of(OTHER, memory_gib)
    return PlanCosts(plan_of(name, memory_gib), *workloads, longest)


def alike(costs: PlanCosts, rows: list[int], length: int) -> list[list[Batch]]:
    """The planned number of micro-batches of each replica, with rows of one length."""
    return [
        [Batch(n * length, n * length**2)] * each.steps
        for n, each in zip(rows, costs.plan.replicas, strict=True)
    ]


@pytest.mark.parametrize("name", PLANS)
def test_costs_are_the_replay_of_both_lengths(name: str) -> None:
    costs = costs_of(name)
    replayed = StageReplayer(workload_of(LENGTH)).seconds(costs.plan)
    assert costs.seconds(alike(costs, costs.rows, LENGTH)) == pytest.approx(replayed, rel=1e-9)
    half = [max(1, round(n / 2)) for n in costs.rows]
    replayed = StageReplayer(workload_of(OTHER)).seconds(costs.with_rows(half))
    if costs.rows[0] == 2:  # then half as many rows of twice the length are as many tokens
        # how much of an all-reduce of tensor ranks is hidden does not follow tokens alone
        assert costs.seconds(alike(costs, half, OTHER)) == pytest.approx(replayed, rel=2e-4)


def test_a_short_micro_batch_has_short_passes_of_weights() -> None:
    costs = costs_of("split backward passes").replicas[0]
    pipeline = costs.with_batches([Batch(1, 1), Batch(costs.tokens, costs.squares)])
    short, planned = np.moveaxis(np.asarray(pipeline.weights), -1, 0)
    # gradients of weights take the time of their bytes at least, however few rows there are
    assert (short <= planned).all() and (short < planned).any()
    assert planned == pytest.approx(np.asarray(costs.pipeline.weights)[..., 0])


def test_three_points_give_the_costs_of_tokens_and_squares() -> None:
    def seconds(rows: int, length: int) -> np.ndarray[Any, Any]:
        tokens, squares = rows * length, rows * length**2
        return np.array([3 + 2 * tokens + 0.5 * squares, 7.0 + 0 * tokens, 0.25 * squares])

    points = [(n, length, seconds(n, length)) for n, length in ((2, 10), (4, 10), (1, 30))]
    costs = fitted(points)
    assert costs.fixed == pytest.approx([3, 7, 0])
    assert costs.token == pytest.approx([2, 0, 0], abs=1e-12)
    assert costs.squared == pytest.approx([0.5, 0, 0.25])
    assert costs.of([Batch(0, 0), Batch(5, 13)])[0] == pytest.approx([0, 3 + 10 + 6.5])


def test_no_cost_is_below_zero() -> None:
    """Rows that get cheaper by the number have no fixed cost below 0; long samples that are cheaper
    by the token have no cost of squares below 0."""
    costs = fitted([(1, 10, np.array([10.0])), (2, 10, np.array([30.0])), (1, 20, np.array([1.0]))])
    assert (costs.fixed[0], costs.squared[0]) == (0, 0)
    assert costs.token[0] == pytest.approx(1.5)


@pytest.mark.parametrize("name", ["four stages", "unequal replicas", "ZeRO 2"])
def test_a_micro_batch_has_the_most_tokens_that_fit(name: str) -> None:
    costs = costs_of(name, longest=10_000, memory_gib=4.0)
    for r, tokens in enumerate(costs.capacities):
        rows = tokens // LENGTH
        assert rows > 0 and costs.fitting(rows)[r] and not costs.fitting(rows + 1)[r]


def test_where_nothing_fits_no_way_has_micro_batches() -> None:
    costs = costs_of("four stages", memory_gib=1.2)
    assert 0 in costs.capacities
    assert balanced(costs, [10] * BATCH, Run()) is None
    assert padded(costs, [10] * BATCH) is None


SAMPLES = [128, 5, 20, 30, 1, 100, 33, 64]


@pytest.mark.parametrize("name", PLANS)
def test_every_sample_is_in_a_micro_batch_of_every_way(name: str) -> None:
    costs = costs_of(name)
    tokens, squares = sum(SAMPLES), sum(length**2 for length in SAMPLES)
    for way in (packed(costs, SAMPLES), balanced(costs, SAMPLES, Run())):
        assert way is not None
        batches = [batch for row in way.batches for batch in row]
        assert sum(batch.tokens for batch in batches) == way.tokens == tokens
        assert sum(batch.squares for batch in batches) == squares
        assert costs.seconds(way.batches) is not None
    filled = padded(costs, SAMPLES)
    assert filled is not None and filled.tokens >= tokens
    assert costs.seconds(filled.batches) is not None


def test_each_way_by_hand() -> None:
    """Replicas of 6 and of 2 samples in three micro-batches and in one: a third of 284 tokens is
    94.7, so that the first sample is in the first third, the next three are in the second."""
    costs = costs_of("unequal replicas")
    assert [own for _, own in in_shares(costs, SAMPLES)] == [SAMPLES[:6], SAMPLES[6:]]
    filled, one_by_one = padded(costs, SAMPLES), packed(costs, SAMPLES)
    assert filled is not None and one_by_one is not None
    assert [[batch.tokens for batch in row] for row in filled.batches] == [[256, 60, 200], [128]]
    assert [[batch.tokens for batch in row] for row in one_by_one.batches] == [[128, 56, 100], [97]]
    costs.capacities = [128, 64]
    in_less_room = packed(costs, SAMPLES)
    assert in_less_room is not None
    assert [[batch.tokens for batch in row] for row in in_less_room.batches] == [
        [128, 56, 100],
        [33, 64],
    ]
    assert filled.batches[0][0].squares == 2 * 128**2
    assert one_by_one.batches[0][1].squares == 5**2 + 20**2 + 30**2 + 1


def test_padded_samples_keep_to_the_memory() -> None:
    """Two samples of 100 tokens fit beside each other, one of 128 beside another only alone."""
    costs = costs_of("unequal replicas")
    costs.capacities = [200, 200]
    filled = padded(costs, [100, 100, 128, 1, 9, 90, 50, 50])
    assert filled is not None
    assert [[batch.tokens for batch in row] for row in filled.batches] == [
        [200, 128, 18, 90],
        [100],
    ]


def test_balance_gives_slow_replicas_less_and_ends_earlier() -> None:
    """T4 take a third of the tokens of V100 or less, and the longest of 16 tokens is no limit."""
    costs = costs_of("ZeRO 1")
    samples = [128, 120, 90, 70, 40, 30, 20, 10]
    way, in_order = balanced(costs, samples, Run()), packed(costs, samples)
    assert way is not None and in_order is not None and way.gap is not None
    of_replicas = [sum(batch.tokens for batch in row) for row in way.batches]
    assert min(of_replicas[:2]) > max(of_replicas[2:])
    before, after = costs.seconds(in_order.batches), costs.seconds(way.batches)
    assert before is not None and after is not None and after < before


def test_a_loop_of_ones_own_gets_every_sample_once() -> None:
    plan = with_inputs(plan_of("ZeRO 1"), Inputs.of(workload_of(LENGTH)))
    rows = BalancedRows(plan, "gpt2", longest=OTHER)
    divided = rows.divide([128, 120, 90, 70, 40, 30, 20, 10])
    assert len(divided) == 4
    assert sorted(i for replica in divided for batch in replica for i in batch) == [*range(8)]
    fast = {i for replica in divided[:2] for batch in replica for i in batch}
    assert {0, 1} <= fast  # the longest are on the V100
    with pytest.raises(InputError, match="the plan is for another model"):
        BalancedRows(plan, "bert-base", longest=OTHER)
    with pytest.raises(InputError, match="no micro-batches that hold these samples"):
        rows.divide([10_000_000] * 2)


def test_an_interleaved_schedule_gets_empty_micro_batches() -> None:
    stages = [
        {"layers": [(0, 4), (7, 11)], "devices": [[0]]},
        {"layers": [(4, 7), (11, 14)], "devices": [[2]]},
    ]
    whole = {"stages": stages, "micro_batches": [{"count": 4, "samples": 2}]}
    plan = new_plan(workload_of(LENGTH), [whole], name="two chunks", schedule="interleaved-1f1b")
    costs = PlanCosts(plan, workload_of(LENGTH), workload_of(OTHER), OTHER)
    assert [costs.micro_batches(0, count) for count in (1, 2, 3, 5)] == [2, 2, 4, 6]
    batch = Batch(LENGTH, LENGTH**2)
    assert costs.seconds([[batch] * 3]) == costs.seconds([[batch] * 3 + [Batch(0, 0)]])


def test_published_lengths_have_the_published_means() -> None:
    """Krell et al.: 88,641 samples of 172 tokens in the mean; the card: 18,292.96 tokens."""
    assert published()["squad"].mean == pytest.approx(172.04, rel=2e-3)
    assert published()["longalpaca-chinese"].mean == pytest.approx(18292.96, rel=1e-4)
    wikipedia = published()["wikipedia"]
    assert wikipedia.quantile(0.8237) <= 1024 < wikipedia.quantile(0.8240)
    assert wikipedia.quantile(0.9775) <= 4096 < wikipedia.quantile(0.9780)


def test_lengths_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_bytes(b"\xef\xbb\xbf30\r\n\n 10\n20\n20")
    lengths = open_lengths(str(path))
    assert lengths.tokens.tolist() == [10, 20, 20, 30]
    assert (lengths.mean, lengths.longest, lengths.quantile(0.75)) == (20, 30, 20)
    cut = lengths.cut_at(20)
    assert (cut.longest, cut.cut) == (20, 0.25)
    drawn = lengths.draw(4000, (0, 1))
    assert drawn == lengths.draw(4000, (0, 1)) != lengths.draw(4000, (0, 2))
    shares = {length: count / 4000 for length, count in Counter(drawn).items()}
    assert shares == pytest.approx({10: 0.25, 20: 0.5, 30: 0.25}, abs=0.03)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", "lengths: has no lengths (expected one whole number per line)"),
        (b"\xff\xfe1", "lengths: line 1: is no length"),
        *(
            (b"7\n" + text.encode(), f"lengths: line 2: is no length (got {text!r}, expected a ")
            for text in ("0", "-3", "1.5", "1_000", "1,000", "abc", "10000001", "٣", "1 2")
        ),
    ],
)
def test_what_is_no_length(content: bytes, error: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_bytes(content)
    with pytest.raises(InputError) as raised:
        read_lengths(str(path))
    assert str(raised.value).startswith(f"{tmp_path}/{error}")


def test_each_length_is_planned_once() -> None:
    def planned(*tokens: int) -> list[tuple[str, int]]:
        return planned_lengths(Lengths("some", "", np.sort(np.array(tokens))))

    assert planned(5, 5) == [("mean", 5)]
    assert planned(1, 9) == [("mean", 5), ("90% quantile", 9)]
    assert planned(*[1] * 95, 1001) == [("mean", 11), ("90% quantile", 1), (LONGEST, 1001)]
