"""Workloads: parts that fit together, parts that do not, and the AMP problem posed from one."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetplan.errors import InputError
from hetplan.formulations.amp.data import AmpData
from hetplan.formulations.amp.pose import pose
from hetplan.formulations.amp.problem import compile_problem
from hetplan.profiling.catalogue import GIB
from hetplan.profiling.cluster import Cluster, example_cluster
from hetplan.profiling.models import load_model
from hetplan.profiling.predict import predict
from hetplan.profiling.profile import Profile
from hetplan.profiling.workload import RESERVED_BYTES, Workload, make_workload
from hetplan.profiling.zoo import BUILT_IN


@pytest.fixture(scope="module")
def mixed() -> Cluster:
    return example_cluster("amp-mixed")


@pytest.fixture(scope="module")
def workload(mixed: Cluster) -> Workload:
    return make_workload("gpt2-amp", mixed, 32)


def profile_of(name: str, cluster: Cluster, sequence: int | None = None) -> Profile:
    return predict(load_model(name, sequence=sequence), cluster, micro_batches=(1,))


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


def test_mismatches_are_refused(mixed: Cluster) -> None:
    other = example_cluster("g4dn-4")
    gpt2 = load_model("gpt2")
    cases = [
        (profile_of("gpt2-medium", mixed), r"another model \(got 'gpt2-medium', expected gpt2\)"),
        (profile_of("gpt2", mixed, 256), r"sequence differs .*got 256, expected 1024"),
        (
            profile_of("gpt2", other),
            r"no table for device type 'V100-SXM2-16GB' of cluster amp-mixed .*got 'T4'",
        ),
        (profile_of("gpt2", mixed).model_copy(update={"precision": "fp32"}), "precision differs"),
        (
            profile_of("gpt2", mixed).model_copy(update={"layers": []}),
            r"number of layers differs \(got 0, expected 14",
        ),
    ]
    for profile, message in cases:
        with pytest.raises(InputError, match=message):
            make_workload(gpt2, mixed, 32, profile=profile)
    with pytest.raises(InputError, match="global batch is not usable"):
        make_workload(gpt2, mixed, 0, profile=profile_of("gpt2", mixed))


@pytest.mark.parametrize("name", sorted(BUILT_IN))
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
    assert table is not None and posed.seconds == table.seconds()
    # The head holds a copy of the tied embedding, and the embedding its own vectors.
    assert data.layers[-1].param_bytes == 2 * (52256 * 1024 + 2 * 1024)
    assert data.layers[0].param_bytes == 2 * (52256 + 1024) * 1024
    assert data.layers[1].tensor_bytes == 8 * 1024 * 1024
    assert data.memory is not None and data.memory.state_bytes_per_param_byte == 8
    assert data.memory.layer_bytes_per_sample[1] == 1024 * 1024 * (34 + 5 * 16)
    assert pose(workload, memory=False).memory is None


def test_tables_of_other_devices_are_left_out(mixed: Cluster) -> None:
    profile = profile_of("gpt2", mixed)
    only = example_cluster("g4dn-4")
    data = pose(make_workload(load_model("gpt2"), only, 16, profile=profile))
    assert {t.type for t in data.layer_seconds} == {"T4"}
