"""Random numbers that do not depend on how many rows are drawn at once.

`Alike` is a mode of torch in which every operator that draws gives fixed numbers, the same for each
row. A pass of two rows then computes what two passes of one row compute, so that both can be
compared although the module draws noise.

The numbers vary along the last dimension of a tensor with two dimensions or more, and are the same
along all others, since the mode cannot know which dimension has the rows. A permutation is the
reversed order, which moves every row of a pair.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from hetplan.runtime.tracing.counter import OpOverload, TorchDispatchMode

GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, spread evenly over [0, 1)
FIRST = 0.4142135623730951  # the first number of a row; near one half
SEED = 0  # of operators without a rule here


def draws(node: Node) -> bool:
    """Whether a node of a traced graph draws random numbers."""
    return operator_draws(node.target, node.args, node.kwargs)


def may_draw(layer: nn.Module) -> bool:
    """Whether a layer may draw random numbers: not where it consists of traced graphs alone, whose
    operators are torch's and draw none. What other code does is not known."""
    for module in layer.modules():
        if not isinstance(module, GraphModule):
            # one that only has others within it has no code of its own
            if type(module).forward is not nn.Module.forward:
                return True
            continue
        for node in module.graph.nodes:
            if node.op in ("call_module", "call_method"):
                return True
            operator = node.target
            if isinstance(operator, OpOverload) and operator.namespace != "aten":
                return True
            if draws(node):
                return True
    return False


def operator_draws(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator draws random numbers for these arguments. One that would drop something
    with the probability 0, or outside of training, draws none."""
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):
        return False
    values = arguments_of(operator, args, kwargs)
    in_training = values.get("train", values.get("training", True))
    names = ("dropout_p", "dropout", "p")
    probabilities = [values[name] for name in names if name in values]
    drops_nothing = any(isinstance(p, (int, float)) and p == 0 for p in probabilities)
    return in_training is not False and not drops_nothing


def arguments_of(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> value of an operator's arguments, with defaults."""
    arguments = operator._schema.arguments
    values = {x.name: x.default_value for x in arguments if x.default_value is not None}
    by_position = dict(zip([x.name for x in arguments], args, strict=False))
    return {**values, **by_position, **kwargs}


def uniform_like(x: Tensor) -> Tensor:
    """Fixed numbers in (0, 1) of the shape of x, in float64."""
    length = x.shape[-1] if x.dim() > 1 else 1
    places = torch.arange(length, dtype=torch.float64, device=x.device)
    return ((FIRST + GOLDEN * places) % 1.0).clamp(1e-3, 1 - 1e-3).expand(x.shape)


def normal_like(x: Tensor) -> Tensor:
    """Fixed numbers of the shape of x, distributed normally, in float64."""
    return torch.erfinv(2 * uniform_like(x) - 1) * 2**0.5


def _uniform(x: Tensor, values: Mapping[str, Any]) -> Tensor:
    """Numbers between the arguments `from` and `to`, which are 0 and 1 where there are none."""
    least, most = values.get("from", 0.0), values.get("to", 1.0)
    return least + (most - least) * uniform_like(x)


def _normal(x: Tensor, values: Mapping[str, Any]) -> Tensor:
    """Numbers of the arguments' mean and deviation."""
    return values.get("mean", 0.0) + values.get("std", 1.0) * normal_like(x)


def _whole(x: Tensor, values: Mapping[str, Any]) -> Tensor:
    """Whole numbers from `low`, 0 where there is none, up to `high`."""
    low = values.get("low", 0)
    return low + ((values["high"] - low) * uniform_like(x)).floor()


def _permutation(x: Tensor, values: Mapping[str, Any]) -> Tensor:
    """The reversed order."""
    return torch.arange(len(x), device=x.device).flip(0)


def _events(x: Tensor, values: Mapping[str, Any]) -> Tensor:
    """Ones with a probability: the argument `p`, or the values of the operator's input."""
    probability = values.get("p", values.get("self"))
    if isinstance(probability, Tensor):
        probability = probability.double()
    return (uniform_like(x) < probability).double()


def _exponential(x: Tensor, values: Mapping[str, Any]) -> Tensor:
    """Numbers of an exponential distribution."""
    return -torch.log(uniform_like(x)) / values.get("lambd", 1.0)


def _chosen(x: Tensor, values: Mapping[str, Any]) -> Tensor:
    """The most probable choices of each row."""
    return values["self"].topk(x.shape[-1]).indices


Rule = Callable[[Tensor, Mapping[str, Any]], Tensor]
# Name of an operator -> its numbers, for the output that it has drawn and its arguments by name.
RULES: dict[str, Rule] = {
    "rand": _uniform, "rand_like": _uniform, "uniform": _uniform, "uniform_": _uniform,
    "randn": _normal, "randn_like": _normal, "normal": _normal, "normal_": _normal,
    "randint": _whole, "randint_like": _whole, "randperm": _permutation,
    "bernoulli": _events, "bernoulli_": _events,
    "exponential": _exponential, "exponential_": _exponential, "multinomial": _chosen,
}  # fmt: skip


class Alike(TorchDispatchMode):
    """A mode in which every row gets the same fixed numbers."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator; where it draws, replace what it has drawn."""
        kwargs = kwargs or {}
        if not operator_draws(func, args, kwargs):
            return func(*args, **kwargs)
        values = arguments_of(func, args, kwargs)
        rule = RULES.get(func._schema.name.rpartition("::")[2])
        if rule is None:
            return self._row_by_row(func, args, kwargs)
        if "self" in values and isinstance(values["self"], Tensor):
            values["self"] = values["self"].clone()  # an operator in place overwrites it
        output = func(*args, **kwargs)
        with torch.no_grad():
            return output.copy_(rule(output, values))

    def _row_by_row(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """The output of an operator without a rule, drawn anew with the same seed for each row of
        its input. Where it draws in place, or has no input with rows, all rows get the numbers of
        the first one."""
        first: Any = args[0] if args else None
        has_rows = isinstance(first, Tensor) and first.dim() > 0
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            if not has_rows or func._schema.is_mutable:
                torch.manual_seed(SEED)
                output = func(*args, **kwargs)
                if isinstance(output, Tensor) and output.dim() > 0:
                    output.copy_(output[:1].clone().expand_as(output))
                return output
            parts = []
            for row in range(len(first)):
                torch.manual_seed(SEED)
                of_row = [row_of(x, row, len(first)) for x in args]
                more = {name: row_of(x, row, len(first)) for name, x in kwargs.items()}
                parts.append(func(*of_row, **more))
        if isinstance(parts[0], Tensor):
            return torch.cat(parts)
        return tuple(map(torch.cat, zip(*parts, strict=True)))


def row_of(value: Any, row: int, rows: int) -> Any:
    """Row `row` of a tensor with `rows` rows; any other value unchanged."""
    if isinstance(value, Tensor) and value.dim() > 0 and len(value) == rows:
        return value[row : row + 1]
    return value
