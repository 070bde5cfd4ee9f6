"""Damaged files through the real entry: always exit code 0, 1 or 2, one line of error, never a
traceback."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from amp.generate import instance as amp_data
from fakes.cli import Call, Ran
from fuzzing.mutations import as_json, check_one_line, damage, mutate
from hetplan.instances.library import Instance, find, load_from_library

BLOCK = 52  # files per test; five tests of edits and five of bytes for each kind


def check(ran: Ran) -> None:
    """The one promise: a code of the contract, and either output or one line of error."""
    assert ran.code in (0, 1, 2), ran.err
    if ran.code == 2:
        check_one_line(ran.error)
    else:
        assert ran.out


def document(seed: int) -> dict[str, Any]:
    """A valid amp instance file."""
    return Instance(problem="amp", name="tiny", origin="generated", data=amp_data(seed)).document()


@pytest.mark.parametrize("block", range(10))
def test_instances(hetplan: Call, tmp_path: Path, block: int) -> None:
    """520 damaged instance files, half by edits and half by bytes."""
    path = tmp_path / "f.json"
    codes = []
    for i in range(BLOCK):
        rng = Random(f"instance {block} {i}")
        made = document(rng.randrange(30))
        wrong = as_json(mutate(rng, made)) if block % 2 else damage(rng, as_json(made))
        path.write_bytes(wrong)
        ran = hetplan("instances", "validate", path)
        check(ran)
        codes.append(ran.code)
    assert codes.count(2) > BLOCK / 3


FAMILIES_LIBRARY = {"astra": "tiny-two-types", "ditto": "tiny-fast-slow", "poplar": "tiles-5-zero3"}


@pytest.mark.parametrize("problem", FAMILIES_LIBRARY)
def test_instances_and_decisions_of_other_families(
    hetplan: Call, tmp_path: Path, problem: str
) -> None:
    """240 damaged files of each: instances, decisions, answers and best-known records."""
    name = FAMILIES_LIBRARY[problem]
    instance = load_from_library(name)
    best = find_best(name)
    path = tmp_path / "f.json"
    codes = []
    for i in range(240):
        rng = Random(f"{problem} {i}")
        made: Any = (
            instance.document() if i % 2 else rng.choice((best["decision"], best, answer_of(best)))
        )
        path.write_bytes(
            as_json(mutate(rng, made)) if rng.random() < 0.5 else damage(rng, as_json(made))
        )
        ran = (
            hetplan("instances", "validate", path)
            if i % 2
            else hetplan("check", name, path, "--json")
        )
        check(ran)
        codes.append(ran.code)
    assert codes.count(2) > len(codes) / 3
    assert codes.count(0) + codes.count(1) > 0


def find_best(name: str) -> dict[str, Any]:
    """The best-known record of a packaged instance, as JSON types."""
    entry = find(name)
    record = entry.best_known() if entry is not None else None
    assert record is not None, name
    return record.model_dump(mode="json")


def answer_of(best: dict[str, Any]) -> dict[str, Any]:
    """A best-known record as an answer document."""
    result = {"method": "m", "status": "optimal", "gap": 0.0}
    result |= {key: best[key] for key in ("objective", "bound", "decision")}
    return {"instance": best["instance"], "problem": best["problem"], "results": [result]}


RULES = """# rules
$tensor_model_parallel_size > 4 && $pipeline_model_parallel_size == 1
$recompute_granularity == 'full' || $micro_batch_size % 2 != 0
$num_gpus % ($pipeline_model_parallel_size * $tensor_model_parallel_size) != 0
$num_layers_per_virtual_pipeline_stage != None && -$num_micro_batches + 3 < 2 * $data_parallel_size
"""
SEARCH = (
    "--model",
    "gpt2",
    "--gpus",
    "A800:4",
    "--global-batch",
    4,
    "--param",
    "tensor=1,2",
    "--json",
)


@pytest.mark.parametrize("block", range(5))
def test_rules(hetplan: Call, tmp_path: Path, block: int) -> None:
    """520 damaged files of rules, through the whole search."""
    path = tmp_path / "my.rules"
    codes = []
    for i in range(104):
        path.write_bytes(damage(Random(f"rules {block} {i}"), RULES.encode()))
        ran = hetplan(
            "plan",
            "search",
            *SEARCH,
            "--param",
            "micro_batch=1",
            "--param",
            "recompute=none",
            "--rules",
            path,
        )
        check(ran)
        if ran.code == 2:
            assert str(path) in ran.error
        codes.append(ran.code)
    assert codes.count(2) > len(codes) / 3
    assert codes.count(2) < len(codes)


@pytest.mark.parametrize("block", range(10))
def test_decisions(hetplan: Call, tmp_path: Path, block: int) -> None:
    """520 damaged decisions, raw ones and whole answers, against a good instance."""
    entry = find("tiny-mixed")
    assert entry is not None
    best = entry.best_known()
    assert best is not None
    result = {
        "method": "m",
        "objective": best.objective,
        "bound": best.bound,
        "decision": best.decision,
    }
    answer = {"instance": "tiny-mixed", "problem": "amp", "results": [result]}
    path = tmp_path / "d.json"
    codes = []
    for i in range(BLOCK):
        rng = Random(f"decision {block} {i}")
        made: Any = rng.choice((best.decision, answer, best.model_dump(mode="json")))
        wrong = as_json(mutate(rng, made)) if block % 2 else damage(rng, as_json(made))
        path.write_bytes(wrong)
        ran = hetplan("check", "tiny-mixed", path, "--json")
        check(ran)
        codes.append(ran.code)
    assert codes.count(2) > BLOCK / 3
    assert codes.count(1) > 0 or block % 2 == 0


@pytest.mark.parametrize("problem", ["amp", *FAMILIES_LIBRARY])
def test_solving_odd_numbers(hetplan: Call, tmp_path: Path, problem: str) -> None:
    """Instances with zeros, huge and tiny numbers pass their schema; no method falls over them."""
    path = tmp_path / "f.json"
    codes = []
    for i in range(60):
        rng = Random(f"solve {i}")
        if problem == "amp":
            made = document(rng.randrange(30))
        else:
            made = load_from_library(FAMILIES_LIBRARY[problem]).document()
        # Poplar divides by its seconds
        least = (1e-30, 1e-30) if problem == "poplar" else (0.0, 5e-324)
        path.write_bytes(as_json(odd_numbers(rng, made, (*least, 1e-12, 1e-3, 1e3, 1e6))))
        ran = hetplan(
            "solve", path, "--json", "-m", "auto,paper", "--threads", 1, "--time-limit", 5
        )
        check(ran)
        codes.append(ran.code)
        if ran.code < 2:
            json.dumps(ran.json, allow_nan=False)
    assert codes.count(2) < 20


def odd_numbers(rng: Random, value: Any, odd: Sequence[float]) -> Any:
    """`value` with one in six of its floats replaced by something that is allowed and unlikely."""
    if isinstance(value, dict):
        return {
            key: item if key == "bandwidth" else odd_numbers(rng, item, odd)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [odd_numbers(rng, item, odd) for item in value]
    return rng.choice(odd) if isinstance(value, float) and rng.random() < 1 / 6 else value


def test_a_layer_that_dwarfs_the_others(hetplan: Call, tmp_path: Path) -> None:
    times = {"type0": [0.0, 0.0, 0.0], "type1": [0.0, 1e12, 0.0], "type2": [0.0, 0.0, 0.0]}
    link = 177.0
    data = {
        "devices": [{"type": name, "node": 0} for name in ("type0", "type1", "type1", "type2")],
        "layers": [
            {
                "name": f"l{k}",
                "param_bytes": 0.0,
                "activation_bytes": float(k == 0),
                "tensor_bytes": float(k > 0),
            }
            for k in range(3)
        ],
        "layer_seconds": [
            {"type": name, "tensor": 2, "micro_batch": 1, "seconds": row}
            for name, row in times.items()
        ],
        "global_batch": 1,
        "bandwidth": [[link * (i != j) for j in range(4)] for i in range(4)],
    }
    path = tmp_path / "f.json"
    path.write_bytes(as_json(document(0) | {"data": data}))
    check(hetplan("solve", path, "--json", "--threads", 1))
