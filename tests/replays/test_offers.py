"""Offers of a cluster whose nodes of one type differ."""

import math
from dataclasses import replace
from typing import Any

import pytest

from hetplan.profiling.hardware.cluster import GBIT, Cluster, example_cluster
from hetplan.profiling.rates.collectives import all_reduce_bus_bandwidth
from hetplan.replays.groups import network_bandwidth
from hetplan.replays.offers import offers_of_cluster

Rates = tuple[tuple[int, float], ...]


def with_all_reduces(*rates: Rates) -> Cluster:
    """A cluster of equal nodes but for the bus bandwidths of their all-reduces, in Gbit/s."""
    cluster = example_cluster("amp-mixed")
    nodes = [
        replace(cluster.nodes[0], all_reduce=tuple((ranks, rate * GBIT) for ranks, rate in each))
        for each in rates
    ]
    return replace(cluster, nodes=tuple(nodes))


def test_the_slowest_node_counts_for_every_number_of_ranks() -> None:
    cluster = with_all_reduces(((2, 90.0), (4, 80.0)), ((2, 100.0), (4, 50.0)))
    (offer,) = offers_of_cluster(cluster)
    assert [ranks for ranks, _ in offer.all_reduce] == [2, 4]
    assert [rate / GBIT for _, rate in offer.all_reduce] == pytest.approx([90, 50], rel=0.02)


def test_a_node_that_states_nothing_does_not_hide_what_another_one_states() -> None:
    cluster = with_all_reduces(((4, 1.0),), ())
    (offer,) = offers_of_cluster(cluster)
    ((ranks, rate),) = offer.all_reduce
    assert ranks == 4
    assert rate / GBIT == pytest.approx(1.0, rel=0.02)
    silent = all_reduce_bus_bandwidth(cluster.nodes[1], 4)
    assert silent > rate


def test_nodes_that_state_the_same_keep_it() -> None:
    rates = ((2, 90.0), (4, 80.0))
    (offer,) = offers_of_cluster(with_all_reduces(rates, rates))
    assert offer.all_reduce == tuple((ranks, rate * GBIT) for ranks, rate in rates)


def test_the_slowest_flow_bounds_each_message_between_nodes() -> None:
    """Nodes of 4 devices at 100 Gbit/s, of which one lets a message have 2 Gbit/s at most."""
    nodes = example_cluster("amp-mixed").nodes[:2]
    shape: dict[str, Any] = {"devices": 4, "network_bandwidth": 100 * GBIT}
    slow = replace(nodes[1], flow=2 * GBIT, device=nodes[0].device, **shape)
    cluster = replace(example_cluster("amp-mixed"), nodes=(replace(nodes[0], **shape), slow))
    (offer,) = offers_of_cluster(cluster)
    assert offer.flow == offer.node.flow == 2 * GBIT
    unbound = replace(offer, flow=math.inf)
    for operation, flows, without in (
        ("send", 1, 25),
        ("all-reduce", 1, 100),
        ("all-to-all", 4, 25),
    ):
        assert network_bandwidth(offer, operation, 1, 8) == flows * 2 * GBIT
        assert network_bandwidth(unbound, operation, 1, 8) == without * GBIT
