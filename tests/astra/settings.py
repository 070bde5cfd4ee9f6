"""Models, tables and pools that the tests of the search share."""

from __future__ import annotations

from hetplan.formulations.astra.search.facts import ModelFacts, model_facts
from hetplan.formulations.astra.search.rules import default_rules
from hetplan.formulations.astra.search.space import Schema, Space, Strategies, strategies
from hetplan.profiling.models import load_model

SCHEMA = Schema(("A800-SXM4-80GB",))
GPT = model_facts(load_model("gpt2", precision="bf16"))
LLAMA = model_facts(load_model("llama2-7b", precision="bf16"))
SMALL = Space(pipeline=(1, 2, 3, 4), tensor=(1, 2, 4), micro_batch=(1, 2, 3))


def table_of(facts: ModelFacts = LLAMA, gpus: int = 64, space: Space | None = None) -> Strategies:
    """All strategies that the shipped rules leave."""
    rules = default_rules(SCHEMA.columns)
    return strategies(facts, space or Space(), rules, gpus=gpus, global_batch=256)
