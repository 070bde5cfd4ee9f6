"""What changes of the cluster are worth: changes by hand, gains that cannot be negative where
nothing is taken away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from fakes.workloads import one_thread, small
from hetplan.errors import InputError
from hetplan.planner.strategy import chosen
from hetplan.planner.what_if import (
    Change,
    addition,
    changed_workload,
    faster_network,
    marginal,
    removal,
    what_if,
)
from hetplan.profiling.cluster import Cluster
from hetplan.profiling.workload import Workload

GBIT = 1e9 / 8


def test_additions_are_linked_like_their_kind(workload: Workload) -> None:
    more = addition("4xT4", workload.cluster).cluster
    assert more.counts() == {"V100-SXM2-16GB": 2, "T4": 6}
    assert (more.nodes[2].intra_bandwidth, more.nodes[2].network_bandwidth) == (
        50 * GBIT,
        50 * GBIT,
    )
    other = addition("1xA100-SXM4-80GB", workload.cluster).cluster
    assert (
        other.nodes[2].intra_bandwidth == 170 * GBIT
        and other.nodes[2].network_bandwidth == 50 * GBIT
    )
    assert other.specs["A100-SXM4-80GB"].memory_gib == 80


def test_removals(workload: Workload) -> None:
    assert removal("node0", workload.cluster).cluster.counts() == {"T4": 2}
    assert removal("1xT4", workload.cluster).cluster.counts() == {
        "V100-SXM2-16GB": 2,
        "T4": 1,
    }
    assert removal("2xT4", workload.cluster).cluster.counts() == {"V100-SXM2-16GB": 2}


@pytest.mark.parametrize(
    ("make", "text", "message"),
    [
        (addition, "A100", "--add: not usable (got 'A100', expected COUNTxDEVICE"),
        (addition, "0xT4", "--add: not usable"),
        (addition, "2xA1000", "--add: unknown device 'A1000'"),
        (removal, "node7", "no such node (got 'node7', expected node0 to node1)"),
        (removal, "3xT4", "more than there are (got '3xT4', expected at most 2)"),
        (removal, "1xP100-PCIE-16GB", "expected at most 0"),
    ],
)
def test_nonsense(
    workload: Workload, make: Callable[[str, Cluster], Change], text: str, message: str
) -> None:
    with pytest.raises(InputError) as caught:
        make(text, workload.cluster)
    assert message in str(caught.value)


@pytest.mark.parametrize("gbit", [0.0, -1.0, float("nan"), float("inf")])
def test_nonsense_networks(workload: Workload, gbit: float) -> None:
    with pytest.raises(InputError, match="--network-gbit-per-s"):
        faster_network(gbit, workload.cluster)


def test_the_last_node_cannot_go() -> None:
    node = {"devices": 2, "device": "T4", "intra_node_gbit_per_s": 50, "network_gbit_per_s": 10}
    alone = small(nodes=[node])
    with pytest.raises(InputError, match="nothing is left"):
        removal("2xT4", alone.cluster)
    names = [change.name for change in marginal(alone.cluster)]
    assert names == ["add 2xT4", "links inside T4 nodes at 100 Gbit/s"]


def test_what_is_asked_without_changes(workload: Workload) -> None:
    assert [change.name for change in marginal(workload.cluster)] == [
        "add 2xV100-SXM2-16GB",
        "remove node0",
        "add 2xT4",
        "remove node1",
        "network at 100 Gbit/s",
        "network of V100-SXM2-16GB nodes at 20 Gbit/s",
        "links inside V100-SXM2-16GB nodes at 340 Gbit/s",
        "network of T4 nodes at 100 Gbit/s",
        "links inside T4 nodes at 100 Gbit/s",
    ]


def test_links_of_one_kind(workload: Workload) -> None:
    by_name = {change.name: change.cluster for change in marginal(workload.cluster)}
    slow = by_name["network of T4 nodes at 100 Gbit/s"].nodes
    assert [node.network_bandwidth for node in slow] == [10 * GBIT, 100 * GBIT]
    assert [node.intra_bandwidth for node in slow] == [170 * GBIT, 50 * GBIT]
    inside = by_name["links inside V100-SXM2-16GB nodes at 340 Gbit/s"].nodes
    assert [node.intra_bandwidth for node in inside] == [340 * GBIT, 50 * GBIT]
    assert [node.network_bandwidth for node in inside] == [10 * GBIT, 50 * GBIT]


def test_gains(workload: Workload) -> None:
    """A network that is faster, and devices that need not be used, can only help; a loss of half
    cannot."""
    asked = [*marginal(workload.cluster), addition("1xT4", workload.cluster)]
    found = what_if(workload, asked, one_thread(), strategies=chosen(["amp", "dp"]))
    assert found.base.best is not None
    for variant in found.variants:
        assert variant.best is not None and variant.gain is not None
        difference = (found.base.best.predicted_seconds or 0) - (
            variant.best.predicted_seconds or 0
        )
        assert variant.gain == difference
        if variant.change.name.startswith("remove"):
            assert variant.gain <= 0
        else:
            assert variant.gain >= 0
    (faster,) = (v for v in found.variants if v.change.name.startswith("network at"))
    assert faster.gain is not None and faster.gain > 0
    document = found.document()
    assert [v["change"] for v in document["variants"]] == [change.name for change in asked]
    per_device = document["variants"][0]["seconds_saved_per_device"]
    assert per_device == pytest.approx(document["variants"][0]["seconds_saved"] / 2)


def test_what_is_faster_without_a_node_leaves_it_idle() -> None:
    """Over a slow network AMP's plans, which use every device, are slower than those of the fast
    node alone."""
    nodes = [
        {"devices": 2, "device": name, "intra_node_gbit_per_s": 170, "network_gbit_per_s": 1}
        for name in ("V100-SXM2-16GB", "T4")
    ]
    workload = small(nodes=nodes)
    found = what_if(workload, [removal("node1", workload.cluster)], strategies=chosen(["dp"]))
    (variant,) = found.variants
    assert found.base.best is not None and found.base.best.plan is not None
    assert (
        found.base.best.label == "enumeration@idle: node1" and found.base.best.plan.world_size == 2
    )
    assert len(found.base.best.plan.devices) == 4
    assert variant.gain == 0.0


def test_a_measured_profile_knows_no_new_devices(workload: Workload) -> None:
    told = workload.profile.provenance.model_copy(update={"kind": "measured"})
    measured = replace(workload, profile=workload.profile.model_copy(update={"provenance": told}))
    change = addition("1xA100-SXM4-80GB", workload.cluster)
    with pytest.raises(InputError, match="the measured profile has no table for 'A100-SXM4-80GB'"):
        changed_workload(measured, change.cluster)
    assert (
        changed_workload(measured, addition("2xT4", workload.cluster).cluster).profile
        is measured.profile
    )


def test_devices_of_no_use_cost_nothing(workload: Workload) -> None:
    """Eight samples do not divide over five devices: the plan as it is stays, with the new one
    idle."""
    found = what_if(workload, [addition("1xT4", workload.cluster)], strategies=chosen(["dp"]))
    (variant,) = found.variants
    assert variant.gain == 0.0
    assert variant.best is not None and variant.best.plan is not None
    assert len(variant.best.plan.devices) == 5 and variant.best.plan.world_size == 4
    assert variant.best.message == "the plan as it is"
