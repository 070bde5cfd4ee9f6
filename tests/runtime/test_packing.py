"""Samples of unequal length in the rows of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")

from export.by_hand import cut, plan_of  # noqa: E402
from hetplan.errors import InputError, UnsupportedError  # noqa: E402
from hetplan.plans.packed import packed_plan  # noqa: E402
from hetplan.plans.plan import Plan  # noqa: E402
from hetplan.runtime.engine.packing import Packing, row_of  # noqa: E402
from parity.asking import run_forked  # noqa: E402


def text(length: int) -> Any:
    return torch.arange(1, length + 1)


def test_a_rows_positions_and_labels_are_those_of_its_samples() -> None:
    row = row_of([text(3), text(1), text(2)], 8)
    assert row["input_ids"].tolist() == [1, 2, 3, 1, 1, 2, 0, 0]
    assert row["position_ids"].tolist() == [0, 1, 2, 0, 0, 1, 0, 1]
    assert row["labels"].tolist() == [-100, 2, 3, -100, -100, 2, -100, -100]


def test_every_sample_is_in_one_row_and_rows_fill_alike() -> None:
    """Also where a later step is asked for first, as after a checkpoint."""
    lengths = [5, 9, 1, 7, 3, 3, 8, 2, 6, 4] * 30
    packing = Packing(lambda number: number * 100 + text(lengths[number]), (40, 16, 8))
    packing.rows_of_step(7)
    seen: list[int] = []
    for step in range(8):
        rows = packing.rows_of_step(step)
        filled = [sum(map(len, row)) for row in rows]
        free = [width - tokens for width, tokens in zip((40, 16, 8), filled, strict=True)]
        assert min(free) >= 0 and max(free) < max(lengths)
        assert packing.padding(step) == 1 - sum(filled) / 64
        seen += sorted(int(sample[0]) // 100 for row in rows for sample in row)
    assert seen == list(range(len(seen))) and packing.begins[8] == len(seen)


def test_a_sample_goes_to_the_row_of_the_least_share() -> None:
    packing = Packing(lambda number: text(2) + 10 * number, (4, 8))
    first, *_ = packing.rows_of_step(0)[0]
    assert int(first[0]) == 11  # the first sample fills a quarter of the other row
    begun = [int(sample[0]) for sample in packing.rows_of_step(0)[1]]
    assert begun[:2] == [1, 21]


def test_the_plan_of_rows_has_the_tokens_of_the_plan() -> None:
    plan = plan_of([[(0, 14)]], data=3, count=2, samples=4)
    rows, widths = packed_plan(plan)
    assert plan.workload.sequence is not None
    assert widths == (4 * plan.workload.sequence,) * 6
    assert rows.workload.global_batch == 6 == sum(replica.samples for replica in rows.replicas)
    assert sum(widths) == plan.workload.global_batch * plan.workload.sequence
    assert Plan.model_validate(rows.model_dump(mode="json")) == rows


def test_rows_that_ranks_would_divide_are_refused() -> None:
    plan = plan_of(cut(6, 6))
    document: dict[str, Any] = plan.model_dump(mode="json")
    document["devices"] += [{"type": "A", "node": 9}] * 2
    for number, stage in enumerate(document["replicas"][0]["stages"]):
        stage["devices"].append([len(plan.devices) + number])
        stage["row_shares"] = [0.5, 0.5]
    with pytest.raises(UnsupportedError, match="ranks compute whole rows"):
        packed_plan(Plan.model_validate(document))


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (lambda _: text(9), r"sample\(0\): a sample is longer than every row \(got '9 tokens'"),
        (
            lambda _: text(3).float(),
            r"sample\(0\): is no sample of tokens \(got 'torch.float32 \[3",
        ),
        (lambda _: "words", r"is no sample of tokens \(got 'words'"),
        ({}.__getitem__, "the model's `sample` raises KeyError"),
    ],
)
def test_unusable_samples_are_refused(sample: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Packing(sample, (8, 4)).rows_of_step(0)


@pytest.mark.engine
def test_steps_are_those_of_one_process_with_a_sample_at_a_time(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is an extra of the tests")
    from parity.packed import STEPS, alone, plans

    run_forked("parity.packed", tmp_path)
    written = torch.load(tmp_path / "packed.pt")
    for name in plans():
        begins = written["begins"][name]
        expected = alone(begins)
        assert len(begins) == STEPS + 1 and begins[STEPS] > begins[1] > 3
        for got, one in zip(written["states"][name], expected, strict=True):
            for key, value in one.items():
                assert torch.allclose(got[key], value, rtol=1e-9, atol=1e-12), (name, key)
