"""Astra's experiments: its search on the paper's models, pools and baselines.

The paper states neither its global batch (1024 samples here) nor the precision (bf16), nor how many
GPUs of each type its mixed pools have (half of each). Its figures are pictures without numbers.
"""

from functools import cache
from typing import Any

from evidence.papers import Row
from hetplan.formulations.astra.search.engine import search
from hetplan.formulations.astra.search.pool import cost, heterogeneous, homogeneous
from hetplan.formulations.astra.search.result import Job, SearchResult
from hetplan.formulations.astra.search.space import Space
from hetplan.profiling.models.model import load_model
from hetplan.replays.offers import offer_of
from hetplan.solvers.run import Run

ALL = Space()
# What the searches compared may take. The ablations' own setting is data and tensor parallelism
# (Appendix B.1).
SPACES = {
    "all": ALL,
    "data ranks alone": Space(pipeline=(1,), tensor=(1,)),
    "hybrid": Space(pipeline=(1,)),
    "no offloading": Space(pipeline=(1,), offload=False),
    "no overlap": Space(pipeline=(1,), overlap=False),
}


@cache
def searched(model: str, types: str, gpus: int, space: Space) -> tuple[SearchResult, float]:
    """A search, and its seconds. types: `H100`, `H100 + A800` (half of each), `A800 | H100` (one of
    them)."""
    clock = Run()
    if "|" in types:
        pool = cost(tuple(offer_of(name, gpus) for name in types.split(" | ")), gpus)
    elif "+" in types:
        each = types.split(" + ")
        pool = heterogeneous(gpus, tuple(offer_of(name, gpus // len(each)) for name in each))
    else:
        pool = homogeneous(offer_of(types, gpus))
    result = search(Job(load_model(model, precision="bf16"), 1024), pool, space=space, top=1)
    return result, clock.elapsed


def tokens(row: Row, space: Space = ALL, **changes: Any) -> float | None:
    """Tokens per second of the best strategy of a row's model and pool; None where none fits."""
    asked = row | changes
    best = searched(asked["model"], asked["type"], asked["GPUs"], space)[0].best
    return None if best is None else best.tokens_per_second


def time(fixed: Row, row: Row) -> Row:
    """Table 1: how many strategies, and how long."""
    result, seconds = searched(row["model"], fixed["type"], row["GPUs"], ALL)
    counts = {f"ours, {key}": result.counts[key] for key in ("generated", "priced")}
    return {**counts, "ours, s": seconds}


def throughput(fixed: Row, row: Row) -> Row:
    """Table 2: beside the paper's own figures."""
    return {"ours": tokens(row)}


def ablation(fixed: Row, row: Row) -> Row:
    """One space of strategies against a smaller one."""
    whole, part = (tokens(row, SPACES[fixed[key]]) for key in ("space", "against"))
    ratio = None if whole is None or part is None else whole / part
    return {"tokens/s": whole, fixed["against"]: part, "ratio": ratio}


def experts(fixed: Row, row: Row) -> Row:
    """Figures 5 and 6: against a rule of thumb, on mixed GPUs at the pace of `fixed["pace"]`."""
    ours, rule = tokens(row), rule_of_thumb(row | fixed.get("pace", {}))
    ratio = None if ours is None or rule is None else ours / rule
    return {"tokens/s": ours, "rule of thumb": rule, "ratio": ratio}


def rule_of_thumb(row: Row) -> float | None:
    """Tokens per second of a rule of thumb: no more tensor and pipeline ranks than the model needs
    to fit, tensor ranks first and up to a node of 8, data parallelism with the rest, 1F1B; of
    micro-batches and full or no recomputation the fastest. Source: Narayanan et al. 2021 (SC),
    Section 3, takeaways 1 to 3, with sequence parallelism and the distributed optimizer as
    Megatron-LM's own scripts have them.
    """
    for degree in (2**e for e in range(10)):
        tensor = min(degree, 8)
        space = Space(
            pipeline=(degree // tensor,), tensor=(tensor,), interleaving=False, offload=False,
            micro_batch=(1, 2, 4, 8), sequence_parallel=(tensor > 1,),
            distributed_optimizer=(True,), recompute=(None, "full"),
            recompute_method=("uniform",), recompute_layers=(1,),
        )  # fmt: skip
        reached = tokens(row, space)
        if reached is not None:
            return reached
    return None


def scaling(fixed: Row, row: Row) -> Row:
    """Figure 9: throughput per GPU, and its share of what 64 GPUs reach."""
    each, few = tokens(row, SPACES["hybrid"]), tokens(row, SPACES["hybrid"], GPUs=64)
    if each is None or few is None:
        return {}
    per_gpu = each / row["GPUs"]
    return {"tokens/s per GPU": per_gpu, "of 64 GPUs'": per_gpu / (few / 64)}


def money(fixed: Row, row: Row) -> Row:
    """Figure 7: the Pareto set's ends."""
    front = searched(row["model"], row["type"], row["GPUs"], ALL)[0].pareto
    ends = {"fastest": front[0], "cheapest": front[-1]}
    speeds = {f"{end}, tokens/s": one.tokens_per_second for end, one in ends.items()}
    dollars = {f"{end}, dollars": one.money for end, one in ends.items()}
    return {"strategies": len(front), **speeds, **dollars}
