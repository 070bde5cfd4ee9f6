"""Profile files, and workloads: whether their parts fit together."""

from __future__ import annotations

import json
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from hetplan.errors import InputError
from hetplan.formulations.amp.data import AmpData
from hetplan.formulations.amp.pose import pose
from hetplan.formulations.amp.problem import compile_problem
from hetplan.profiling.frameworks import RESERVED_BYTES
from hetplan.profiling.hardware.cluster import GIB, Cluster, example_cluster
from hetplan.profiling.models.model import load_model
from hetplan.profiling.models.zoo import BUILT_IN
from hetplan.profiling.profiles.predict import (
    default_micro_batches,
    default_tensor_degrees,
    predict,
)
from hetplan.profiling.profiles.profile import Profile, load_profile
from hetplan.profiling.rates.times import Rates, layer_time
from hetplan.profiling.workload import Workload, make_workload
from present import present
from quick import rest_wide


@pytest.fixture(scope="module")
def mixed() -> Cluster:
    return example_cluster("amp-mixed")


@pytest.fixture(scope="module")
def profile(mixed: Cluster) -> Profile:
    return predict(load_model("gpt2", sequence=256), mixed, micro_batches=(1, 4), date="2025-01-31")


@pytest.mark.parametrize("name", ["p.json", "p.json.gz"])
def test_round_trip(profile: Profile, tmp_path: Path, name: str) -> None:
    profile.save(tmp_path / name)
    assert load_profile(tmp_path / name) == profile


def test_prediction_covers_types_degrees_and_sizes(profile: Profile, mixed: Cluster) -> None:
    assert profile.devices() == mixed.types
    assert {(t.device, t.tensor, t.micro_batch) for t in profile.tables} == {
        (d, tp, b) for d in mixed.types for tp in (1, 2, 4) for b in (1, 4)
    }
    assert profile.micro_batches("T4", 2) == (1, 4) and profile.micro_batches("T4", 8) == ()
    assert profile.provenance.kind == "predicted" and not profile.provenance.calibrated
    assert profile.provenance.date == "2025-01-31"


def test_prediction_is_the_analytical_time_layer_by_layer(profile: Profile, mixed: Cluster) -> None:
    model = load_model("gpt2", sequence=256)
    table = profile.table("T4", 2, 4)
    assert table is not None and profile.table("T4", 2, 3) is None
    for i, layer in enumerate(model.layers):
        t = layer_time(layer, Rates("T4", mixed.specs["T4"], "fp16"), micro_batch=4, tensor=2)
        assert (table.forward_seconds[i], table.backward_seconds[i]) == (t.forward, t.backward)
        assert table.layer_seconds()[i] == t.forward + t.backward
    assert [x.name for x in profile.layers] == [x.name for x in model.layers]
    assert sum(x.param_bytes for x in profile.layers) == 2 * model.params
    assert profile.layers[-1].held_param_bytes == profile.layers[-1].param_bytes + 2 * 50257 * 768


def test_precision_a_device_lacks_is_refused_by_name(mixed: Cluster) -> None:
    with pytest.raises(
        InputError, match=r"amp-mixed: device V100-SXM2-16GB: .*got 'bf16', expected fp16, fp32"
    ):
        predict(load_model("gpt2", precision="bf16"), mixed, micro_batches=(1,))
    with pytest.raises(InputError, match="nothing to predict"):
        predict(load_model("gpt2"), mixed, micro_batches=())


def broken(change: str = "version", value: Any = 1) -> Any:
    document: Any = {
        "format": "hetplan-profile",
        "version": 1,
        "model": "m",
        "sequence": None,
        "precision": "fp16",
        "provenance": {"kind": "measured", "source": "me", "date": "2025-01-31"},
        "layers": [
            {
                "name": "l",
                "param_bytes": 8,
                "activation_bytes": 2,
                "tensor_bytes": 0,
                "saved_bytes": 4,
            }
        ],
        "tables": [
            {
                "device": "T4",
                "tensor": 1,
                "micro_batch": 1,
                "forward_seconds": [0.1],
                "backward_seconds": [0.2],
            }
        ],
    }
    *parents, last = (int(key) if key.isdigit() else key for key in change.split("."))
    reduce(getitem, parents, document)[last] = value
    return document


