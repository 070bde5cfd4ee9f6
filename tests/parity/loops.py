"""What users' loops do beside forward and backward passes, under plans of every kind and in one
process by plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetplan.errors import UnsupportedError
from hetplan.runtime import distribute
from parity.cases import MODELS, Case, R, S, even, zero
from parity.device import DEVICE, default_type
from parity.gradients import SEED, parts, step_of, total_loss, whole

STEPS = 4
TWO = [R([S((0, 5))], [(2, 2)]), R([S((0, 5))], [(1, 3), (1, 1)])]
CASES = [
    Case("data parallel", "gpt", TWO),
    *(Case(f"data parallel, ZeRO {level}", "gpt", TWO, zero(level, 3, 1)) for level in (1, 2, 3)),
    Case("pipeline with tied ends", "gpt", [R(even([0, 2, 5]), [(4, 2)])]),
    Case("tensor ranks", "gpt", [R([S((0, 5), tensor=(1, 2))], [(2, 4)])]),
    Case(
        "tensor ranks beside one",
        "gpt",
        [R([S((0, 5), tensor=(1, 2))], [(2, 2)]), R([S((0, 5))], [(2, 1)])],
        zero(3),
    ),
    *(
        Case(
            f"pipelines, ZeRO {level}",
            "gpt",
            [R(even([0, 2, 5]), [(2, 2)]), R(even([0, 3, 5]), [(1, 3), (1, 1)])],
            zero(level),
        )
        for level in (1, 3)
    ),
]
FULL = {"recomputation": "full"}
THREE = [(2, 2), (1, 1)]
# The same micro-batches everywhere; the first one is what the others are compared with.
DROPPING = [
    Case("one rank", "dropping", [R([S((0, 4))], THREE)]),
    Case("one rank, recomputed", "dropping", [R([S((0, 4))], THREE)], FULL),
    Case("pipeline, recomputed", "dropping", [R(even([0, 2, 4]), THREE)], FULL),
    Case("tensor ranks, alike", "dropping", [R([S((0, 4), tensor=(1, 1))], THREE)]),
    Case(
        "ZeRO 3, recomputed",
        "dropping",
        [R([S((0, 4))], [(2, 2)]), R([S((0, 4))], [(1, 1), (1, 0)])],
        FULL | zero(3),
    ),
]
WORLDS = sorted({case.world for case in (*CASES, *DROPPING)})
LIMIT, NORMS = 0.05, (2.0, 1.0, float("inf"))


def decays(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Matrices decay, norms and biases do not; the head learns more slowly."""
    slow = {"lr": 1e-3} if name.startswith("embedding") else {}
    return slow | {"weight_decay": 0.3 if len(shape) > 1 else 0.0}


def rate(step: int) -> float:
    """Of the scheduler."""
    return 1.0 / (1 + step)


def average(optimizer: Any, *_: object) -> None:
    """Behind every update: an exponential moving average, as a state of the optimizer."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            kept = optimizer.state[p].setdefault("average", torch.zeros_like(p))
            kept.lerp_(p.detach(), 0.5)


def taken(optimizer: Any, passes: Any, clip: Any) -> Iterator[tuple[float, float]]:
    """(loss, norm) of each step: two iterations of passes, clipped together."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    optimizer.register_step_post_hook(average)
    for step in range(STEPS):
        loss = passes(2 * step) + passes(2 * step + 1)
        norm = clip(LIMIT, NORMS[step % len(NORMS)])
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        yield loss, float(norm)


def of_plan(case: Case) -> tuple[list[tuple[float, float]], list[dict[str, Any]], list[str]]:
    """Losses and norms, this rank's parts of the averages, and refusals."""
    with torch.device("meta"):
        module = MODELS[case.model]()
    model: Any = distribute(module, case.plan, device=DEVICE, seed=SEED)
    optimizer = model.optimizer(torch.optim.AdamW, groups=decays, lr=1e-2)
    steps = list(taken(optimizer, lambda _: model.train_step(), model.clip_grad_norm_))
    averages = {id(p): state["average"] for p, state in optimizer.state.items()}
    return steps, parts(model, averages), refusals(model)


def alone(case: Case) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """The same by plain torch."""
    with default_type(case.dtype):
        module, named = whole(case)

        def passes(step: int) -> float:
            loss = total_loss(module, case, step)
            loss.backward()
            return float(loss.detach())

        def clip(limit: float, norm: float) -> Tensor:
            return nn.utils.clip_grad_norm_(named.values(), limit, norm)

        groups = [{"params": [p], **decays(n, tuple(p.shape))} for n, p in named.items()]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        steps = list(taken(optimizer, passes, clip))
    return steps, {name: optimizer.state[p]["average"] for name, p in named.items()}


COMPILED = [
    Case("compiled pipeline", "gpt-no-dropout", [R(even([0, 2, 5]), [(2, 2)])], FULL),
    Case("compiled, ZeRO 3", "gpt-no-dropout", TWO, zero(3, 3, 1)),
]


def compiled(rank: int, world: int, folder: Path) -> None:
    """Layers that torch.compile has made anew, beside the same as they are; whole modules are
    refused."""
    torch.set_default_dtype(torch.float64)
    for case in COMPILED if world == 2 else ():
        steps = []
        for compiling in (False, True):
            with torch.device("meta"):
                module = MODELS[case.model]()
            model: Any = distribute(module, case.plan, device=DEVICE, seed=SEED)
            for layer in model.chain.layers if compiling else ():
                layer.compile(backend="aot_eager")
            steps.append((model.train_step(), [p.grad for _, p in model.updated()]))
        (loss, gradients), (again, others) = steps
        assert again == pytest.approx(loss, rel=1e-12), case.name
        for one, other in zip(gradients, others, strict=True):
            assert torch.allclose(one, other, rtol=1e-9, atol=1e-12), case.name
        with pytest.raises(UnsupportedError, match=r"compiled one by one .*torch\.compile"):
            distribute(torch.compile(module), case.plan)


def refusals(model: Any) -> list[str]:
    """What optimizers are refused that see more than single elements; and passes in fp16's
    autocast."""
    refused = []
    refusal = pytest.raises(UnsupportedError, match=r"inside torch\.autocast of torch\.float16")
    with refusal, torch.autocast("cpu", torch.float16):
        model.train_step()
    for kind in (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.AdamW):
        try:
            model.optimizer(kind)
        except UnsupportedError as error:
            refused.append(str(error).partition("got '")[2].partition("'")[0])
    return refused


def work(rank: int, world: int, folder: Path) -> None:
    """All cases of this size."""
    torch.set_default_dtype(torch.float64)
    written: dict[str, Any] = {}
    for case in CASES:
        if case.world == world:
            written[case.name] = of_plan(case)
            dist.barrier()
    for case in DROPPING:
        if case.world == world:
            torch.manual_seed(rank)  # as users have it: other draws on every rank
            before = torch.get_rng_state()
            written[case.name] = step_of(case)
            assert torch.equal(torch.get_rng_state(), before)
    torch.save(written, folder / f"found-{world}-{rank}.pt")
