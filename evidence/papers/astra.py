"""Astra's experiments: its search on the paper's models, pools and baselines.

The paper states neither its global batch (1024 samples here) nor the precision (bf16), nor how many
GPUs of each type its mixed pools have (half of each). Its figures are pictures without numbers.
"""

from dataclasses import replace
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
    # Of all that may be overlapped, without the gradients' reduction, the weights' gathering, both.
    "tensor": Space(pipeline=(1,), overlap_grad_reduce=False, overlap_param_gather=False),
    "gradients": Space(pipeline=(1,), overlap_param_gather=False),
    "weights": Space(pipeline=(1,), overlap_grad_reduce=False),
    # Every data rank holds all optimizer states.
    "whole states": Space(pipeline=(1,), distributed_optimizer=(False,)),
    "whole states, no offloading": Space(
        pipeline=(1,), distributed_optimizer=(False,), offload=False
    ),
}
BATCH = 1024  # samples per iteration
# Bytes per second of a host's memory for each of its eight devices, by its type of memory: of two
# sockets with eight channels each, DDR4-3200 or DDR5-4800.
HOST_MEMORY = {"DDR4": 51e9, "DDR5": 77e9}


@cache
def searched(
    model: str,
    types: str,
    gpus: int,
    space: Space,
    *,
    batch: int = BATCH,
    host_memory: float | None = None,
) -> tuple[SearchResult, float]:
    """A search, and its seconds.

    types: `H100`, `H100 + A800` (half of each), `A800 | H100` (one of them). host_memory: bytes per
    second for each device of a pool of one type; None: the catalogue's.
    """
    clock = Run()
    if "|" in types:
        pool = cost(tuple(offer_of(name, gpus) for name in types.split(" | ")), gpus)
    elif "+" in types:
        each = types.split(" + ")
        pool = heterogeneous(gpus, tuple(offer_of(name, gpus // len(each)) for name in each))
    else:
        offer = offer_of(types, gpus)
        if host_memory is not None:
            offer = replace(offer, host_memory=host_memory)
        pool = homogeneous(offer)
    result = search(Job(load_model(model, precision="bf16"), batch), pool, space=space, top=1)
    return result, clock.elapsed


def tokens(row: Row, space: Space = ALL, **changes: Any) -> float | None:
    """Tokens per second of the best strategy of a row's model and pool; None where none fits."""
    asked = row | changes
    batch, memory = asked.get("batch", BATCH), HOST_MEMORY.get(asked.get("host memory", ""))
    best = searched(
        asked["model"], asked["type"], asked["GPUs"], space, batch=batch, host_memory=memory
    )[0].best
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
    figures: Row = {}
    for name, text in (("hybrid", "of 64 GPUs'"), ("whole states", "of 64 GPUs', whole states")):
        each, few = tokens(row, SPACES[name]), tokens(row, SPACES[name], GPUs=64)
        if each is None or few is None:
            continue
        per_gpu = each / row["GPUs"]
        figures |= {f"tokens/s per GPU, {name}": per_gpu, text: per_gpu / (few / 64)}
    return figures


def offloading(fixed: Row, row: Row) -> Row:
    """Figure 10: with offloading over without; the same with one assumption changed at a time.

    The last columns are throughput per GPU without offloading, as a share of what 64 GPUs reach.
    """
    growing = {"batch": fixed["samples"] * row["GPUs"]}
    cases: dict[str, tuple[str, str, Row]] = {
        "ratio": ("hybrid", "no offloading", {}),
        "batch grows": ("hybrid", "no offloading", growing),
        "whole states": ("whole states", "whole states, no offloading", {}),
        "whole states, batch grows": ("whole states", "whole states, no offloading", growing),
    }
    figures: Row = {}
    for name, (space, against, changed) in cases.items():
        whole, part = (tokens(row, SPACES[key], **changed) for key in (space, against))
        if whole is not None:
            figures[name] = "needs it" if part is None else whole / part
    for name in ("ratio", "whole states"):
        _, without, _ = cases[name]
        each = tokens(row, SPACES[without])
        few = tokens(row, SPACES[without], GPUs=64)
        if each is not None and few is not None:
            figures[f"{without}, of 64 GPUs'"] = (each / row["GPUs"]) / (few / 64)
    return figures


def host_memory(fixed: Row, row: Row) -> Row:
    """The setting DDR4 and DDR5: tokens per second where states may be offloaded."""
    figures: Row = {
        kind: tokens(row, SPACES["whole states"], **{"host memory": kind}) for kind in HOST_MEMORY
    }
    if None in figures.values():
        return figures
    return figures | {"ratio": figures["DDR5"] / figures["DDR4"]}


def overlaps(fixed: Row, row: Row) -> Row:
    """Figure 11: tokens per second without overlap; with that of tensor ranks; and with the
    settings of Appendix B.1 besides, over none."""
    none = tokens(row, SPACES["no overlap"])
    figures: Row = {"none, tokens/s": none}
    settings = {"tensor": "tensor", "gradients": "gradients", "weights": "weights", "all": "hybrid"}
    for name, space in settings.items():
        speed = tokens(row, SPACES[space])
        figures[name] = None if speed is None or none is None else speed / none
    return figures


def money(fixed: Row, row: Row) -> Row:
    """Figure 7: the Pareto set's ends."""
    front = searched(row["model"], row["type"], row["GPUs"], ALL)[0].pareto
    ends = {"fastest": front[0], "cheapest": front[-1]}
    speeds = {f"{end}, tokens/s": one.tokens_per_second for end, one in ends.items()}
    dollars = {f"{end}, dollars": one.money for end, one in ends.items()}
    return {"strategies": len(front), **speeds, **dollars}