TABLE = broken()["tables"][0]


@pytest.mark.parametrize(
    ("change", "value", "message"),
    [
        ("format", "hetplan-instance", "format: not a hetplan-profile file"),
        ("version", 2, "version"),
        ("precision", "int8", r"precision: .*got 'int8'"),
        ("sequence", 0, r"sequence: .*got 0"),
        ("surprise", 1, "surprise: unknown key"),
        ("provenance.date", "yesterday", r"provenance\.date: .*got 'yesterday'"),
        ("provenance.kind", "guessed", r"provenance\.kind: .*got 'guessed'"),
        ("layers.0.param_bytes", -1, r"layers\[0\]\.param_bytes: .*got -1"),
        (
            "layers.0.replicated_saved_bytes",
            5,
            r"layers\[0\]: replicated_saved_bytes is 5.*expected at most saved_bytes",
        ),
        (
            "tables.0.forward_seconds",
            [0.1, 0.1],
            r"tables\[0\]\.forward_seconds has 2 entries, expected one per layer \(1\)",
        ),
        ("tables.0.backward_seconds", [], r"tables\[0\]\.backward_seconds has 0 entries"),
        ("tables.0.backward_seconds", ["x"], r"tables\[0\]\.backward_seconds\[0\]: .*got 'x'"),
        ("tables.0.forward_seconds", [-0.1], r"tables\[0\]\.forward_seconds\[0\]: .*got -0.1"),
        ("tables.0.tensor", 0, r"tables\[0\]\.tensor: .*got 0"),
        ("tables", [], "tables: .*at least 1 item"),
        ("layers", [], "layers: .*at least 1 item"),
        ("tables", [TABLE, TABLE], r"tables\[1\] repeats tables\[0\]"),
    ],
)
def test_errors_name_the_place(tmp_path: Path, change: str, value: Any, message: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(broken()))
    assert load_profile(path).layers[0].tied_param_bytes == 0
    path.write_text(json.dumps(broken(change, value)))
    with pytest.raises(InputError, match=rf"p\.json: .*{message}|p\.json: {message}") as caught:
        load_profile(path)
    assert "\n" not in str(caught.value)


@settings(deadline=None)
@given(st.integers(1, 10**6))
def test_default_micro_batches_are_few_divisors(global_batch: int) -> None:
    sizes = default_micro_batches(global_batch)
    assert sizes[0] == 1 and list(sizes) == sorted(set(sizes)) and len(sizes) <= 7
    assert all(global_batch % b == 0 and b <= 64 for b in sizes)
    assert max(sizes) == max(b for b in range(1, 65) if global_batch % b == 0)


def test_default_sizes_and_degrees(mixed: Cluster) -> None:
    assert default_micro_batches(32) == (1, 2, 4, 8, 16, 32)
    assert default_micro_batches(720) == (1, 2, 4, 8, 16, 30, 60)
    assert default_tensor_degrees(load_model("gpt2-medium"), mixed) == (1, 2, 4)
    assert default_tensor_degrees(load_model("gpt2-xl"), mixed) == (1,)
    for unusable in (0, -4, 10**10):
        with pytest.raises(InputError, match="global batch is not usable"):
            default_micro_batches(unusable)


@pytest.fixture(scope="module")
def workload(mixed: Cluster) -> Workload:
    return make_workload("gpt2-amp", mixed, 32)


def test_from_files(tmp_path: Path, mixed: Cluster) -> None:
    config, cluster, profile = tmp_path / "m.json", tmp_path / "c.yaml", tmp_path / "p.json"
    config.write_text(
        '{"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}'
    )
    cluster.write_text(
        "format: hetplan-cluster\nversion: 1\nname: c\nnodes:\n"
        "  - {devices: 2, device: T4, intra_node_gbit_per_s: 50, network_gbit_per_s: 50}\n"
    )
    first = make_workload(config, cluster, 8, sequence=128, precision="fp32")
    first.profile.save(profile)
    again = make_workload(str(config), cluster, 8, sequence=128, precision="fp32", profile=profile)
    assert again.profile == first.profile
    assert (again.sequence, again.precision, again.tokens_per_iteration) == (128, "fp32", 1024)


