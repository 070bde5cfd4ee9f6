"""Some plan shapes with passes in half precision, and ten steps of training beside fp32's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from parity.cases import CASES, Case
from parity.curves import PLANS, train
from parity.gradients import Written, assembled, single, step_of

PRECISIONS = ("bf16", "fp16")
MODELS_TRIED = ("gpt", "llama", "bert", "moe", "vit", "vgg", "untied")
WORLDS = (2, 4)
DIVIDED = (
    "recomputation under ZeRO 3: full", "recomputation under ZeRO 3: operators",
    "ZeRO 1 on pipelines", "ZeRO 2 on pipelines",
)  # fmt: skip
AUTOCAST = "autocast"  # bf16, by the user's loop
CURVE = "ZeRO 3 on a pipeline"
# Relative errors of the loss, and of all gradients together: docs/engine.md has them.
LOSS = {"bf16": 5e-3, "fp16": 5e-4, AUTOCAST: 5e-3}
GRADIENTS = {"bf16": 2e-2, "fp16": 2.5e-3, AUTOCAST: 2e-2}


def chosen() -> list[Case]:
    """The first shape of each model and world size."""
    first: dict[tuple[str, int], Case] = {}
    for case in CASES:
        if case.model in MODELS_TRIED and case.world in WORLDS:
            first.setdefault((case.model, case.world), case)
    return list(first.values())


def cast() -> list[Case]:
    """Those whose layers plain torch takes inside of autocast: routers of experts mix types."""
    more = [case for case in CASES if case.name in DIVIDED]
    return [case for case in (*chosen(), *more) if case.model != "moe"]


def work(rank: int, world: int, folder: Path) -> None:
    """One step of each case in each precision, and curves of one plan."""
    torch.set_default_dtype(torch.float32)
    steps: dict[Any, Any] = {
        (case.name, precision): step_of(case, precision=precision)
        for case in chosen()
        if case.world == world
        for precision in PRECISIONS
    }
    for case in cast():
        if case.world == world:
            with torch.autocast("cpu", torch.bfloat16):
                steps[case.name, AUTOCAST] = step_of(case)
    if world == PLANS[CURVE].world_size:
        types = ("fp32", *PRECISIONS)
        steps["curves"] = {p: train(PLANS[CURVE], "sgd", precision=p) for p in types}
    torch.save(steps, folder / f"found-{world}-{rank}.pt")


def error_of(case: Case, precision: str, written: Written, apart: float = 0.0) -> float:
    """The relative error of all gradients together, within the type's rounding as the loss is.
    apart: as for `assembled`. Inside of autocast one process is, too."""
    ranks = [rank[case.name, precision] for rank in written[case.world]]
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == AUTOCAST):
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
