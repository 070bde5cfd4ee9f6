"""A model as a chain of layers, with its parameters and the shapes between layers; and the contract
of models that state their layers themselves.

The contract is for models that state their layers, and how tensor ranks divide them;
`tracing.split` splits any other module into layers. A model of the contract is a torch module with:
- `layers`: a ModuleDict with the plan's layer names in the plan's order. The first layer takes the
  inputs [rows, …]. Every other layer takes the output of the layer before: a tensor [rows, …] or a
  tuple of such tensors. Samples must not influence each other (no batch normalisation).
- a loss: the last layer is called with (x, targets) and returns the *sum* of the losses. The
  gradient is that of the sum over the global batch divided by the sum of `count(targets)`. By
  default `count` gives the number of targets other than -100, or the number of rows where targets
  are not whole numbers.
- `batch(step, first, last)`: returns (inputs, targets) of rows [first, last) of the global batch.
  It is not needed where `distribute` gets data.
- `initial(name, parameter)`, for a model on the meta device: returns the initial values of a whole
  parameter. `name` is layer.parameter.

Its layers
- can run on the meta device, which computes shapes alone, and do not change their inputs in place
  (no nn.ReLU(inplace=True)).
- keep parameters with `requires_grad=False` unchanged under every optimizer.
- take weights and values of any floating type for passes in half precision; the last layer computes
  the loss in fp32. Weights, gradients and optimizer states keep their type, and each pass uses
  rounded weights.

Where a stage is split over tensor ranks, a module inside a layer may have `tensor` (a TensorGroup,
set before the module runs) and a method `cuts(part)`, which returns name -> `Cut` for the
parameters that tensor ranks divide. Modules without them compute everything on every tensor rank.
Activations are whole on every rank of a tensor group. A layer with split weights computes with its
part between `enter` (sums the gradients of its inputs) and `leave` (sums its outputs), which are f
and g of Megatron-LM (Shoeybi et al. 2019, Section 3). A part may have any size, 0 included.
Parameters shared by several layers (tied embeddings) are the same object in each of them.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetplan.errors import InputError, UnsupportedError, one_line, require
from hetplan.plans.shares import split
from hetplan.runtime.engine.rows import LeafForm, forms_of
from hetplan.runtime.engine.transport import Group, mirrored
from hetplan.runtime.tracing.draws import may_draw
from hetplan.runtime.tracing.split import Divided, Shape, Split, Totals, divisions, mapped
from hetplan.schema import Range

# (first, last) -> (inputs, targets) of the rows [first, last) of the global batch
Rows = Callable[[int, int], Any]


@dataclass(frozen=True)
class Part:
    """The part of the layers that a rank of a tensor group computes."""

    index: int = 0  # number of the rank in its tensor group
    shares: tuple[float, ...] = (1.0,)  # [tensor rank] the share of each
    expert: tuple[int, int] = (0, 1)  # (index, number) among the ranks that divide whole experts

    def of(self, length: int) -> Range:
        """[first, last) of `length` heads, columns, rows or experts; may be empty."""
        return split(length, self.shares)[self.index]

    def experts(self, count: int) -> "Cut":
        """The cut of a parameter whose first dimension are `count` stacked experts."""
        index, ranks = self.expert
        ranges = split(count, [1.0] * ranks)
        return Cut(0, (ranges[index],), partial_gradients=True)


@dataclass(frozen=True)
class Cut:
    """The part of a parameter that is on a rank."""

    dim: int  # the dimension that tensor ranks divide
    ranges: tuple[Range, ...]  # [first, last) of that dimension; on the rank, one after the other
    # Whether each rank of a tensor group has the gradient of a part of the samples, so that the
    # gradients of all these ranks add up. Otherwise each rank has the whole gradient of its cut.
    partial_gradients: bool = False

    @property
    def size(self) -> int:
        """Length of dimension `dim` on the rank."""
        return sum(last - first for first, last in self.ranges)

    def take(self, whole: Tensor) -> Tensor:
        """A copy of the rank's part of a whole tensor."""
        if whole.dim() == 0:  # a single number, which no rank has a part of
            return whole.clone()
        pieces = [whole.narrow(self.dim, first, last - first) for first, last in self.ranges]
        return torch.cat(pieces, self.dim)


