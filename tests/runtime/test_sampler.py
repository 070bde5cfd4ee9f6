"""A plan's rows in a loop of one's own: every rank its micro-batches, every row once, the same
gradient as one process, and going on from the middle."""

from __future__ import annotations

from typing import Any

import pytest

from hetplan.errors import InputError
from hetplan.plans.plan import Plan, parse_plan
from hetplan.runtime.sampler import PlannedBatches

# Micro-batches of three replicas, 16 rows together.
SIZES: list[list[tuple[int, int]]] = [[(2, 3), (1, 1)], [(1, 5)], [(2, 2)]]


def plan_of(sizes: list[list[tuple[int, int]]], **stage: Any) -> Plan:
    """Replicas of one stage; of the devices, those of the last replica come first."""
    count = len(sizes)
    replicas = [
        {
            "stages": [{"layers": [[0, 2]], "devices": [[count - 1 - i]], **stage}],
            "micro_batches": [{"count": n, "samples": b} for n, b in row],
        }
        for i, row in enumerate(sizes)
    ]
    document = {
        "format": "hetplan-plan",
        "version": 1,
        "name": "unequal",
        "workload": {
            "model": "m",
            "cluster": "c",
            "layers": ["a", "b"],
            "global_batch": sum(n * b for row in sizes for n, b in row),
            "precision": "fp32",
        },
        "devices": [{"type": "x", "node": 0} for _ in sizes],
        "schedule": "1f1b",
        "zero": 1,
        "replicas": replicas,
    }
    return parse_plan(document, where="here")


def test_each_rank_gets_its_rows_and_each_row_comes_once() -> None:
    plan = plan_of(SIZES)
    samplers = [PlannedBatches(plan, rank, 40, seed=3) for rank in range(3)]
    drawn = [list(sampler) for sampler in samplers]
    assert [len(rows) for rows in drawn] == [len(sampler) for sampler in samplers] == [4, 2, 6]
    sizes = [[len(batch) for batch in rows] for rows in drawn]
    assert sizes == [[2, 2] * 2, [5] * 2, [3, 3, 1] * 2]  # two iterations of 16 in 40 samples
    iterations: list[list[int]] = [[], []]
    for rows in drawn:
        for at, batch in enumerate(rows):
            iterations[2 * at // len(rows)] += batch
    assert [len(set(rows)) for rows in iterations] == [16, 16]
    assert not set(iterations[0]) & set(iterations[1])
    in_order = [list(PlannedBatches(plan, rank, 16, seed=None)) for rank in range(3)]
    assert in_order == [[[12, 13], [14, 15]], [[7, 8, 9, 10, 11]], [[0, 1, 2], [3, 4, 5], [6]]]


def test_epochs_differ_and_go_on_where_they_stopped() -> None:
    sampler, again = (PlannedBatches(plan_of(SIZES), 0, 64) for _ in range(2))
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    assert first != second
    again.set_epoch(1, done=3)
    assert list(again) == second[3 * 2 :] and len(again) == 2


def test_weighted_means_make_the_mean_over_the_global_batch() -> None:
    """As DDP averages: the ranks' sums of weighted micro-batch means over the number of ranks."""
    torch = pytest.importorskip("torch")
    plan, rows = plan_of(SIZES), torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(rows)
    weights = torch.zeros(4, requires_grad=True)
    wanted = torch.autograd.grad(((rows @ weights - 1) ** 2).mean(), weights)[0]
    total = torch.zeros(4)
    for rank in range(3):
        sampler = PlannedBatches(plan, rank, len(rows))
        for (batch,) in torch.utils.data.DataLoader(data, batch_sampler=sampler):
            loss = ((batch @ weights - 1) ** 2).mean() * sampler.weight(len(batch))
            total += torch.autograd.grad(loss, weights)[0]
    torch.testing.assert_close(total / 3, wanted)


def test_a_rank_without_rows_of_its_own_is_refused() -> None:
    with pytest.raises(InputError, match="unequal: rank 0 has no samples of its own"):
        PlannedBatches(plan_of([[(1, 4)], [(1, 0)]]), 0, 40)
    whole = plan_of(SIZES)
    halves = (
        whole.replicas[0]
        .stages[0]
        .model_copy(update={"devices": [[2], [0]], "row_shares": [1.0, 1.0]})
    )
    wide = whole.model_copy(
        update={"replicas": [whole.replicas[0].model_copy(update={"stages": [halves]})]}
    )
    with pytest.raises(InputError, match="expected a replica on one device"):
        PlannedBatches(wide, 0, 40)
