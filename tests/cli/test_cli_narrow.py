"""Products in 8 and 4 bits: planned where devices have units for them, exported, refused by name
elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fakes.cli import Call

CLUSTER = """format: hetplan-cluster
version: 1
name: two
nodes:
  - {{count: 2, devices: 4, device: {device}, intra_node_gbit_per_s: 2400,
     network_gbit_per_s: 400}}
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    file = tmp_path / "two.yaml"
    file.write_text(CLUSTER.format(device="B200"), encoding="utf-8")
    return file


def asked(cluster: Path, stack: str, output: Path, precision: str = "bf16") -> list[object]:
    """A plan of one family."""
    return [
        "plan", "--model", "llama2-7b", "--cluster", cluster, "--global-batch", 64, "--stack",
        stack, "--precision", precision, "--strategies", "astra", "-o", output, "-q",
    ]  # fmt: skip


def test_fewer_bits_are_faster_and_exported(hetplan: Call, cluster: Path, tmp_path: Path) -> None:
    seconds = []
    for stack in ("fused", "fp8", "fp4"):
        plan = tmp_path / f"{stack}.json"
        assert hetplan(*asked(cluster, stack, plan)).code == 0
        seconds.append(json.loads(plan.read_text())["prediction"]["predicted_seconds"])
        flags = hetplan("export", plan, "--to", "megatron").out
        assert ("--fp8-format hybrid" in flags) == (stack == "fp8")
        assert ("--fp4-format e2m1" in flags) == (stack == "fp4")
        bridge = hetplan("export", plan, "--to", "bridge").out
        assert ("fp8: hybrid" in bridge) == (stack == "fp8")
        recipe = {"fp8": "_with_fp8_delayed_scaling", "fp4": "_with_nvfp4"}.get(stack, "")
        assert f"mixed_precision: bf16{recipe}_mixed\n" in bridge
        if stack != "fused":
            ran = hetplan("run", plan, "--steps", 1, "-q")
            assert ran.code == 2 and f"no products in {stack}" in ran.err
            refused = hetplan("export", plan, "--to", "deepspeed")
            assert refused.code == 2 and f"products in {stack}" in refused.error
    assert seconds[0] > seconds[1] > seconds[2]


@pytest.mark.parametrize(
    ("device", "stack", "precision"),
    [
        ("V100-SXM2-32GB", "fp8", "fp16"),
        ("H100-SXM5-80GB", "fp4", "bf16"),
        ("H100-SXM5-80GB", "fp8", "fp32"),
    ],
)
def test_devices_without_units_are_refused(
    hetplan: Call, cluster: Path, tmp_path: Path, device: str, stack: str, precision: str
) -> None:
    cluster.write_text(CLUSTER.format(device=device), encoding="utf-8")
    output = tmp_path / "plan.json"
    ran = hetplan(*asked(cluster, stack, output, precision))
    assert ran.code == 2 and f"stack {stack}, {precision}" in ran.error and not output.exists()