def cut(dim: int, length: int, part: Part, blocks: int = 1) -> Cut:
    """The cut of a dimension that consists of `blocks` blocks of `length`, such as gate and value:
    the same part of each block."""
    first, last = part.of(length)
    return Cut(dim, tuple((i * length + first, i * length + last) for i in range(blocks)))


@dataclass(frozen=True)
class TensorGroup(Part):
    """A rank's part, with the collectives of its tensor group."""

    group: Group | None = None  # None for a single rank: `enter` and `leave` do nothing

    def enter(self, x: Tensor) -> Tensor:
        """x; in the backward pass its gradients are summed over the group.

        All ranks of the group must join this sum, or the others wait. So a rank with an empty part
        keeps x in its graph, for example by adding x times 0.
        """
        return x if self.group is None else mirrored(unchanged, self.group.reduced, x)

    def leave(self, x: Tensor) -> Tensor:
        """The sum of x over the group; the backward pass leaves gradients unchanged."""
        return x if self.group is None else mirrored(self.group.reduced, unchanged, x)

    def largest(self, x: Tensor) -> Tensor:
        """The elementwise maximum of x over the group; it has no gradient."""
        x = x.detach()
        return x if self.group is None else self.group.reduced(x, dist.ReduceOp.MAX)


ALONE = TensorGroup()  # the group of a rank that computes whole layers


def unchanged(x: Tensor) -> Tensor:
    """A view of x, which autograd takes for another tensor."""
    return x.view_as(x)


def cuts_of(layer: nn.Module, part: Part) -> dict[str, Cut]:
    """Name of a parameter within the layer -> its cut, by methods `cuts` of the layer's modules.

    A parameter without a cut is whole on every tensor rank, and every rank computes its whole
    gradient.
    """
    cuts: dict[str, Cut] = {}
    for prefix, module in layer.named_modules():
        cuts_of_module = getattr(module, "cuts", None)
        if callable(cuts_of_module):
            for name, cut in cuts_of_module(part).items():
                # the prefix of the layer itself is empty
                cuts[f"{prefix}.{name}".lstrip(".")] = cut
    return cuts


@dataclass(frozen=True)
class Parameter:
    """A parameter of the whole model."""

    name: str  # its name under the first layer that has it
    shape: tuple[int, ...]
    dtype: Any
    layers: tuple[int, ...]  # all layers that have it
    dim: int  # the dimension that tensor ranks divide, if they do
    trained: bool = True  # whether it has a gradient


@dataclass(frozen=True)
class InputsAndTargets:
    """The data that layers of a contract's chain read: inputs in the first layer, targets in the
    last one. `tracing.split.Split` has the same methods for a split module."""

    last: int  # number of the last layer
    count: Callable[[Tensor], float]  # the weight of targets: the number of their losses

    rounds = (1,)  # the weight alone is added up over all ranks
    inputs = ()  # of a graph: there is none

    def feed(
        self, data: Callable[[], Any], first: int, last: int, totals: Totals | None = None
    ) -> list[tuple[Tensor, ...]]:
        """[layer] the data that each of the layers [first, last) reads. data: returns (inputs,
        targets) of some rows; it is called only where one of the layers reads data. totals: none,
        since the layers of the contract compute a sum."""
        if not self.reads(first, last):
            return [()] * (last - first)
        inputs, targets = data()
        read: list[tuple[Tensor, ...]] = []
        for layer in range(first, last):
            values: tuple[Tensor, ...] = ()
            if layer == 0:
                values += (inputs,)
            if layer == self.last:
                values += (targets,)
            read.append(values)
        return read

    def reads(self, first: int, last: int) -> bool:
        """Whether one of the layers [first, last) reads data."""
        return first == 0 or last > self.last

    def measure(self, number: int, data: Any, totals: Totals) -> Tensor:
        """The weight of some rows, by which their losses are averaged, [1]. data: (inputs,
        targets)."""
        return torch.tensor([float(self.count(data[1]))], dtype=torch.float64)

    def known(self, number: int, numbers: Tensor) -> tuple[float, Totals]:
        """(weight of the losses, no totals), from the sum over all ranks of what `measure`
        gives."""
        return float(numbers[0]), {}

    def check_evaluation(self) -> None:
        """Do nothing: modules of the contract know their mode themselves."""

    def lacks_labels(self, totals: Totals) -> bool:
        """Whether all that the loss divides by is 0: not by totals, of which there are none."""
        return False


