"""Mixtures of experts, spread over ranks: gradients, weights and what is exchanged, beside one
process; the last plan goes on from a checkpoint of another one, without spreading."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fakes.hugging import CONFIGURED, mixtral, qwen
from hetplan.plans.plan import Plan, parse_plan
from hetplan.runtime import distribute
from hetplan.runtime.engine import chain, checkpoint
from hetplan.runtime.engine.chain import TensorGroup
from hetplan.runtime.engine.distributed import example_of
from hetplan.runtime.engine.transport import Transport
from hetplan.runtime.tracing.experts import Experts
from hetplan.runtime.tracing.layers import Called
from parity.device import default_type, doubled
from parity.forked import largest

ROWS, TOKENS, WIDTH, EACH = 8, 6, 16, 2  # rows of a batch; EACH: experts of a token
RATE = 1e-2
ALL_TO_ALL = dist.all_to_all_single
MODELS: dict[str, Callable[[], nn.Module]] = {"mixtral": mixtral, "qwen": qwen}
END = len(CONFIGURED)


@dataclass(frozen=True)
class Spread:
    """A plan of equal replicas of stages [first, last) of layers, each on as many tensor ranks.
    before: the plan whose checkpoint it goes on from."""

    name: str
    model: str
    replicas: int
    expert: int
    stages: tuple[tuple[int, int], ...] = ((0, END),)
    batches: int = 2
    tensor: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    degrees: dict[str, Any] = field(default_factory=dict)
    before: str = ""

    @property
    def world(self) -> int:
        """Ranks."""
        return self.replicas * len(self.stages) * self.tensor

    @property
    def plan(self) -> Plan:
        """Devices go replica by replica."""
        shares = {"row_shares": [1.0], "tensor_shares": [1.0] * self.tensor}
        count, each = len(self.stages), range(self.tensor)
        samples = ROWS // self.replicas // self.batches
        replicas = [
            {
                "stages": [
                    {
                        "layers": [stage],
                        "devices": [[(i * count + j) * self.tensor + t for t in each]],
                        **shares,
                    }
                    for j, stage in enumerate(self.stages)
                ],
                "micro_batches": [{"count": self.batches, "samples": samples}],
            }
            for i in range(self.replicas)
        ]
        workload = {
            "model": self.model, "cluster": "made up", "global_batch": ROWS, "sequence": None,
            "precision": "fp32", "layers": CONFIGURED,
        }  # fmt: skip
        document = {
            "format": "hetplan-plan", "version": 1, "name": self.name, "workload": workload,
            "devices": [{"type": "A", "node": 0}] * self.world, "replicas": replicas,
            "degrees": {"expert": self.expert, **self.degrees}, **self.options,
        }  # fmt: skip
        return parse_plan(document, where=self.name)


HALVES = ((0, 2), (2, END))
CASES = [
    Spread("two ranks", "mixtral", 2, 2),
    Spread(
        "two groups, ZeRO 2 in two groups", "mixtral", 4, 2, batches=1,
        options={"zero": 2}, degrees={"shard_groups": 2},
    ),
    Spread(
        "pipelines, recomputed", "qwen", 2, 2, HALVES,
        options={"zero": 1, "recomputation": "full"},
        degrees={"recompute_method": "block", "recompute_layers": 1},
    ),
    Spread("tensor ranks", "qwen", 1, 2, tensor=4),
    Spread("uneven experts, ZeRO 3", "qwen", 4, 4, batches=1, options={"zero": 3}),
    Spread("without", "mixtral", 4, 1, batches=1, before="two ranks"),
]  # fmt: skip
WORLDS = (2, 4)
PREPARED: dict[tuple[str, bool], tuple[nn.Module, chain.Chain]] = {}


def made(model: str) -> Any:
    """A model with its first weights."""
    torch.manual_seed(3)
    return MODELS[model]()


def prepare() -> None:
    """Splits the models before there are ranks, each once."""
    cases = [case for case in CASES if case.world <= largest()]
    for model, spread in dict.fromkeys((case.model, case.expert > 1) for case in cases):
        with default_type("float64"), doubled():
            module = made(model)
            split = chain.describe(module, CONFIGURED, example_of(module), spread=1 + spread)
            PREPARED[model, spread] = module, split


def errors_where_one_rank_has_no_token(rank: int) -> list[float]:
    """Of the values and the gradients of tokens that all go to the first rank's experts."""
    with default_type("float64"):
        module = made("mixtral").model.layers[0].mlp.experts
        index = torch.tensor([[0, 1]] * 5)
        weights, own = torch.rand(5, EACH), TensorGroup(expert=(rank, 2))
        first, second = (torch.rand(5, WIDTH).requires_grad_() for _ in range(2))
        second.data.copy_(first.data)
        node = Experts(module)
        node.join(own, Transport.over("cpu").groups([(0, 1)], 7)[0, 1])
        held = [value[2 * rank : 2 * rank + 2] for value in module.parameters()]
        here = node(first, index, weights, held)
        here.sum().backward()
        module.config._experts_implementation = "eager"
        there = module(second, index, weights)
        there.sum().backward()
        assert first.grad is not None and second.grad is not None
        pairs = ((here, there), (first.grad, second.grad))
        return [float((one - other).detach().abs().max()) for one, other in pairs]


