"""`hetplan profile`: predictions, curves measured on the device at hand, traced modules; the files
that they write, and planning with those."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fakes.cli import Call
from hetplan.profiling.hardware.cluster import example_cluster
from hetplan.profiling.models.model import load_model
from hetplan.profiling.profiles.batch_curve import BatchCurve
from hetplan.profiling.profiles.predict import predict
from hetplan.profiling.profiles.profile import load_profile

GPT2 = ("profile", "predict", "--model", "gpt2", "--cluster", "amp-mixed", "--sequence", 128)
TINY = {
    "model_type": "gpt2",
    "n_layer": 4,
    "n_head": 4,
    "n_embd": 64,
    "vocab_size": 100,
    "n_positions": 32,
}
ARGUMENTS: dict[str, tuple[object, ...]] = {
    "plan": ("--cluster", "g4dn-4", "--global-batch", 32, "--strategies", "dp", "--json"),
    "predict": ("--cluster", "g4dn-4", "--json"),
    "search": ("--gpus", "T4:4", "--global-batch", 32, "--precision", "fp16", "--json"),
    "fits": ("--cluster", "g4dn-4", "--json"),
    "what-if": (
        "--cluster",
        "g4dn-4",
        "--global-batch",
        32,
        "--strategies",
        "dp",
        "--json",
        "--network-gbit-per-s",
        100,
        "-q",
    ),
}


@pytest.mark.parametrize("name", ["p.json", "p.json.gz"])
def test_the_file_is_the_prediction(hetplan: Call, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    ran = hetplan(
        *GPT2, "--micro-batches", "4,1", "--tensor", "2", "--precision", "fp32", "-o", path
    )
    assert (ran.code, ran.err) == (0, "")
    model = load_model("gpt2", sequence=128, precision="fp32")
    found = load_profile(path)
    assert found == predict(
        model,
        example_cluster("amp-mixed"),
        micro_batches=(1, 4),
        tensor_degrees=(2,),
        date=found.provenance.date,
    )
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")
    if name.endswith(".gz"):
        assert json.loads(gzip.decompress(path.read_bytes()))["provenance"]["kind"] == "predicted"


def test_sizes_and_degrees_by_default(hetplan: Call) -> None:
    tables = hetplan(*GPT2, "--json").json["tables"]
    assert {t["micro_batch"] for t in tables} == {1, 2, 4, 8, 16, 32, 64}
    assert {t["tensor"] for t in tables} == {1, 2, 4}
    assert {t["device"] for t in tables} == {"V100-SXM2-16GB", "T4"}
    tables = hetplan(*GPT2, "--json", "--global-batch", 24).json["tables"]
    assert {t["micro_batch"] for t in tables} == {1, 2, 4, 8, 12, 24}


def test_a_row_per_table_for_people(hetplan: Call) -> None:
    ran = hetplan(*GPT2, "--micro-batches", "8", "--tensor", "1")
    profile = predict(
        load_model("gpt2", sequence=128),
        example_cluster("amp-mixed"),
        micro_batches=(8,),
        tensor_degrees=(1,),
    )
    title, _, _, *rows = ran.out.splitlines()
    assert title.startswith(
        "predicted profile of gpt2 (124.4 M parameters, 14 layers, 128 tokens per sample"
    )
    for row, table in zip(rows, profile.tables, strict=False):
        assert row.split()[:3] == [table.device, "1", "8"]
        assert float(row.split()[-1]) == pytest.approx(8 / sum(table.layer_seconds()), rel=1e-3)


def test_numbers_replaced_in_the_file_change_the_plan(hetplan: Call, tmp_path: Path) -> None:
    config, path = tmp_path / "tiny.json", tmp_path / "p.json"
    config.write_text(json.dumps(TINY))
    common = ("--model", config, "--cluster", "g4dn-4", "--global-batch", 32)
    assert hetplan("profile", "predict", *common, "-o", path).code == 0

    def seconds(*more: object) -> float:
        ran = hetplan("plan", *common, "--strategies", "dp", "--json", *more)
        value = ran.json["candidates"][0]["predicted_seconds"]
        assert isinstance(value, float)
        return value

    assert seconds("--profile", path) == seconds()
    document = json.loads(path.read_text())
    for table in document["tables"]:
        table["backward_seconds"] = [s + 0.5 for s in table["backward_seconds"]]
    document["provenance"] |= {"kind": "measured", "source": "by hand"}
    path.write_text(json.dumps(document))
    # 16 devices take two samples each at once, so that every layer is paid once.
    assert seconds("--profile", path) == pytest.approx(seconds() + 0.5 * len(document["layers"]))


@pytest.mark.parametrize(
    "command",
    [("plan",), ("profile", "predict"), ("plan", "search"), ("fits",), ("plan", "what-if")],
)
def test_what_is_assumed_of_a_model_is_told_once(
    hetplan: Call, tmp_path: Path, command: tuple[str, ...]
) -> None:
    config = tmp_path / "tiny.json"
    config.write_text(json.dumps(TINY))
    ran = hetplan(*command, "--model", config, *ARGUMENTS[command[-1]])
    assert ran.code == 0 and ran.json
    told = (
        f"hetplan: {config}: assumed, as transformers does: n_inner = 256, "
        "tie_word_embeddings = true\n"
    )
    assert ran.err == told


@pytest.mark.parametrize("command", [("plan",), ("profile", "predict"), ("plan", "search")])
def test_a_missing_dimension_is_one_line(
    hetplan: Call, tmp_path: Path, command: tuple[str, ...]
) -> None:
    config = tmp_path / "tiny.json"
    config.write_text(json.dumps({key: value for key, value in TINY.items() if key != "n_embd"}))
    ran = hetplan(*command, "--model", config, *ARGUMENTS[command[-1]])
    expected = (
        "the width of the hidden states, without which the size of this gpt2 model is not known"
    )
    assert ran.error == f"{config}: n_embd: key is missing (expected {expected})"


CURVE = ("profile", "batch-curve", "--model", "gpt2", "--sequence", 16, "--precision", "fp32")


def test_without_torch_one_line_says_what_to_install(
    hetplan: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [name for name in sys.modules if name.startswith("hetplan.runtime.measuring")]:
        monkeypatch.delitem(sys.modules, name)
    ran = hetplan(*CURVE, "--memory-gib", 1)
    assert ran.code != 0 and ran.out == ""
    assert (
        ran.err.count("\n") == 1 and "measuring needs torch" in ran.err and "[runtime]" in ran.err
    )


def test_a_curve_goes_from_the_device_into_a_plan(hetplan: Call, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is an extra of hetplan")
    path, model = tmp_path / "curve.json", tmp_path / "tiny.json"
    sizes = {"vocab_size": 500, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}
    model.write_text(json.dumps({"model_type": "gpt2", **sizes}))
    measured = (*CURVE[:3], model, *CURVE[4:])
    limits = ("--memory-gib", 4, "--devices", 4, "--max-micro-batch", 3, "--repeats", 1)
    ran = hetplan(*measured, *limits, "--device", "cpu", "--device-type", "T4", "-o", path)
    assert ran.code == 0, ran.err
    assert "largest micro-batch: ZeRO 0: 3" in ran.out and "micro-batch 1:" in ran.err
    assert "stopped at --max-micro-batch 3: more may fit" in ran.out
    curve = BatchCurve.load(path)
    assert curve.tried_up_to == 3
    assert curve.provenance.kind == "measured" and "torch" in curve.provenance.source
    plan = (
        "plan",
        *measured[2:],
        "--cluster",
        "poplar-b",
        "--strategies",
        "poplar",
        "-q",
        "--json",
    )
    settings = ("--set", f"poplar.curves={path}", "--set", "poplar.zero=0", "--global-batch", 12)
    best = hetplan(*plan, *settings).json["candidates"][0]["plan"]
    for replica in best["replicas"]:
        device = best["devices"][replica["stages"][0]["devices"][0][0]]
        largest = max(batch["samples"] for batch in replica["micro_batches"])
        assert device["type"] != "T4" or largest <= 3


@pytest.mark.engine
def test_one_command_measures_plans_and_runs(
    hetplan: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two kinds of devices, which this CPU stands for, one with room for few samples."""
    pytest.importorskip("torch", reason="torch is an extra of hetplan")
    config, cluster, output = (tmp_path / n for n in ("config.json", "lab.yaml", "plan.json"))
    config.write_text(json.dumps(TINY))
    links = {"devices": 1, "intra_node_gbit_per_s": 80, "network_gbit_per_s": 10}
    card = {"peak_tflops": {"fp32": 1}, "memory_gb_per_s": 20, "source": "this machine"}
    sizes = {"roomy": 1.9, "narrow": 1.583}
    document = {
        "format": "hetplan-cluster", "version": 1, "name": "two-kinds",
        "nodes": [{"count": 1, "device": name, **links} for name in sizes],
        "devices": {name: {"memory_gib": size, **card} for name, size in sizes.items()},
    }  # fmt: skip
    cluster.write_text(json.dumps(document))
    asked = (
        "plan",
        "--model",
        config,
        "--cluster",
        cluster,
        "--precision",
        "fp32",
        "--sequence",
        8,
    )
    planned = ("--global-batch", 8, "--strategies", "poplar", "--set", "poplar.zero=0")
    measured = (*planned, "--measure", "cpu", "--run", 2)
    runs: list[subprocess.CompletedProcess[str]] = []
    real = subprocess.run

    def heard(*words: Any, **more: Any) -> subprocess.CompletedProcess[str]:
        runs.append(real(*words, **{**more, "stdout": subprocess.PIPE, "text": True}))
        return runs[-1]

    monkeypatch.setattr(subprocess, "run", heard)
    ran = hetplan(*asked, *measured, "-q", "--json", "-o", output)
    assert ran.code == 0, ran.err
    roomy, narrow = (BatchCurve.load(tmp_path / f"plan-{name}.json") for name in sizes)
    assert (roomy.device, roomy.largest[0], roomy.devices) == ("roomy", 8, 2)
    assert narrow.largest[0] == 5
    best = ran.json["candidates"][ran.json["winner"]]
    assert best["predicted_seconds"] == best["objective"] and not best["replayed"]
    saved = json.loads(output.read_text())
    for plan in (best["plan"], saved):
        plan["inputs"].pop("files")  # paths from the folder of each
    assert best["plan"] == saved | {"origin": best["plan"]["origin"]}
    assert "measured batch curves: roomy, narrow" in best["plan"]["origin"]
    assert " on CPUs" in runs[0].stdout and "at step 1" in runs[0].stdout
    refused = hetplan(*asked, "--global-batch", 8, "--measure", "cpu")
    assert refused.code == 2 and "--measure and --run need --output" in refused.err


