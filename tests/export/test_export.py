"""Plans in other frameworks' words: what each can say, as its own parser reads it, and what it
cannot, refused by name."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from export.by_hand import BLOCKS, UNEVEN, cut, kinds_of, plan_of, run_script
from hetplan.adapters.exports import export
from hetplan.adapters.exports.grid import Grid
from hetplan.adapters.exports.megatron_arguments import stage_settings
from hetplan.adapters.exports.titan import keeps_weights
from hetplan.errors import UnsupportedError
from hetplan.plans.plan import Plan
from hetplan.profiling.frameworks import FSDP, HETPLAN, Framework


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_deepspeed_parsed_back(zero: int) -> None:
    plan = plan_of([[(0, 14)]], data=4, count=3, samples=5, zero=zero)
    config = json.loads(export(plan, "deepspeed"))
    assert config["train_micro_batch_size_per_gpu"] == 5
    assert config["gradient_accumulation_steps"] == 3
    sizes = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
    assert config["train_batch_size"] == sizes * plan.world_size == plan.workload.global_batch
    assert config["zero_optimization"]["stage"] == zero
    assert (config["bf16"]["enabled"], config["fp16"]["enabled"]) == (True, False)


TITAN = [
    plan_of(UNEVEN, data=2, tensor=2, recomputation="full", zero=3),
    plan_of(UNEVEN, data=2, tensor=2, recomputation="operators", zero=3),
    plan_of([[(0, 4), (7, 9)], [(4, 7), (9, 14)]], schedule="interleaved-1f1b"),
    plan_of(UNEVEN, schedule="gpipe", tensor=2),
    plan_of(UNEVEN, data=2, tensor=2),
    plan_of([[(0, 14)]], data=4, zero=3),
    plan_of([[(0, 14)]], data=4),
]


@pytest.mark.parametrize(
    ("stages", "framework", "keeps"),
    [(2, FSDP, True), (1, FSDP, False), (2, HETPLAN, False), (2, None, False)],
)
def test_stages_keep_gathered_weights_as_the_framework_does(
    stages: int, framework: Framework | None, keeps: bool
) -> None:
    inputs = None if framework is None else SimpleNamespace(framework=framework)
    grid: Any = SimpleNamespace(pipeline=stages, plan=SimpleNamespace(inputs=inputs))
    assert keeps_weights(grid) is keeps


@pytest.mark.parametrize("plan", TITAN)
def test_torchtitan_parsed_back(plan: Plan) -> None:
    module = assigned(export(plan, "torchtitan"))
    way, training = module["PARALLELISM"], module["TRAINING"]
    stages = plan.replicas[0].stages
    (batches,) = plan.replicas[0].micro_batches
    assert way["pipeline_parallel_degree"] == len(stages)
    assert way["tensor_parallel_degree"] == len(stages[0].devices[0])
    copies = way["data_parallel_replicate_degree"], way["data_parallel_shard_degree"]
    assert copies == ((1, len(plan.replicas)) if plan.zero == 3 else (len(plan.replicas), 1))
    assert way["fsdp_reshard_after_forward"] == ("always" if plan.zero == 3 else "never")
    assert way["enable_sequence_parallel"] is False
    assert training["global_batch_size"] == plan.workload.global_batch
    assert training["mixed_precision_param"] == "bfloat16" and training["seq_len"] == 128
    if len(stages) > 1:
        assert training["local_batch_size"] == batches.count * batches.samples
        assert way["pipeline_parallel_microbatch_size"] == batches.samples
        names = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved-1f1b": "Interleaved1F1B"}
        assert way["pipeline_parallel_schedule"] == names[plan.schedule]
        modules = {"E": 1, "t": 1, "L": 2}
        sizes = [sum(modules[kind] for kind in part) for part in kinds_of(plan)]
        assert [len(part) for part in way["module_fqns_per_model_part"]] == sizes
        flat = [name for part in way["module_fqns_per_model_part"] for name in part]
        assert flat == [
            "tok_embeddings", *(f"layers.{i}" for i in range(BLOCKS)), "norm", "lm_head",
        ]  # fmt: skip
    else:
        assert training["local_batch_size"] == batches.samples
    policies = {"none": None, "operators": "SelectiveAC.Config()", "full": "FullAC.Config()"}
    assert module["ACTIVATION_CHECKPOINT"] == policies[plan.recomputation]


def assigned(program: str) -> dict[str, Any]:
    """The constants of a Python module: their values, or the source of what is no literal."""
    values: dict[str, Any] = {}
    for statement in ast.parse(program).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            try:
                value = ast.literal_eval(statement.value)
            except ValueError:
                value = ast.unparse(statement.value)
            values[statement.targets[0].id] = value
    return values


TITAN_MODELS = "torchtitan.models.qwen3.config_registry:qwen3_0_6b"


@pytest.mark.wide
def test_torchtitan_takes_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current release finds the module, checks its model and fills its configuration."""
    manager = pytest.importorskip(
        "torchtitan.config.manager", reason="needs torchtitan (pip install torchtitan)"
    )
    config = {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "vocab_size": 151936, "rope_theta": 1000000, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "m.json").write_text(json.dumps(config))
    plan = plan_of([[(0, 30)]], blocks=28, data=2, tensor=2, zero=3, recomputation="full")
    (tmp_path / "plan_titan.py").write_text(export(plan, "torchtitan", str(tmp_path / "m.json")))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("BASE", TITAN_MODELS)
    words = ["--module", "plan_titan", "--config", "planned"]
    filled = manager.ConfigManager().parse_args(words)
    assert filled.parallelism.data_parallel_shard_degree == 2
    assert filled.parallelism.tensor_parallel_degree == 2
    assert type(filled.activation_checkpoint).__qualname__ == "FullAC.Config"
    assert (filled.training.local_batch_size, filled.training.seq_len) == (2, 128)
    monkeypatch.setenv("BASE", TITAN_MODELS.replace("0_6b", "1_7b"))
    with pytest.raises(ValueError, match="qwen3_1_7b: dim is 2048, expected 1024"):
        manager.ConfigManager().parse_args(words)


