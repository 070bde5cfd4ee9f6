"""Plan shapes for the parity tests, the awkward ones first, and the small models that they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import pairwise
from random import Random
from typing import Any

import torch
from torch import nn

from fakes.references import build, build_vgg, build_vit
from hetplan.plans.passes import FOLDED, virtual_stages
from hetplan.plans.plan import Plan, parse_plan
from hetplan.profiling.models.transformer import Experts
from hetplan.profiling.models.zoo import bert, encoder, gpt2, llama
from hetplan.runtime.references import stand_in
from random_orders import random_orders

SMALL: dict[str, Any] = {"vocabulary": 23}
MIXED = Experts(5, 2)


class Squared(nn.Linear):
    """A last layer: the sum of squared errors."""

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return ((super().forward(x).to(targets.dtype) - targets) ** 2).sum()


class Perceptron(nn.Module):
    """A user's own model with data, without tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.Sequential(nn.Tanh(), nn.Linear(5, 5))
        layers = (nn.Linear(6, 5), inner, nn.Tanh(), Squared(5, 3))
        self.layers = nn.ModuleDict({str(k): layer for k, layer in enumerate(layers)})

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> Any:
        *inner, last = self.layers.values()
        for layer in inner:
            x = layer(x)
        return last(x, targets)

    def initial(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(len(name) + parameter.numel())
        return (
            torch.empty(parameter.shape, dtype=torch.float64)
            .normal_(generator=generator)
            .to(parameter.dtype)
        )

    def batch(self, step: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.arange(first, last, dtype=torch.get_default_dtype())
        x = torch.sin(rows[:, None] * torch.arange(1, 7) + step)
        return x, torch.cos(rows[:, None] + torch.arange(3))


class Dropping(Perceptron):
    """The same with torch's own dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers["1"].append(nn.Dropout(0.5))
        self.layers["2"] = nn.Sequential(nn.Dropout(0.3), nn.Tanh())


MODELS: dict[str, Callable[[], nn.Module]] = {
    # these two write their scores, with dropout; the others have fused attention
    "gpt": lambda: build(gpt2(3, 16, 4, **SMALL, positions=12, attention="standard"), 6),
    "gpt-no-dropout": lambda: build(
        replace(gpt2(3, 16, 4, **SMALL, positions=12), dropout=False), 6
    ),
    "untied": lambda: build(gpt2(2, 16, 4, **SMALL, positions=12, tied=False), 5),
    "narrow": lambda: build(
        gpt2(1, 16, 4, **SMALL, positions=12, position_offset=2, embedding_width=8), 5
    ),
    "llama": lambda: build(llama(3, 16, 4, 20, **SMALL, kv_heads=2), 6),
    "window": lambda: build(llama(2, 16, 4, 20, **SMALL, window=3), 6),
    "bert": lambda: build(bert(2, 16, 4, 24, **SMALL, attention="standard"), 6),
    "moe": lambda: build(
        replace(gpt2(2, 16, 4, **SMALL, positions=12, experts=MIXED), dropout=False), 6
    ),
    "mixtral": lambda: build(llama(2, 16, 4, 12, **SMALL, experts=Experts(3, 2)), 6),
    "vit": lambda: build_vit(encoder(16, 2, 4, 24), image=8, patch=4, classes=5),
    "vgg": lambda: build_vgg((4, 0, 6, 0), image=8, classes=5, inner=12),
    "one": lambda: stand_in(["everything"]),
    "two": lambda: stand_in(["first", "last"]),
    "perceptron": Perceptron,
    "dropping": Dropping,
}


def two(plan: Plan) -> nn.Module:
    """A model of two layers, as `--factory` wants it."""
    return MODELS["two"]()


def names_of(model: str) -> list[str]:
    """The model's layers."""
    return list(layer_names(model))


@cache
def layer_names(model: str) -> tuple[str, ...]:
    """The model's layers, of a model that is made once."""
    with torch.device("meta"):
        made = MODELS[model]()
    layers = getattr(made, "layers", None)
    return tuple(layers) if isinstance(layers, nn.ModuleDict) else tuple("0123")


@dataclass(frozen=True)
class S:
    """A stage: its layers (one range, or one per chunk), rows of its groups, tensor shares."""

    layers: Any
    rows: Sequence[float] = (1.0,)
    tensor: Sequence[float] = (1.0,)


@dataclass(frozen=True)
class R:
    """A replica: stages, and (count, samples) of its micro-batches."""

    stages: Sequence[S]
    batches: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Case:
    """A plan shape on a model. order: of the devices, where not the natural one."""

    name: str
    model: str
    replicas: Sequence[R]
    options: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float64"
    reverse: bool = False

    @cached_property
    def plan(self) -> Plan:
        """Devices are numbered in order, or backwards; one more than is used."""
        names, used = names_of(self.model), 0
        world = sum(len(s.rows) * len(s.tensor) for r in self.replicas for s in r.stages)
        replicas: list[dict[str, Any]] = []
        for replica in self.replicas:
            stages = []
            for stage in replica.stages:
                ranges = [stage.layers] if isinstance(stage.layers[0], int) else stage.layers
                width = len(stage.tensor)
                grid = [
                    [used + g * width + t for t in range(width)] for g in range(len(stage.rows))
                ]
                used += len(stage.rows) * width
                if self.reverse:
                    grid = [[world - d for d in group] for group in grid]
                stages.append(
                    {
                        "layers": [list(r) for r in ranges],
                        "devices": grid,
                        "row_shares": [float(x) for x in stage.rows],
                        "tensor_shares": [float(x) for x in stage.tensor],
                    }
                )
            batches = [{"count": count, "samples": samples} for count, samples in replica.batches]
            replicas.append({"stages": stages, "micro_batches": batches})
        total = sum(count * samples for r in self.replicas for count, samples in r.batches)
        document = {
            "format": "hetplan-plan",
            "version": 1,
            "name": self.name,
            "workload": {
                "model": self.model,
                "cluster": "made up",
                "global_batch": total,
                "sequence": None,
                "precision": "fp32",
                "layers": names,
            },
            "devices": [{"type": "A", "node": d // 4} for d in range(world + 1)],
            "replicas": replicas,
            **self.options,
        }
        return parse_plan(document, where=self.name)

    @property
    def world(self) -> int:
        """Ranks."""
        return self.plan.world_size


def even(cuts: Sequence[int], **options: Any) -> list[S]:
    """Stages between the cuts."""
    return [S((a, b), **options) for a, b in pairwise(cuts)]


def zero(level: int, *shares: float) -> dict[str, Any]:
    """ZeRO, with shares of all devices where given."""
    return {"zero": level} | ({"zero_shares": [*shares, 0.0]} if shares else {})


AWKWARD = [
    Case("more stages than micro-batches", "gpt", [R(even([0, 1, 2, 4, 5]), [(1, 3)])]),
    Case("a stage without blocks, tied ends apart", "gpt", [R(even([0, 1, 4, 5]), [(2, 2)])]),
    Case("one layer, two replicas", "one", [R([S((0, 1))], [(1, 2)]), R([S((0, 1))], [(2, 1)])]),
    Case(
        "one layer in three unequal tensor parts",
        "one",
        [R([S((0, 1), tensor=(1, 2, 1))], [(2, 2)])],
    ),
    Case(
        "ranks with zero rows",
        "gpt",
        [R([S((0, 2), rows=(8, 1)), S((2, 5), rows=(1, 1, 1))], [(3, 1), (1, 4)])],
    ),
    Case("a row group that never gets a row", "llama", [R([S((0, 5), rows=(9, 1))], [(4, 1)])]),
    Case("widths 3 to 1", "llama", [R([S((0, 2), rows=(3, 2, 1)), S((2, 5))], [(2, 4), (1, 3)])]),
    Case(
        "widths 1 to 2 to 1",
        "gpt",
        [R([S((0, 1)), S((1, 3), rows=(2, 1)), S((3, 5))], [(1, 3), (2, 2)])],
    ),
    Case(
        "tensor widths 1 to 3 to 2",
        "gpt",
        [R([S((0, 2)), S((2, 3), tensor=(2, 1, 1)), S((3, 5), tensor=(1, 3))], [(2, 2)])],
    ),
    Case(
        "rows and tensor parts in one stage",
        "gpt",
        [R([S((0, 3), rows=(2, 1), tensor=(1, 2)), S((3, 5), rows=(1, 1), tensor=(1,))], [(2, 3)])],
    ),
    Case("fewer heads than tensor ranks", "llama", [R([S((0, 5), tensor=(1, 1, 1))], [(2, 2)])]),
    Case("uneven experts", "moe", [R([S((0, 4), tensor=(3, 1, 1))], [(2, 2)])]),
    Case(
        "more ranks than experts",
        "mixtral",
        [R([S((0, 2)), S((2, 4), tensor=(1, 1, 1, 1))], [(2, 2)])],
    ),
    Case(
        "replicas cut differently",
        "gpt",
        [R(even([0, 1, 5]), [(2, 2)]), R(even([0, 2, 4, 5]), [(1, 3), (1, 1)])],
    ),
    Case(
        "replicas of different width",
        "gpt",
        [
            R([S((0, 5), tensor=(1, 2))], [(1, 3)]),
            R([S((0, 3)), S((3, 5), tensor=(2, 1, 1))], [(2, 2)]),
        ],
    ),
    Case(
        "unequal counts of micro-batches",
        "llama",
        [R(even([0, 2, 5]), [(5, 1)]), R(even([0, 3, 5]), [(1, 4)])],
    ),
    Case(
        "devices in another order",
        "gpt",
        [R(even([0, 2, 5]), [(2, 2)]), R([S((0, 5), tensor=(1, 1))], [(1, 2)])],
        reverse=True,
    ),
    Case(
        "interleaved on one stage",
        "gpt",
        [R([S([(0, 2), (2, 3), (3, 5)])], [(2, 2)]), R([S([(0, 1), (1, 4), (4, 5)])], [(1, 3)])],
        {"schedule": "interleaved-1f1b"},
    ),
    Case(
        "interleaved with different widths",
        "gpt",
        [
            R(
                [S([(0, 1), (2, 3)], rows=(2, 1)), S([(1, 2), (3, 5)], tensor=(1, 2))],
                [(2, 3), (2, 1)],
            )
        ],
        {"schedule": "interleaved-1f1b"},
    ),
    Case(
        "ZeRO 2 with empty micro-batches",
        "gpt",
        [R([S((0, 5))], [(2, 2), (1, 0)]), R([S((0, 5))], [(1, 3), (2, 1)])],
        zero(2, 3, 1),
    ),
    Case(
        "ZeRO 3 with a replica that never gets a row",
        "llama",
        [R([S((0, 5))], [(2, 2)]), R([S((0, 5))], [(2, 0)]), R([S((0, 5))], [(1, 1), (1, 2)])],
        zero(3, 5, 1, 2),
    ),
    Case(
        "ZeRO 1 with a pipeline of empty micro-batches",
        "gpt",
        [R(even([0, 2, 5]), [(3, 0)]), R(even([0, 3, 5]), [(2, 2)])],
        zero(1),
    ),
    Case(
        "ZeRO 3 over different tensor widths",
        "gpt",
        [R([S((0, 5), tensor=(1, 2))], [(2, 2)]), R([S((0, 5), rows=(1, 2))], [(1, 3), (1, 1)])],
        zero(3, 1, 2, 3, 4),
    ),
]


def last(model: str) -> int:
    """The number of a model's layers."""
    return len(names_of(model))


INTERLEAVED = {"schedule": "interleaved-1f1b"}

# What the planner makes of each family, on each model.
FAMILIES = [
    *(
        Case(
            f"AMP: {schedule}, {model}",
            model,
            [R([S((0, 1), tensor=(1, 1)), S((1, last(model)), tensor=(1, 1))], [(3, 1)])] * 2,
            {"schedule": schedule},
        )
        for schedule in ("gpipe", "1f1b")
        for model in ("gpt", "llama", "bert", "vit")
    ),
    *(
        Case(f"{shape}, {model}", model, replicas)
        for model in ("vgg", "perceptron", "moe", "mixtral", "narrow", "untied", "window", "two")
        for end in [last(model)]
        for shape, replicas in (
            ("pipeline of two", [R(even([0, end // 2, end]), [(2, 2), (1, 1)])]),
            ("data parallel", [R([S((0, end))], [(2, 2)]), R([S((0, end))], [(1, 3)])]),
        )
    ),
    *(
        Case(f"two tensor ranks, {m}", m, [R([S((0, last(m)), tensor=(2, 1))], [(1, 3)])])
        for m in ("vgg", "perceptron", "bert", "vit")
    ),
    *(
        Case(
            f"Poplar: ZeRO {level}, {model}",
            model,
            [
                R([S((0, last(model)))], batches)
                for batches in ([(1, 3), (1, 1)], [(2, 2)], [(1, 2), (1, 1)])
            ],
            zero(level),
        )
        for level in (0, 1, 2, 3)
        for model in ("gpt", "moe")
    ),
    *(
        Case(
            f"ZeRO {level} on pipelines",
            "gpt",
            [R(even([0, 2, 5]), [(2, 2)]), R(even([0, 3, 5]), [(1, 3), (1, 1)])],
            zero(level, 1, 2, 3, 4),
        )
        for level in (1, 2, 3)
    ),
    *(
        Case(
            f"ZeRO {level} with tensor ranks in pipelines",
            "llama",
            [R([S((0, 2), tensor=(1, 1)), S((2, 5))], [(2, 2)]), R(even([0, 3, 5]), [(2, 1)])],
            zero(level),
        )
        for level in (1, 2, 3)
    ),
    Case(
        "Ditto: widths 4, 2, 1",
        "gpt",
        [R([S((0, 2), tensor=(1,) * 4), S((2, 4), tensor=(1, 1)), S((4, 5))], [(4, 1)])],
    ),
    Case(
        "Ditto: widths 1, 2, 4",
        "llama",
        [R([S((0, 1)), S((1, 3), tensor=(1, 1)), S((3, 5), tensor=(1,) * 4)], [(4, 1)])],
    ),
    Case(
        "interleaved 1F1B, two chunks",
        "gpt",
        [R([S([(0, 1), (2, 3)]), S([(1, 2), (3, 5)])], [(4, 1)])] * 2,
        INTERLEAVED,
    ),
    Case(
        "interleaved, replicas with other cuts",
        "llama",
        [
            R([S([(0, 2), (3, 4)]), S([(2, 3), (4, 5)])], [(4, 1)]),
            R([S([(0, 1), (3, 4)]), S([(1, 3), (4, 5)])], [(2, 2)]),
        ],
        INTERLEAVED | {"zero": 1},
    ),
    *(
        Case(
            f"ZeRO {level} in two groups, {shape}",
            "gpt",
            replicas,
            zero(level) | {"degrees": {"shard_groups": 2}},
        )
        for level in (1, 2, 3)
        for shape, replicas in (
            ("replicas", [R([S((0, 5))], [(2, 1 + i % 2)]) for i in range(4)]),
            ("pipelines", [R(even([0, 2, 5]), [(1, 2)])] * 4),
        )
    ),
    Case("stages of one layer each", "gpt", [R(even([0, 1, 2, 3, 4, 5]), [(6, 1)])]),
    Case(
        "eight ranks, everything at once",
        "gpt",
        [
            R([S((0, 2), rows=(1, 2), tensor=(1, 1)), S((2, 5), tensor=(2, 1))], [(2, 3)]),
            R(even([0, 4, 5]), [(1, 2)]),
        ],
        zero(1),
    ),
    *(
        Case(f"{name}: {mode}", "gpt", replicas, {"recomputation": mode} | options)
        for mode in ("full", "selective", "operators")
        for name, replicas, options in (
            ("recomputation", [R([S((0, 2), tensor=(1, 1)), S((2, 5))], [(3, 2)])], {}),
            (
                "recomputation under ZeRO 3",
                [R([S((0, 5))], [(2, 2)]), R([S((0, 5))], [(2, 1)])],
                zero(3),
            ),
        )
    ),
]

IN_FP32 = (
    "replicas of different width",
    "rows and tensor parts in one stage",
    "uneven experts",
    "Poplar: ZeRO 3, gpt",
    "Ditto: widths 4, 2, 1",
    "recomputation: full",
    "eight ranks, everything at once",
    "pipeline of two, vgg",
)

# Two stages that take the micro-batches in different orders, some backward passes split.
SWAPPED = [
    ["F0", "F1", "F2", "B1", "D0", "B2", "W2", "W1"],
    ["F1", "F0", "B1", "D0", "F2", "W1", "D2"],
]
FLAT, ON_A_V = [S((0, 2)), S((2, 5))], [S([(0, 1), (3, 5)]), S([(1, 2), (2, 3)])]
# Backward passes in two parts: every named schedule, and orders of a plan's own.
SPLIT = [
    *(
        Case(f"{name}, {model}", model, [R(stages, [(3, 1), (2, 2)])], {"schedule": name})
        for names, stages in ((("zb-h1", "zb-h2"), FLAT), (FOLDED, ON_A_V))
        for name in names
        for model in ("gpt", "llama")
    ),
    Case("order of its own", "gpt", [R(FLAT, [(3, 2)])],
         {"schedule": "explicit", "passes": [SWAPPED]}),
    Case("zb-h1 with tensor ranks and rows", "gpt",
         [R([S((0, 2), tensor=(1, 2)), S((2, 5), rows=(2, 1))], [(3, 3)])], {"schedule": "zb-h1"}),
    Case("zbv of two replicas, ZeRO 1", "gpt-no-dropout", [R(ON_A_V, [(4, 1)])] * 2,
         {"schedule": "zbv", "zero": 1}),
    Case("zb-h1, experts", "mixtral", [R([S((0, 2)), S((2, 4))], [(3, 1)])],
         {"schedule": "zb-h1"}),
    Case("split passes of one stage", "moe", [R([S((0, 4))], [(2, 1)])] * 2,
         {"schedule": "zb-h1", "zero": 1}),
    Case("zb-h2, selective", "gpt", [R(FLAT, [(3, 1)])],
         {"schedule": "zb-h2", "recomputation": "selective"}),
]  # fmt: skip


def drawn(seed: int) -> Case:
    """Random orders that the checker accepts, on three stages or on two that lie on a V; in some
    of them a stage has two row groups."""
    rng, on_a_v = Random(seed), seed % 3 == 0
    stages = [*ON_A_V] if on_a_v else even([0, 2, 3, 5])
    if seed % 5 == 4:
        stages[0] = replace(stages[0], rows=(2, 1))
    places = virtual_stages(len(stages), 1 + on_a_v, folded=on_a_v)
    passes = random_orders(rng, places, 4, split=rng.choice([0.0, 0.5, 1.0]))
    options = {"schedule": "explicit", "passes": [passes]}
    return Case(f"random order {seed}", "gpt", [R(stages, [(4, 1 + seed % 2)])], options)


DRAWN = [drawn(seed) for seed in range(30)]
IN_FP64 = [*AWKWARD, *FAMILIES, *SPLIT]
CASES = [
    *IN_FP64,
    *(replace(c, name=f"{c.name}, fp32", dtype="float32") for c in IN_FP64 if c.name in IN_FP32),
]
