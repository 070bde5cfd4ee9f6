"""Adapters beside a frozen Llama, on three ranks that take 5, 2 and 1 samples, and on pipelines:
weights after each step, and what is exchanged; each plan goes on from the one before."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from fakes.hugging import CONFIGURED, TOKENS, llama
from fakes.lora import with_lora
from hetplan.plans.plan import Plan, parse_plan
from hetplan.runtime import distribute
from hetplan.runtime.engine import chain, checkpoint
from hetplan.runtime.engine.buckets import Bucket
from hetplan.runtime.engine.distributed import example_of
from hetplan.runtime.tracing.layers import Called
from hetplan.runtime.tracing.split import Split
from parity.device import default_type

WORLDS = [3]
ROWS, RATE, RANK = 8, 0.5, 2
END = len(CONFIGURED)


def stage(first: int, last: int, device: int) -> dict[str, Any]:
    return {
        "layers": [[first, last]],
        "devices": [[device]],
        "row_shares": [1.0],
        "tensor_shares": [1.0],
    }


UNEQUAL = [([stage(0, END, rank)], samples) for rank, samples in enumerate((5, 2, 1))]
PIPELINE = [([stage(0, 2, 0), stage(2, END, 1)], 6), ([stage(0, END, 2)], 2)]


def planned(name: str, replicas: list[Any], zero: int) -> Plan:
    """A plan of replicas of (stages, samples of their one micro-batch)."""
    document = {
        "format": "hetplan-plan",
        "version": 1,
        "name": name,
        "zero": zero,
        "workload": {
            "model": "llama",
            "cluster": "made up",
            "global_batch": ROWS,
            "sequence": TOKENS,
            "precision": "fp32",
            "layers": list(CONFIGURED),
        },
        "devices": [{"type": "A", "node": 0}] * 3,
        "replicas": [
            {"stages": stages, "micro_batches": [{"count": 1, "samples": samples}]}
            for stages, samples in replicas
        ],
    }
    return parse_plan(document, where=name)


def plans() -> dict[str, Plan]:
    """Unequal batches under every ZeRO level, and a pipeline beside one rank."""
    made = [planned(f"5 to 2 to 1, ZeRO {z}", UNEQUAL, z) for z in (0, 2, 3, 1)]
    made.append(planned("a pipeline and a rank, ZeRO 1", PIPELINE, 1))
    return {plan.name: plan for plan in made}


def adapted(plan: object = None) -> Any:
    """The model with its first weights: also B has values, so that A has gradients."""
    torch.manual_seed(5)
    module: Any = llama()
    batch = module.batch
    with_lora(module, RANK)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            generator = torch.Generator().manual_seed(len(name) + parameter.numel())
            parameter.data.normal_(std=0.3, generator=generator)
    module.batch = batch
    return module


PREPARED: list[tuple[Any, Split, dict[str, Tensor]]] = []  # the module, its layers, first values


def prepare() -> None:
    """Splits the model before there are ranks, once."""
    with default_type("float64"):
        module = adapted()
        split = Split(module, CONFIGURED, example_of(module), None, None, "cpu")
        first = {name: p.detach().clone() for name, p in module.named_parameters()}
        PREPARED.append((module, split, first))


def restored() -> tuple[Any, Split]:
    """The prepared model, whose layers have its parameters and their first values again."""
    module, split, first = PREPARED[0]
    for name, parameter in module.named_parameters():
        parameter.data = first[name].clone()
    for layer in split.layers:
        for inside, _ in list(layer.named_parameters(remove_duplicate=False)):
            owner, _, last = inside.rpartition(".")
            setattr(layer.get_submodule(owner), last, module.get_parameter(inside))
    return module, split


def work(rank: int, world: int, folder: Path) -> None:
    """A step under each plan, with the numbers that each rank brings into sums of gradients."""
    weights: dict[str, dict[str, Tensor]] = {}
    summed: dict[str, int] = {}
    kept = str(folder / "kept")
    flatten = Bucket.flatten
    for number, (name, plan) in enumerate(plans().items()):
        numbers: list[int] = []

        def counting(bucket: Any, tensors: Any, **more: Any) -> Any:
            flat = flatten(bucket, tensors, **more)
            if more.get("contributed"):
                numbers.append(flat.numel())  # noqa: B023 - read before the next plan
            return flat

        module, split = restored()

        def split_already(*_: Any, **__: Any) -> Split:
            return split  # noqa: B023 - called before the next plan

        with (
            default_type("float64"),
            patch.object(Bucket, "flatten", counting),
            patch.object(chain, "Split", split_already),
        ):
            model: Any = distribute(module, plan, probe=False)
            optimizer = model.optimizer(torch.optim.SGD, lr=RATE)
            if number:
                checkpoint.load(model, optimizer, kept)
            model.step = number
            model.train_step()
            optimizer.step()
            checkpoint.save(model, optimizer, kept)
            state = model.state_dict()
        summed[name] = sum(numbers)
        if dist.get_rank() == 0:
            weights[name] = state
    torch.save(summed, folder / f"summed-{rank}.pt")
    if dist.get_rank() == 0:
        torch.save(weights, folder / "adapted.pt")


def alone() -> list[dict[str, Tensor]]:
    """Weights of one process after each step."""
    with default_type("float64"):
        module = adapted()
        trained = [p for p in module.parameters() if p.requires_grad]
        called, optimizer = Called(module), torch.optim.SGD(trained, lr=RATE)
        states = []
        for step in range(len(plans())):
            called(*module.batch(step, 0, ROWS)).backward()
            optimizer.step()
            optimizer.zero_grad()
            states.append(copy.deepcopy(module.state_dict()))
    return states
