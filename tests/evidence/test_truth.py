"""Published measurements: read, posed, compared and summed up. The rows are single facts, each
with its source; nothing else of the published tables is needed."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evidence.truth.__main__ import main
from evidence.truth.calibrated import calibrate_set
from evidence.truth.job import (
    A100_80,
    EAGER,
    PARALLEL,
    cluster,
    even_blocks,
    gpt,
    layer_ranges,
    posed_plan,
    posed_workload,
)
from evidence.truth.operators import driver_device
from evidence.truth.recipes import (
    EAGER as EAGER_TRUTH,
    EAGER_FLEX,
    PARTIAL_FLEX,
    WHOLE,
    Recipe,
    recipe_of,
)
from evidence.truth.runs import megatron_job, mosaic_job, vtrain_job, vtrain_published
from evidence.truth.sets import compare
from evidence.truth.simumax import simumax_job
from evidence.truth.tables import (
    Cells,
    Compared,
    Predicted,
    Published,
    Scoring,
    order,
    regret,
    summarised,
    summary,
    tied,
)
from hetplan.errors import InputError
from hetplan.profiling.models.model import load_model
from hetplan.profiling.models.transformer import transformer_layers
from hetplan.profiling.models.zoo import text_model
from hetplan.profiling.rates.times import Rates, layer_time
from hetplan.runtime.calibration import predicted_seconds
from present import present

pytestmark = pytest.mark.evidence

Row = Mapping[str, Any]
# DeepSpeed's pipelines, which are slower than predicted; see docs/accuracy.md.
MISSED = {"BLOOM 176B", "GPT-NeoX 20B", "MT-NLG 530B"}
# VIA-Research/vTrain@f8dda84, data/ground_truth_single.csv (MIT).
VTRAIN_COLUMNS = (
    "# GPUs", "global batch", "micro batch", "hidden size", "attention heads", "# layers",
    "sequence length", "tensor parallelism", "data parallelism", "pipeline parallelism",
    "iteration time (ms)",
)  # fmt: skip
VTRAIN = [
    dict(zip(VTRAIN_COLUMNS, row, strict=True))
    for row in (
        (2, 16, 8, 1024, 16, 24, 1024, 1, 1, 2, 372.160408),
        (8, 8, 2, 2048, 16, 20, 1024, 4, 1, 2, 160.6027),
        (8, 4, 1, 1024, 16, 16, 1024, 1, 2, 4, 77.216619),
    )
]
# mosaicml/llm-foundry@8c8dd48, scripts/train/benchmarking/README.md (Apache-2.0).
MOSAIC_COLUMNS = (
    "Model", "SeqLen (T)", "# GPUs", "GPU", "MFU", "MicroBatchSize", "GlobalBatchSize",
    "Throughput (T/s)", "Precision", "MP Mode", "Sharding Strategy", "Activation Checkpointing",
    "Activation CPUOffload", "NumParams",
)  # fmt: skip
AMP = ("amp_bf16", "DEFAULT", "FULL_SHARD")
MOSAIC = [
    dict(zip(MOSAIC_COLUMNS, row, strict=True))
    for row in (
        ("70b", 2048, 64, "h100_80gb", 42.57, 8, 2048, 66523, *AMP, True, False, 64862437376),
        ("13b", 2048, 8, "h100_80gb", 39.79, 2, 16, 38336, *AMP, False, False, 12853954560),
        ("1b", 4096, 8, "h100_80gb", 40.26, 7, 224, 308282, *AMP, False, False, 1320144896),
        ("1b", 512, 8, "h100_80gb", 29.06, 56, 1792, 562523, "amp_fp8", *AMP[1:], False, False,
         1312804864),
    )
]  # fmt: skip
# pytorch/torchtitan@b5bcd76, benchmarks/llama3_h100_202412_torchtitan.md (BSD-3).
TITAN = {
    "model": "llama3.1-70b", "gpus": 256,
    "gpu": "H100 96GB HBM2e 500W 400Gb/s per GPU", "techniques": "compile+float8",
    "sequence": 8192, "local_batch": 16, "global_batch": 512, "activation_checkpointing": "full",
    "fsdp": 32, "tp": 8, "pp": 1, "cp": 1, "tokens_per_second_per_gpu": 829, "memory_gib": 71.9,
}  # fmt: skip
# NVIDIA/Megatron-LM@d98e8a6, tests/functional_tests/test_cases/gpt (BSD-3).
EMPTY = (
    "ffn", "kv_groups", "vocab", "vp_layers", "vp_stages", "cp", "experts", "sequence_parallel",
    "distributed_optimizer", "recompute", "recompute_layers", "first_pp_layers", "last_pp_layers",
    "layout", "swiglu", "untie", "fp16", "fp8", "fsdp", "ep", "etp", "topk",
)  # fmt: skip
MEGATRON: dict[str, Any] = dict.fromkeys(EMPTY, "") | {
    "case": "gpt/gpt3_mcore_te_tp1_pp4_vp1_uneven_pipeline", "platform": "dev_dgx_a100",
    "seconds_per_iteration_median": 0.19532, "max_allocated_bytes": 2386205184.0, "layers": 12,
    "hidden": 512, "heads": 8, "sequence": 1024, "micro_batch": 4, "global_batch": 32, "tp": 1,
    "pp": 4, "first_pp_layers": 2, "last_pp_layers": 2, "untie": True, "bf16": True, "nodes": 1,
    "deterministic": True, "gpus_per_node": 8, "gpu": "A100-SXM4-80GB", "training_complete": True,
}  # fmt: skip
# NVIDIA-NeMo/Megatron-Bridge@067f987, docs/performance-summary-archive.md (Apache-2.0).
BRIDGE = {
    "task": "Pre-Training Performance", "system": "DGX-B200", "model": "LLAMA3.1_405B",
    "gpus": 128, "precision": "BF16", "global_batch": 64, "micro_batch": 1, "sequence": 8192,
    "fsdp": 0, "tp": 4, "pp": 8, "cp": 2, "vp": 8, "ep": 1, "tokens_per_second_per_gpu": 700.0,
    "release": "26.04 NeMo Container", "model_tflops_per_gpu": 1700.0,
}  # fmt: skip
# sitar-lab/NeuSight@6945927 and microsoft/vidur@7d47513 (MIT).
OPERATORS: dict[str, list[Row]] = {
    "neusight_gemm_fp32.csv.gz": [
        {"OPName": "linear", "Device": "NVIDIA L4", "B": 1, "M": 1024, "N": 2560, "K": 2560,
         "seconds": 0.0011338346401850382},
        {"OPName": "linear", "Device": "a potato", "B": 1, "M": 1, "N": 1, "K": 1, "seconds": 1},
    ],
    "neusight_elementwise_fp32.csv.gz": [
        {"OPName": "add", "Device": "Tesla P100-PCIE-16GB", "B": 13021, "H": 984,
         "seconds": 0.0002981696009635925},
    ],
    "vidur_gemm_fp16.csv.gz": [
        {"device": "a100", "op": "attn_pre_proj", "m": 32768, "k": 8192.0, "n": 10240.0,
         "seconds": 0.0202825},
    ],
    "vidur_collectives.csv.gz": [
        {"system": "a100_dgx", "op": "all_reduce", "num_workers": 2, "devices_per_node": 1,
         "size": 2048, "seconds": 4.3e-05},
        {"system": "a100_dgx", "op": "send_recv", "num_workers": 2, "devices_per_node": 2,
         "size": 67108864, "seconds": 0.000294},
    ],
}  # fmt: skip


def write(path: Path, rows: Sequence[Row]) -> Path:
    """The rows as a CSV file."""
    text = io.StringIO()
    table = csv.DictWriter(text, list(rows[0]))
    table.writeheader()
    table.writerows(rows)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wb") as stream:
        stream.write(text.getvalue().encode())
    return path


def cells(row: Row) -> Cells:
    return Cells("here", {key: str(value) for key, value in row.items()}, by_hand=True)


def test_vtrain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "vtrain_single_node_a100.csv", [*VTRAIN, {**VTRAIN[0], "data parallelism": 2}])
    assert main(["vtrain", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = document["rows"]
    assert document["set"] == "vtrain" and [row["row"] for row in rows] == [0, 1, 2, 3]
    assert set(rows[0]) == {
        "file", "row", "workload", "measured_seconds", "predicted_seconds", "measured_bytes",
        "predicted_bytes", "reason",
    }  # fmt: skip
    assert rows[0]["measured_seconds"] == pytest.approx(0.372160408)
    assert rows[0]["measured_bytes"] is None and rows[0]["reason"] is None
    for row in rows[:3]:  # within a factor of ten: posed as what it is
        assert 0.1 < row["predicted_seconds"] / row["measured_seconds"] < 10
    assert rows[0]["workload"] == rows[3]["workload"] != rows[1]["workload"]
    assert rows[3]["predicted_seconds"] is None and rows[3]["reason"]
    assert document["summary"]["rows"] == 4 and document["summary"]["predicted"] == 3


def test_degrees_and_places_of_a_plan() -> None:
    """Tensor ranks stand next to each other, then data ranks, then stages; 20 blocks in two
    stages."""
    job = vtrain_job(
        cells({**VTRAIN[1], "tensor parallelism": 2, "data parallelism": 2}), single=False
    )
    plan = posed_plan(job, posed_workload(job))
    places = [[stage.devices[0] for stage in replica.stages] for replica in plan.replicas]
    assert places == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert layer_ranges(job) == [(0, 11), (11, 22)]
    assert plan.recomputation == "full" and plan.replicas[0].micro_batches[0].count == 2


@pytest.mark.parametrize("row", MOSAIC[:3])
def test_mpt_has_the_published_parameters(row: Row) -> None:
    job = mosaic_job(cells(row))
    spec = text_model("mpt", "here", job.sequence, job.shape)
    assert load_model(spec, sequence=job.sequence).params == row["NumParams"]


def test_mosaicml(tmp_path: Path) -> None:
    write(tmp_path / "mosaicml_llm_foundry.csv", MOSAIC)
    *bf16, fp8 = compare("mosaicml", tmp_path)
    assert [row.published.seconds for row in bf16] == pytest.approx(
        [2048 * 2048 / 66523, 16 * 2048 / 38336, 224 * 4096 / 308282]
    )
    assert all(row.error is not None and abs(row.error) < 0.5 for row in bf16)
    assert present(fp8.error) == pytest.approx(0.0, abs=0.3)
    assert all(row.predicted is not None and row.predicted.fits for row in bf16)
    assert mosaic_job(cells(MOSAIC[0])).zero == 3
    assert mosaic_job(cells(MOSAIC[0])).stack.gradient_bytes == 4
    assert mosaic_job(cells({**MOSAIC[0], "MP Mode": "PURE"})).stack.gradient_bytes is None


def test_torchtitan(tmp_path: Path) -> None:
    plain = {**TITAN, "techniques": "compile", "tp": 1, "fsdp": 256, "local_batch": 2}
    changed: list[Row] = [{"gpu": "abacus"}, {"techniques": "compile float8 rowwise"}, {"cp": 2}]
    rows = [TITAN, plain, *({**plain, **change} for change in changed)]
    write(tmp_path / "torchtitan.csv", rows)
    told, predicted, *others = compare("torchtitan", tmp_path)
    assert told.published.seconds == pytest.approx(512 * 8192 / 829 / 256)
    assert told.published.held_bytes == 71.9 * 2**30 and abs(present(told.error)) < 0.3
    assert abs(present(told.memory_error)) < 0.05  # of the allocator's whole pool
    assert predicted.predicted is not None and predicted.predicted.peak_bytes is not None
    assert [row.reason for row in others] == [
        "unknown GPU 'abacus'",
        "float8 with a scale for each row is not modelled",
        "256 shards of 2 ranks each",
    ]


# The same page, Tables 2, 5 and 6: context degree, tokens of a sample, GiB.
TITAN_CONTEXT = ((1, 32768, 83.9), (2, 65536, 84.2), (4, 131072, 84.0), (8, 262144, 84.5))
TITAN_PIPELINE = ((1, 32768, 75.3), (2, 65536, 75.9), (4, 131072, 77.1), (8, 262144, 84.9))


def memory_errors(tmp_path: Path, rows: Sequence[Row]) -> list[float]:
    """Of torchtitan's runs."""
    write(tmp_path / "torchtitan.csv", rows)
    return [present(row.memory_error) for row in compare("torchtitan", tmp_path)]


