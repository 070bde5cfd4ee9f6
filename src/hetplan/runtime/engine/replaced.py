"""The parameters of a module that `distribute` has replaced by this rank's parts.

The module keeps its own parameters, which no pass reads any more. An optimizer over them would step
without any effect, and so would a change of their `requires_grad`. Both raise an error here.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from hetplan.errors import InputError, require

_NAMES: Any = WeakTensorKeyDictionary()
"""A replaced parameter -> its name in its module."""


class Replaced:
    """The replaced parameters of one module."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """parameters: name in the module -> parameter that it had before `distribute`."""
        self.parameters = parameters
        self.trained = {name: p.requires_grad for name, p in self.parameters.items()}
        for name, parameter in self.parameters.items():
            _NAMES[parameter] = name

    def release(self) -> None:
        """Let optimizers step the parameters again: the module has its trained weights."""
        for parameter in self.parameters.values():
            _NAMES.pop(parameter, None)
        self.parameters = {}

    def check_trained(self) -> None:
        """Raise InputError where a parameter was frozen or unfrozen since it was replaced."""
        for name, parameter in self.parameters.items():
            require(
                parameter.requires_grad == self.trained[name],
                "a parameter is frozen or unfrozen behind `distribute`, which has no effect",
                where=name,
                got=f"requires_grad={parameter.requires_grad}",
                expected="the change before, and `distribute` again from a checkpoint",
            )


def check_optimizer(optimizer: Optimizer, _: Any, __: Any) -> None:
    """Raise InputError where an optimizer is about to step a replaced parameter."""
    if not len(_NAMES):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in _NAMES:
                raise InputError(
                    "the optimizer has the module's own parameters, which do not train behind "
                    "`distribute`",
                    where=_NAMES[parameter], got=type(optimizer).__name__,
                    expected=f"model.optimizer(…{type(optimizer).__name__}, …)",
                )  # fmt: skip


register_optimizer_step_pre_hook(check_optimizer)
