"""Tiny random instances of problem `astra` with their oracle by brute force; models and tables that
the tests of the search share."""

from __future__ import annotations

import random
from itertools import combinations_with_replacement, product

from hetplan.formulations.astra.data import AstraData, AstraDecision, AstraStage, DeviceType
from hetplan.formulations.astra.evaluate import evaluate
from hetplan.formulations.astra.search.rules import default_rules
from hetplan.formulations.astra.search.space import Space, rule_columns, strategies
from hetplan.formulations.astra.search.table import Strategies
from hetplan.profiling.models.model import load_model
from hetplan.replays.facts import ModelFacts, model_facts


def random_instance(seed: int) -> AstraData:
    """Up to 3 types, 5 stages, 9 layers; tight devices and memory, ties and zeros: about a quarter
    is infeasible."""
    rng = random.Random(seed)
    stages = rng.randint(1, 5)
    group = (rng.randint(1, 2), rng.randint(1, 2))
    equal_h = rng.random() < 0.3
    h = rng.choice([0.0, 0.1, 1.0])
    return AstraData(
        layers=rng.randint(max(1, stages - (rng.random() < 0.1)), 9),
        stages=stages,
        micro_batches=rng.choice([1, 2, 3, 8, 64]),
        data_parallel=group[0],
        tensor_parallel=group[1],
        device_types=[
            DeviceType(
                name=f"t{i}",
                max_devices=rng.randint(stages // 3, stages + 2) * group[0] * group[1]
                + rng.randint(0, 1),
                layer_seconds=rng.choice([0.0, 0.5, 1.0, 1.0, 1.5, 2.0, rng.random() * 3]),
                p2p_seconds=h if equal_h else rng.choice([0.0, 0.3, 2.0, 5.0, rng.random() * 4]),
                max_layers=rng.choice([None] * 8 + [0, 1, 2, 3, 4]),
            )
            for i in range(rng.randint(1, 3))
        ],
        equal_layers_per_type=rng.random() < 0.5,
    )


def oracle(data: AstraData) -> float | None:
    """The optimum by trying every multiset of stages (their order never matters); None when there
    is none."""
    kinds = [
        AstraStage(type=kind.name, layers=x)
        for kind, x in product(data.device_types, range(1, data.layers + 1))
    ]
    costs = (
        evaluate(data, AstraDecision(stages=list(stages))).objective
        for stages in combinations_with_replacement(kinds, data.stages)
        if sum(stage.layers for stage in stages) == data.layers
    )
    return min((cost for cost in costs if cost is not None), default=None)


COLUMNS = rule_columns(("A800-SXM4-80GB",))
GPT = model_facts(load_model("gpt2", precision="bf16", attention="standard"))
LLAMA = model_facts(load_model("llama2-7b", precision="bf16"))
SMALL = Space(pipeline=(1, 2, 3, 4), tensor=(1, 2, 4), micro_batch=(1, 2, 3))


def table_of(facts: ModelFacts = LLAMA, gpus: int = 64, space: Space | None = None) -> Strategies:
    """All strategies that the shipped rules leave."""
    rules = default_rules(COLUMNS)
    return strategies(facts, space or Space(), rules, gpus=gpus, global_batch=256)