def test_context_ranks_hold_what_torchtitan_published(tmp_path: Path) -> None:
    """Llama 8B on eight H100, which 12 bytes a logit and FSDP's buffers fill; of the 84 GiB some
    47 would be left without them."""
    own = {**TITAN, "model": "llama3.1-8b", "gpus": 8, "tp": 1, "local_batch": 1}
    rows: list[Row] = [
        {**own, "cp": cp, "fsdp": 8 // cp, "sequence": s, "global_batch": 8 // cp,
         "memory_gib": gib}
        for cp, s, gib in TITAN_CONTEXT
    ]  # fmt: skip
    for error in memory_errors(tmp_path, rows):
        assert -0.03 < error < 0.08


def test_pipelines_of_full_shards_hold_what_torchtitan_published(tmp_path: Path) -> None:
    """Llama 405B on 512 H100: stages keep whole weights and gradients, and cut the local batch."""
    own = {
        **TITAN, "model": "llama3.1-405b", "gpus": 512, "pp": 8, "techniques": "compile+float8",
        "local_batch": 8,
    }  # fmt: skip
    rows: list[Row] = [{**own, "fsdp": 8, "local_batch": 32, "global_batch": 256,
                        "memory_gib": 82.5}]  # fmt: skip
    rows += [
        {**own, "cp": cp, "fsdp": 8 // cp, "sequence": s, "global_batch": 64 // cp,
         "memory_gib": gib}
        for cp, s, gib in TITAN_PIPELINE
    ]  # fmt: skip
    errors = memory_errors(tmp_path, rows)
    assert abs(errors[0]) < 0.05
    for error in errors:
        assert -0.03 < error < 0.15


