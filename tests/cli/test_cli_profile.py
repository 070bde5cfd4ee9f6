"""`hetplan profile predict`: the file that it writes, its defaults, and planning with numbers
replaced in it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from fakes.cli import Call
from hetplan.profiling.cluster import example_cluster
from hetplan.profiling.models import load_model
from hetplan.profiling.predict import predict
from hetplan.profiling.profile import load_profile

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
        assert float(row.split()[-1]) == pytest.approx(8 / sum(table.seconds()), rel=1e-3)


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


@pytest.mark.parametrize("command", [("plan",), ("profile", "predict"), ("plan", "search")])
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


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ("--micro-batches", "0"),
            "--micro-batches: not usable (got '0', expected whole numbers from 1 to 10000",
        ),
        (("--micro-batches", "1e3"), "--micro-batches: not usable (got '1e3'"),
        (("--micro-batches", "9" * 5000), "--micro-batches: not usable"),
        (("--micro-batches", ","), "--micro-batches: no number given"),
        (("--micro-batches", "1", "--global-batch", 8), "exclude each other"),
        (("--global-batch", 0), "global batch"),
        (("--tensor", "5"), "--tensor: not usable (got 5, expected a divisor of the model's heads"),
        (("--precision", "bf16"), "device V100-SXM2-16GB"),
        (("--sequence", "2000"), "learned positions"),
        (("-o", "no/such/place.json"), "no/such: no such folder"),
    ],
)
def test_nonsense_is_one_line(hetplan: Call, more: tuple[object, ...], message: str) -> None:
    assert message in hetplan(*GPT2, *more).error


@pytest.mark.parametrize("command", [("plan",), ("profile", "predict"), ("plan", "search")])
def test_a_missing_dimension_is_one_line(
    hetplan: Call, tmp_path: Path, command: tuple[str, ...]
) -> None:
    config = tmp_path / "tiny.json"
    config.write_text(json.dumps({key: value for key, value in TINY.items() if key != "n_embd"}))
    ran = hetplan(*command, "--model", config, *ARGUMENTS[command[-1]])
    expected = "the width of the hidden states, which every gpt2 configuration gives"
    assert ran.error == f"{config}: n_embd: key is missing (expected {expected})"


def test_what_has_to_be_said(hetplan: Call) -> None:
    assert "'--device'" in hetplan("profile", "measure", "--model", "gpt2").error
    assert "--model: missing" in hetplan("profile", "predict", "--cluster", "g4dn-4").error
    assert "'--cluster'" in hetplan("profile", "predict", "--model", "gpt2").error