def work(rank: int, world: int, folder: Path) -> None:
    """A step of each case for its gradients and what was exchanged, then an update."""
    written: dict[str, Any] = {}
    for case in (case for case in CASES if case.world == world):
        with default_type("float64"):
            module, split = PREPARED[case.model, case.expert > 1]
            first = copy.deepcopy(module.state_dict())
            own = replace(split, layers=copy.deepcopy(split.layers))
            model: Any = distribute(module, case.plan, chain=own)
            optimizer = model.optimizer(torch.optim.AdamW, lr=RATE)
            if case.before:
                checkpoint.load(model, optimizer, str(folder / case.before))
            sent: list[list[int]] = []

            def counted(
                into: Tensor, x: Tensor, coming: Any, leaving: Any, *, sent: Any = sent, **more: Any
            ) -> None:
                sent.append([n * x.element_size() for n in leaving])
                ALL_TO_ALL(into, x, coming, leaving, **more)

            with patch.object(dist, "all_to_all_single", counted):
                loss = model.train_step()
            gradients = {id(p): p.grad for _, p in model.updated()}
            boxes = [
                (
                    box.name,
                    model.chain.parameters[box.name].dim,
                    box.offsets[0],
                    box.values.reshape(-1).clone(),
                )
                for box in model.boxes(gradients, deduplicated=True)
            ]
            norm = float(model.clip_grad_norm_(1e9))
            optimizer.step()
            optimizer.zero_grad()
            checkpoint.save(model, optimizer, str(folder / case.name))
            state = copy.deepcopy(model.gather().state_dict())
            module.load_state_dict(first)  # for the next case
            written[case.name] = {
                "loss": loss, "gradients": boxes, "norm": norm, "sent": sent,
                "held": {n: tuple(p.shape) for n, p in model.states.parameters.items()},
                "state": state if rank == 0 else None,
            }  # fmt: skip
    if world == 2:
        written["no token"] = errors_where_one_rank_has_no_token(rank)
    torch.save(written, folder / f"written-{world}-{rank}.pt")


def alone(model: str, steps: int) -> list[dict[str, Any]]:
    """By step: loss, gradients and weights behind the update in one process, by the model's own
    forward pass; of the first one [layers][rows] the experts of each row's tokens."""
    told = []
    with default_type("float64"), doubled():
        module = made(model)
        module.set_experts_implementation("eager")  # torch's grouped product knows no fp64
        optimizer = torch.optim.AdamW(module.parameters(), lr=RATE)
        chosen: list[Tensor] = []
        for inner in module.modules():
            if hasattr(inner, "num_experts") and hasattr(inner, "_apply_gate"):
                inner.register_forward_pre_hook(
                    lambda _, given: chosen.append(given[1].reshape(ROWS, TOKENS, EACH))
                )
        for step in range(steps):
            loss = Called(module)(*module.batch(step, 0, ROWS))
            loss.backward()
            gradients = {name: p.grad.clone() for name, p in module.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
            state = {name: value.clone() for name, value in module.state_dict().items()}
            told.append(
                {
                    "loss": float(loss.detach()), "gradients": gradients, "state": state,
                    "chosen": list(chosen),
                }
            )  # fmt: skip
    return told