def test_flagscale_parsed_back() -> None:
    types = ["A100"] * 4 + ["V100"] * 4
    plan = plan_of(cut(5, 4, 3), tensor=[4, 2, 2], types=types, recomputation="full")
    config = yaml.safe_load(export(plan, "flagscale"))
    hetero = config["system"]["hetero"]
    assert hetero["hetero_pipeline_layer_split"] == [5, 4, 3]
    assert hetero["hetero_process_meshes"] == [4, 1, 1, 1, 1, 2, 1, 1, 1, 2]
    assert hetero["hetero_device_types"] == ["A100", "V100"]
    meshes = [hetero["hetero_process_meshes"][i : i + 5] for i in range(0, 10, 5)]
    assert sum(tp * cp * dp * pp for tp, cp, _, dp, pp in meshes) == plan.world_size
    assert sum(mesh[4] for mesh in meshes) == config["system"]["pipeline_model_parallel_size"] == 3
    assert config["system"]["recompute_granularity"] == "full"
    assert config["system"]["precision"] == {"bf16": True}
    assert config["model"] == {
        "num_layers": 12,
        "seq_length": 128,
        "micro_batch_size": 2,
        "global_batch_size": 16,
    }


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
        options = parser.parse_args(one["words"])
        assert (options.nnodes, options.node_rank) == (3, node)
        assert options.nproc_per_node == sum(device.node == node for device in plan.devices)
        assert options.rest == ["run", "entry.py", "--lr", "1"]
        ranks += options.nproc_per_node
    assert ranks == plan.world_size


def changed(plan: Plan, change: Any) -> Plan:
    """The plan with its document edited."""
    document = plan.model_dump(mode="json")
    change(document)
    return Plan.model_validate(document)


def unequal(key: str, first: int, second: int) -> Plan:
    """Two replicas, the first with other micro-batches than the second."""
    document = FLAT.model_dump(mode="json")
    for replica, value in zip(document["replicas"], (first, second), strict=True):
        replica["micro_batches"][0][key] = value
    return Plan.model_validate(document)


