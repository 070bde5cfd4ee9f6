"""What a model must offer to be run by a plan, and its description: layers, parameters, shapes
between layers.

Any module is split by `tracing.split`. The contract is for those that say themselves how they are
divided, over tensor ranks, too. Such a model is a torch module with
- `layers`: a ModuleDict of the plan's layer names in the plan's order; the first layer takes the
  inputs [rows, …], every other what the one before returned: a tensor [rows, …] or a tuple of such.
  Samples must not influence each other (no batch normalisation).
- a loss: the last layer is called with (x, targets) and returns the *sum* of the losses. The
  gradient is that of the sum over the global batch divided by the sum of `count(targets)`: by
  default the targets other than -100, or the rows where targets are not whole numbers.
- `batch(step, first, last)` -> (inputs, targets) of those rows of the global batch, unless
`distribute` gets data.
- on the meta device: `initial(name, parameter)` -> the parameter's first values, unsplit. `name` is
layer.parameter.
- layers run on the meta device as far as shapes go, and do not change what they get in place
(nn.ReLU(inplace=True)).
- parameters with `requires_grad=False` stay as they are, whatever the optimizer.
- for passes in half precision: layers that take weights and values of any floating type, the last
  one with a loss in fp32. Weights, their gradients and the optimizer's states stay what they are;
  each pass uses rounded weights.
Where a stage is split over tensor ranks, modules inside the layers may have `tensor` (a
TensorGroup, set before they run) and `cuts(part)`, what a rank holds of their parameters; the
others compute everything on every tensor rank. Activations are whole on every rank of a tensor
group. A layer whose weights are split computes with its part between `enter` (gradients of what
goes in are summed) and `leave` (what comes out is summed): Megatron-LM's f and g (Shoeybi et al.
2019, Section 3), with parts of any size, none included.
Parameters shared by several layers (tied embeddings) are the same object in each of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetplan.errors import InputError, UnsupportedError, one_line, require
from hetplan.plans.shares import split
from hetplan.runtime.engine.transport import Group, mirrored
from hetplan.runtime.tracing.split import Divided, Shape, Split, divisions, mapped
from hetplan.schema import Range

Rows = Callable[[int, int], Any]  # global rows [first, last) -> (inputs, targets), tensors in them


@dataclass(frozen=True)
class Part:
    """The `index`-th of several shares. expert: place among the ranks over which whole experts are
    spread, and their number."""

    index: int = 0
    shares: tuple[float, ...] = (1.0,)
    expert: tuple[int, int] = (0, 1)

    def of(self, length: int) -> Range:
        """[first, last) of `length` heads, columns, rows or experts; may be empty."""
        return split(length, self.shares)[self.index]

    def experts(self, count: int) -> "Cut":
        """Of stacked experts."""
        own, ranks = self.expert
        return Cut(0, (split(count, [1.0] * ranks)[own],), apart=True)


@dataclass(frozen=True)
class Cut:
    """What a rank holds of a parameter: `ranges` [first, last) of dimension `dim`, one behind the
    other. apart: each rank of a tensor group has a gradient of its own samples' part."""

    dim: int
    ranges: tuple[Range, ...]
    apart: bool = False

    @property
    def size(self) -> int:
        """Of the dimension."""
        return sum(b - a for a, b in self.ranges)

    def take(self, whole: Tensor) -> Tensor:
        """The part of an unsplit tensor, as a tensor of its own."""
        return (
            whole.clone()
            if whole.dim() == 0
            else torch.cat([whole.narrow(self.dim, a, b - a) for a, b in self.ranges], self.dim)
        )


def cut(dim: int, length: int, part: Part, blocks: int = 1) -> Cut:
    """The part of each of `blocks` equal blocks of `length` that a dimension is made of (gate and
    value, say)."""
    a, b = part.of(length)
    return Cut(dim, tuple((i * length + a, i * length + b) for i in range(blocks)))


@dataclass(frozen=True)
class TensorGroup(Part):
    """A rank's part and the group of all parts; group None: alone, both collectives do nothing."""

    group: Group | None = None

    def enter(self, x: Tensor) -> Tensor:
        """x; in the backward pass its gradients are summed over the group.

        On every rank of it: one without a part keeps what it gets in its graph, times 0 say, or the
        others wait.
        """
        return x if self.group is None else mirrored(unchanged, self.group.reduced, x)

    def leave(self, x: Tensor) -> Tensor:
        """The sum of x over the group; gradients pass unchanged."""
        return x if self.group is None else mirrored(self.group.reduced, unchanged, x)

    def largest(self, x: Tensor) -> Tensor:
        """The largest x of the group, elementwise; no gradient."""
        x = x.detach()
        return x if self.group is None else self.group.reduced(x, dist.ReduceOp.MAX)


ALONE = TensorGroup()


def unchanged(x: Tensor) -> Tensor:
    """The same values, as a tensor that autograd tells from x."""
    return x.view_as(x)