@dataclass(frozen=True)
class Chain:
    """A model as a chain of L layers."""

    names: tuple[str, ...]  # [L] names of the layers
    layers: tuple[nn.Module, ...]  # [L]
    parameters: Mapping[str, Parameter]  # name -> parameter
    parameter_names: tuple[Mapping[str, str], ...]  # [L] name within the layer -> name
    outputs: tuple[tuple[Shape, ...], ...]  # [L - 1] shapes of a layer's outputs, of one sample
    source: InputsAndTargets | Split  # the data that layers read
    compute: Any = None  # floating type of the passes; None: the type of the parameters
    forms: tuple[LeafForm, ...] = ()  # forms of the leaves of the example's data

    def check_gathers(self) -> None:
        """Raise UnsupportedError where trained weights cannot be written back to the module from
        which the chain was made."""
        if isinstance(self.source, InputsAndTargets):
            raise UnsupportedError(
                "only models that hetplan splits are gathered", got="a chain of layers",
                expected="--factory with any module, or --checkpoint",
            )  # fmt: skip

    def read(
        self,
        rows: Rows,
        local_rows: Range,
        first: int,
        last: int,
        device: Any,
        totals: Totals | None = None,
    ) -> Any:
        """[layer] the data that each of the layers [first, last) reads of `local_rows`, on a
        device. totals: totals of the global batch; None: these rows are the global batch."""
        read = self.source.feed(lambda: rows(*local_rows), first, last, totals)
        return mapped(read, lambda x: x.to(device) if isinstance(x, Tensor) else x)

    def call(self, layer: int, values: Sequence[Any]) -> tuple[Tensor, ...]:
        """The outputs of a layer, or the loss of the last one. values: the outputs of the layer
        before, and then the data that the layer reads."""
        targets: Sequence[Any] = ()
        if isinstance(self.source, InputsAndTargets) and layer + 1 == len(self.names):
            values, targets = values[:-1], values[-1:]  # targets are never rounded
        y = run_layer(self.layers[layer], self.compute, values, *targets)
        return y if isinstance(y, tuple) else (y,)

    @cached_property
    def drawing(self) -> tuple[bool, ...]:
        """[layer] whether the layer may draw random numbers."""
        return tuple(may_draw(layer) for layer in self.layers)

    def cuts(self, layer: int, part: Part) -> dict[str, Cut]:
        """Name of each parameter of a layer -> the cut of a rank with `part`."""
        stated = cuts_of(self.layers[layer], part)
        cuts: dict[str, Cut] = {}
        for inside, name in self.parameter_names[layer].items():
            shape = self.parameters[name].shape or (1,)  # a single number counts as one row
            cuts[name] = stated.get(inside, Cut(0, ((0, shape[0]),)))
        return cuts


def run_layer(
    layer: nn.Module, compute: Any, x: Sequence[Any], *targets: Tensor, on_meta: bool = False
) -> Any:
    """The output of a layer for values x. Floating-point weights and values are rounded to the type
    `compute`, None: not rounded; targets never are. on_meta: compute shapes alone."""
    if compute is None and not on_meta:
        return layer(*x, *targets)

    def rounded(value: Tensor) -> Tensor:
        dtype = value.dtype
        if compute is not None and value.is_floating_point():
            dtype = compute
        if on_meta:
            return torch.empty_like(value, device="meta", dtype=dtype)
        return value.to(dtype)

    named = (
        *layer.named_parameters(remove_duplicate=False),
        *layer.named_buffers(remove_duplicate=False),
    )
    # by id, so that tied weights share a copy
    copies = {id(value): rounded(value) for _, value in named}
    state = {name: copies[id(value)] for name, value in named}
    arguments = (*map(rounded, x), *targets)
    with rounding_again([value for _, value in named], copies, rounded):
        # `state` has every name of a tied weight
        return torch.func.functional_call(layer, state, arguments, tie_weights=False)