def test_context_ranks_hold_what_megatrons_tests_published(tmp_path: Path) -> None:
    """gpt3_mcore_te_tp2_pp2_cp2, of the last rank: 12 GPT blocks; 0.86 GB on A100, 0.94 GB on
    H100, of which some 80 MB differ by the kernels of the GPU alone."""
    row = {
        **MEGATRON, "case": "gpt/gpt3_mcore_te_tp2_pp2_cp2", "tp": 2, "pp": 2, "cp": 2,
        "first_pp_layers": "", "last_pp_layers": "", "sequence_parallel": True, "untie": "",
        "deterministic": "", "vocab": 50257,
    }  # fmt: skip
    h100 = {"gpu": "H100-SXM5-80GB", "platform": "dev_dgx_h100", "max_allocated_bytes": 935253504}
    write(tmp_path / "megatron_golden.csv", [{**row, "max_allocated_bytes": 857134592},
                                             {**row, **h100}])  # fmt: skip
    for found in compare("megatron", tmp_path):
        assert abs(present(found.memory_error)) < 0.06


def test_megatron(tmp_path: Path) -> None:
    changes: list[Row] = [
        {},
        {"training_complete": False, "hidden": "?"},
        {"case": "multimodal/x"},
        {"gpus_per_node": "8 (4)"},
        {"cp": 2, "pp": 1, "first_pp_layers": "", "last_pp_layers": ""},
        {
            "case": "moe/x",
            "pp": 1,
            "first_pp_layers": "",
            "last_pp_layers": "",
            "experts": 8,
            "topk": 2,
            "ep": 4,
            "tp": 2,
            "etp": 1,
            "sequence_parallel": True,
        },
    ]
    rows = [{**MEGATRON, **change} for change in changes]
    write(tmp_path / "megatron_golden.csv", rows)
    found = compare("megatron", tmp_path)
    assert [row.predicted is not None for row in found] == [True, False, False, False, True, False]
    assert found[0].published.held_bytes == 2386205184
    # seconds are shown beside each other, and count nowhere
    assert present(found[0].published.seconds) > 0 and found[0].error is None
    assert summary(found)["error"] is None and summary(found)["memory_rows"] == 2
    # the last rank's, unfused attention
    assert found[0].memory_error is not None and abs(found[0].memory_error) < 0.02
    reasons = " ".join(row.reason or "" for row in found)
    assert "complete" in reasons and "multimodal" in reasons and "(4)" in reasons
    assert str(found[5].reason).startswith("incomplete: no column has the widths of experts")


