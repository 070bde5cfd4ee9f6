"""Every case's gradients, from its ranks and from one process; some by the ways that tensors on
GPUs go, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetplan.runtime.engine.distributed import Distributed
from hetplan.runtime.engine.position import Position, at
from hetplan.runtime.engine.transport import Transport
from parity import exchanges
from parity.cases import CASES, DRAWN, MODELS, Case
from parity.device import DEVICE, default_type, exact

SEED, STEP = 3, 2
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
WORLDS = sorted({case.world for case in CASES})
EXCHANGING = 3  # ranks that try every exchange, too
# One plan of each kind on two or three ranks: the default tests run these.
QUICK = (
    "pipeline of two, untied",
    "pipeline of two, vgg, fp32",
    "a stage without blocks, tied ends apart",
    "interleaved on one stage",
    "data parallel, perceptron",
    "a row group that never gets a row",
    "two tensor ranks, vgg",
    "one layer in three unequal tensor parts",
    "fewer heads than tensor ranks",
    "uneven experts",
    "Poplar: ZeRO 1, gpt",
    "Poplar: ZeRO 2, gpt",
    "ZeRO 3 with a replica that never gets a row",
    "recomputation: full",
    "zbv, gpt",
    "order of its own",
)
# Run again with everything copied to other buffers and back, and messages on lanes instead of with
# tags.
STAGED = (
    "two tensor ranks, vgg",
    "a stage without blocks, tied ends apart",
    "uneven experts",
    "Poplar: ZeRO 2, gpt",
    "Poplar: ZeRO 3, gpt, fp32",
    "recomputation: full",
    "widths 1 to 2 to 1",
    "interleaved with different widths",
    "interleaved, replicas with other cuts",
    "ZeRO 3 over different tensor widths",
    "rows and tensor parts in one stage",
)


def step_of(case: Case, **options: Any) -> tuple[float, list[dict[str, Any]]]:
    """Loss and fragments of gradients of one step."""
    with torch.device("meta"):
        module = MODELS[case.model]()
    model = Distributed(module, case.plan, device=DEVICE, seed=SEED, **options)
    model.step = STEP
    loss = model.train_step()
    return loss, parts(model, {id(p): p.grad for _, p in model.updated() if p.grad is not None})


def parts(model: Distributed, values: dict[int, Tensor]) -> list[dict[str, Any]]:
    """What a rank holds of some tensors, by id of their parameters."""
    return [
        {
            "name": box.name,
            "dim": model.chain.parameters[box.name].dim,
            "first": box.offsets[0],
            "last": box.offsets[0] + box.sizes[0],
            "values": box.values.reshape(-1).clone().cpu(),
        }
        for box in model.boxes(values)
    ]


def quick(rank: int, world: int, folder: Path) -> None:
    """One step of each case of QUICK of this size."""
    work(rank, world, folder, [case for case in CASES if case.name in QUICK])


def drawn(rank: int, world: int, folder: Path) -> None:
    """One step of each random order of this size."""
    work(rank, world, folder, DRAWN)


def work(rank: int, world: int, folder: Path, cases: Sequence[Case] = CASES) -> None:
    """One step of each case of this size; what the rank answers for is written to the folder."""
    exact()
    written: dict[str, Any] = {}
    for case in cases:
        if case.world != world:
            continue
        torch.set_default_dtype(getattr(torch, case.dtype))
        written[case.name] = step_of(case)
        if case.name in STAGED:
            with patch.object(
                Transport, "with_lanes", lambda own, streams: own.on_lanes(streams(), "gloo")
            ):
                written[f"staged: {case.name}"] = step_of(case, staging="always")
        dist.barrier()
    torch.save(written, folder / f"found-{world}-{rank}.pt")
    if world == EXCHANGING:
        exchanges.work(rank, world, folder)


def whole(case: Case) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """The unsplit model in this process, and its parameters by name."""
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
    layers = list(module.layers.values())
    with at(Position(SEED, step, 0)):
        x = inputs
        for layer in layers[:-1]:
            x = layer(x)
        summed = layers[-1](x, targets)
    count = len(targets) if targets.is_floating_point() else int((targets != -100).sum())
    return summed / count


def single(case: Case) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one process."""
    with default_type(case.dtype):
        module, named = whole(case)
        loss = total_loss(module, case, STEP)
        loss.backward()
    return float(loss.detach()), {
        name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in named.items()
    }


def assembled(
    shapes: dict[str, Tensor], fragments: list[dict[str, Any]], apart: float = 0.0
) -> dict[str, Tensor]:
    """Unsplit tensors from all ranks' fragments; what nobody answers for stays NaN, what two do
    must be equal.

    apart: how far they may be apart, beside 1 and the value: GPUs add up in any order.
    """
    flat: dict[str, Tensor] = {}
    dims: dict[str, int] = {}
    for f in fragments:
        name, like = f["name"], shapes[f["name"]]
        dims[name] = f["dim"]
        into = flat.setdefault(name, torch.full((like.numel(),), torch.nan, dtype=like.dtype))
        have = into[f["first"] : f["last"]]
        known = ~have.isnan()
        agree = torch.isclose(
            have[known], f["values"][known].to(have.dtype), rtol=apart, atol=apart
        )
        assert bool(agree.all()), f"{name}: two ranks disagree"
        into[f["first"] : f["last"]] = f["values"]
    whole = {}
    for name, like in shapes.items():
        if like.dim() == 0:
            whole[name] = flat[name].reshape(())
            continue
        moved = like.movedim(dims[name], 0)
        whole[name] = flat[name].view(moved.shape).movedim(0, dims[name])
    return whole


Written = dict[int, list[dict[Any, Any]]]  # world size -> [rank] -> what that rank wrote


def read(folder: Path, worlds: Iterable[int]) -> Written:
    """What the ranks of these world sizes left in `found-WORLD-RANK.pt`."""
    return {
        world: [torch.load(folder / f"found-{world}-{rank}.pt") for rank in range(world)]
        for world in worlds
    }


def check_case(case: Case, written: Written, apart: float = 0.0) -> None:
    """Loss and every gradient of a case are those of one process. apart: as for `assembled`."""
    losses = [rank[case.name][0] for rank in written[case.world]]
    fragments = [f for rank in written[case.world] for f in rank[case.name][1]]
    loss, gradients = single(case)
    tolerance = TOLERANCE[case.dtype]
    assert len(set(losses)) == 1
    assert losses[0] == pytest.approx(loss, rel=tolerance)
    for name, gradient in assembled(gradients, fragments, apart).items():
        expected = gradients[name]
        error = float((gradient - expected).norm())
        assert error <= tolerance * max(float(expected.norm()), 1e-3), f"{name}: {error}"
    assert any(float(g.norm()) > 1e-6 for g in gradients.values())
