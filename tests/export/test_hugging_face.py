"""Device maps and configurations of accelerate: every parameter of transformers' own modules has
one device, and accelerate's keys say what the plan says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml
from transformers.integrations.accelerate import expand_device_map

from export.by_hand import cut, plan_of
from fakes.small_models import SMALL
from hetplan.adapters.exports import export
from hetplan.adapters.exports.hugging_face import NAMES, device_map, device_map_notes
from hetplan.errors import UnsupportedError
from hetplan.plans.making import new_plan, with_inputs
from hetplan.plans.plan import Plan
from hetplan.profiling.hardware.cluster import Cluster, ClusterFile, build_cluster
from hetplan.profiling.inputs.inputs import Inputs
from hetplan.profiling.models.model import load_model
from hetplan.profiling.workload import make_workload
from quick import rest_wide

BLOCKS = 12
# Keys of single types beside those of `SMALL`, which have other names or other values there.
OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 6]]},
    "gpt2": {"n_inner": None},
    "helium": {"head_dim": 12},
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "gpt_bigcode": {"head_dim": None, "num_key_value_heads": None},
    "gpt_neox": {"head_dim": None, "num_key_value_heads": None},
    "falcon": {"head_dim": None, "num_key_value_heads": None},
    "opt": {"hidden_size": 96, "word_embed_proj_dim": 64, "ffn_dim": 80},
}
DEPTHS = dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), BLOCKS)


def parameters_of(kind: str) -> dict[str, bool]:
    """Name of each parameter and buffer of a small model -> True."""
    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    sizes = SMALL | DEPTHS | OWN.get(kind, {})
    config = CONFIG_MAPPING[kind](**{key: sizes[key] for key in sizes if sizes[key] is not None})
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: True for name, _ in named}


@pytest.mark.parametrize("kind", rest_wide(NAMES, 3))
def test_every_parameter_has_one_device(kind: str) -> None:
    """Stages of 2, 4 and 6 blocks: in each entry's module, and by transformers' own reading."""
    entries = json.loads(device_map(plan_of(cut(2, 4, 6)), kind=kind))
    blocks = NAMES[kind].blocks
    assert [entries[f"{blocks}.{b}"] for b in range(BLOCKS)] == [0] * 2 + [1] * 4 + [2] * 6
    names = list(parameters_of(kind))
    for name in names:
        holders = [key for key in entries if name == key or name.startswith(f"{key}.")]
        assert len(holders) == 1, name
    read = expand_device_map(entries, names)
    for name in names:
        if name.startswith(f"{blocks}."):
            number = int(name.removeprefix(f"{blocks}.").partition(".")[0])
            assert read[name] == (0 if number < 2 else 1 if number < 6 else 2)
        elif name.startswith(NAMES[kind].last):
            assert read[name] == 2
    assert entries["lm_head"] == 2


def test_a_tied_head_is_on_the_embeddings_device() -> None:
    plan = plan_of(cut(5, 7)).model_copy(update={"name": "gpt2 here"})
    named = plan.workload.model_copy(update={"model": "gpt2"})
    entries = json.loads(export(plan.model_copy(update={"workload": named}), "device-map"))
    assert (entries["lm_head"], entries["transformer.ln_f"]) == (0, 1)
    assert entries["transformer.wte"] == 0 and entries["transformer.h.4"] == 0
    assert entries["transformer.h.5"] == 1


def desk(nodes: list[dict[str, Any]]) -> Cluster:
    links = {"intra_node_gbit_per_s": 100, "network_gbit_per_s": 10}
    document = {
        "format": "hetplan-cluster",
        "version": 1,
        "name": "desk",
        "nodes": [{**node, **links} for node in nodes],
    }
    return build_cluster(ClusterFile.model_validate(document))


def adapted_plan(devices: list[int], cluster: Cluster) -> Plan:
    """A plan of adapters on one pipeline, with its inputs."""
    model = load_model("llama3-8b", sequence=128, adapters="lora:8")
    workload = make_workload(model, cluster, 4)
    ends = [0, *(34 * (i + 1) // len(devices) for i in range(len(devices)))]
    stages = [
        {"layers": [[first, last]], "devices": [[device]], "tensor_shares": [1.0]}
        for device, first, last in zip(devices, ends[:-1], ends[1:], strict=True)
    ]
    replica = {"stages": stages, "micro_batches": [{"count": 4, "samples": 1}]}
    return with_inputs(new_plan(workload, [replica]), Inputs.of(workload))


def test_the_cards_of_one_machine_are_numbered_as_its_own() -> None:
    """Of the second node alone its own numbers; of two nodes those of a machine with both."""
    one = {"count": 1, "devices": 1, "device": "RTX-3090"}
    two = {"count": 1, "devices": 2, "device": "RTX-4090"}
    cluster = desk([one, two])
    alone = adapted_plan([1, 2], cluster)
    entries = json.loads(export(alone, "device-map"))
    assert (entries["model.layers.0"], entries["model.layers.31"]) == (0, 1)
    assert entries["lm_head"] == entries["model.norm"] == 1
    assert list(device_map_notes(alone)) == []
    both = adapted_plan([2, 0], cluster)
    entries = json.loads(export(both, "device-map"))
    assert (entries["model.embed_tokens"], entries["lm_head"]) == (2, 0)
    (note,) = device_map_notes(both)
    assert "2 nodes are numbered as those of one machine" in note


UNLIKE = {
    "replicas": [
        {
            "stages": [{"layers": [[0, 14]], "devices": [[d]], "tensor_shares": [1.0]}],
            "micro_batches": [{"count": 1, "samples": size}],
        }
        for d, size in enumerate((5, 2, 1))
    ]
}


def configuration(text: str) -> tuple[dict[str, Any], list[str]]:
    """(keys, comments)."""
    return yaml.safe_load(text), [line for line in text.splitlines() if line.startswith("#")]


def test_accelerates_keys_say_the_plan() -> None:
    plan = plan_of([[(0, 14)]], data=3, count=1, samples=1)
    document = plan.model_dump(mode="json") | UNLIKE
    document["workload"]["global_batch"] = 8
    unlike = Plan.model_validate(document)
    keys, remarks = configuration(export(unlike, "accelerate"))
    assert (keys["distributed_type"], keys["num_processes"], keys["num_machines"]) == (
        "MULTI_GPU", 3, 1,
    )  # fmt: skip
    assert keys["mixed_precision"] == "bf16" and "fsdp_config" not in keys
    of_ranks = [line for line in remarks if line.startswith("# rank")]
    assert [line.rpartition(" ")[2] for line in of_ranks] == ["5", "2", "1"]
    assert any("PlannedBatches" in line for line in remarks)


@pytest.mark.parametrize(("zero", "strategy"), [(2, "SHARD_GRAD_OP"), (3, "FULL_SHARD")])
def test_sharded_states_are_fsdps(zero: int, strategy: str) -> None:
    plan = plan_of([[(0, 14)]], data=8, zero=zero, recomputation="full")
    keys, remarks = configuration(export(plan, "accelerate"))
    assert keys["distributed_type"] == "FSDP" and keys["num_machines"] == 2
    sharded = keys["fsdp_config"]
    assert sharded["fsdp_sharding_strategy"] == strategy
    assert sharded["fsdp_activation_checkpointing"] and sharded["fsdp_use_orig_params"]
    assert any("machine_rank" in line for line in remarks)
    plain = plan_of([[(0, 14)]], data=2, recomputation="full")
    assert "gradient_checkpointing_enable" in export(plain, "accelerate")
    keys, remarks = configuration(export(plan_of([[(0, 14)]], data=2, zero=1), "accelerate"))
    assert keys["distributed_type"] == "MULTI_GPU"
    assert any("ZeroRedundancyOptimizer" in line for line in remarks)


def test_nodes_of_unequal_ranks_are_named() -> None:
    keys, remarks = configuration(export(plan_of([[(0, 14)]], data=3, per_node=2), "accelerate"))
    assert (keys["num_processes"], keys["num_machines"]) == (3, 1)
    assert any("--to torchrun" in line for line in remarks)


@pytest.mark.parametrize(
    ("to", "plan", "message"),
    [
        ("device-map", plan_of(cut(6, 6), data=2), "cannot express 2 replicas"),
        ("device-map", plan_of(cut(6, 6), tensor=2), "cannot express a stage on 2 devices"),
        ("device-map", plan_of(cut(6, 6)), "names of the model's modules are not known"),
        ("accelerate", plan_of(cut(6, 6)), "cannot express pipelines"),
        ("accelerate", plan_of([[(0, 14)]], data=2, recomputation="selective"), "selective"),
        ("accelerate", plan_of([[(0, 14)]], data=2, tensor=2), "a stage on 2 devices"),
    ],
)
def test_what_they_cannot_express_is_refused(to: str, plan: Plan, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        export(plan, to)


def small_module(kind: str) -> Any:
    """A small model with weights."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    sizes = SMALL | DEPTHS | OWN.get(kind, {})
    config = CONFIG_MAPPING[kind](**{key: sizes[key] for key in sizes if sizes[key] is not None})
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox"])
def test_accelerate_dispatches_a_model_by_the_map(kind: str) -> None:
    """Its own check finds a device for every parameter. On processors in place of the map's GPUs,
    the dispatched model computes what the model computes."""
    torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")
    accelerate: Any = pytest.importorskip("accelerate", reason="peft brings it along")
    entries = json.loads(device_map(plan_of(cut(2, 4, 6)), kind=kind))
    module = small_module(kind).eval()
    accelerate.utils.check_device_map(module, entries)
    words = torch.arange(6)[None]
    with torch.no_grad():
        expected = module(input_ids=words).logits
        processors = dict.fromkeys(entries, "cpu")
        dispatched = accelerate.dispatch_model(
            module, processors, main_device="cpu", force_hooks=True
        )
        assert dispatched.hf_device_map == processors
        assert torch.equal(dispatched(input_ids=words).logits, expected)
    del entries[f"{NAMES[kind].blocks}.3"]
    with pytest.raises(ValueError, match="does not give any device"):
        accelerate.utils.check_device_map(module, entries)


@pytest.mark.wide
@pytest.mark.parametrize("zero", [0, 3])
def test_accelerate_reads_the_configuration(zero: int, tmp_path: Path) -> None:
    """By the class behind `accelerate launch --config_file`, which refuses unknown keys."""
    config_args: Any = pytest.importorskip("accelerate.commands.config.config_args")
    path = tmp_path / "accelerate.yaml"
    path.write_text(export(plan_of([[(0, 14)]], data=3, zero=zero), "accelerate"))
    read = config_args.load_config_from_file(str(path))
    assert read.num_processes == 3 and read.mixed_precision == "bf16"
    assert read.distributed_type == ("FSDP" if zero else "MULTI_GPU")
    path.write_text(path.read_text() + "samples: [5, 2, 1]\n")
    with pytest.raises(ValueError, match="unknown keys"):
        config_args.load_config_from_file(str(path))