def test_a_configuration_is_ranked_among_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    divided = {
        "pp": 1, "first_pp_layers": "", "last_pp_layers": "", "tp": 2, "sequence_parallel": True,
        "distributed_optimizer": True,
    }  # fmt: skip
    frugal = {**divided, "tp": 1, "sequence_parallel": False, "recompute": "full"}
    rows = [{**MEGATRON, **divided}, {**MEGATRON, **frugal}, {**MEGATRON, "recompute_layers": 3}]
    write(tmp_path / "megatron_golden.csv", rows)
    arguments = ["megatron", str(tmp_path), "--rank"]
    assert main([*arguments, "--json"]) == 0
    one, other, reason = json.loads(capsys.readouterr().out)["rows"]
    assert "ranked" not in reason and reason["reason"]
    places = [row["ranked"]["place"] for row in (one, other)]
    assert all(0 <= place <= 1 for place in places)
    faster = one["predicted_seconds"] < other["predicted_seconds"]
    assert (places[0] > places[1]) == faster
    for row in (one, other):
        ranked, count = row["ranked"], row["ranked"]["count"]
        assert ranked["best_seconds"] <= row["predicted_seconds"] and count > 100
        own, best = (sum(cause[i] for cause in ranked["why"]) for i in (1, 2))
        assert own == pytest.approx(row["predicted_seconds"])  # the causes add up
        assert best == pytest.approx(ranked["best_seconds"])
    assert main(arguments) == 0
    assert "are no faster; preferred" in capsys.readouterr().out


def test_uneven_and_interleaved_stages_of_megatron() -> None:
    uneven = megatron_job(cells(MEGATRON))
    assert layer_ranges(uneven) == [(0, 3), (3, 7), (7, 11), (11, 14)]
    chunks = {"first_pp_layers": "", "last_pp_layers": "", "vp_layers": 1}
    job = megatron_job(cells({**MEGATRON, **chunks}))
    plan = posed_plan(job, posed_workload(job))
    assert plan.schedule == "interleaved-1f1b" and job.chunks == 3
    assert [list(one) for one in plan.replicas[0].stages[3].layers] == [[4, 5], [8, 9], [12, 14]]
    assert job.shape.vocabulary == 50304  # 50257 tokens, to a multiple of 128


def test_nemo_and_mlperf(tmp_path: Path) -> None:
    dense = {**BRIDGE, "cp": 1, "model": "LLAMA3_8B", "gpus": 64, "pp": 2, "vp": 1}
    changes = (
        {"precision": "FP8"}, {"tp": "2 (4)"},
        {"precision": "FP8-CS (FP8-MX)", "model_tflops_per_gpu": 16141540.0},
        {"precision": "", "task": "Another"},
        {"precision": "", "release": "25.09 NeMo Container"}, {"micro_batch": 4},
        {"micro_batch": 4, "task": "LoRA Performance"},
        {"model": "Nemotron_3_Nano", "pp": 1, "tp": 1, "ep": 8, "gpus": 8, "precision": "FP8",
         "system": "DGX-GB200"},
        {"precision": "FP6"},
    )  # fmt: skip
    bridge = [BRIDGE, dense, *({**dense, **change} for change in changes)]
    write(tmp_path / "nemo_megatron_bridge.csv", bridge)
    write(tmp_path / "nemo_24.07_h100_fp8.csv", [BRIDGE])
    *found, old = compare("nemo", tmp_path)
    assert [row.reason for row in found] == [
        None, None, None, "tp is '2 (4)'", None, "precision not stated", None, None, None, None,
        "precision FP6",
    ]  # fmt: skip
    assert old.reason is None and found[4].published.seconds is None  # two figures in one cell
    whole, eight = (present(row.predicted).seconds for row in found[1:3])
    assert 0.5 * whole < eight < whole
    assert present(found[6].predicted).seconds == eight  # release 25.09 is of 8-bit products
    trained, adapters = present(found[7].predicted), present(found[8].predicted)
    assert adapters.seconds < trained.seconds
    # Beside adapters, an eighth of the model's weights lack gradients of 2 bytes, and an eighth of
    # their optimizer states. All products keep their inputs, as they do in full training.
    spared = present(trained.peak_bytes) - present(adapters.peak_bytes)
    assert spared == pytest.approx(8.03e9 / 8 * (2 + 12 / 8), rel=0.1)
    assert present(found[9].predicted).fits
    system = {
        "benchmark": "llama2_70b_lora", "nodes": 2, "accelerators_per_node": 8, "cp": "",
        "accelerator": "NVIDIA H200-SXM5-141GB", "global_batch": 8, "step_seconds_median": "",
        "seconds_per_step_from_throughput": 1.7477, "grad_accum": 1, "sequence": "", "tp": "",
        "pp": "",
    }  # fmt: skip
    write(tmp_path / "mlperf_v5.0_llm.csv", [system, {**system, "cp": 4, "tp": 1, "pp": 1}])
    inferred, stated = compare("mlperf", tmp_path)
    assert inferred.published.seconds == 1.7477 and inferred.reason is None
    assert present(inferred.predicted).fits  # 2 context ranks: 16 GPUs for 8 samples
    assert "do not divide" not in str(stated.reason) and stated.predicted != inferred.predicted