def cuts_of(layer: nn.Module, part: Part) -> dict[str, Cut]:
    """Parameter name within the layer -> its cut, as the modules inside tell by their methods
    `cuts`.

    What nobody names is whole on every tensor rank, and every rank computes its whole gradient.
    """
    made: dict[str, Cut] = {}
    for prefix, module in layer.named_modules():
        cuts = getattr(module, "cuts", None)
        if callable(cuts):
            made |= {f"{prefix}.{name}".lstrip("."): cut for name, cut in cuts(part).items()}
    return made


@dataclass(frozen=True)
class Parameter:
    """A parameter of the unsplit model. name: under the first layer that has it; layers: all that
    have it.

    dim: the dimension that tensor ranks would split, whether or not they do.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    layers: tuple[int, ...]
    dim: int


@dataclass(frozen=True)
class Ends:
    """The data of a chain that keeps the contract: inputs for its first layer, targets for its
    last one, which is the `last`-th. count: what targets weigh."""

    last: int
    count: Callable[[Tensor], float]

    def feed(self, data: Callable[[], Any], first: int, last: int) -> list[tuple[Tensor, ...]]:
        """What each of the layers [first, last) reads; the data of some rows are asked for where
        one does."""
        inputs, targets = data() if self.reads(first, last) else (None, None)
        return [
            (*((inputs,) if k == 0 else ()), *((targets,) if k == self.last else ()))
            for k in range(first, last)
        ]

    def reads(self, first: int, last: int) -> bool:
        """Whether one of the layers [first, last) reads data."""
        return first == 0 or last > self.last

    def weigh(self, data: Any) -> float:
        """What the losses of some rows weigh."""
        return self.count(data[1])


@dataclass(frozen=True)
class Chain:
    """A model as a chain. parameters by name; own [L]: name within the layer -> name.

    outputs: what passes on, of one sample, of all layers but the last. source: what layers read of
    the data. compute: type of the passes, None: the parameters' own.
    """

    names: tuple[str, ...]
    layers: tuple[nn.Module, ...]
    parameters: Mapping[str, Parameter]
    own: tuple[Mapping[str, str], ...]
    outputs: tuple[tuple[Shape, ...], ...]
    source: Ends | Split
    compute: Any = None

    def check_gathers(self) -> None:
        """Raise UnsupportedError where the module that it was made of cannot get trained weights
        back."""
        if isinstance(self.source, Ends):
            raise UnsupportedError(
                "only models that hetplan splits are gathered", got="a chain of layers",
                expected="--factory with any module, or --checkpoint",
            )  # fmt: skip

    def read(self, rows: Rows, own: Range, first: int, last: int, device: Any) -> Any:
        """What each of the layers [first, last) reads of the data of its own rows, on a device."""
        return mapped(
            self.source.feed(lambda: rows(*own), first, last),
            lambda x: x.to(device) if isinstance(x, Tensor) else x,
        )

    def call(self, layer: int, values: Sequence[Any]) -> tuple[Tensor, ...]:
        """A layer's pass: the values that pass on, or the loss. values: what it gets from the layer
        before and from the data."""
        # targets are never rounded
        ends = isinstance(self.source, Ends) and layer + 1 == len(self.names)
        rounded, targets = (values[:-1], values[-1:]) if ends else (values, ())
        y = called(self.layers[layer], self.compute, rounded, *targets)
        return y if isinstance(y, tuple) else (y,)

    def cuts(self, layer: int, part: Part) -> dict[str, Cut]:
        """name -> what a tensor rank holds of each of a layer's parameters."""
        cuts = cuts_of(self.layers[layer], part)
        return {
            name: cuts.get(inside, Cut(0, ((0, (*self.parameters[name].shape, 1)[0]),)))
            for inside, name in self.own[layer].items()
        }


def called(
    layer: nn.Module, compute: Any, x: Sequence[Any], *more: Tensor, on_meta: bool = False
) -> Any:
    """What a layer returns in a pass with its floating-point weights and values rounded to
    `compute`; None: as they are."""
    if compute is None and not on_meta:
        return layer(*x, *more)

    def rounded(value: Tensor) -> Tensor:
        dtype = compute if compute is not None and value.is_floating_point() else value.dtype
        return torch.empty_like(value, device="meta", dtype=dtype) if on_meta else value.to(dtype)

    named = (
        *layer.named_parameters(remove_duplicate=False),
        *layer.named_buffers(remove_duplicate=False),
    )
    values = {id(value): rounded(value) for _, value in named}
    state = {name: values[id(value)] for name, value in named}
    with read_again([value for _, value in named], values, rounded):
        return torch.func.functional_call(
            layer, state, (*map(rounded, x), *more), tie_weights=False
        )


