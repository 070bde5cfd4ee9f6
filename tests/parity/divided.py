"""Users' models on tensor ranks and context ranks: one step under a plan that divides their layers,
the next one from its checkpoint under a plan that does not; and the same in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers as hf
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fakes.hugging import CONFIGURED, TEXT, TOKENS, gpt2, text, with_data
from hetplan.plans.plan import Plan, parse_plan
from hetplan.runtime import distribute
from hetplan.runtime.engine import chain, checkpoint
from hetplan.runtime.engine.distributed import example_of
from hetplan.runtime.engine.tensors import in_ring
from hetplan.runtime.engine.transport import Transport
from hetplan.runtime.tracing.layers import Called
from hetplan.runtime.tracing.split import Split
from parity.device import default_type, doubled

ROWS, RATE = 4, 0.1
ONE = ((0, 5),)


def llama(plan: object = None) -> nn.Module:
    """Four heads, two of keys and values."""
    config = hf.LlamaConfig(**TEXT | {"num_attention_heads": 4}, num_key_value_heads=2)
    return with_data(hf.LlamaForCausalLM(config), text)


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": llama, "gpt2": gpt2}


@dataclass(frozen=True)
class Case:
    """A replica of stages [first, last) of layers, each on `context` row groups of `tensor` ranks;
    on a V they have the second chunks `back`. holds, computes: shares of all parameters and of all
    FLOPs that a rank has at most."""

    name: str
    model: str
    stages: tuple[tuple[int, int], ...] = ONE
    context: int = 1
    tensor: int = 1
    exchange: str = "all-to-all"
    sequence_parallel: bool = False
    holds: float = 1.0
    computes: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)
    layers: tuple[str, ...] = tuple(CONFIGURED)
    back: tuple[tuple[int, int], ...] = ()

    @property
    def world(self) -> int:
        """Ranks."""
        return len(self.stages) * self.context * self.tensor

    @property
    def plan(self) -> Plan:
        """Two micro-batches of two samples; devices go stage by stage."""
        each = self.context * self.tensor
        stages = [
            {
                "layers": [list(layers), *(list(chunk) for chunk in self.back[j : j + 1])],
                "devices": [
                    [j * each + g * self.tensor + t for t in range(self.tensor)]
                    for g in range(self.context)
                ],
                "row_shares": [1.0] * self.context,
                "tensor_shares": [1.0] * self.tensor,
            }
            for j, layers in enumerate(self.stages)
        ]
        degrees = {
            "context": self.context, "exchange": self.exchange,
            "sequence_parallel": self.sequence_parallel,
        }  # fmt: skip
        more = {"degrees": degrees} if self.context > 1 or self.sequence_parallel else {}
        replicas = [(stages, ROWS)]
        return planned(self.name, self.world, replicas, self.layers, **self.options, **more)


def batches_of(rows: Any) -> list[int]:
    """The samples of micro-batches of at most two, or those that a list says."""
    return rows if isinstance(rows, list) else [min(rows, 2)] * -(-rows // 2)


def planned(
    name: str,
    world: int,
    replicas: list[Any],
    layers: Sequence[str] = CONFIGURED,
    **options: Any,
) -> Plan:
    """A plan of replicas of (stages, samples), in micro-batches of at most two samples or as a list
    of samples says."""
    workload = {
        "model": name, "cluster": "made up", "global_batch": ROWS, "sequence": TOKENS,
        "precision": "fp32", "layers": list(layers),
    }  # fmt: skip
    document = {
        "format": "hetplan-plan", "version": 1, "name": name, "workload": workload,
        "devices": [{"type": "A", "node": 0}] * world,
        "replicas": [
            {
                "stages": stages,
                "micro_batches": [{"count": 1, "samples": samples} for samples in batches_of(rows)],
            }
            for stages, rows in replicas
        ],
    }  # fmt: skip
    return parse_plan(document | options, where=name)


CASES = [
    Case("tensor", "llama", tensor=2, holds=0.56, computes=0.56),
    Case(
        "tensor, recomputed",
        "gpt2",
        tensor=2,
        holds=0.53,
        computes=0.67,  # half of a step and a third more
        options={"recomputation": "full"},
    ),
    Case("sequence parallel", "llama", tensor=2, sequence_parallel=True, holds=0.56, computes=0.56),
    Case("context", "llama", context=2, computes=0.56),
    Case("context", "gpt2", context=2, computes=0.5, options={"zero": 3}),
    Case("tensor, pipeline", "gpt2", ((0, 2), (2, 5)), tensor=2),
    Case("context, pipeline", "llama", ((0, 2), (2, 5)), context=2),
    Case("context, tensor", "llama", context=2, tensor=2, holds=0.56, computes=0.56),
    Case("ring", "gpt2", context=2, exchange="ring", computes=0.56, options={"zero": 3}),
    Case("ring", "llama", context=3, exchange="ring", computes=0.4),
    Case(
        "ring, tensor, recomputed", "llama", context=2, tensor=2, exchange="ring",
        holds=0.56, computes=0.42, options={"recomputation": "full"},
    ),
]  # fmt: skip
TWO = ((0, 2), (2, 5))
# Two stages that take the micro-batches in different orders, some backward passes split.
SWAPPED = [["F0", "F1", "B1", "D0", "W1"], ["F1", "F0", "B1", "B0", "W0", "W1"]]
# Backward passes in two parts.
SPLIT = [
    Case("tensor, zb-h1", "llama", TWO, tensor=2, options={"schedule": "zb-h1"}),
    Case(
        "sequence parallel, order of its own", "llama", TWO, tensor=2, sequence_parallel=True,
        options={"schedule": "explicit", "passes": [SWAPPED]},
    ),
    Case("context, zb-h2", "gpt2", TWO, context=2, options={"schedule": "zb-h2"}),
    Case(
        "ring, zbv", "llama", ((0, 1), (1, 2)), context=2, exchange="ring", back=((3, 5), (2, 3)),
        options={"schedule": "zbv"},
    ),
    Case(
        "ring, tensor, zb-h1", "gpt2", context=2, tensor=2, exchange="ring",
        options={"schedule": "zb-h1"},
    ),
    Case(
        "tensor, ZeRO 3, v-half", "gpt2", ((0, 1), (1, 2)), tensor=2, back=((3, 5), (2, 3)),
        options={"schedule": "v-half", "zero": 3},
    ),
]  # fmt: skip
CASES += SPLIT
QUICK = CASES[1], CASES[3], CASES[8]
# Every way to divide a layer, split backward passes, and one case with several ways at once.
KINDS = [
    case
    for case in CASES
    if case.world < 4 or case.name == "ring, tensor, recomputed" or case in SPLIT
]
WORLDS = sorted({case.world for case in CASES})
PREPARED: dict[str, tuple[nn.Module, Split]] = {}


class Counting(TorchDispatchMode):
    """FLOPs on this rank: of operators on local tensors."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        made = func(*args, **(kwargs or {}))
        flops = flop_registry.get(func.overloadpacket)
        shapes_alone = any(kind not in (Tensor, nn.Parameter) for kind in types)
        if flops is not None and not shapes_alone:
            self.total += flops(*args, **(kwargs or {}), out_val=made)
        return made