def test_recipes_say_what_rows_leave_out() -> None:
    base = {**BRIDGE, "cp": 1, "vp": 1, "ep": 8, "release": "26.08 NeMo Container"}
    changes: dict[Recipe, list[Row]] = {
        WHOLE: [
            {"model": "DeepSeekV3", "system": "DGX-GB300", "precision": "MXFP8"},
            {"model": "Qwen3_235B_a22B", "system": "DGX-GB200", "precision": "FP8-MX"},
        ],
        PARTIAL_FLEX: [
            {"model": "DeepSeekV3", "system": "DGX-GB300", "precision": "BF16"},
            {"model": "Qwen3_30B_a3B", "system": "DGX-B200", "precision": "MXFP8"},
            {"model": "Nemotron_3_Nano", "system": "DGX-H100", "precision": "FP8"},
        ],
        EAGER_FLEX: [{"model": "DeepSeekV3", "system": "DGX-B200", "precision": "MXFP8", "pp": 16}],
        EAGER_TRUTH: [
            {"model": "LLAMA3_70B", "system": "DGX-B200", "precision": "FP8"},
            {"model": "DeepSeekV3", "system": "DGX-GB300", "release": "25.09 NeMo Container"},
        ],
        Recipe(recomputed=5): [{"model": "LLAMA3_8B", "system": "DGX-H100", "precision": "FP8"}],
    }
    for recipe, rows in changes.items():
        for row in rows:
            assert recipe_of(cells({**base, **row})) == recipe, row


def test_ends_count_as_layers_where_blocks_do_not_divide() -> None:
    """Llama 405B has 126 blocks, which divide over 64 chunks with embedding and loss."""
    assert even_blocks(126, 64) == (1, *[2] * 62, 1)
    assert even_blocks(126, 128) != (0, *[1] * 126, 0)
    assert even_blocks(12, 4) == (3, 3, 3, 3)
    assert sum(even_blocks(61, 8)) == 61


def test_the_newest_release_of_a_configuration_counts(tmp_path: Path) -> None:
    """26.04.01 is newer than 26.04 and 26.02.01; another configuration stands for itself."""
    dense = {**BRIDGE, "cp": 1, "model": "LLAMA3_8B", "gpus": 64, "pp": 2, "vp": 1}
    releases = ("26.04", "26.04.01", "26.02.01")
    rows = [
        {**dense, "release": f"{release} NeMo Container", "tokens_per_second_per_gpu": 700.0 + i}
        for i, release in enumerate(releases)
    ]
    write(tmp_path / "nemo_megatron_bridge.csv", [*rows, {**rows[2], "tp": 2}])
    write(tmp_path / "nemo_24.07_h100_fp8.csv", [BRIDGE])
    older = "a newer release measured the configuration"
    found = compare("nemo", tmp_path)[:4]
    assert [row.reason for row in found] == [older, None, older, None]
    assert found[0].predicted is None and present(found[0].published.seconds) > 0


def test_recipes_with_a_dispatcher_send_one_copy_of_a_token(tmp_path: Path) -> None:
    """From 25.11 on; on eight GPUs with an expert rank each, 5.3 copies for eight experts. GPT OSS
    has none on B200, so that its seconds do not depend on the release."""
    mixture = {
        **BRIDGE, "gpus": 8, "global_batch": 64, "micro_batch": 1, "tp": 1, "pp": 1, "cp": 1,
        "vp": 1, "ep": 8, "precision": "BF16", "system": "DGX-GB300",
    }  # fmt: skip
    rows = [
        {**mixture, "model": model, "system": system, "release": release}
        for model, system in (("Qwen3_30B_a3B", "DGX-GB300"), ("GPT OSS 120B", "DGX-B200"))
        for release in ("25.09 NeMo Container", "25.11 NeMo Container")
    ]
    seconds = []
    for each in rows:  # configurations of their own, of which none is passed over
        write(tmp_path / "nemo_megatron_bridge.csv", [each])
        write(tmp_path / "nemo_24.07_h100_fp8.csv", [BRIDGE])
        seconds.append(present(compare("nemo", tmp_path)[0].predicted).seconds)
    before, after, oss, oss_after = seconds
    assert after < 0.97 * before
    assert oss_after == oss


def test_cells_count_once(tmp_path: Path) -> None:
    """Three rows of one cell that err by 10 % and one that errs by 30 % are 20 % off."""
    rows = [
        Compared("f", i, Published("w", 1.0, cell=cell), Predicted(1 + error))
        for i, (cell, error) in enumerate([("a", 0.1), ("a", -0.1), ("a", 0.1), ("b", 0.3)])
    ]
    figures = summarised(rows)
    assert figures["cells"] == 2 and figures["cell_error"] == pytest.approx(0.2)
    assert figures["error"] == pytest.approx(0.15)
    assert summarised([replace(rows[0], published=Published("w", 1.0))])["cell_error"] is None
    wide = {**VTRAIN[0], "tensor parallelism": 2, "data parallelism": 1}
    assert (
        vtrain_published(cells(wide)).cell
        == f"{wide['hidden size']} wide, tensor 2, micro-batch {wide['micro batch']}"
    )


