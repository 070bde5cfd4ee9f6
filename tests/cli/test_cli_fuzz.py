"""Damaged files through the real entry: always exit code 0, 1 or 2, one line of error, never a
traceback."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from amp.generate import instance as amp_data
from fakes.cli import Call, Ran
from fakes.workloads import cluster_document, profile_document
from fuzzing.mutations import as_json, check_one_line, damage, mutate
from hetplan.instances.library import Instance, find, load_from_library
from quick import rest_wide

NAMES = {
    "amp": "tiny-mixed",
    "astra": "tiny-two-types",
    "ditto": "tiny-fast-slow",
    "poplar": "tiles-5-zero3",
}
FILES = 16  # damaged ones of a seed, half by edits and half by bytes
RULES = b"""# rules
$tensor_model_parallel_size > 4 && $pipeline_model_parallel_size == 1
$recompute_granularity == 'full' || $micro_batch_size % 2 != 0
$num_gpus % ($pipeline_model_parallel_size * $tensor_model_parallel_size) != 0
$num_layers_per_virtual_pipeline_stage != None && -$num_micro_batches + 3 < 2 * $data_parallel_size
"""
CLUSTER = cluster_document(devices={"T4": {"memory_gib": 15, "peak_tflops": {"fp16": 60}}})
CONFIGS = (
    {
        "model_type": "t5",
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 100,
    },
    {
        "model_type": "clip",
        "projection_dim": 32,
        "text_config": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": 100,
        },
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "patch_size": 32,
        },
    },
    {
        "model_type": "gpt2",
        "n_layer": 4,
        "n_head": 4,
        "n_embd": 64,
        "vocab_size": 100,
        "n_positions": 32,
    },
    {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 50,
        "max_position_embeddings": 16,
    },
)
# FILE stands for the damaged file, GOOD for a cluster file that is not.
PLAN = "plan --global-batch 8 --strategies dp --threads 1 --json"
SEARCH = (
    "plan search --model gpt2 --gpus A800:4 --global-batch 4 --param tensor=1,2 --param "
    "micro_batch=1 --param recompute=none --json"
)


def check(ran: Ran) -> None:
    """The one promise: a code of the contract, and either output or one line of error."""
    assert ran.code in (0, 1, 2), ran.err
    if ran.code == 2:
        check_one_line(ran.error)
    else:
        assert ran.out


def stated(name: str, rng: Random) -> Any:
    """A packaged instance's best-known record, its decision, or both as an answer document."""
    entry = find(name)
    record = entry.best_known() if entry is not None else None
    assert record is not None, name
    best = record.model_dump(mode="json")
    result = {key: best[key] for key in ("objective", "bound", "decision")} | {"method": "m"}
    answer = {"instance": name, "problem": best["problem"], "results": [result]}
    return rng.choice((best["decision"], best, answer))


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(s, marks=pytest.mark.wide) for s in range(1, 20))]
)
@pytest.mark.parametrize(
    ("make", "command"),
    [
        *((lambda _, n=n: load_from_library(n).document(), "instances validate FILE")
          for n in NAMES.values()),
        *((lambda rng, n=n: stated(n, rng), f"check {n} FILE --json") for n in NAMES.values()),
        (lambda _: CLUSTER, f"{PLAN} --model gpt2 --cluster FILE"),
        (lambda _: profile_document(), f"{PLAN} --model gpt2 --cluster GOOD --profile FILE"),
        (lambda rng: rng.choice(CONFIGS), f"{PLAN} --cluster GOOD --model FILE"),
        (lambda _: RULES, f"{SEARCH} --rules FILE"),
    ],
    ids=[*NAMES, *(f"{n} decision" for n in NAMES), "cluster", "profile", "config", "rules"],
)  # fmt: skip
def test_damaged_files(
    hetplan: Call, tmp_path: Path, make: Callable[[Random], Any], command: str, seed: int
) -> None:
    path, good, codes = tmp_path / "f.json", tmp_path / "good.yaml", []
    good.write_text(yaml.safe_dump(cluster_document()))
    words = [{"FILE": path, "GOOD": good}.get(word, word) for word in command.split()]
    whole = make(Random(f"{command} {seed}"))
    path.write_bytes(whole if isinstance(whole, bytes) else as_json(whole))
    assert hetplan(*words).code < 2, "the file that is not damaged is taken"
    for i in range(FILES):
        rng = Random(f"{command} {seed} {i}")
        made = make(rng)
        if isinstance(made, bytes):
            path.write_bytes(damage(rng, made))
        else:
            edited = rng.random() < 0.5
            path.write_bytes(as_json(mutate(rng, made)) if edited else damage(rng, as_json(made)))
        ran = hetplan(*words)
        check(ran)
        codes.append(ran.code)
        if ran.code < 2 and "--json" in words:
            json.loads(ran.out, parse_constant=lambda text: pytest.fail(f"{text} in the output"))
    assert codes.count(2) > FILES / 5


@pytest.mark.parametrize("numbers", rest_wide([range(12), range(12, 30)], 1), ids=str)
@pytest.mark.parametrize("problem", NAMES)
def test_solving_odd_numbers(hetplan: Call, tmp_path: Path, problem: str, numbers: range) -> None:
    """Instances with zeros, huge and tiny numbers pass their schema; no method falls over them."""
    path, codes = tmp_path / "f.json", []
    # Poplar divides by its seconds
    least = (1e-30, 1e-30) if problem == "poplar" else (0.0, 5e-324)
    for i in numbers:
        rng = Random(f"solve {i}")
        made = load_from_library(NAMES[problem]).document()
        if problem == "amp":
            data = amp_data(rng.randrange(30))
            made = Instance(problem="amp", name="tiny", origin="made", data=data).document()
        path.write_bytes(as_json(odd_numbers(rng, made, (*least, 1e-12, 1e-3, 1e3, 1e6))))
        more = ("-m", "auto,paper", "--threads", 1, "--time-limit", 5)
        ran = hetplan("solve", path, "--json", *more)
        check(ran)
        codes.append(ran.code)
        if ran.code < 2:
            json.dumps(ran.json, allow_nan=False)
    assert codes.count(2) < len(numbers) / 3


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
    document = load_from_library("tiny-mixed").document() | {"data": data}
    path.write_bytes(as_json(document))
    check(hetplan("solve", path, "--json", "--threads", 1))