def read_again(
    weights: Sequence[Tensor], copies: Mapping[int, Tensor], rounded: Callable[[Tensor], Tensor]
) -> Any:
    """Inside, graphs keep no rounded weights, one copy for each micro-batch in flight: a backward
    pass rounds those that it reads. copies: by id of their weight."""
    kept = {copies[id(one)].untyped_storage().data_ptr(): one for one in weights}

    def pack(saved: Tensor) -> Any:
        weight = kept.get(saved.untyped_storage().data_ptr())
        return (
            saved
            if weight is None
            else (weight.detach(), (saved.shape, saved.stride(), saved.storage_offset()))
        )

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else rounded(packed[0]).as_strided(*packed[1])

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def describe(
    module: nn.Module,
    names: Sequence[str],
    example: Any,
    *,
    compute: Any = None,
    loss: Callable[..., Tensor] | None = None,
    device: str = "cpu",
    spread: int = 1,
) -> Chain:
    """The chain that a module is, or is split into; example: (inputs, targets) of a sample or more.
    spread: over so many ranks its experts are spread. Raises InputError where it is none for the
    plan."""
    count = getattr(module, "count", default_count)
    layers = layers_of(module, names) if loss is None and spread == 1 else None
    source: Ends | Split = Ends(len(names) - 1, count)
    if layers is None:
        require(
            compute is None,
            "passes in half precision are for models that keep the contract of chains",
            where=type(module).__name__,
            got=str(compute),
            expected="fp32",
            kind=UnsupportedError,
        )
        weigh: Callable[[Any], float] = lambda data: count(data[1])  # noqa: E731
        source = Split(module, names, example, loss, weigh, device, spread=spread)
        layers, outputs = source.layers, source.outputs
        divided = divisions(module, source)
        for layer in layers:
            layer.cuts = partial(divided_cuts, divided, [n for n, _ in layer.named_parameters()])
    else:
        outputs = outputs_of(names, layers, example[0], compute)
    seen: dict[int, str] = {}
    shapes: dict[str, tuple[Tensor, list[int]]] = {}
    own: list[dict[str, str]] = []
    for k, (layer, of) in enumerate(zip(names, layers, strict=True)):
        own.append({})
        for inside, parameter in of.named_parameters(remove_duplicate=False):
            full = f"{layer}.{inside}" if isinstance(source, Ends) else inside
            name = seen.setdefault(id(parameter), full)
            shapes.setdefault(name, (parameter, []))[1].append(k)
            own[-1][inside] = name
    dims = split_dimensions(layers, own)
    parameters = {
        name: Parameter(
            name, tuple(p.shape), p.dtype, tuple(dict.fromkeys(where)), dims.get(name, 0)
        )
        for name, (p, where) in shapes.items()
    }
    return Chain(tuple(names), layers, parameters, tuple(own), outputs, source, compute)


def divided_cuts(
    divided: Mapping[str, Divided], names: Sequence[str], part: Part
) -> dict[str, Cut]:
    """name -> what a rank holds of a split model's layer: equal parts, or else all of it, and
    beside experts over ranks."""
    _, spread = part.expert
    return {
        name: cut(
            one.dim,
            one.length,
            part if spread == 1 and one.goes_into(part.shares) else Part(),
            one.blocks,
        )
        for name, one in divided.items()
        if name in names
    }


def split_dimensions(
    layers: Sequence[nn.Module], own: Sequence[Mapping[str, str]]
) -> dict[str, int]:
    """name -> the dimension that its layers cut; raises InputError where two cut different ones."""
    dims: dict[str, int] = {}
    for layer, names in zip(layers, own, strict=True):
        for inside, cut in cuts_of(layer, Part(0, (1.0, 1.0))).items():
            require(
                dims.setdefault(names[inside], cut.dim) == cut.dim,
                "shared parameter is cut along two dimensions",
                where=names[inside],
            )
    return dims


def layers_of(module: nn.Module, names: Sequence[str]) -> tuple[nn.Module, ...] | None:
    """The layers of a module that keeps the contract, checked against the plan's names."""
    named = getattr(module, "layers", None)
    if not isinstance(named, nn.ModuleDict):
        return None
    check_names(list(named), names)
    return tuple(named.values())


def check_names(has: Sequence[str], wants: Sequence[str], where: str | None = None) -> None:
    """Raise InputError where a model's layers are not the plan's."""
    what = "model does not match the plan"
    for k, (name, expected) in enumerate(zip(has, wants, strict=False)):
        require(name == expected, f"{what}: layer {k}", where=where, got=name, expected=expected)
    require(
        len(has) == len(wants),
        what,
        where=where,
        got=f"{len(has)} layers",
        expected=f"{len(wants)}",
    )


def outputs_of(
    names: Sequence[str], layers: Sequence[nn.Module], example: Tensor, compute: Any
) -> tuple[tuple[Shape, ...], ...]:
    """What passes between the layers, of one sample, computed on the meta device."""
    x: Any = (example[:1].to("meta"),)
    outputs = []
    for name, layer in zip(names[:-1], layers[:-1], strict=True):
        try:
            with torch.no_grad():
                x = called(layer, compute, x, on_meta=True)
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
    """Whole numbers other than -100; rows of anything else."""
    return (
        float(len(targets))
        if targets.is_floating_point() or targets.is_complex()
        else float((targets != -100).sum())
    )
