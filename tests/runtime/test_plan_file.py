"""The plan file: what is read comes back, and every rule that a plan can break is told with its
place."""

from __future__ import annotations

import copy
from itertools import pairwise
from math import fsum, lcm
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from fuzzing.mutations import as_json, check_one_line, damage, mutate
from hetplan.errors import InputError
from hetplan.files import parse_json, to_json
from hetplan.plans.making import check_world
from hetplan.plans.plan import load_plan, parse_plan, save_plan
from hetplan.plans.shares import split
from quick import rest_wide

Document = dict[str, Any]


def random_plan(rng: Random) -> Document:
    """A valid plan: replicas with different cuts and widths, uneven shares, any schedule and ZeRO
    level."""
    layers, zero = rng.randint(1, 8), rng.randint(0, 3)
    schedule = rng.choice(("gpipe", "1f1b", "interleaved-1f1b"))
    replicas: list[dict[str, Any]] = []
    used = 0
    for _ in range(rng.randint(1, 3)):
        width = rng.randint(1, layers)
        chunks = rng.randint(1, layers // width) if schedule == "interleaved-1f1b" else 1
        inner = sorted(rng.sample(range(1, layers), width * chunks - 1))
        cuts = list(zip([0, *inner], [*inner, layers], strict=True))
        stages = []
        for j in range(width):
            rows, tensor = rng.randint(1, 2), rng.randint(1, 2)
            grid = [[used + g * tensor + r for r in range(tensor)] for g in range(rows)]
            used += rows * tensor
            stages.append(
                {
                    "layers": [list(cut) for cut in cuts[j::width]],
                    "devices": grid,
                    "row_shares": [rng.choice((1.0, 0.5, 3.0)) for _ in range(rows)],
                    "tensor_shares": [rng.choice((1.0, 2.0)) for _ in range(tensor)],
                }
            )
        replicas.append({"stages": stages})
    steps = 2 * rng.randint(1, 3) * lcm(*(len(replica["stages"]) for replica in replicas))
    for replica in replicas:
        first = rng.randint(1, steps - 1)
        least = 0 if zero >= 2 else 1
        replica["micro_batches"] = [
            {"count": first, "samples": rng.randint(1, 4)},
            {"count": steps - first, "samples": rng.randint(least, 4)},
        ]
    total = sum(b["count"] * b["samples"] for r in replicas for b in r["micro_batches"])
    return {
        "format": "hetplan-plan",
        "version": 1,
        "name": "made up",
        "origin": "generated",
        "workload": {
            "model": "m",
            "cluster": "c",
            "global_batch": total,
            "sequence": rng.choice((None, 1024)),
            "precision": "bf16",
            "framework": rng.choice(("hetplan", "megatron")),
            "stack": rng.choice(("fused", "graphs")),
            "layers": [f"layer{k}" for k in range(layers)],
        },
        "devices": [{"type": "A", "node": d // 4} for d in range(used + rng.randint(0, 2))],
        "schedule": schedule,
        "zero": zero,
        "recomputation": rng.choice(("none", "full")),
        "replicas": replicas,
    }


@settings(max_examples=60)
@given(st.integers(0, 10**9))
def test_document_comes_back_unchanged(seed: int) -> None:
    made = random_plan(Random(seed))
    plan = parse_plan(parse_json(to_json(made), where="p"), where="p")
    assert plan.model_dump(mode="json") == made
    assert sorted(plan.ranks.values()) == list(range(plan.world_size))


def simple() -> Document:
    """Two replicas of two stages on 2 + 1 devices each, six layers, 1F1B."""
    stages = [
        [{"layers": [[0, 4]], "devices": [[4 * i, 4 * i + 1]], "tensor_shares": [1.0, 1.0]}, last]
        for i, last in enumerate({"layers": [[4, 6]], "devices": [[4 * i + 2]]} for i in range(2))
    ]
    return {
        "format": "hetplan-plan",
        "version": 1,
        "name": "simple",
        "workload": {
            "model": "m",
            "cluster": "c",
            "global_batch": 16,
            "precision": "fp16",
            "layers": list("abcdef"),
        },
        "devices": [{"type": "A", "node": d // 4} for d in range(8)],
        "replicas": [{"stages": s, "micro_batches": [{"count": 4, "samples": 2}]} for s in stages],
    }


def changed(*path: Any, value: Any) -> Document:
    """`simple` with the entry at `path` replaced."""
    made = copy.deepcopy(simple())
    container: Any = made
    for key in path[:-1]:
        container = container[key]
    container[path[-1]] = value
    return made


def test_defaults_and_ranks() -> None:
    plan = parse_plan(simple(), where="p")
    assert (plan.schedule, plan.zero, plan.recomputation) == ("1f1b", 0, "none")
    assert plan.world_size == 6
    assert plan.ranks == {0: 0, 1: 1, 2: 2, 4: 3, 5: 4, 6: 5}
    check_world(plan, 6)
    with pytest.raises(
        InputError, match=r"simple: number of processes \(got 4, expected 6, one per device\)"
    ):
        check_world(plan, 4)


STAGE = ("replicas", 1, "stages", 1)


BATCHES = ("replicas", 1, "micro_batches")


def sharded(shares: list[float], zero: int = 1) -> Document:
    """`simple`, which leaves devices 3 and 7 idle, with ZeRO shares."""
    return simple() | {"zero": zero, "zero_shares": shares}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            changed(*STAGE, "layers", value=[[3, 6]]),
            "replicas[1].stages[1].layers[0] begins at layer 3, expected 4",
        ),
        (
            changed(*STAGE, "layers", value=[[4, 5]]),
            "replicas[1].stages end at layer 5, expected 6",
        ),
        (
            changed("workload", "layers", 3, value=simple()["workload"]["layers"][1]),
            f"workload.layers[3] is {simple()['workload']['layers'][1]!r}, as "
            "workload.layers[1] is",
        ),
        (
            changed(*STAGE, "layers", value=[[4, 4]]),
            "replicas[1].stages[1].layers[0] is [4, 4), expected one layer at least",
        ),
        (
            changed(*STAGE, "layers", value=[[4, 5], [5, 6]]),
            "replicas[1].stages[1].layers has 2 ranges, expected 1 under 1f1b",
        ),
        (
            changed(*STAGE, "devices", value=[[8]]),
            "replicas[1].stages[1].devices[0][0] is 8, expected a device of 0..7",
        ),
        (
            changed(*STAGE, "devices", value=[[1]]),
            "replicas[1].stages[1].devices[0][0] is device 1, which "
            "replicas[0].stages[0].devices[0][1] uses",
        ),
        (
            changed(*STAGE, "devices", value=[[6], [7]]),
            "replicas[1].stages[1].row_shares has 1 entries, expected one per row group (2)",
        ),
        (
            changed(*STAGE, "devices", value=[[6, 7]]),
            "replicas[1].stages[1].devices[0] has 2 devices, expected one per tensor share (1)",
        ),
        (
            changed(*STAGE, "devices", value=[[]]),
            "replicas[1].stages[1].devices[0] has 0 devices, expected one per tensor share (1)",
        ),
        (
            changed(*BATCHES, value=[{"count": 3, "samples": 2}]),
            "replicas take 14 samples per iteration, expected workload.global_batch (16)",
        ),
        (
            changed(*BATCHES, value=[{"count": 4, "samples": 2}, {"count": 1, "samples": 0}]),
            "replicas[1].micro_batches[1].samples is 0, expected at least 1 under ZeRO 0",
        ),
        (
            changed(*BATCHES, value=[{"count": 8, "samples": 1}]) | {"zero": 3},
            "replicas[1].micro_batches are 8, expected as many as those of replicas[0] (4) "
            "under ZeRO 3",
        ),
        (
            changed(*BATCHES, value=[{"count": 1, "samples": 8}])
            | {"schedule": "interleaved-1f1b"},
            "replicas[1].micro_batches are 1, expected a multiple of the stages (2) under "
            "interleaved-1f1b",
        ),
        (
            changed(*STAGE, "layers", value=[[4, 5], [5, 6]]) | {"schedule": "interleaved-1f1b"},
            "replicas[1].stages[1].layers has 2 ranges, expected as many as stages[0] (1)",
        ),
        (sharded([1.0] * 7), "zero_shares has 7 entries, expected one per device (8)"),
        (sharded([1.0] * 8), "zero_shares[3] is 1.0, expected 0, not being in use"),
        (
            sharded([0.0] * 8),
            "zero_shares[0] is 0.0, expected more than 0, being in use",
        ),
        (sharded([1.0] * 8, zero=0), "zero_shares is given, expected null under ZeRO 0"),
        (sharded([-1.0] * 8), "zero_shares[0]: not usable"),
        (simple() | {"zero": 4}, "zero: not usable (got 4, expected at most 3)"),
        (
            simple() | {"schedule": "2f2b"},
            "schedule: not usable (got '2f2b', expected 'gpipe', '1f1b'",
        ),
        (
            changed(*STAGE, "row_shares", value=[0]),
            "replicas[1].stages[1].row_shares[0]: not usable",
        ),
        (
            {"format": "hetplan-instance"},
            "format: not a hetplan-plan file (got 'hetplan-instance'",
        ),
    ],
)
def test_each_rule(wrong: Document, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_plan(wrong, where="p.json")
    assert str(caught.value).startswith(f"p.json: {message}")


@settings(max_examples=100)
@given(st.integers(0, 10**6), st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12))
def test_split_is_whole_ordered_and_near(length: int, shares: list[float]) -> None:
    parts = split(length, shares)
    assert parts[0][0] == 0 and parts[-1][1] == length
    assert all(here[1] == after[0] for here, after in pairwise(parts))
    total = fsum(shares)
    for (first, last), share in zip(parts, shares, strict=True):
        assert last >= first
        assert abs((last - first) - length * share / total) <= 1 + 1e-6


def test_split_by_hand() -> None:
    assert split(6, [3, 2, 1]) == [(0, 3), (3, 5), (5, 6)]
    # 2.5 each rounds to 2, the earlier one gets the missing unit
    assert split(5, [1, 1]) == [(0, 3), (3, 5)]
    # 1.5 each rounds to 2, the earlier one gives the surplus
    assert split(3, [1, 1]) == [(0, 1), (1, 3)]
    assert split(0, [1, 2]) == [(0, 0), (0, 0)]
    assert split(10, [1, 1, 1, 1]) == [(0, 3), (3, 6), (6, 8), (8, 10)]
    for wrong in ([], [1, 0], [-1, 2]):
        with pytest.raises(ValueError, match="expected positive numbers"):
            split(4, wrong)


@pytest.mark.parametrize("count", rest_wide([200, 600], 1))
def test_random_edits_never_escape(count: int) -> None:
    """Each edited plan is a plan or one InputError."""
    refused = 0
    for i in range(count):
        rng = Random(i)
        try:
            plan = parse_plan(mutate(rng, random_plan(rng)), where="p.json")
        except InputError as error:
            refused += 1
            check_one_line(str(error), "p.json: ")
        else:
            assert parse_plan(plan.model_dump(mode="json"), where="again") == plan
    assert refused > 0.6 * count


@pytest.mark.parametrize("count", rest_wide([150, 500], 1))
def test_random_bytes_never_escape(count: int, tmp_path: Path) -> None:
    """A file comes back unchanged; each damaged one is a plan or one InputError that names the
    file."""
    path, refused = tmp_path / "plan.json", 0
    plan = parse_plan(random_plan(Random(3)), where="p")
    save_plan(plan, path)
    assert load_plan(path) == plan
    for i in range(count):
        rng = Random(i)
        path.write_bytes(damage(rng, as_json(random_plan(rng))))
        try:
            load_plan(path)
        except InputError as error:
            refused += 1
            check_one_line(str(error), f"{path}: ")
    assert refused > 0.6 * count


def test_shares_are_kept_and_left_out_where_equal() -> None:
    shares = [0.5, 0.25, 0.25, 0.0, 0.5, 0.25, 0.25, 0.0]
    read = parse_plan(sharded(shares), where="p")
    assert read.zero_shares == read.model_dump(mode="json")["zero_shares"] == shares
    assert "zero_shares" not in parse_plan(simple(), where="p").model_dump(mode="json")


def test_a_replica_without_samples_has_shards() -> None:
    document = changed(*BATCHES, value=[{"count": 4, "samples": 0}]) | {"zero": 1}
    document["workload"]["global_batch"] = 8
    assert parse_plan(document, where="p").world_size == 6
