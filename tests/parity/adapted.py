"""Adapters of `peft` beside a frozen Llama, on three ranks that take 5, 2 and 1 samples, and on
pipelines and tensor ranks: weights after each step, and what is exchanged. Each plan goes on from
the one before. The last one writes its adapters as `peft` does."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import peft
import torch
import torch.distributed as dist
from torch import Tensor

from fakes.hugging import CONFIGURED, TOKENS, llama
from hetplan.plans.plan import Plan, parse_plan
from hetplan.runtime import distribute
from hetplan.runtime.engine import chain, checkpoint
from hetplan.runtime.engine.buckets import Bucket
from hetplan.runtime.engine.distributed import example_of
from hetplan.runtime.engine.worker import write_module
from hetplan.runtime.tracing.layers import Called
from hetplan.runtime.tracing.split import Split
from parity.device import default_type, doubled

WORLDS = [3]
ROWS, RATE, RANK = 8, 0.5, 2
END = len(CONFIGURED)


def stage(first: int, last: int, *devices: int) -> dict[str, Any]:
    """A stage of layers on tensor ranks of equal shares."""
    return {
        "layers": [[first, last]],
        "devices": [list(devices)],
        "row_shares": [1.0],
        "tensor_shares": [1 / len(devices)] * len(devices),
    }


UNEQUAL = [([stage(0, END, rank)], samples) for rank, samples in enumerate((5, 2, 1))]
PIPELINE = [([stage(0, 2, 0), stage(2, END, 1)], 6), ([stage(0, END, 2)], 2)]
TENSOR = [([stage(0, END, 0, 1)], 5), ([stage(0, END, 2)], 3)]
THREE_STAGES = [([stage(0, 2, 0), stage(2, 3, 1), stage(3, END, 2)], 8)]


def planned(name: str, replicas: list[Any], zero: int, rows: int = ROWS) -> Plan:
    """A plan of replicas of (stages, samples of their one micro-batch)."""
    document = {
        "format": "hetplan-plan",
        "version": 1,
        "name": name,
        "zero": zero,
        "workload": {
            "model": "llama",
            "cluster": "made up",
            "global_batch": rows,
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
    """Unequal batches under every ZeRO level, a pipeline or two tensor ranks beside one rank, and a
    pipeline of all three."""
    made = [planned(f"5 to 2 to 1, ZeRO {z}", UNEQUAL, z) for z in (0, 2, 3, 1)]
    made.append(planned("a pipeline and a rank, ZeRO 1", PIPELINE, 1))
    made.append(planned("two tensor ranks and a rank", TENSOR, 0))
    made.append(planned("three stages", THREE_STAGES, 0))
    return {plan.name: plan for plan in made}


def adapted(plan: object = None) -> Any:
    """The model with its first weights: also B has values, so that A has gradients."""
    torch.manual_seed(5)
    base: Any = llama()
    lora = peft.LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    module: Any = peft.get_peft_model(base, lora, autocast_adapter_dtype=False)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            generator = torch.Generator().manual_seed(len(name) + parameter.numel())
            parameter.data.normal_(std=0.3, generator=generator)
    module.batch = base.batch
    return module


@contextmanager
def exactly() -> Iterator[None]:
    """All is computed in fp64, norms too. A trace that is made so stays so."""
    with default_type("float64"), doubled():
        yield


PREPARED: list[tuple[Any, Split, dict[str, Tensor]]] = []  # the module, its layers, first values


def prepare() -> None:
    """Splits the model before there are ranks, once."""
    with exactly():
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
            trained = model.gather()
        summed[name] = sum(numbers)
        if dist.get_rank() == 0:
            weights[name] = copy.deepcopy(trained.state_dict())
            write_module(trained, folder / "trained")
    torch.save(summed, folder / f"summed-{rank}.pt")
    if dist.get_rank() == 0:
        torch.save(weights, folder / "adapted.pt")


def alone() -> list[dict[str, Tensor]]:
    """Weights of one process after each step."""
    with exactly():
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
