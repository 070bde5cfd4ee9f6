"""What a user's loop does beside the passes, the same on every rank: iterations that accumulate,
optimizers with groups of parameters, clipping by the norm of all gradients.

Ranks hold parts of parameters, flat ones under ZeRO, and several may hold the same. So groups are
decided on the unsplit parameters, and norms are added up over all ranks, each element once.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hetplan.errors import UnsupportedError, require
from hetplan.runtime.engine.transport import gather_objects, host_total

# Of torch.optim: those whose update of an element depends on others.
WHOLE_PARAMETERS = ("Adafactor", "Muon")
WHOLE_MODELS = ("LBFGS",)


@dataclass(frozen=True)
class LossScale:
    """What losses are multiplied by in fp16, beside what makes a token's gradient about 1. Source:
    torch.amp.GradScaler and its default numbers."""

    value: float = 1.0
    good: int = 0
    """Iterations with finite gradients since it changed."""
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    """Iterations with finite gradients in a row, after which it grows."""

    def following(self, *, finite: bool) -> "LossScale":
        """Behind an iteration."""
        good = self.good + 1 if finite else 0
        grows = good == self.interval
        factor = self.growth if grows else 1.0 if finite else self.backoff
        return replace(self, value=factor * self.value, good=0 if grows else good)


@dataclass(frozen=True)
class Box:
    """Part of an unsplit tensor of sizes `whole`. values: a view of what is here, with the elements
    of a box of `sizes` at `offsets`, in their order."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    whole: tuple[int, ...]
    values: Tensor


def overlap(one: tuple[int, int], two: tuple[int, int], origin: int) -> tuple[int, int]:
    """The elements that two ranges share, counted from `origin`; (0, 0) where they share none."""
    first, last = max(one[0], two[0]), min(one[1], two[1])
    return (first - origin, last - origin) if first < last else (0, 0)


class Trained(ABC):
    """A rank's part of a model. step: iterations begun; seed: of dropout and of synthetic data;
    shapes: of the unsplit parameters; scale: of passes in fp16; autocast: type of an iteration's
    passes inside torch.autocast."""

    step: int
    seed: int
    device: Any
    scale = LossScale()
    autocast: Any = None
    shapes: Mapping[str, tuple[int, ...]]

    @abstractmethod
    def updated(self) -> list[tuple[str, nn.Parameter]]:
        """(unsplit name, parameter) that this rank's optimizer updates; a name may come in several
        pieces."""

    @abstractmethod
    def boxes(
        self,
        values: Mapping[int, Tensor] | None = None,
        *,
        mine: bool = False,
        scalars: bool = False,
    ) -> Iterator[Box]:
        """What this rank holds. values: by id of an updated parameter (gradients, say); default its
        own.

        mine: only what this rank answers for, so that all ranks' boxes are every element once.
        scalars: the values are single ones, which go with whole boxes.
        """

    @abstractmethod
    def iteration(self, step: int, rows: Any) -> float:
        """The passes of an iteration, into gradients that are None before."""

    def train_step(self, rows: Any = None) -> float:
        """Forward and backward passes of one global batch; gradients are added to those that are
        where `optimizer` finds them.

        rows: (first, last) -> these global rows, as the model's `batch` returns them; default its
        own of this step. Returns the loss of the whole batch, the same on every rank. All ranks
        call this together. Inside torch.autocast layers run in bf16 as it says, backward passes as
        their forward passes did. Raises UnsupportedError for fp16 there.
        """
        kind = torch.device(self.device).type
        self.autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        require(
            self.autocast in (None, torch.bfloat16),
            "the passes would need a scaled loss",
            got=f"train_step inside torch.autocast of {self.autocast}",
            expected="bf16, or distribute(…, precision='fp16')",
            kind=UnsupportedError,
        )
        step = self.step
        self.step += 1
        before = [(parameter, parameter.grad) for _, parameter in self.updated()]
        for parameter, _ in before:
            parameter.grad = None
        with torch.autocast(kind, enabled=False):
            loss = self.iteration(step, rows)
        for parameter, gradient in before:
            if gradient is not None and parameter.grad is not None:
                gradient += parameter.grad
            parameter.grad = parameter.grad if gradient is None else gradient
        return loss

    def optimizer(
        self,
        kind: Callable[..., Any],
        *,
        groups: Callable[[str, tuple[int, ...]], Mapping[str, object]] | None = None,
        **options: Any,
    ) -> Any:
        """An optimizer of torch over what this rank updates; elementwise ones (SGD, Adam, AdamW)
        are exact under every plan. All ranks together.

        groups: (name, shape) of an unsplit parameter -> its options beside the common ones;
        parameters with equal options are a group, and every rank has the same groups in the same
        order. Raises UnsupportedError for one of torch's others where it would see parts.
        """
        chosen = {n: dict(groups(n, s)) if groups else {} for n, s in self.shapes.items()}
        each = list(chosen.values())
        different = [own for k, own in enumerate(each) if own not in each[:k]]
        parameters = [[p for n, p in self.updated() if chosen[n] == own] for own in different]
        made = [{"params": p, **own} for p, own in zip(parameters, different, strict=True)]
        optimizer = kind(made, **options)
        name, held = type(optimizer).__name__, {n: tuple(p.shape) for n, p in self.updated()}
        divided = (name in WHOLE_MODELS and held != self.shapes) or (
            name in WHOLE_PARAMETERS and not held.items() <= self.shapes.items()
        )
        require(
            host_total(float(divided)) <= 0,
            "the plan divides what the optimizer needs whole",
            got=name,
            expected="an elementwise one, such as AdamW or SGD",
            kind=UnsupportedError,
        )
        return optimizer

    def gradient_norm(self, norm_type: float = 2.0) -> Tensor:
        """Of all gradients of the model, the same on every rank. All ranks together."""
        gradients = {id(p): p.grad for _, p in self.updated() if p.grad is not None}
        own = nn.utils.get_total_norm(
            [box.values for box in self.boxes(gradients, mine=True)], norm_type
        )
        everyone = torch.tensor(gather_objects(float(own)), dtype=torch.float64)
        return torch.linalg.vector_norm(everyone, norm_type)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """In place of `torch.nn.utils.clip_grad_norm_`, which would see this rank's gradients
        alone: returns the norm before. All ranks together."""
        total = self.gradient_norm(norm_type)
        nn.utils.clip_grads_with_norm_([p for _, p in self.updated()], max_norm, total)
        return total
