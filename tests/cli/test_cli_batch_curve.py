"""`hetplan profile batch-curve`: from the device at hand into a file and into a plan."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fakes.cli import Call
from hetplan.profiling.measured import load_batch_curve

BASE = ("profile", "batch-curve", "--model", "gpt2", "--sequence", 16, "--precision", "fp32")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("profile", "--model", "gpt2"), "missing option '--device'"),
        (("profile", "batch-curve"), "missing option '--model'"),
        (BASE, "--memory-gib: missing"),
        ((*BASE, "--cluster", "poplar-a"), "no such option: --cluster"),
        ((*BASE, "--tensor", 2), "no such option: --tensor"),
        (
            (*BASE, "--memory-gib", -1),
            "--memory-gib: not usable (got -1.0, expected 1e-09 to 1e+15)",
        ),
        ((*BASE, "--memory-gib", 1, "--repeats", 0), "invalid value for '--repeats'"),
    ],
)
def test_usage(hetplan: Call, arguments: tuple[object, ...], message: str) -> None:
    assert message in hetplan(*arguments).error


def test_without_torch_one_line_says_what_to_install(
    hetplan: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    ran = hetplan(*BASE, "--memory-gib", 1)
    assert ran.code != 0 and ran.out == ""
    assert (
        ran.err.count("\n") == 1 and "measuring needs torch" in ran.err and "[runtime]" in ran.err
    )


def test_a_curve_goes_from_the_device_into_a_plan(hetplan: Call, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is an extra of hetplan")
    path = tmp_path / "curve.json"
    base = ("--model", "gpt2", "--sequence", 16, "--precision", "fp32")
    limits = ("--memory-gib", 4, "--devices", 4, "--max-micro-batch", 3, "--repeats", 1)
    ran = hetplan(
        "profile",
        "batch-curve",
        *base,
        *limits,
        "--device",
        "cpu",
        "--device-type",
        "T4",
        "-o",
        path,
    )
    assert ran.code == 0, ran.err
    assert "largest micro-batch: ZeRO 0: 3" in ran.out and "micro-batch 1:" in ran.err
    assert "stopped at --max-micro-batch 3: more may fit" in ran.out
    curve = load_batch_curve(path)
    assert curve.tried_up_to == 3
    assert curve.provenance.kind == "measured" and "torch" in curve.provenance.source
    plan = (
        "plan",
        *base,
        "--cluster",
        "poplar-b",
        "--global-batch",
        12,
        "--strategies",
        "poplar",
        "-q",
    )
    found = hetplan(*plan, "--set", f"poplar.curves={path}", "--set", "poplar.zero=0", "--json")
    assert found.code == 0, found.err
    best = found.json["candidates"][0]
    samples = [max(b["samples"] for b in r["micro_batches"]) for r in best["plan"]["replicas"]]
    devices = [r["stages"][0]["devices"][0][0] for r in best["plan"]["replicas"]]
    types = found.json["candidates"][0]["plan"]["devices"]
    assert all(
        size <= 3 for size, d in zip(samples, devices, strict=True) if types[d]["type"] == "T4"
    )
    assert (
        hetplan(*plan, "--set", f"poplar.curves={path}", "--global-batch", 13, "--json").code == 0
    )


def test_nothing_fits_is_exit_code_1(hetplan: Call) -> None:
    pytest.importorskip("torch", reason="torch is an extra of hetplan")
    ran = hetplan(
        "profile",
        "batch-curve",
        "--model",
        "gpt2",
        "--memory-gib",
        0.1,
        "--sequence",
        16,
        "--precision",
        "fp32",
    )
    assert ran.code == 1 and "no sample fits" in ran.out
