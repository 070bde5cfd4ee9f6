"""A workload as Ditto's problem, and a template as a table."""

from __future__ import annotations

import pytest

from ditto.ditto_cases import workload_on
from hetplan.formulations.ditto.family import FAMILY
from hetplan.formulations.ditto.pose import group_size, micro_batch_sizes, pose
from hetplan.formulations.ditto.templates import describe
from hetplan.solvers.registry import solve


def test_posing_takes_times_bandwidths_and_memory_from_the_workload_on() -> None:
    w = workload_on(
        {"count": 2, "devices": 2, "device": "V100-SXM2-16GB"}, {"devices": 2, "device": "T4"}
    )
    assert micro_batch_sizes(w) == [1, 2, 4, 8]
    data = pose(w, 2)
    assert data.micro_batches == 4
    assert [(kind.name, kind.nodes) for kind in data.device_types] == [
        ("V100-SXM2-16GB", 2),
        ("T4", 1),
    ]
    table = w.profile.table("T4", 1, 2)
    assert table is not None
    assert data.device_types[1].forward_seconds == table.forward_seconds
    block = w.profile.layers[1]
    # A ring of two moves the bytes once: 2 (n - 1) / n = 1, at 80 Gbit/s, half in each direction.
    seconds = block.tensor_bytes / 2 * 2 / 1e10
    assert data.device_types[0].allreduce_seconds["2"][1] == pytest.approx(seconds, rel=1e-9)
    assert data.memory is not None
    assert data.memory.layer_activation_bytes[1] == block.saved_bytes * 2
    assert data.memory.device_bytes == w.device_bytes()
    assert pose(w, 2, memory=False).memory is None
    assert solve(FAMILY, data, "auto").status == "optimal"


def test_nodes_of_one_device_with_other_links_are_types_of_their_own() -> None:
    fast, slow = (
        {"devices": 2, "device": "T4"},
        {"devices": 2, "device": "T4", "intra_node_gbit_per_s": 40.0},
    )
    data = pose(workload_on(fast, slow, fast), 1)
    assert [(kind.name, kind.nodes) for kind in data.device_types] == [("T4 (1)", 2), ("T4 (2)", 1)]
    assert data.memory is not None
    assert set(data.memory.device_bytes) == {"T4 (1)", "T4 (2)"}


@pytest.mark.parametrize(
    ("sizes", "group", "nodes"),
    [
        ((2, 4), 2, 3),
        ((3, 3), 1, 6),
        ((8, 4, 12), 4, 6),
        ((6, 2), 2, 4),
        ((8,), 4, 2),  # GPT-2 has 12 heads: it divides over 4 devices, not over 8
    ],
)
def test_uneven_nodes_are_posed_as_equal_parts(
    sizes: tuple[int, ...], group: int, nodes: int
) -> None:
    w = workload_on(*({"devices": size, "device": "T4"} for size in sizes))
    assert group_size(w) == group
    (kind,) = pose(w, 1).device_types
    assert (kind.devices_per_node, kind.nodes) == (group, nodes)


def test_a_template_reads_as_one_line_per_stage() -> None:
    data = pose(workload_on({"count": 2, "devices": 2, "device": "T4"}), 1)
    result = solve(FAMILY, data, "auto")
    assert result.decision is not None
    (table,) = describe(data, result.decision)
    assert len(table.rows) == len(result.decision.stages)
    assert sum(row[-1] == "slowest" for row in table.rows) == 1
    assert any(note.startswith("T2 ") for note in table.notes)
