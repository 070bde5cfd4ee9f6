"""Megatron-LM: its flags and ranks, read back by rules of its own, are the plan's."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from export.by_hand import BLOCKS, UNEVEN, cut, kinds_of, plan_of, run_script
from hetplan.runtime.export import export
from hetplan.runtime.export.grid import grid_of
from hetplan.runtime.export.megatron import layout, stage_flags
from hetplan.runtime.plan import Plan


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
    return re.sub(r"(\w)\*(\d+)", lambda found: found[1] * int(found[2]), layout_text)


def stages_of_flags(given: argparse.Namespace) -> list[list[str]]:
    """What each virtual stage holds, by Megatron-LM's rules: E, t and L."""
    pipeline = given.pipeline_model_parallel_size
    if given.pipeline_model_parallel_layout:
        return [list(expanded(part)) for part in given.pipeline_model_parallel_layout.split("|")]
    chunks = 1
    if given.num_layers_per_virtual_pipeline_stage:
        chunks = given.num_layers // pipeline // given.num_layers_per_virtual_pipeline_stage
    total = pipeline * chunks
    first, last = given.decoder_first_pipeline_num_layers, given.decoder_last_pipeline_num_layers
    ends = sum(end is not None for end in (first, last))
    rest = given.num_layers - (first or 0) - (last or 0)
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
            given = megatron_parser().parse_args(one["words"][3:])
    tp, pp = given.tensor_model_parallel_size, given.pipeline_model_parallel_size
    dp = plan.world_size // (tp * pp)
    for i, replica in enumerate(plan.replicas):
        for j, stage in enumerate(replica.stages):
            for r, device in enumerate(stage.devices[0]):
                assert placed[r + tp * (i + dp * j)] == device
    assert dp == len(plan.replicas)
    assert stages_of_flags(given) == kinds_of(plan)
    (batches,) = plan.replicas[0].micro_batches
    assert (given.micro_batch_size, given.global_batch_size) == (
        batches.samples,
        plan.workload.global_batch,
    )
    assert given.global_batch_size == dp * batches.count * batches.samples
    assert (given.num_layers, given.seq_length) == (BLOCKS, 128)
    assert (given.bf16, given.fp16) == (True, False)
    assert (given.recompute_granularity or "none") == plan.recomputation
    assert (given.recompute_method is not None) == (plan.recomputation == "full")
    assert given.use_distributed_optimizer == (plan.zero == 1)


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
    plan = plan_of(stages)
    assert stage_flags(plan, grid_of(plan, "Megatron-LM")) == flags


@given(st.lists(st.integers(1, 6), min_size=2, max_size=6), st.data())
def test_any_layout_reads_back(sizes: list[int], data: st.DataObject) -> None:
    total = sum(sizes)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    ranges = list(zip([0, *ends[:-1]], ends, strict=True))
    blocks = total - 2
    if blocks < 1:
        return
    parts = expanded(layout(ranges, blocks)).split("|")
    assert [len(part) for part in parts] == sizes
    assert "".join(parts) == "E" + "t" * blocks + "L"


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
