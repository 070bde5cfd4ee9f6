"""Every case's gradients, from its ranks and from one process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetplan.runtime.execution.distributed import Distributed
from hetplan.runtime.execution.position import Position, at
from parity.cases import CASES, LOSSES, MODELS, Case

SEED, STEP = 3, 2
WORLDS = sorted({case.world for case in CASES})


def work(rank: int, world: int, folder: Path) -> None:
    """One step of each case of this size; what the rank answers for is written to the folder."""
    found: dict[str, Any] = {}
    for case in CASES:
        if case.world != world:
            continue
        begun = time.perf_counter()
        (folder / f"at-{world}-{rank}").write_text(case.name)
        torch.set_default_dtype(getattr(torch, case.dtype))
        with torch.device("meta"):
            module = MODELS[case.model]()
        model = Distributed(module, case.plan, loss=LOSSES.get(case.model), seed=SEED)
        model.step = STEP
        loss = model.train_step()
        found[case.name] = (
            loss,
            [vars(f) | {"values": f.values.reshape(-1).clone()} for f in model.gradients()],
        )
        dist.barrier()
        if rank == 0:
            with (folder / "seconds.txt").open("a") as told:
                told.write(f"{world} {time.perf_counter() - begun:.3f} {case.name}\n")
    torch.save(found, folder / f"found-{world}-{rank}.pt")


def whole(case: Case) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """The unsplit model in this process, and its parameters by name."""
    torch.set_default_dtype(getattr(torch, case.dtype))
    with torch.device("meta"):
        module = MODELS[case.model]()
    layers = module.layers if isinstance(getattr(module, "layers", None), nn.ModuleDict) else module
    named: dict[str, nn.Parameter] = {}
    made: dict[int, tuple[str, nn.Parameter]] = {}
    for layer, plan_name in zip(layers.children(), case.plan.workload.layers, strict=True):
        for inside, parameter in list(layer.named_parameters(remove_duplicate=False)):
            if id(parameter) not in made:
                full = f"{plan_name}.{inside}"
                made[id(parameter)] = (full, nn.Parameter(module.initial(full, parameter)))
                named[full] = made[id(parameter)][1]
            owner, _, last = inside.rpartition(".")
            setattr(layer.get_submodule(owner), last, made[id(parameter)][1])
    return module, named


def total_loss(module: Any, case: Case, step: int) -> Tensor:
    """The loss of the whole batch by plain torch: layer after layer, one pass of all rows."""
    inputs, targets = module.batch(step, 0, case.plan.workload.global_batch)
    layers = (
        list(module.layers.values())
        if isinstance(getattr(module, "layers", None), nn.ModuleDict)
        else list(module)
    )
    with at(Position(SEED, step, 0)):
        x = inputs
        for layer in layers[:-1]:
            x = layer(x)
        given = LOSSES.get(case.model)
        summed = given(layers[-1](x), targets) if given else layers[-1](x, targets)
    count = len(targets) if targets.is_floating_point() else int((targets != -100).sum())
    return summed / count


def single(case: Case) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one process."""
    module, named = whole(case)
    loss = total_loss(module, case, STEP)
    loss.backward()
    return float(loss.detach()), {
        name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in named.items()
    }


def assembled(shapes: dict[str, Tensor], fragments: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Unsplit tensors from all ranks' fragments; what nobody answers for stays NaN, what two do must be equal."""
    flat: dict[str, Tensor] = {}
    dims: dict[str, int] = {}
    for f in fragments:
        name, like = f["name"], shapes[f["name"]]
        dims[name] = f["dim"]
        into = flat.setdefault(name, torch.full((like.numel(),), torch.nan, dtype=like.dtype))
        have = into[f["first"] : f["last"]]
        known = ~have.isnan()
        assert torch.equal(have[known], f["values"][known]), f"{name}: two ranks disagree"
        into[f["first"] : f["last"]] = f["values"]
    whole = {}
    for name, like in shapes.items():
        if like.dim() == 0:
            whole[name] = flat[name].reshape(())
            continue
        moved = like.movedim(dims[name], 0)
        whole[name] = flat[name].view(moved.shape).movedim(0, dims[name])
    return whole
