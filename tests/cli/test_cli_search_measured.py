"""`hetplan plan search` with what was measured: profile, operators, links (Astra, eq. 25, 26)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fakes.cli import Call
from hetplan.profiling.profiles.profile import Provenance
from hetplan.profiling.rates.efficiency import LinkCurve, LinkEfficiencyFile, OperatorData

A800 = "A800-SXM4-80GB"
SEARCH = ("plan", "search", "-m", "gpt2", "-g", "A800:16", "-b", 64, "--json", "--top", 100)
MADE = Provenance(kind="measured", source="made up", date="2026-01-01")


def strategies(hetplan: Call, *more: Any) -> dict[str, dict[str, Any]]:
    """The listed strategies by their own names, without sequence parallelism."""
    ran = hetplan(*SEARCH, "-p", "sequence_parallel=false", "-p", "offload=false", *more)
    assert ran.code == 0, ran.err
    return {json.dumps(one["strategy"]): one for one in ran.json["top"]}


def test_operators_of_a_second_each_make_slow_pipelines(hetplan: Call, tmp_path: Path) -> None:
    file = tmp_path / "operators.json"
    shapes: list[dict[str, Any]] = [
        {"kind": "product", "count": 1, "m": 2**e, "k": 2**e, "n": 2**e} for e in (9, 11, 13)
    ]
    moves: list[dict[str, Any]] = [{"kind": "elementwise"}] * 3
    OperatorData.model_validate(
        {
            "device": A800,
            "precision": "fp16",
            "element_bytes": 2,
            "flops_per_second": 312e12,
            "bytes_per_second": 2039e9,
            "provenance": MADE,
            "operators": [
                {**one, "elements": 4.0**e, "seconds": 1.0}
                for one, e in zip([*shapes, *moves], (9, 11, 13) * 2, strict=True)
            ],
        }
    ).save(file)
    narrow = ("-p", "tensor=1", "-p", "pipeline=1", "-p", "micro-batch=1,2,4")
    plain, slow = strategies(hetplan, *narrow), strategies(hetplan, *narrow, "--efficiency", file)
    assert plain.keys() == slow.keys()
    for name, one in plain.items():
        assert slow[name]["pipeline_seconds"] > 100 * one["pipeline_seconds"]
    ran = hetplan(*SEARCH, "--efficiency", file, "--precision", "bf16")
    assert ran.code == 2 and "of another precision" in ran.err


def test_learned_links_replace_bandwidth_and_latency(hetplan: Call, tmp_path: Path) -> None:
    """A link that reaches a thousandth of its bandwidth takes a thousand times as long, at once."""
    file = tmp_path / "links.json"
    LinkEfficiencyFile(
        device=A800,
        backend="nccl",
        provenance=MADE,
        bytes_per_second={"node": 2e11},
        trained_on=20,
        kept_apart=1,
        error=0.0,
        plain_error=0.0,
        line_error=0.0,
        curves=[
            LinkCurve(operation="all-reduce", group="node", ranks=8, bytes=[1.0], share=[1e-3])
        ],
    ).save(file)
    only = ("-p", "tensor=1", "-p", "pipeline=1", "-p", "overlap=false", "-p", "micro-batch=4")
    (one,) = strategies(hetplan, *only, "-p", "recompute=none", "--links", file, "-p",
                        "distributed_optimizer=false").values()  # fmt: skip
    gradients = 124_439_808 * 2
    assert one["reduction_seconds"] == pytest.approx(2 * 15 / 16 * gradients / (200e9 / 1000))
    plain = strategies(hetplan, *only, "-p", "recompute=none", "-p", "distributed_optimizer=false")
    assert next(iter(plain.values()))["reduction_seconds"] < one["reduction_seconds"] / 100


def test_a_profile_decides_over_what_is_tried(hetplan: Call, tmp_path: Path) -> None:
    """Its degrees and micro-batches alone, at its seconds; one of another device is refused."""
    cluster, profile = tmp_path / "lab.yaml", tmp_path / "profile.json"
    cluster.write_text(
        "format: hetplan-cluster\nversion: 1\nname: lab\nnodes:\n  - {count: 2, devices: 8, "
        f"device: {A800}, intra_node_gbit_per_s: 1600, network_gbit_per_s: 1600}}\n"
    )
    made = hetplan(
        "profile", "predict", "--model", "gpt2", "--cluster", cluster, "--micro-batches", "1,4",
        "--tensor", "1,2", "-o", profile,
    )  # fmt: skip
    assert made.code == 0
    plain = strategies(hetplan, "-p", "tensor=1,2", "-p", "micro-batch=1,4")
    same = strategies(hetplan, "--profile", profile)
    assert same.keys() == plain.keys()
    for name, one in plain.items():
        assert same[name]["seconds"] == pytest.approx(one["seconds"], rel=1e-6)
    document = json.loads(profile.read_text())
    for table in document["tables"]:
        table["forward_seconds"] = [10 * s for s in table["forward_seconds"]]
        table["backward_seconds"] = [10 * s for s in table["backward_seconds"]]
    profile.write_text(json.dumps(document))
    slow = strategies(hetplan, "--profile", profile)
    assert min(s["seconds"] for s in slow.values()) > 5 * min(s["seconds"] for s in same.values())
    for refused in (("-g", "H100:16"), ("-m", "gpt2-medium")):
        ran = hetplan("plan", "search", "-m", "gpt2", "-g", "A800:16", *refused,
                      "--profile", profile)  # fmt: skip
        assert ran.code == 2 and str(profile) in ran.err