def test_memory_facts(workload: Workload, mixed: Cluster) -> None:
    assert workload.state_bytes_per_param_byte == 8
    assert make_workload("gpt2", mixed, 4, precision="fp32").state_bytes_per_param_byte == 4
    assert workload.device_bytes() == {
        "V100-SXM2-16GB": 16 * GIB - RESERVED_BYTES, "T4": 15 * GIB - RESERVED_BYTES
    }  # fmt: skip
    tiny = Workload(workload.model, mixed, workload.profile, 32, reserved_bytes=1e15)
    assert set(tiny.device_bytes().values()) == {0.0}


@pytest.mark.parametrize(
    ("of", "change", "message"),
    [
        (
            ("gpt2-medium", None, "amp-mixed"),
            {},
            r"model differs .*got 'gpt2-medium', expected 'gpt2'",
        ),
        (("gpt2", 256, "amp-mixed"), {}, r"sequence differs .*got 256, expected 1024"),
        (
            ("gpt2", None, "g4dn-4"),
            {},
            r"no table for device type 'V100-SXM2-16GB' of cluster amp-mixed .*got 'T4'",
        ),
        (("gpt2", None, "amp-mixed"), {"precision": "fp32"}, "precision differs"),
        (
            ("gpt2", None, "amp-mixed"),
            {"layers": []},
            r"number of layers differs \(got 0, expected 14",
        ),
    ],
)
def test_mismatches_are_refused(
    of: tuple[str, int | None, str], change: dict[str, Any], message: str, mixed: Cluster
) -> None:
    name, sequence, cluster = of
    model = load_model(name, sequence=sequence)
    profile = predict(model, example_cluster(cluster), micro_batches=(1,))
    with pytest.raises(InputError, match=message):
        make_workload("gpt2", mixed, 32, profile=profile.model_copy(update=change))


# One of each family.
FAMILIES = [
    "bert-base", "bert-moe", "glm-67b", "gpt2", "llama-0.5b", "llama2-7b", "llama3-8b",
    "transgan-amp", "vgg19", "vit-base",
]  # fmt: skip


@pytest.mark.parametrize(
    "name", rest_wide([*FAMILIES, *sorted(set(BUILT_IN) - set(FAMILIES))], len(FAMILIES))
)
def test_every_model_poses_a_valid_amp_problem(name: str, mixed: Cluster) -> None:
    data = pose(make_workload(name, mixed, 16))
    assert AmpData.model_validate(data.model_dump()) == data
    assert list(compile_problem(data).configurations())


def test_amp_problem_carries_the_workload(workload: Workload, mixed: Cluster) -> None:
    data = pose(workload)
    assert [(d.type, d.node) for d in data.devices] == [(d.type, d.node) for d in mixed.devices]
    assert data.bandwidth == mixed.bandwidth().tolist() and data.global_batch == 32
    assert len(data.layers) == 26 and len(data.layer_seconds) == 2 * 3 * 6
    table = workload.profile.table("T4", 2, 8)
    posed = next(t for t in data.layer_seconds if (t.type, t.tensor, t.micro_batch) == ("T4", 2, 8))
    assert table is not None and posed.seconds == table.layer_seconds()
    # The head holds a copy of the tied embedding, and the embedding its own vectors.
    assert data.layers[-1].param_bytes == 2 * (52256 * 1024 + 2 * 1024)
    assert data.layers[0].param_bytes == 2 * (52256 + 1024) * 1024
    assert data.layers[1].tensor_bytes == 8 * 1024 * 1024
    assert data.memory is not None and data.memory.state_bytes_per_param_byte == 8
    assert data.memory.layer_bytes_per_sample[1] == 1024 * 1024 * 34 + 4 * 1024 * 16
    assert pose(workload, memory=False).memory is None


def test_an_interval_is_of_all_types_in_use(workload: Workload, mixed: Cluster) -> None:
    """The widest of their tables, whatever the types are handed over as."""
    ends = [present(table.interval) for table in workload.profile.tables]
    widest = min(low for low, _ in ends), max(high for _, high in ends)
    assert workload.interval(kind for kind in mixed.types) == widest
    alone = present(workload.interval(["V100-SXM2-16GB"]))
    assert alone != widest and widest[0] <= alone[0] < 1 < alone[1] <= widest[1]
    assert workload.interval([]) is None
