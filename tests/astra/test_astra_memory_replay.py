"""The memory filter against the replay: both say the same of every strategy that a plan file can
say, whatever trains."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from fakes.workloads import cluster
from hetplan.formulations.astra.search.engine import search
from hetplan.formulations.astra.search.pool import homogeneous
from hetplan.formulations.astra.search.result import Job
from hetplan.formulations.astra.search.space import Space
from hetplan.planner.astra import plan_of
from hetplan.profiling.frameworks import FRAMEWORKS
from hetplan.profiling.hardware.cluster import Cluster
from hetplan.profiling.models.model import Model, load_model
from hetplan.profiling.models.operators import Attention
from hetplan.profiling.models.transformer import Experts
from hetplan.profiling.models.zoo import llama, text_model
from hetplan.profiling.profiles.predict import predict
from hetplan.profiling.profiles.profile import Profile
from hetplan.profiling.workload import make_workload
from hetplan.replays.assumptions import Assumptions
from hetplan.replays.facts import model_facts
from hetplan.replays.offers import offers_of_cluster
from hetplan.replays.replay import replay
from quick import rest_wide

BATCH, DEVICES = 16, 8
STRATEGIES = 20  # of a search that are replayed
MIXTRAL = text_model(
    "mixtral",
    "Jiang et al. 2024, Table 1",
    4096,
    llama(32, 4096, 32, 14336, kv_heads=8, experts=Experts(count=8, active=2)),
)
SELECTIVE = ("gpt2", "bert-large")  # with scores that can be computed again
DENSE = ("gpt2", "llama3-8b", "vit-base", "bert-large", "llama2-70b", "gpt2-xl")


@cache
def node() -> Cluster:
    """Eight H100."""
    links = {"intra_node_gbit_per_s": 3600, "network_gbit_per_s": 3200}
    return cluster(nodes=[{"count": 1, "devices": DEVICES, "device": "H100-SXM5-80GB", **links}])


@cache
def profiled(name: str) -> tuple[Model, Profile]:
    """The model with predicted times."""
    spec = MIXTRAL if name == "mixtral" else name
    attention: Attention | None = "standard" if name in SELECTIVE else None
    model = load_model(spec, precision="bf16", attention=attention)
    degrees = [t for t in (1, 2) if model.tensor_degree_fits(t)]
    return model, predict(model, node(), micro_batches=[2], tensor_degrees=degrees)


def space(**more: Any) -> Space:
    """Pipelines, tensor ranks, ZeRO 0, 1 and 3, all recomputation that a plan file can say."""
    values: dict[str, Any] = {
        "pipeline": (1, 2, 4),
        "tensor": (1, 2),
        "micro_batch": (2,),
        "expert": (1,),
        "fsdp": (False, True),
        "virtual": (1, 3),
        "uneven": True,
        "recompute": (None, "selective", "full"),
        "recompute_method": ("uniform",),
        "recompute_layers": (1,),
        "no_overlap_offload": (True,),
        "offload": False,
        "overlap": False,
    }
    return Space(**{**values, **more})


def compare(name: str, framework: str, searched: Space, count: int) -> dict[str, set[object]]:
    """Hold so many strategies, spread over the list, against their replays; returns what they
    had."""
    model, profile = profiled(name)
    workload = make_workload(model, node(), BATCH, profile=profile, framework=FRAMEWORKS[framework])
    (offer,) = offers_of_cluster(workload.cluster)
    # what does not fit is priced, too
    roomy = offer.spec.model_copy(update={"memory_gib": 1e6})
    pool = homogeneous(replace(offer, spec=roomy))
    assumed = Assumptions(framework=workload.framework, profile=profile)
    found = search(Job(model, BATCH), pool, space=searched, assumed=assumed, top=10**6).top
    seen: dict[str, set[object]] = {}
    for candidate in found[:: max(1, len(found) // count)]:
        plan = plan_of(candidate, workload, pool)
        run = replay(plan, workload)
        for stage, claimed in enumerate(candidate.stage_bytes):
            device = plan.replicas[0].stages[stage].devices[0][0]
            held = run.peak_bytes[device] + workload.reserved_bytes
            assert claimed == pytest.approx(held, rel=1e-6), (candidate.strategy, stage)
        for option, value in candidate.strategy.items():
            seen.setdefault(option, set()).add(value)
    return seen


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", rest_wide(DENSE, 2))
def test_the_search_holds_what_the_replay_holds(name: str, framework: str) -> None:
    """Without further degrees: ZeRO, recomputation, pipelines, virtual stages, tensor ranks. Full
    shards in pipelines of encoders are not replayed."""
    sharded = (False,) if name == "vit-base" else (False, True)
    seen = compare(name, framework, space(sequence_parallel=(False,), fsdp=sharded), STRATEGIES)
    assert seen["pipeline_model_parallel_size"] == {1, 2, 4}
    assert seen["use_fsdp"] == {*sharded} and seen["use_distributed_optimizer"] == {False, True}
    modes = {None, "full", "selective"} if name in SELECTIVE else {None, "full"}
    assert seen["recompute_granularity"] == modes


@pytest.mark.parametrize("framework", rest_wide(FRAMEWORKS, 2))
def test_so_it_does_with_ranks_that_divide_tokens_and_experts(framework: str) -> None:
    seen = compare(
        "mixtral",
        framework,
        space(
            pipeline=(1, 2), virtual=(8,), context=(1, 2), exchange=("p2p", "a2a"), expert=(1, 4),
            whole_experts=(False, True), recompute=(None, "full"),
        ),
        STRATEGIES,
    )  # fmt: skip
    assert seen["context_parallel_size"] == {1, 2} and seen["expert_model_parallel_size"] > {1}
    assert seen["sequence_parallel"] == {False, True} == seen["use_fsdp"]


def test_these_models_have_equal_blocks() -> None:
    for name in ("mixtral", *DENSE):
        assert len(model_facts(profiled(name)[0]).different_blocks) == 1
