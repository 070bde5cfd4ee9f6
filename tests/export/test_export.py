"""DeepSpeed, torchtitan, FlagScale, torchrun: what exporters write is parsed back and compared with
the plan."""

from __future__ import annotations

import argparse
import json
import tomllib
from pathlib import Path

import pytest
import yaml

from export.by_hand import BLOCKS, UNEVEN, cut, kinds_of, plan_of, run_script
from hetplan.runtime.export import EXPORTERS, export
from hetplan.runtime.plan import Plan

# DeepSpeed


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_deepspeed_parsed_back(zero: int) -> None:
    plan = plan_of([[(0, 14)]], data=4, count=3, samples=5, zero=zero)
    found = json.loads(export(plan, "deepspeed"))
    assert found["train_micro_batch_size_per_gpu"] == 5
    assert found["gradient_accumulation_steps"] == 3
    sizes = found["train_micro_batch_size_per_gpu"] * found["gradient_accumulation_steps"]
    assert found["train_batch_size"] == sizes * plan.world_size == plan.workload.global_batch
    assert found["zero_optimization"]["stage"] == zero
    assert (found["bf16"]["enabled"], found["fp16"]["enabled"]) == (True, False)


# torchtitan


def in_fp32(plan: Plan) -> Plan:
    """Of another precision: torchtitan's bf16 needs FSDP where a model is divided."""
    return plan.model_copy(
        update={"workload": plan.workload.model_copy(update={"precision": "fp32"})}
    )


TITAN = [
    plan_of(UNEVEN, data=2, tensor=2, recomputation="full", zero=3),
    in_fp32(plan_of([[(0, 4), (7, 9)], [(4, 7), (9, 14)]], schedule="interleaved-1f1b")),
    in_fp32(plan_of(UNEVEN, schedule="gpipe", tensor=2)),
    plan_of([[(0, 14)]], data=4, zero=3),
    plan_of([[(0, 14)]], data=4),
]


@pytest.mark.parametrize("plan", TITAN)
def test_torchtitan_parsed_back(plan: Plan) -> None:
    found = tomllib.loads(export(plan, "torchtitan"))
    way, training = found["parallelism"], found["training"]
    stages = plan.replicas[0].stages
    (batches,) = plan.replicas[0].micro_batches
    assert way["pipeline_parallel_degree"] == len(stages)
    assert way["tensor_parallel_degree"] == len(stages[0].devices[0])
    copies = way["data_parallel_replicate_degree"], way["data_parallel_shard_degree"]
    assert copies == ((1, len(plan.replicas)) if plan.zero == 3 else (len(plan.replicas), 1))
    divided = way["pipeline_parallel_degree"] * way["tensor_parallel_degree"] > 1
    assert not (divided and copies[0] > 1)  # DDP beside other parallelism is an error there
    dtype = {"bf16": "bfloat16", "fp32": "float32"}[plan.workload.precision]
    assert dtype == "float32" or not divided or copies[1] > 1  # else bf16 does nothing there
    assert training["global_batch_size"] == plan.workload.global_batch
    assert training["mixed_precision_param"] == dtype and training["seq_len"] == 128
    if len(stages) > 1:
        assert training["local_batch_size"] == batches.count * batches.samples
        assert way["pipeline_parallel_microbatch_size"] == batches.samples
        names = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved-1f1b": "Interleaved1F1B"}
        assert way["pipeline_parallel_schedule"] == names[plan.schedule]
        modules = {"E": 1, "t": 1, "L": 2}
        sizes = [sum(modules[kind] for kind in part) for part in kinds_of(plan)]
        assert [len(part) for part in way["module_fqns_per_model_part"]] == sizes
        flat = [name for part in way["module_fqns_per_model_part"] for name in part]
        assert flat == ["tok_embeddings", *(f"layers.{i}" for i in range(BLOCKS)), "norm", "output"]
    else:
        assert training["local_batch_size"] == batches.samples
    assert found["activation_checkpoint"]["mode"] == plan.recomputation


# FlagScale


def test_flagscale_parsed_back() -> None:
    types = ["A100"] * 4 + ["V100"] * 4
    plan = plan_of(cut(5, 4, 3), tensor=[4, 2, 2], types=types, recomputation="full")
    found = yaml.safe_load(export(plan, "flagscale"))
    hetero = found["system"]["hetero"]
    assert hetero["hetero_pipeline_layer_split"] == [5, 4, 3]
    assert hetero["hetero_process_meshes"] == [4, 1, 1, 1, 1, 2, 1, 1, 1, 2]
    assert hetero["hetero_device_types"] == ["A100", "V100"]
    meshes = [hetero["hetero_process_meshes"][i : i + 5] for i in range(0, 10, 5)]
    assert sum(tp * cp * dp * pp for tp, cp, _, dp, pp in meshes) == plan.world_size
    assert sum(mesh[4] for mesh in meshes) == found["system"]["pipeline_model_parallel_size"] == 3
    assert found["system"]["recompute_granularity"] == "full"
    assert found["system"]["precision"] == {"bf16": True}
    assert found["model"] == {
        "num_layers": 12,
        "seq_length": 128,
        "micro_batch_size": 2,
        "global_batch_size": 16,
    }


# torchrun


def test_torchrun_starts_every_rank_in_order(tmp_path: Path) -> None:
    plan = plan_of(cut(5, 4, 3), tensor=[1, 2, 4], per_node=3)
    text, ranks = export(plan, "torchrun"), 0
    for node in range(3):
        (one,) = run_script(text, tmp_path / str(node), node, "torchrun")
        parser = argparse.ArgumentParser()
        for name in ("nnodes", "node-rank", "nproc-per-node", "master-port"):
            parser.add_argument(f"--{name}", type=int)
        parser.add_argument("--master-addr")
        parser.add_argument("-m")
        parser.add_argument("rest", nargs=argparse.REMAINDER)
        given = parser.parse_args(one["words"])
        assert (given.nnodes, given.node_rank) == (3, node)
        assert given.nproc_per_node == sum(device.node == node for device in plan.devices)
        assert given.rest == ["entry.py", "--lr", "1"]
        ranks += given.nproc_per_node
    assert ranks == plan.world_size


# all


@pytest.mark.parametrize("to", EXPORTERS)
def test_free_text_stays_a_comment(to: str) -> None:
    plan = plan_of([[(0, 14)]], data=2, name="evil\nrm -rf /\n$(touch x)")
    text = export(plan, to)
    assert "rm -rf" not in "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    assert EXPORTERS[to].version
