"""A rank's part of a model in training, with the methods that a user's loop calls. The loop
accumulates gradients over iterations, makes an optimizer with groups of parameters, and clips
gradients by the norm of all of them. The results are the same on every rank.

A rank has parts of parameters, which ZeRO flattens, and several ranks may have the same part.
Therefore `TrainedPart.optimizer` chooses groups by unsplit parameters, and
`TrainedPart.gradient_norm` adds norms up over all ranks, each element once.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed as dist, nn

from hetplan.errors import UnsupportedError, require
from hetplan.plans.plan import Plan
from hetplan.runtime.engine.failures import told_to_peers
from hetplan.runtime.engine.transport import gather_objects, host_total

# Optimizers of torch.optim whose update of an element depends on other elements: of its parameter,
# or of the whole model.
WHOLE_PARAMETERS = ("Adafactor", "Muon")
WHOLE_MODELS = ("LBFGS",)


@dataclass(frozen=True)
class LossScale:
    """The dynamic loss scale of fp16 passes, on top of the scale that makes the gradient of a token
    about 1. Source: torch.amp.GradScaler and its default numbers."""

    value: float = 1.0
    """The factor of losses."""
    good: int = 0
    """Iterations with finite gradients since `value` changed."""
    growth: float = 2.0
    """Factor of `value` after `interval` iterations with finite gradients."""
    backoff: float = 0.5
    """Factor of `value` after an iteration whose gradients are not finite."""
    interval: int = 2000
    """Iterations with finite gradients in a row, after which `value` grows."""

    def following(self, *, finite: bool) -> "LossScale":
        """The scale of the next iteration. finite: whether this iteration's gradients are."""
        if not finite:
            return replace(self, value=self.backoff * self.value, good=0)
        if self.good + 1 == self.interval:
            return replace(self, value=self.growth * self.value, good=0)
        return replace(self, good=self.good + 1)


@dataclass(frozen=True)
class Box:
    """A part of an unsplit tensor: a range of indices in each dimension."""

    name: str
    """Name of the tensor in the unsplit model."""
    offsets: tuple[int, ...]
    """First index in each dimension."""
    sizes: tuple[int, ...]
    """Number of indices in each dimension."""
    whole: tuple[int, ...]
    """Sizes of the unsplit tensor."""
    values: Tensor
    """A view of the elements on this rank, in the order of the box; its shape may differ."""


def overlap(first: tuple[int, int], second: tuple[int, int], origin: int) -> tuple[int, int]:
    """The [begin, end) that two such ranges share, counted from `origin`; (0, 0) where they share
    nothing."""
    begin, end = max(first[0], second[0]), min(first[1], second[1])
    return (begin - origin, end - origin) if begin < end else (0, 0)