def test_the_run_behind_a_plan_gets_the_same_model(
    hetplan: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="tracing needs torch")
    asked: list[Sequence[str]] = []

    def heard(words: Sequence[str], *, json: bool) -> int:
        asked.append(words)
        return 0

    monkeypatch.setattr("hetplan.cli.plan.run_here", heard)
    output, mine = tmp_path / "plan.json", "fakes.networks:text"
    words = ("--cluster", "g4dn-4", "--global-batch", 16, "--strategies", "dp", "--run", 3)
    hetplan("plan", *words, "-o", output, "-q", "--factory", mine)
    hetplan("plan", *words, "-o", output, "-q", "--model", "gpt2")
    common = [str(output), "--steps", "3", "--device", "auto"]
    assert asked == [[*common, "--factory", mine], common]
    stated = json.loads(output.read_text())
    assert stated["workload"]["model"] == "gpt2" and "shape" in stated["inputs"]["model"]


def test_nothing_fits_is_exit_code_1(hetplan: Call) -> None:
    pytest.importorskip("torch", reason="torch is an extra of hetplan")
    ran = hetplan(*CURVE, "--memory-gib", 0.1)
    assert ran.code == 1 and "no sample fits" in ran.out


def test_a_traced_module_is_profiled_and_planned(hetplan: Call, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="tracing needs torch")
    profile, model = tmp_path / "profile.json", tmp_path / "model.json"
    on = ("--cluster", "g4dn-4")
    predict = ("profile", "predict", *on, "--micro-batches", "1,2,4")
    factory = ("--factory", "fakes.networks:text", "--model", "mine", "--model-output", model)
    ran = hetplan(*predict, *factory, "-o", profile)
    assert ran.code == 0 and "operators in 5 layers" in ran.err
    found = load_profile(profile)
    assert (found.model, found.sequence, {t.tensor for t in found.tables}) == ("mine", 16, {1})
    again = hetplan(*predict, "--model", model, "--json").json
    assert again["tables"] == json.loads(profile.read_text())["tables"]
    plan = ("plan", "--model", model, *on, "--global-batch", 16, "--strategies", "dp", "--json")
    assert hetplan(*plan, "--profile", profile).json["winner"] == 0
    assert hetplan(*plan, "--sequence", 8).code == 2
    document = json.loads(model.read_text())
    document["layers"][1]["operators"] = 7
    model.write_text(json.dumps(document))
    assert "layers[1].operators is 7" in hetplan(*plan).error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--factory", "fakes.networks:nothing", "--cluster", "g4dn-4"), "cannot be imported"),
        (("--factory", "fakes.networks:text"), "--cluster"),
        (("--model", "gpt2", "--cluster", "g4dn-4", "--model-output", "m"), "--factory"),
    ],
)
def test_nonsense_about_factories(hetplan: Call, arguments: tuple[str, ...], message: str) -> None:
    pytest.importorskip("torch", reason="tracing needs torch")
    assert message in hetplan("profile", "predict", *arguments).error