def made(name: str) -> Any:
    """A model with its first weights."""
    torch.manual_seed(3)
    return MODELS[name]()


def prepare() -> None:
    """Splits both models before there are ranks."""
    for name in MODELS:
        with default_type("float64"), doubled():
            module = made(name)
            split = Split(module, CONFIGURED, example_of(module), None, None, "cpu")
            PREPARED[name] = module, split


def restored(name: str) -> nn.Module:
    """A prepared model whose layers have their whole weights again."""
    module, split = PREPARED[name]
    for layer in split.layers:
        for inside, _ in list(layer.named_parameters(remove_duplicate=False)):
            owner, _, last = inside.rpartition(".")
            setattr(layer.get_submodule(owner), last, module.get_parameter(inside))
    return module


def check_ring(rank: int, world: int) -> None:
    """Values and gradients of a ring beside torch's attention: fewer heads of keys, wider values,
    masks of both kinds, under which some ranks see no key of others."""
    torch.manual_seed(5)
    ring, tokens = Transport.over("cpu").groups([range(world)])[tuple(range(world))], 3 * world
    seen = torch.rand(2, 1, tokens, tokens) < 0.5
    seen[:, :, :, 0], seen[0, 0, :, 3:] = True, False
    added = torch.rand(4, tokens, tokens).double()
    added[:, :, 3:] = -torch.inf
    options: list[dict[str, Any]] = [
        {}, {"is_causal": True, "scale": 0.3}, {"attn_mask": seen}, {"attn_mask": added},
        {"attn_mask": seen[:, :, :1]},
    ]  # fmt: skip
    for option in options:
        sizes = ((4, 5), (2, 5), (2, 7))
        inputs = [torch.rand(2, h, tokens, w).double().requires_grad_() for h, w in sizes]
        part = slice(3 * rank, 3 * rank + 3)
        own = [x.detach()[:, :, part].clone().requires_grad_() for x in inputs]
        whole = nn.functional.scaled_dot_product_attention(*inputs, **option, enable_gqa=True)
        here = in_ring(ring, rank, *own, **option)
        weights = torch.rand_like(whole)
        (whole * weights).sum().backward()
        (here * weights[:, :, part]).sum().backward()
        pairs = [(here, whole), *zip((x.grad for x in own), (x.grad for x in inputs), strict=True)]
        for ours, like in pairs:
            torch.testing.assert_close(ours, like[:, :, part], rtol=1e-12, atol=1e-12)