def test_operators_of_aiconfigurator(tmp_path: Path) -> None:
    """ai-dynamo/aiconfigurator@095f58a (Apache-2.0): milliseconds; sizes of messages are counts of
    elements; the row has the ends of the predicted interval."""
    product = {"device": "NVIDIA B200", "gemm_dtype": "fp8", "m": 4096, "n": 8192, "k": 8192}
    products: list[Row] = [
        {**product, "best_ms": 0.21, "median_ms": 0.25},
        {**product, "gemm_dtype": "int4_wo", "best_ms": 1.0, "median_ms": 1.0},
        {**product, "gemm_dtype": "fp8_block", "k": 64, "best_ms": 1.0, "median_ms": 1.0},
        {**product, "device": "NVIDIA A100-SXM4-80GB", "best_ms": 1.0, "median_ms": 1.0},
        {**product, "device": "Intel B60", "best_ms": 1.0, "median_ms": 1.0},
    ]
    collective = {"device": "NVIDIA L40S", "op_name": "all_reduce", "num_gpus": 8}
    collectives: list[Row] = [
        {**collective, "nccl_dtype": "half", "message_size": 2**28, "latency": 649.0},
        {**collective, "nccl_dtype": "int8", "message_size": 2**29, "latency": 721.0},
        {**collective, "nccl_dtype": "half", "message_size": 2**20, "latency": 5.3}
        | {"device": "NVIDIA L4", "op_name": "gossip"},
    ]
    write(tmp_path / "aic_gemm.csv.gz", products)
    write(tmp_path / "aic_nccl.csv.gz", collectives)
    found = compare("operators", tmp_path)
    assert [row.reason for row in found] == [
        None, "products in int4_wo are not modelled", "fp8_block of k or n that are no 128 wide",
        "A100-SXM4-80GB has no units for fp8", "unknown device Intel B60", None, None,
        "unknown operation gossip",
    ]  # fmt: skip
    assert found[0].published.seconds == pytest.approx(0.21e-3)
    assert all(abs(row.error) < 0.15 for row in found if row.error is not None)
    row = found[0].document()
    low, high = row["predicted_low_seconds"], row["predicted_high_seconds"]
    assert 0 < low < row["predicted_seconds"] < high
    assert found[0].held is (low <= 0.21e-3 <= high)
    figures = summarised(found)
    assert figures["held"] == np.mean([present(row.held) for row in found if row.predicted])
    assert driver_device("NVIDIA B300 SXM6 AC") == ("B300", 7200.0)
    assert driver_device("NVIDIA H200")[0] == "H200-SXM-141GB"


def test_operators(tmp_path: Path) -> None:
    for name, rows in OPERATORS.items():
        write(tmp_path / name, rows)
    found = compare("operators", tmp_path)
    reasons = ["unknown device a potato", "the network between nodes is not stated"]
    assert [row.reason for row in found if row.reason] == reasons
    assert all(abs(row.error) < 0.4 for row in found if row.error is not None)
    assert len(found) == 6 and found[0].published.workload is None


BROKEN = [
    (b"", "a100.csv: has no rows"),
    (",".join(VTRAIN_COLUMNS).encode() + b"\n", "a100.csv: has no rows"),
    (b"\xff\xfe", "is no table"),
    (b"a,b\n1,2\n", "a100.csv: column is missing .got 'a, b', expected # layers"),
    (None, "row 0.*number of cells.*got 3, expected 11"),
    ({"# GPUs": "many"}, r"row 1: # GPUs: is no (whole )?number.*'many'"),
    ({"# GPUs": "2.5"}, "row 1: # GPUs: is no whole number"),
    ({"iteration time (ms)": "nan"}, "row 1: iteration time"),
]


