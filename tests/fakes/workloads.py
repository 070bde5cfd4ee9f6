"""Small workloads: a few layers with measured-looking times on a few devices."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from hetplan.plans.making import new_plan
from hetplan.plans.plan import Plan
from hetplan.profiling.hardware.cluster import Cluster, ClusterFile, build_cluster
from hetplan.profiling.models.model import Model, load_model
from hetplan.profiling.models.operators import DEFAULT_STACK, Attention, Stack
from hetplan.profiling.models.transformer import Experts, Transformer
from hetplan.profiling.models.zoo import text_model
from hetplan.profiling.profiles.predict import predict
from hetplan.profiling.profiles.profile import Profile
from hetplan.profiling.workload import Workload, make_workload
from hetplan.solvers.run import Options, Run

# No host time, attention with scores that can be computed again, gradients as precise as weights.
BARE = replace(DEFAULT_STACK, attention="standard", host_seconds=0.0, gradient_bytes=None)


def cluster_document(**changes: Any) -> dict[str, Any]:
    """One node of two fast devices and one of two slow ones, as a cluster file's content."""
    return {
        "format": "hetplan-cluster",
        "version": 1,
        "name": "two-by-two",
        "nodes": [
            {
                "count": 1,
                "devices": 2,
                "device": "V100-SXM2-16GB",
                "intra_node_gbit_per_s": 170,
                "network_gbit_per_s": 10,
            },
            {
                "count": 1,
                "devices": 2,
                "device": "T4",
                "intra_node_gbit_per_s": 50,
                "network_gbit_per_s": 50,
            },
        ],
    } | changes


def cluster(**changes: Any) -> Cluster:
    """`cluster_document` as a cluster."""
    return build_cluster(ClusterFile.model_validate(cluster_document(**changes)))


def small(
    global_batch: int = 8,
    model: str = "gpt2",
    attention: Attention | None = None,
    stack: Stack = BARE,
    **changes: Any,
) -> Workload:
    """A small model on `cluster(**changes)` with a profile of micro-batches of 1 and 2. stack: one
    with a name where commands read the plan; attention: None: the stack's."""
    attention = attention or stack.attention
    described = load_model(model, attention=attention)
    profile = predicted(model, attention, stack, json.dumps(changes, sort_keys=True))
    return make_workload(described, cluster(**changes), global_batch, profile=profile, stack=stack)


@cache
def predicted(model: str, attention: Attention, stack: Stack, changes: str) -> Profile:
    """The profile of `small`, predicted once. changes: of the cluster's document, as JSON."""
    return predict(
        load_model(model, attention=attention),
        cluster(**json.loads(changes)),
        micro_batches=[1, 2],
        stack=stack,
        date="2026-01-01",
    )


def pipeline(workload: Workload, *cuts: int, name: str = "pipeline") -> Plan:
    """gpt2's 14 layers cut before the given ones, stage j on device j, micro-batches of one sample,
    1F1B."""
    bounds = pairwise([0, *cuts, len(workload.profile.layers)])
    stages = [{"layers": [cut], "devices": [[j]]} for j, cut in enumerate(bounds)]
    batches = [{"count": workload.global_batch, "samples": 1}]
    return new_plan(workload, [{"stages": stages, "micro_batches": batches}], name=name)


# The configuration of a gpt2 of two blocks: where every strategy has its say, and soon.
TWO_BLOCKS = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_head": 12,
    "n_embd": 768,
    "vocab_size": 50257,
    "n_positions": 1024,
}


def profile_document(model: str | Path = "gpt2") -> dict[str, Any]:
    """A profile of a model for `cluster_document`, with one micro-batch size."""
    profile = predict(
        load_model(model), cluster(), micro_batches=[1], tensor_degrees=[1, 2], date="2026-01-01"
    )
    return profile.model_dump(mode="json")


def shape(**changes: Any) -> Transformer:
    """A small decoder with everything that a block can have."""
    plain: dict[str, Any] = {
        "vocabulary": 96,
        "hidden": 24,
        "layers": 2,
        "heads": 8,
        "feed_forward": 40,
        "kv_heads": 4,
        "head_dim": 6,
        "norm": "rms",
        "gated": True,
        "rotary": True,
        "tied": False,
        "dropout": False,
        "attention_bias": False,
        "output_bias": False,
        "feed_forward_bias": False,
    }
    return Transformer(**(plain | changes))


def small_model(**changes: Any) -> Model:
    """The same as a model of 12 tokens."""
    return load_model(text_model("small", "made up", 12, shape(**changes)))


SHAPES: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "gpt": {
        "kv_heads": 8,
        "norm": "layer",
        "attention": "standard",
        "gated": False,
        "rotary": False,
        "tied": True,
        "positions": 20,
        "attention_bias": True,
        "output_bias": True,
        "feed_forward_bias": True,
    },
    "bert": {
        "kv_heads": 8,
        "norm": "layer",
        "attention": "standard",
        "gated": False,
        "head": "bert",
        "embedding_norm": True,
        "final_norm": False,
        "positions": 12,
        "types": 2,
        "tied": True,
    },
    "narrow embedding": {"embedding_width": 16, "kv_heads": 8},
    "experts": {"experts": Experts(4, 2, 2), "kv_heads": 8},
    "gated experts everywhere": {"experts": Experts(8, 2, 1)},
}


def with_memory(gib: float, model: str = "gpt2", **changes: Any) -> Workload:
    """A small model on devices of that much memory."""
    kinds = ("V100-SXM2-16GB", "T4")
    return small(model=model, devices={name: {"memory_gib": gib} for name in kinds}, **changes)


def one_thread(seconds: float = 300.0) -> Run:
    """A run on one thread, with time enough for what tests ask."""
    return Run(Options(time_limit=seconds, threads=1))