def other_stage(**fields: Any) -> Plan:
    """The first stage of the first replica is another one."""
    return changed(PIPES, lambda document: document["replicas"][0]["stages"][0].update(fields))


def other_cut(document: dict[str, Any]) -> None:
    """One replica is cut elsewhere."""
    stages = document["replicas"][1]["stages"]
    stages[0]["layers"], stages[1]["layers"] = [[0, 4]], [[4, 6]]


PIPES = plan_of(UNEVEN, data=2, tensor=2)


FLAT = plan_of([[(0, 14)]], data=2)


@pytest.mark.parametrize(
    ("to", "plan", "message"),
    [
        ("megatron", unequal("samples", 3, 1), "micro-batches of different sizes (1, 3)"),
        ("megatron", unequal("count", 10, 6), "different numbers of micro-batches (6, 10)"),
        ("megatron", changed(PIPES, other_cut), "replicas with different stages"),
        (
            "megatron",
            other_stage(devices=[[0], [1]], tensor_shares=[1.0], row_shares=[3.0, 1.0]),
            "the division of every micro-batch as 3, 1",
        ),
        ("megatron", other_stage(tensor_shares=[3.0, 1.0]), "unequal tensor shards"),
        (
            "megatron",
            plan_of(cut(5, 7), tensor=[1, 2]),
            "stages of different tensor degrees (1, 2)",
        ),
        ("megatron", plan_of(UNEVEN, schedule="gpipe"), "schedule gpipe"),
        ("bridge", plan_of(UNEVEN, schedule="gpipe"), "schedule gpipe"),
        ("bridge", plan_of(UNEVEN, recomputation="operators"), "recomputation operators"),
        (
            "megatron",
            plan_of([[(0, 14)]], data=2, zero=1, zero_shares=[1.0, 3.0]),
            "unequal ZeRO shards",
        ),
        ("deepspeed", PIPES, "pipelines (replicas[0] has 4 stages)"),
        ("deepspeed", plan_of([[(0, 14)]], data=2, tensor=2), "tensor parallelism of degree 2"),
        ("deepspeed", plan_of([[(0, 14)]], recomputation="full"), "recomputation full"),
        (
            "deepspeed",
            unequal("samples", 3, 1),
            "the samples that each device takes by its speed",
        ),
        ("torchtitan", plan_of(UNEVEN, recomputation="selective"), "recomputation selective"),
        ("megatron", plan_of(UNEVEN, recomputation="operators"), "recomputation operators"),
        ("torchtitan", plan_of([[(0, 14)]], data=2, zero=1), "zero 1 (only 0, 3)"),
        (
            "torchtitan",
            plan_of(UNEVEN, data=2, by_stage=False, per_node=2, zero=3),
            "node 0 has ranks 0,2",
        ),
        (
            "torchtitan",
            changed(
                plan_of([[(0, 14)]], tensor=2),
                lambda d: (
                    d.update(degrees={"context": 2}, replicas=d["replicas"])
                    or d["replicas"][0]["stages"][0].update(
                        devices=[[0], [1]], tensor_shares=[1.0], row_shares=[1.0, 1.0]
                    )
                ),
            ),
            "ZeRO 0 beside context ranks",
        ),
        ("flagscale", plan_of([[(0, 1)], [(1, 14)]]), "a stage without blocks (stage 0)"),
        (
            "flagscale",
            plan_of(cut(6, 6), data=2, types=["A", "B", "B", "B"]),
            "several device types (stage 0: A, B)",
        ),
        ("flagscale", plan_of([[(0, 14)]], data=2, zero=2), "zero 2"),
    ],
)
def test_what_cannot_be_said_is_refused_by_name(to: str, plan: Plan, message: str) -> None:
    with pytest.raises(UnsupportedError, match=r"what would be lost: .+ --to torchrun") as caught:
        export(plan, to)
    assert message in str(caught.value)