class TrainedPart(ABC):
    """A rank's part of a model in training."""

    plan: Plan
    step: int
    """Iterations begun."""
    seed: int
    """Seed of dropout and of synthetic data."""
    device: Any
    scale = LossScale()
    """Loss scale of passes in fp16."""
    autocast: Any = None
    """Type that torch.autocast gave the passes of the latest iteration; None outside of it."""
    shapes: Mapping[str, tuple[int, ...]]
    """Sizes of the unsplit parameters by their names."""

    @abstractmethod
    def updated(self) -> list[tuple[str, nn.Parameter]]:
        """(unsplit name, parameter) for each parameter that this rank's optimizer updates; several
        pieces of an unsplit parameter have the same name."""

    @abstractmethod
    def boxes(
        self,
        values: Mapping[int, Tensor] | None = None,
        *,
        deduplicated: bool = False,
        scalars: bool = False,
    ) -> Iterator[Box]:
        """The boxes of this rank's part of the parameters.

        values: by id of an updated parameter, a tensor to take the boxes' values from, such as its
        gradient; default the parameters. deduplicated: only the boxes that this rank saves, so that
        the boxes of all ranks have every element once. scalars: `values` are single numbers; their
        boxes are those of the parameters.
        """

    @abstractmethod
    def iteration(self, step: int, rows: Any) -> float:
        """Run the passes of an iteration and return the loss of the whole batch. `train_step` has
        set all gradients to None before."""

    def train_step(self, rows: Any = None) -> float:
        """Run forward and backward passes of one global batch, and return its loss, the same on
        every rank. Gradients are added to those of the parameters in `updated`, as torch's backward
        passes do. All ranks call this together. Where one fails, the others raise LostPeer with
        that rank's error.

        rows: (first, last) -> the data of these rows of the global batch, as the model's `batch`
        returns them; default the model's `batch` of this step. Inside torch.autocast of bf16 layers
        run as it says, backward passes with the types of their forward passes. Raises
        UnsupportedError inside torch.autocast of fp16.
        """
        device_type = torch.device(self.device).type
        self.autocast = self._autocast("train_step")
        step = self.step
        self.step += 1
        earlier_gradients = [(parameter, parameter.grad) for _, parameter in self.updated()]
        for parameter, _ in earlier_gradients:
            parameter.grad = None
        place = self.plan.rank_text(dist.get_rank())
        with torch.autocast(device_type, enabled=False), told_to_peers(f"{place}, step {step}"):
            loss = self.iteration(step, rows)
        for parameter, earlier in earlier_gradients:
            if earlier is None:
                continue
            if parameter.grad is not None:
                earlier += parameter.grad
            parameter.grad = earlier
        return loss

    def evaluate(self, rows: Any = None) -> float:
        """The loss of a global batch in evaluation, the same on every rank. All ranks call this
        together. rows: see `train_step`. Raises UnsupportedError for an engine that only
        trains."""
        raise UnsupportedError(
            "this engine only trains",
            got="evaluate",
            expected="a plan of stages and hetplan's own engine, or model.gather()",
        )

    def _autocast(self, caller: str) -> Any:
        """The type of torch.autocast around this call, None outside of it. caller: a method's name,
        for errors."""
        device_type = torch.device(self.device).type
        if not torch.is_autocast_enabled(device_type):
            return None
        dtype = torch.get_autocast_dtype(device_type)
        require(
            dtype == torch.bfloat16,
            "the passes would need a scaled loss",
            got=f"{caller} inside torch.autocast of {dtype}",
            expected="bf16, or distribute(…, precision='fp16')",
            kind=UnsupportedError,
        )
        return dtype

    def optimizer(
        self,
        kind: Callable[..., Any],
        *,
        groups: Callable[[str, tuple[int, ...]], Mapping[str, object]] | None = None,
        **options: Any,
    ) -> Any:
        """An optimizer of torch for the parameters that this rank updates. Elementwise optimizers
        (SGD, Adam, AdamW) are exact under every plan. All ranks call this together.

        kind: its class, called with parameter groups and `options`. groups: (name, shape) of an
        unsplit parameter -> its options beside the common ones; parameters with equal options form
        a group, and every rank has the same groups in the same order. Raises UnsupportedError where
        the optimizer needs whole parameters, or all of them, and the plan divides them.
        """
        options_of: dict[str, dict[str, object]] = {name: {} for name in self.shapes}
        if groups is not None:
            options_of = {name: dict(groups(name, shape)) for name, shape in self.shapes.items()}
        different: list[dict[str, object]] = []
        for parameter_options in options_of.values():
            if parameter_options not in different:
                different.append(parameter_options)
        parameter_groups = []
        for group_options in different:
            parameters = [p for name, p in self.updated() if options_of[name] == group_options]
            parameter_groups.append({"params": parameters, **group_options})
        optimizer = kind(parameter_groups, **options)
        name = type(optimizer).__name__
        ranks_with_divided = host_total(float(self._divides_what_it_needs(name)))
        require(
            ranks_with_divided <= 0,
            "the plan divides what the optimizer needs whole",
            got=name,
            expected="an elementwise one, such as AdamW or SGD",
            kind=UnsupportedError,
        )
        return optimizer

    def _divides_what_it_needs(self, optimizer: str) -> bool:
        """Whether this rank has parts only of what an optimizer of torch.optim needs whole."""
        shapes = {name: tuple(parameter.shape) for name, parameter in self.updated()}
        if optimizer in WHOLE_MODELS:
            return shapes != self.shapes
        if optimizer in WHOLE_PARAMETERS:
            all_whole = shapes.items() <= self.shapes.items()
            return not all_whole
        return False

    def gradient_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients of the model, the same on every rank. All ranks call this
        together."""
        gradients = {id(p): p.grad for _, p in self.updated() if p.grad is not None}
        saved_once = [box.values for box in self.boxes(gradients, deduplicated=True)]
        rank_norm = float(nn.utils.get_total_norm(saved_once, norm_type))
        norms = torch.tensor(gather_objects(rank_norm), dtype=torch.float64)
        return torch.linalg.vector_norm(norms, norm_type)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients by the norm of all gradients of the model, and return this norm.
        `torch.nn.utils.clip_grad_norm_` would see this rank's gradients only. All ranks call this
        together."""
        norm = self.gradient_norm(norm_type)
        nn.utils.clip_grads_with_norm_([p for _, p in self.updated()], max_norm, norm)
        return norm