def rounding_again(
    weights: Sequence[Tensor], copies: Mapping[int, Tensor], rounded: Callable[[Tensor], Tensor]
) -> Any:
    """A context in which autograd saves no rounded weights; the backward pass rounds weights again.

    Without it, every micro-batch in flight would keep a rounded copy. copies: id of a weight -> its
    rounded copy.
    """
    weight_at = {copies[id(weight)].untyped_storage().data_ptr(): weight for weight in weights}

    def pack(saved: Tensor) -> Any:
        """(weight, view of it) for a view of a rounded weight; any other tensor as it is."""
        weight = weight_at.get(saved.untyped_storage().data_ptr())
        if weight is None:
            return saved
        view = (saved.shape, saved.stride(), saved.storage_offset())
        return weight.detach(), view

    def unpack(packed: Any) -> Tensor:
        """The tensor that `pack` was given, with the weight rounded again."""
        if isinstance(packed, Tensor):
            return packed
        weight, view = packed
        return rounded(weight).as_strided(*view)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def describe(
    module: nn.Module,
    names: Sequence[str],
    example: Any,
    *,
    compute: Any = None,
    loss: Callable[..., Tensor] | None = None,
    count: Callable[[Any], float] | None = None,
    device: str = "cpu",
    spread: int = 1,
) -> Chain:
    """The chain of a module: of the contract's layers where the module has them, else of the layers
    into which `tracing.split` splits it.

    names: the names of the plan's layers. example: (inputs, targets) of a sample or more. compute:
    as in `Chain`. loss: a function of (output, targets) for a module that does not return its loss.
    count: targets of some rows, or the dictionary of their data -> the number by which a loss that
    is a sum is divided; None: the module's `count`. spread: number of ranks over which experts are
    spread. Raises InputError where the module does not match the plan, UnsupportedError where it
    cannot be split.
    """
    check_unpacked(module)
    # Layers of the contract compute their loss and all their experts themselves. Only `Split` calls
    # a user's loss, and spreads experts over ranks.
    layers = layers_of(module, names) if loss is None and spread == 1 else None
    stated_count: Any = count or getattr(module, "count", default_count)
    source: InputsAndTargets | Split = InputsAndTargets(len(names) - 1, stated_count)
    if layers is None:
        require(
            compute is None,
            "passes in half precision are for models that keep the contract of chains",
            where=type(module).__name__,
            got=str(compute),
            expected="fp32",
            kind=UnsupportedError,
        )
        source = Split(module, names, example, loss, count, device, spread=spread)
        layers, outputs = source.layers, source.outputs
        divided = divisions(module, source)
        for layer in layers:
            layer.cuts = partial(divided_cuts, divided, [n for n, _ in layer.named_parameters()])
    else:
        outputs = outputs_of(names, layers, example[0], compute)
    # parameters of a split module have their full names already
    prefixes = [f"{name}." if isinstance(source, InputsAndTargets) else "" for name in names]
    parameters, parameter_names = parameters_of(layers, prefixes)
    return Chain(
        tuple(names), layers, parameters, parameter_names, outputs, source, compute,
        forms_of(example),
    )  # fmt: skip


def check_unpacked(module: nn.Module) -> None:
    """Raise UnsupportedError for frozen weights that are packed in 8 or 4 bits, as bitsandbytes
    packs them: torch.export makes no graph of the kernels that unpack them."""
    for name, parameter in module.named_parameters():
        require(
            parameter.dtype not in (torch.int8, torch.uint8),
            "its weights are packed in fewer bits",
            where=f"{type(module).__name__}.{name}",
            got=type(parameter).__name__,
            expected="a base in 16 or 32 bits; for packed ones `hetplan export` has files",
            kind=UnsupportedError,
        )


def parameters_of(
    layers: Sequence[nn.Module], prefixes: Sequence[str]
) -> tuple[dict[str, Parameter], tuple[dict[str, str], ...]]:
    """(`parameters`, `parameter_names`) of a chain. prefixes: [L] the prefix that turns a
    parameter's name within the layer into its name in the model."""
    first_name: dict[int, str] = {}  # id of a parameter -> its name under its first layer
    tensors: dict[str, Tensor] = {}
    layers_with: dict[str, list[int]] = defaultdict(list)
    parameter_names: list[dict[str, str]] = []
    for k, (layer, prefix) in enumerate(zip(layers, prefixes, strict=True)):
        names: dict[str, str] = {}
        for inside, tensor in layer.named_parameters(remove_duplicate=False):
            name = first_name.setdefault(id(tensor), prefix + inside)
            tensors.setdefault(name, tensor)
            if k not in layers_with[name]:
                layers_with[name].append(k)
            names[inside] = name
        parameter_names.append(names)
    dims = split_dimensions(layers, parameter_names)
    parameters = {
        name: Parameter(
            name=name,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            layers=tuple(layers_with[name]),
            dim=dims.get(name, 0),
            trained=tensor.requires_grad,
        )
        for name, tensor in tensors.items()
    }
    return parameters, tuple(parameter_names)