def test_other_chains_are_refused() -> None:
    plan = changed(FLAT, lambda d: d["workload"].update(layers=[f"conv-{i}" for i in range(14)]))
    with pytest.raises(
        UnsupportedError, match="layers other than one embedding, blocks and one head"
    ):
        export(plan, "megatron")


def megatron_parser() -> argparse.ArgumentParser:
    """The options that are written, with the types and choices of Megatron-LM's own parser."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in (
        "tensor-model-parallel-size",
        "pipeline-model-parallel-size",
        "micro-batch-size",
        "global-batch-size",
        "num-layers",
        "seq-length",
        "decoder-first-pipeline-num-layers",
        "decoder-last-pipeline-num-layers",
        "num-layers-per-virtual-pipeline-stage",
        "recompute-num-layers",
    ):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--pipeline-model-parallel-layout", type=str)
    parser.add_argument("--recompute-granularity", choices=["full", "selective"])
    parser.add_argument("--recompute-method", choices=["uniform", "block"])
    for name in ("fp16", "bf16", "use-distributed-optimizer"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser


def expanded(layout_text: str) -> str:
    """`t*3L` as `tttL`."""
    return re.sub(r"(\w)\*(\d+)", lambda config: config[1] * int(config[2]), layout_text)


def stages_of_flags(options: argparse.Namespace) -> list[list[str]]:
    """What each virtual stage holds, by Megatron-LM's rules: E, t and L."""
    pipeline = options.pipeline_model_parallel_size
    if options.pipeline_model_parallel_layout:
        return [list(expanded(part)) for part in options.pipeline_model_parallel_layout.split("|")]
    chunks = 1
    if options.num_layers_per_virtual_pipeline_stage:
        chunks = options.num_layers // pipeline // options.num_layers_per_virtual_pipeline_stage
    total = pipeline * chunks
    first, last = (
        options.decoder_first_pipeline_num_layers,
        options.decoder_last_pipeline_num_layers,
    )
    ends = sum(end is not None for end in (first, last))
    rest = options.num_layers - (first or 0) - (last or 0)
    each, remainder = divmod(rest, total - ends)
    assert remainder == 0
    counts = [each] * (total - ends)
    counts = [
        *([first] if first is not None else []),
        *counts,
        *([last] if last is not None else []),
    ]
    parts = [["t"] * count for count in counts]
    parts[0].insert(0, "E")
    parts[-1].append("L")
    return parts


MEGATRON = [
    plan_of(cut(3, 3, 3, 3), data=2, tensor=2),
    plan_of(UNEVEN, data=2, zero=1, recomputation="full"),
    plan_of(cut(2, 4, 4, 2), recomputation="selective"),
    plan_of(cut(2, 5, 5)),
    plan_of(cut(5, 5, 2)),
    plan_of([[(0, 1)], [(1, 7)], [(7, 13)], [(13, 14)]]),
    plan_of([[(0, 4), (7, 10)], [(4, 7), (10, 14)]], schedule="interleaved-1f1b"),
    plan_of([[(0, 4), (7, 9)], [(4, 7), (9, 14)]], schedule="interleaved-1f1b"),
    plan_of([[(0, 14)]], data=4),
    plan_of(UNEVEN, data=2, tensor=2, by_stage=False),
]