@pytest.mark.parametrize(("content", "message"), BROKEN)
def test_a_damaged_table_is_one_line(
    tmp_path: Path, content: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "vtrain_multi_node_a100.csv"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is None:
        path.write_text(f"{','.join(VTRAIN_COLUMNS)}\n1,2,3\n")
    else:
        write(path, [VTRAIN[0], {**VTRAIN[0], **content}])
    assert main(["vtrain", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    with pytest.raises(InputError, match=message):
        compare("vtrain", tmp_path)


@pytest.mark.parametrize("name", ["vtrain", "nemo", "operators", "vtrian"])
def test_missing_files_and_sets(name: str, tmp_path: Path) -> None:
    write(tmp_path / "nemo_24.07_h100_fp8.csv", [BRIDGE])  # one of the two is not enough
    with pytest.raises(InputError, match=r"no such file|unknown set"):
        compare(name, tmp_path)


def test_seconds_within_two_percent_are_equal() -> None:
    assert tied([10.1, 10.0, 10.25, 12.0], 0.02) == [10.0, 10.0, 10.25, 12.0]
    rules = Scoring()
    # measured ranks 1.5 1.5 3 4, predicted 2 1 3 4: covariance 4.5, variances 4.5 and 5
    assert order([10.1, 10.0, 11, 12], [2, 1, 3, 4], rules) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert order([10.0, 10.1, 10.15], [1, 2, 3], rules) is None
    assert order([1, 2], [1, 2], rules) is None
    assert order([1, 2, 3], [3, 2, 1], rules) == pytest.approx(-1)


def test_regret_is_what_the_pick_costs() -> None:
    assert regret([10, 12, 15], [3, 1, 2]) == pytest.approx(0.2)
    assert regret([10, 12], [1, 2]) == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"global_batch": 48, "pp": 4, "vp": 2}, "expected a multiple of the stages"),
        ({"tp": 0}, "tp is 0"),
        ({"tp": 3}, "do not divide 64 GPUs"),
        ({"global_batch": 100}, "does not divide over 32 replicas"),
        ({"gpus": 10**6, "global_batch": 10**6}, "to replay"),
        ({"pp": 32, "tp": 1, "vp": 2}, "too few for the stages"),
    ],
)
def test_plans_that_nobody_can_run_are_reasons(changes: Row, reason: str, tmp_path: Path) -> None:
    dense = {**BRIDGE, "cp": 1, "model": "LLAMA3_8B", "gpus": 64, "tp": 1, "pp": 2, "vp": 1}
    write(tmp_path / "nemo_megatron_bridge.csv", [{**dense, **changes}])
    write(tmp_path / "nemo_24.07_h100_fp8.csv", [BRIDGE])
    assert reason in (compare("nemo", tmp_path)[0].reason or "")


def row(workload: str, measured: float, predicted: float | None, **more: Any) -> Compared:
    published = Published(workload, measured, more.get("held"), more.get("share"), "A100")
    found = None if predicted is None else Predicted(predicted, more.get("peak"))
    return Compared("f", 0, published, found, None if found else "because")


def test_figures_of_a_set() -> None:
    rows = [
        row("a", 1.0, 0.9, held=6e9, peak=5.4e9, share=0.5),
        row("a", 2.0, 0.8, held=1e9, peak=2e9, share=0.4),
        row("a", 3.0, 3.3, share=0.3),
        row("b", 1.0, 1.0, share=0.2),
        row("b", 5.0, None),
    ]
    figures = summarised(rows)
    assert (figures["rows"], figures["predicted"], figures["workloads"]) == (5, 4, 1)
    assert figures["error"] == pytest.approx((0.1 + 0.6 + 0.1 + 0) / 4)
    assert figures["bias"] == pytest.approx((-0.1 - 0.6 + 0.1) / 4)
    assert figures["spearman"] == pytest.approx(0.5)  # 1 2 3 beside 2 1 3
    assert figures["regret"] == figures["worst_regret"] == pytest.approx(1.0)
    assert figures["memory_error"] == pytest.approx((0.1 + 1.0) / 2)
    assert figures["memory_large_error"] == pytest.approx(0.1) and figures["memory_below"] == 1
    # 0.5 / 0.9, 0.4 / 0.4, 0.3 / 1.1, 0.2: the first two change places
    assert figures["utilisation"] == pytest.approx(0.8)


def test_tables_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "truth"
    folder.mkdir()
    for name in ("vtrain_single_node_a100.csv", "vtrain_multi_node_a100.csv"):
        write(folder / name, VTRAIN)
    assert main(["vtrain", str(folder)]) == 0
    assert "row by row" in capsys.readouterr().out
    assert main(["table", str(tmp_path)]) == 0  # only of the set that is there
    text = capsys.readouterr().out
    assert "predictions beside published measurements" in text and "mosaicml" not in text
    assert "vtrain vtrain_single_node_a100.csv" in text
    assert main(["table", str(tmp_path / "nothing")]) == 2
    assert "no set" in capsys.readouterr().err


def made_rows(count: int, **constants: float) -> list[Row]:
    """Rows of vTrain's columns whose seconds are hetplan's own with these constants."""
    rows: list[Row] = []
    for i in range(count):
        tensor, pipeline = [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2)][i % 5]
        layers, batch = [4, 8, 12][i % 3], [1, 2, 4][i // 5 % 3]
        values = (
            4, 32, batch, 1024, 16, layers, 512, tensor, 4 // tensor // pipeline, pipeline, 0
        )  # fmt: skip
        row = dict(zip(VTRAIN_COLUMNS, values, strict=True))
        job = vtrain_job(cells(row), single=False)
        seconds = predicted_seconds(
            posed_plan(job, posed_workload(job)), posed_workload(job), constants
        )
        rows.append({**row, "iteration time (ms)": 1000 * seconds})
    return rows


def test_a_set_is_calibrated_on_some_of_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = made_rows(20, **{"compute A100-SXM4-80GB": 1.4, "host": 0.6})
    write(tmp_path / "vtrain_multi_node_a100.csv", made)
    arguments = ["calibrate", "vtrain", str(tmp_path), "--rows", "12"]
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    constants, rest = document["calibration"], document["rest"]
    assert constants["compute"]["A100-SXM4-80GB"] == pytest.approx(1.4, rel=0.05)
    assert constants["host"] == pytest.approx(0.6, rel=0.1)
    assert "0 runs depend on it" in constants["refused"]["between"]  # it is one node
    assert len(document["runs"]) == 12 and rest["before"]["rows"] == rest["after"]["rows"] == 8
    assert rest["before"]["error"] > 0.1 and rest["after"]["error"] < 0.02
    assert main([*arguments, "--seed", "1"]) == 0
    assert "the other rows: before -> calibrated" in capsys.readouterr().out
    assert main([*arguments[:-1], "21"]) == 2
    assert "got 20, expected at least 21" in capsys.readouterr().err


def test_a_set_that_hetplan_predicts_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path / "vtrain_multi_node_a100.csv", made_rows(10))
    rest = calibrate_set("vtrain", tmp_path, 8, seed=0)
    assert rest.estimate.calibration is None and "hardly better" in rest.estimate.reason
    assert rest.before == rest.after and len(rest.after) == 2


