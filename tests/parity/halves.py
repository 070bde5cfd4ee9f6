"""Some plan shapes with passes in half precision, and ten steps of training beside fp32's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetplan.runtime import distribute
from parity.cases import CASES, MODELS, Case
from parity.curves import PLANS
from parity.device import DEVICE
from parity.gradients import SEED, STEP, Found, assembled, single

PRECISIONS = ("bf16", "fp16")
MODELS_TRIED = ("gpt", "llama", "bert", "moe", "vit", "vgg", "untied")
WORLDS = (2, 4)
STEPS = 10
CURVE = "ZeRO 3 on a pipeline"
# Relative errors of the loss, and of all gradients together: docs/runtime.md has them.
LOSS = {"bf16": 5e-3, "fp16": 5e-4}
GRADIENTS = {"bf16": 2e-2, "fp16": 2.5e-3}


def chosen() -> list[Case]:
    """The first shape of each model and world size."""
    found: dict[tuple[str, int], list[Case]] = {}
    for case in CASES:
        if case.model in MODELS_TRIED and case.world in WORLDS:
            found.setdefault((case.model, case.world), []).append(case)
    return [case for cases in found.values() for case in cases[:1]]


def train(precision: Any) -> list[float]:
    """The losses of some steps of AdamW on one batch."""
    with torch.device("meta"):
        module = MODELS["gpt"]()
    model = distribute(module, PLANS[CURVE], device=DEVICE, seed=1, precision=precision)
    updates = model.optimizer(torch.optim.AdamW, lr=1e-2)
    losses = []
    for _ in range(STEPS):
        losses.append(model.train_step(lambda first, last: module.batch(0, first, last)))
        updates.step()
        updates.zero_grad()
    return losses


def work(rank: int, world: int, folder: Path) -> None:
    """One step of each case in each precision."""
    torch.set_default_dtype(torch.float32)
    found: dict[Any, Any] = {}
    for case in chosen():
        if case.world != world:
            continue
        for precision in PRECISIONS:
            with torch.device("meta"):
                module = MODELS[case.model]()
            model = distribute(module, case.plan, device=DEVICE, seed=SEED, precision=precision)
            model.step = STEP
            loss = model.train_step()
            fragments = [
                vars(f) | {"values": f.values.reshape(-1).clone().cpu()} for f in model.gradients()
            ]
            found[case.name, precision] = (loss, fragments)
    if world == PLANS[CURVE].world_size:
        found["curves"] = {precision: train(precision) for precision in ("fp32", *PRECISIONS)}
    torch.save(found, folder / f"found-{world}-{dist.get_rank()}.pt")


def error_of(case: Case, precision: str, found: Found, apart: float = 0.0) -> float:
    """The relative error of all gradients together, within the type's rounding as the loss is.
    apart: as for `assembled`."""
    ranks = [rank[case.name, precision] for rank in found[case.world]]
    loss, gradients = single(case)
    assert ranks[0][0] == pytest.approx(loss, rel=LOSS[precision])
    whole = assembled(gradients, [f for rank in ranks for f in rank[1]], apart)
    assert {g.dtype for g in whole.values()} == {g.dtype for g in gradients.values()}
    size = sum(float(g.norm()) ** 2 for g in gradients.values()) ** 0.5
    error: float = (
        sum(float((whole[n] - g).norm()) ** 2 for n, g in gradients.items()) ** 0.5 / size
    )
    assert error <= GRADIENTS[precision]
    return error