def divided_cuts(
    divided: Mapping[str, Divided], names: Sequence[str], part: Part
) -> dict[str, Cut]:
    """Name -> the cut of a parameter, for the parameters of a split module's layer that tensor
    ranks can divide. The cut is an equal part where the parameter divides into equal parts and
    experts are not spread over ranks; else it is the whole parameter.

    divided: the parameters of the model that tensor ranks can divide. names: the parameters of the
    layer.
    """
    # Where experts are spread, layers do not run on a mesh (see `tensors.on_meshes`), and without
    # one a layer needs its whole weights.
    _, expert_ranks = part.expert
    whole = Part()
    cuts: dict[str, Cut] = {}
    for name, division in divided.items():
        if name not in names:
            continue
        divides = expert_ranks == 1 and division.goes_into(part.shares)
        cuts[name] = cut(division.dim, division.length, part if divides else whole, division.blocks)
    return cuts


def split_dimensions(
    layers: Sequence[nn.Module], parameter_names: Sequence[Mapping[str, str]]
) -> dict[str, int]:
    """Name of a parameter -> the dimension along which its layers cut it; raises InputError where
    two layers cut it along different dimensions."""
    dims: dict[str, int] = {}
    for layer, names in zip(layers, parameter_names, strict=True):
        # the dimension is the same for any shares; these are two equal ones
        for inside, cut in cuts_of(layer, Part(0, (1.0, 1.0))).items():
            require(
                dims.setdefault(names[inside], cut.dim) == cut.dim,
                "shared parameter is cut along two dimensions",
                where=names[inside],
            )
    return dims


def layers_of(module: nn.Module, names: Sequence[str]) -> tuple[nn.Module, ...] | None:
    """The layers of a module that keeps the contract, None for any other module. Raises InputError
    where the layers are not the plan's `names`."""
    named = getattr(module, "layers", None)
    if not isinstance(named, nn.ModuleDict):
        return None
    check_names(list(named), names)
    return tuple(named.values())


def check_names(
    model_layers: Sequence[str], plan_layers: Sequence[str], where: str | None = None
) -> None:
    """Raise InputError where the names of a model's layers are not the plan's."""
    what = "model does not match the plan"
    # not strict: different numbers of layers have an error of their own, below
    for k, (name, expected) in enumerate(zip(model_layers, plan_layers, strict=False)):
        require(name == expected, f"{what}: layer {k}", where=where, got=name, expected=expected)
    require(
        len(model_layers) == len(plan_layers),
        what,
        where=where,
        got=f"{len(model_layers)} layers",
        expected=f"{len(plan_layers)}",
    )


def outputs_of(
    names: Sequence[str], layers: Sequence[nn.Module], example: Tensor, compute: Any
) -> tuple[tuple[Shape, ...], ...]:
    """[L - 1] the shapes of the outputs of each layer but the last, for one sample. Layers run on
    the meta device."""
    x: Any = (example[:1].to("meta"),)
    outputs = []
    for name, layer in zip(names[:-1], layers[:-1], strict=True):
        try:
            with torch.no_grad():
                x = run_layer(layer, compute, x, on_meta=True)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            raise InputError(
                f"does not run on the meta device: {one_line(str(error))[:200]}",
                where=f"layer {name}",
            ) from None
        x = x if isinstance(x, tuple) else (x,)
        for value in x:
            require(
                isinstance(value, Tensor) and value.dim() > 0 and len(value) == 1,
                "layer returned something else",
                where=f"layer {name}",
                got=type(value).__name__,
                expected="tensors whose first dimension are the samples",
            )
        outputs.append(tuple((tuple(value.shape[1:]), value.dtype) for value in x))
    return tuple(outputs)


def default_count(targets: Tensor) -> float:
    """The weight of targets: the number of targets other than -100, which losses over classes
    ignore; for targets that are not whole numbers, the number of rows."""
    if targets.is_floating_point() or targets.is_complex():
        return float(len(targets))
    return float((targets != -100).sum())