def quick(rank: int, world: int, folder: Path) -> None:
    """Some cases of two ranks."""
    work(rank, world, folder, QUICK)


def kinds(rank: int, world: int, folder: Path) -> None:
    """The cases of KINDS of this size."""
    work(rank, world, folder, KINDS)


def work(rank: int, world: int, folder: Path, cases: Sequence[Case] = CASES) -> None:
    """All cases of this size."""
    check_ring(rank, world)
    left: dict[Any, Any] = {}
    halves = [
        ([{"layers": [[0, 5]], "devices": [[rank]], "row_shares": [1.0], "tensor_shares": [1.0]}],
         ROWS * (rank + 1) // world - ROWS * rank // world)
        for rank in range(world)
    ]  # fmt: skip
    for case in (case for case in cases if case.world == world):
        key, kept = (case.name, case.model), str(folder / f"{case.name}-{case.model}")
        first = {n: p.detach().clone() for n, p in PREPARED[case.model][0].named_parameters()}
        left[key] = {"losses": [], "weights": []}
        for part, plan in enumerate((case.plan, planned(case.name, world, halves))):
            module, split = restored(case.model), PREPARED[case.model][1]
            with default_type("float64"):
                with patch.object(chain, "Split", lambda *_, split=split, **__: split):
                    model = distribute(module, plan, probe=False)
                optimizer = model.optimizer(torch.optim.SGD, lr=RATE)
                if part:
                    checkpoint.load(model, optimizer, kept)
                with Counting() as counter:
                    left[key]["losses"].append(model.train_step())
                optimizer.step()
                if not part:
                    left[key]["flops"] = counter.total
                    left[key]["held"] = sum(p.numel() for p in model.states.parameters.values())
                    checkpoint.save(model, optimizer, kept)
                state = model.gather().state_dict()
                left[key]["weights"].append({n: state[n].clone() for n in first})
        with torch.no_grad():
            for n, p in PREPARED[case.model][0].named_parameters():
                p.copy_(first[n])
    torch.save(left, folder / f"left-{world}-{rank}.pt")


def alone(name: str) -> tuple[list[float], list[dict[str, Tensor]], int]:
    """Losses and weights of both steps of one process, and the FLOPs of the first one."""
    with default_type("float64"), doubled():
        module = made(name)
        called = Called(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
        losses, weights, flops = [], [], 0
        for step in range(2):
            with Counting() as counter:
                loss = called(*module.batch(step, 0, ROWS))
                loss.backward()
            flops = flops or counter.total
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            weights.append({n: p.detach().clone() for n, p in module.named_parameters()})
    return losses, weights, flops
