"""`--adapters`, `--base` and `--optimizer` of the commands that plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fakes.cli import Call

ADAPTED = ("--adapters", "lora:8", "--base", "4")


def test_fits_counts_what_is_held_and_what_is_trained(hetplan: Call) -> None:
    job = ("fits", "--model", "gpt2", "--cluster", "amp-mixed", "--zero", "0", "--json")
    full, frozen, narrow = (
        hetplan(*job, *more).json["layouts"][0]["stages"][0]["bytes"]
        for more in ((), ("--adapters", "lora:8"), (*ADAPTED, "--optimizer", "adam-8bit"))
    )
    trained = frozen["gradients"] / 2
    assert trained == 12 * 8 * (768 + 3 * 768 + 2 * 768 + 2 * 5 * 768)
    assert frozen["weights"] == full["weights"] + 2 * trained
    assert narrow["weights"] < 0.7 * frozen["weights"]
    assert frozen["optimizer"] == 12 * trained
    assert narrow["optimizer"] == pytest.approx(trained * (4 + 2 * (1 + 4 / 256)))
    assert narrow["casts"] == 2 * 768 * 4 * 768 and frozen["casts"] == 0


def test_a_plan_keeps_its_adapters_and_is_shown_with_them(
    hetplan: Call, cluster: Path, two_blocks: Path, tmp_path: Path
) -> None:
    written = tmp_path / "plan.json"
    job = ("--model", two_blocks, "--cluster", cluster, "--global-batch", "8", "--quiet")
    ran = hetplan("plan", *job, *ADAPTED, "--strategies", "poplar,hap,dp", "-o", written, "--all")
    assert ran.code == 0
    assert " trained) on " in ran.out
    assert "no rule for adapters beside frozen weights" in ran.out  # of hap
    shape = json.loads(written.read_text())["inputs"]["model"]["shape"]
    assert shape["adapters"] == {"rank": 8, "base_bits": 4, "joint": "qkv"}
    shown = hetplan("show", written)
    assert shown.code == 0 and "per iteration" in shown.out
    refused = hetplan("export", written, "--to", "megatron")
    assert refused.code == 2
    assert "megatron cannot express adapters beside frozen weights" in refused.error
    ran = hetplan("run", written, "--steps", "1", "--device", "cpu")
    assert ran.code == 2 and "have no adapters beside frozen weights" in ran.error


def test_astras_search_takes_adapters(hetplan: Call) -> None:
    job = ("plan", "search", "--model", "llama2-7b", "--gpus", "A100-SXM4-80GB:8", "-b", "8")
    plain, adapted = (
        hetplan(*job, "--json", *more).json["top"][0] for more in ((), ("--adapters", "lora:8"))
    )
    assert adapted["seconds"] < plain["seconds"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--base", "4"), "--base: not usable (got 4, expected --adapters beside it)"),
        (("--adapters", "lora:8", "--base", "5"), "--base: bits of the frozen weights"),
        (("--adapters", "lora:8:q"), "--adapters: gpt2 has no module 'q'"),
        (
            ("--optimizer", "adam-8bit", "--moment-bytes", "2"),
            "--moment-bytes: not usable (got 2.0, expected none with adam-8bit)",
        ),
    ],
)
def test_what_is_no_setting_is_refused_in_one_line(
    hetplan: Call, options: tuple[str, ...], message: str
) -> None:
    ran = hetplan("fits", "--model", "gpt2", "--cluster", "amp-mixed", *options)
    assert ran.code == 2 and message in ran.error and len(ran.err.splitlines()) == 1