def test_well_known_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["known", "--json"]) == 0
    runs = {run["name"]: run for run in json.loads(capsys.readouterr().out)["runs"]}
    points = {name: run["predicted"] - run["published"] for name, run in runs.items()}
    misses = {name for name, points_off in points.items() if abs(points_off) > 0.05}
    assert misses == MISSED and len(points) - len(misses) >= 8
    # Smith et al. 2022: 126 TFLOP/s with recomputation, which are 3/4 of them without.
    assert runs["MT-NLG 530B"]["published"] == pytest.approx(126 * 0.75 / 312, rel=0.01)
    assert main(["known"]) == 0
    assert "nothing is fitted" in capsys.readouterr().out


def test_sequence_parallelism_divides_what_lies_between_products() -> None:
    """Korthikanti et al. 2022, Table 4, a layer of the 22B model on 8 A100: 7.7 ms forward, and
    7.2 ms with sequence parallelism."""
    layer = transformer_layers(gpt(0), 2048)[1]
    spec = cluster(A100_80, 8).specs["A100-SXM4-80GB"]
    seconds = [
        layer_time(layer, Rates("A100-SXM4-80GB", spec, "fp16", stack), micro_batch=4, tensor=8)
        for stack in (EAGER, PARALLEL, replace(PARALLEL, gather_copies=True))
    ]
    assert 0.3e-3 < seconds[0].forward - seconds[1].forward < 1.5e-3
    assert seconds[1].forward < seconds[2].forward < seconds[0].forward + 2e-3


# MooreThreads/SimuMax@4dcaae5, docs/b200/b200_release_v1.2_summary.json (Apache-2.0).
SIMUMAX: dict[str, Any] = dict.fromkeys(
    ("dense_layers", "experts", "topk", "moe_ffn", "shared_ffn", "mla", "cp_comm", "etp"), ""
) | {
    "case": "llama3_405b_l4_tp4_pp1_dp2_mbc4_cef", "model": "llama3-405b", "gpu": "B200",
    "gpus": 8, "layers": 4, "hidden": 16384, "ffn": 53248, "heads": 128, "kv_groups": 16,
    "vocab": 128256, "sequence": 4096, "micro_batch": 1, "micro_batches": 4, "global_batch": 8,
    "tp": 4, "pp": 1, "cp": 1, "ep": 1, "dp": 2, "precision": "bf16", "recompute": "none",
    "distributed_optimizer": True, "sequence_parallel": True, "seconds": 0.476,
    "max_allocated_bytes": 56788897280,
}  # fmt: skip
STAGED = {
    "tp": 1, "pp": 2, "dp": 4, "global_batch": 16, "sequence_parallel": False, "seconds": 1.0746,
    "max_allocated_bytes": 93505086464,
}  # fmt: skip
SMALLER = {
    "layers": 12, "hidden": 8192, "ffn": 28672, "heads": 64, "kv_groups": 8, "seconds": 0.4098,
    "max_allocated_bytes": 41953287680,
}  # fmt: skip


def test_simumax(tmp_path: Path) -> None:
    """Megatron-LM's peaks on B200 within half a percent: unused gradients of weights, the head's
    backward pass and the gradients of a block's activations among them."""
    mixture: dict[str, object] = {
        "experts": 8, "topk": 2, "moe_ffn": 1024, "shared_ffn": 2048, "dense_layers": 1,
        "mla": True, "layers": 4, "hidden": 2048, "ffn": 8192, "heads": 16, "kv_groups": 16,
        "ep": 4, "tp": 1, "etp": 1, "dp": 8, "sequence_parallel": False,
    }  # fmt: skip
    changes: list[dict[str, Any]] = [
        {},
        STAGED,
        SMALLER,
        {"cp": 2, "tp": 2},
        mixture,
        {"recompute": "some"},
    ]
    rows = [{**SIMUMAX, **change} for change in changes]
    write(tmp_path / "simumax_b200.csv", rows)
    *measured, context, experts, unknown = compare("simumax", tmp_path)
    for row in measured:
        assert row.memory_error == pytest.approx(0.0, abs=0.005)
    for row in (context, experts):
        assert present(row.predicted).peak_bytes is not None
    assert unknown.reason == "recomputation some is not modelled"


def test_latent_attention_of_simumax_follows_from_the_models_name() -> None:
    columns = {**SIMUMAX, "experts": 8, "topk": 2, "moe_ffn": 1024, "mla": True}
    shapes = [
        simumax_job(cells({**columns, "model": name})).shape for name in ("deepseek-v3", "v2-lite")
    ]
    assert [present(shape.latent).query for shape in shapes] == [1536, None]
    assert {present(shape.latent).keys for shape in shapes} == {512}