@pytest.mark.parametrize("plan", MEGATRON)
def test_megatron_parsed_back(plan: Plan, tmp_path: Path) -> None:
    text = export(plan, "megatron")
    placed: dict[int, int] = {}
    for node in sorted({d.node for d in plan.devices}):
        for one in run_script(text, tmp_path / str(node), node):
            local = [d for d, device in enumerate(plan.devices) if device.node == node]
            placed[int(one["rank"])] = local[int(one["local"])]
            assert int(one["world"]) == plan.world_size
            assert int(one["local_world"]) == len(local)
            assert one["words"][:3] == ["entry.py", "--lr", "1"]
            options = megatron_parser().parse_args(one["words"][3:])
    tp, pp = options.tensor_model_parallel_size, options.pipeline_model_parallel_size
    dp = plan.world_size // (tp * pp)
    for i, replica in enumerate(plan.replicas):
        for j, stage in enumerate(replica.stages):
            for r, device in enumerate(stage.devices[0]):
                assert placed[r + tp * (i + dp * j)] == device
    assert dp == len(plan.replicas)
    assert stages_of_flags(options) == kinds_of(plan)
    (batches,) = plan.replicas[0].micro_batches
    assert (options.micro_batch_size, options.global_batch_size) == (
        batches.samples,
        plan.workload.global_batch,
    )
    assert options.global_batch_size == dp * batches.count * batches.samples
    assert (options.num_layers, options.seq_length) == (BLOCKS, 128)
    assert (options.bf16, options.fp16) == (True, False)
    assert (options.recompute_granularity or "none") == plan.recomputation
    assert (options.recompute_method is not None) == (plan.recomputation == "full")
    assert options.use_distributed_optimizer == (plan.zero == 1)


@pytest.mark.parametrize(
    ("stages", "flags"),
    [
        (cut(3, 3, 3, 3), []),
        (cut(2, 5, 5), ["--decoder-first-pipeline-num-layers", "2"]),
        (cut(5, 5, 2), ["--decoder-last-pipeline-num-layers", "2"]),
        (
            UNEVEN,
            ["--decoder-first-pipeline-num-layers", "2", "--decoder-last-pipeline-num-layers", "4"],
        ),
        (cut(2, 4, 3, 3), ["--pipeline-model-parallel-layout", "Et*2|t*4|t*3|t*3L"]),
    ],
)
def test_plainest_flags_of_megatron(stages: list[list[tuple[int, int]]], flags: list[str]) -> None:
    written = stage_settings(Grid(plan_of(stages), "Megatron-LM"))
    words = [(f"--{name.replace('_', '-')}", str(value)) for name, value in written.items()]
    assert [word for pair in words for word in pair] == flags


def test_a_node_without_a_part_is_told(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(export(plan_of(UNEVEN), "megatron"))
    ran = subprocess.run(
        ["bash", str(tmp_path / "run.sh")],
        env={"PATH": os.environ["PATH"], "NODE": "9", "MASTER_ADDR": "h"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 2
    assert "node 9 has no part in this plan" in ran.stderr


@pytest.mark.parametrize(
    "stages", [[[(0, 7), (7, 14)]], [[(0, 7)], [(7, 14)]]], ids=["one stage", "one chunk"]
)
@pytest.mark.parametrize("framework", ["megatron", "bridge"])
def test_interleaving_needs_stages_and_chunks(stages: Any, framework: str) -> None:
    """Megatron-LM's arguments refuse chunks of one stage, and know no doubled warm-up."""
    plan = plan_of(stages, schedule="interleaved-1f1b")
    with pytest.raises(UnsupportedError, match="interleaved 1F1B of one stage, or of one chunk"):
        export(plan, framework)
    assert "torchrun" in export(plan, "torchrun")


@pytest.mark.parametrize(
    ("schedule", "name"), [("zbv", "ZBVZeroBubble"), ("dualpipev", "DualPipeV")]
)
def test_torchtitan_takes_a_v_and_megatron_refuses_it(schedule: str, name: str) -> None:
    plan = plan_of([[(0, 4), (9, 14)], [(4, 7), (7, 9)]], schedule=schedule)
    text = export(plan, "torchtitan", with_model=False)
    assert f"'{name}'" in text
    first, second, third, fourth = Grid(plan, "torchtitan").virtual_stages
    assert (first, second, third, fourth) == ((0, 4), (4, 7), (7, 9), (9, 14))
    for framework in ("megatron", "bridge"):
        with pytest.raises(UnsupportedError, match=f"schedule {schedule}"):
            export(plan, framework)


def test_torchtitan_has_no_zero_bubble_of_one_chunk() -> None:
    plan = plan_of([[(0, 7)], [(7, 14)]], schedule="zb-h1")
    with pytest.raises(UnsupportedError, match="schedule zb-h1"):
        export(plan, "torchtitan", with_model=False)
