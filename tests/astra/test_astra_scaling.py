"""What Astra's Table 2 and Figures 8 to 10 show of networks, links and hosts holds of prices."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from astra.cases import LLAMA, table_of
from hetplan.formulations.astra.search.engine import search
from hetplan.formulations.astra.search.pool import homogeneous
from hetplan.formulations.astra.search.pricing import Priced, after_pipeline, iteration_parts
from hetplan.formulations.astra.search.result import Job
from hetplan.formulations.astra.search.space import Space
from hetplan.profiling.models.model import load_model
from hetplan.replays.assumptions import Assumptions
from hetplan.replays.groups import group_seconds
from hetplan.replays.offers import offer_of
from present import present


def speed(model: str, gpu: str, gpus: int, space: Space | None = None) -> float:
    """Tokens per second and GPU of the best strategy, 1024 samples per iteration."""
    job = Job(load_model(model, precision="bf16"), 1024)
    found = search(job, homogeneous(offer_of(gpu, gpus)), space=space, top=1)
    return present(found.best).tokens_per_second / gpus


@pytest.mark.parametrize("model", ["llama2-7b", "glm-130b"])
def test_more_gpus_do_less_each(model: str) -> None:
    """Figure 9, under its data and tensor parallelism."""
    space = Space(pipeline=(1,))
    each = [speed(model, "A800", gpus, space) for gpus in (64, 256, 1024, 4096)]
    assert all(more < 0.985 * less for less, more in pairwise(each))
    assert each[-2] > 0.75 * each[0]


def test_half_the_nvlink_costs_speed() -> None:
    """Table 2: H800 is 3 to 17 % slower than H100, which differs in NVLink alone."""
    for model in ("llama2-7b", "glm-130b"):
        assert 0.8 < speed(model, "H800", 1024) / speed(model, "H100", 1024) < 0.98


def test_data_parallelism_alone_falls_behind() -> None:
    """Figure 8: more than gradients can hide makes other degrees pay on many GPUs."""
    alone = speed("llama2-7b", "H100", 1024, Space(pipeline=(1,), tensor=(1,)))
    assert speed("llama2-7b", "H100", 1024) > 1.02 * alone


def test_offloading_goes_by_the_hosts_pcie() -> None:
    """H800 has PCIe 5 and A800 PCIe 4; on one device the host's rates alone decide."""
    table = table_of(LLAMA, 8)
    offers = [offer_of("A800", 8)]
    newer = offer_of("H800", 8)
    offers.append(replace(offers[0], host_link=newer.host_link, host_memory=newer.host_memory))
    assert offers[1].host_link == 2 * offers[0].host_link
    layers, none = (
        LLAMA.layers // table.columns["pipeline_model_parallel_size"],
        np.zeros(table.rows),
    )
    older, faster = (
        after_pipeline(Priced(LLAMA, table, offer, Assumptions()), layers, none, none + 1.0)[1]
        for offer in offers
    )
    blocking = table.columns["no_overlap_offload_optimizer"] == 1
    assert (faster < older).all()
    # 30 bytes per parameter in the host's memory, 6 over its link
    expected = (30 / 77e9 + 6 / 50e9) / (30 / 51e9 + 6 / 25e9)
    assert faster[blocking] / older[blocking] == pytest.approx(expected)


def test_ring_hops_within_nodes_are_short() -> None:
    """A byte on 64 devices of 8 nodes: 56 hops inside, 7 between, once round and back."""
    offer, one = offer_of("A800", 64), np.ones(1)
    whole = group_seconds(offer, Assumptions(), "all-reduce", one, one.astype(int), np.array([64]))
    assert whole[0] == pytest.approx(2 * (56 * 6e-6 + 7 * 20e-6), rel=1e-6)
    across = group_seconds(offer, Assumptions(), "all-reduce", one, np.array([8]), np.array([8]))
    assert across[0] == pytest.approx(2 * 7 * 20e-6, rel=1e-6)


def test_a_pipelines_messages_cost_though_they_hide() -> None:
    """The more often micro-batches cross stages, the more they take from computation."""
    table, offer = table_of(LLAMA, 64), offer_of("A800", 64)
    columns = table.columns
    same = (
        (columns["pipeline_model_parallel_size"] == 4)
        & (columns["micro_batch_size"] == 1)
        & (columns["sequence_parallel"] == 0)
        & (columns["tensor_model_parallel_size"] == 4)
        & (columns["recompute_granularity"] == -1)
    )
    rows = table.take(np.flatnonzero(same))
    free = replace(offer, network=1e15, intra=1e15, network_latency=0.0, intra_latency=0.0)
    lost = [
        iteration_parts(Priced(LLAMA, rows, o, Assumptions()), np.zeros(rows.rows))[0]
        for o in (offer, free)
    ]
    virtual = rows.columns["virtual_pipeline_model_parallel_size"]
    extra = [float((lost[0] - lost[1])[virtual == v].mean()) for v in (2, 4, 8)]
    assert extra == sorted(extra) and extra[0] < 0.95 * extra[2]
