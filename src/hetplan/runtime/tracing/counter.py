"""Records the operators of one pass of a module on fake tensors: the layer and the pass of each,
the bytes that it reads and writes, and its matrix products.

Fake tensors have shapes and no values. What a mask of the data selects has as many elements as the
mask (`Selected`), and any other operator cannot run whose output's size depends on values. An
operator of the backward pass belongs to the layer whose forward pass made its autograd node; the
nodes are numbered in the order in which they were made.

Every operator reads its inputs and writes its outputs; a dimension that is broadcast counts once.
Views read and write nothing. The tables below list the operators with matrix products, those that
read less than their inputs, and those known to do nothing but move memory. Names of operators are
without overload: `aten.mm`.

This module has all private names of torch that tracing needs: fake tensors and dispatch modes have
no public names yet, and nothing public numbers autograd's nodes. When one of these names changes,
`tests/runtime/test_torch_names.py` fails.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensorMode",
    "OpOverload",
    "TorchDispatchMode",
    "next_node",
    "running_node",
    "tree_leaves",
    "tree_map",
]


def next_node() -> int:
    """The number that the next autograd node gets."""
    return int(torch.autograd._get_sequence_nr())


def running_node() -> int | None:
    """The number of the autograd node whose backward pass runs; None outside of one."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# Numbers of autograd nodes from here on are those of the nodes that accumulate the gradients of
# parameters. They have the largest number there is; all others are counted from 0.
FIRST_ACCUMULATING = 1 << 62
PARAMETRIZATIONS = "parametrizations"  # torch.nn.utils.parametrize keeps them under this name
Product = tuple[float, float, float, float]  # count products of [m, k] by [k, n]
Arguments = Sequence[Any]


def _aten(names: str) -> frozenset[str]:
    """The names in a text, each with the prefix `aten.`."""
    return frozenset(f"aten.{name}" for name in names.split())


# Operators that allocate memory without writing it, give an input another name, or only ask about
# it.
FREE = _aten(
    """
    empty empty_like empty_strided new_empty new_empty_strided sym_size is_same_size
    _local_scalar_dense resize_ _unsafe_view _reshape_alias lift_fresh detach_ alias
    """
)
# Operators that write without reading.
FILLS = _aten(
    """
    zeros zeros_like ones ones_like full full_like new_zeros new_ones new_full arange fill_
    zero_ bernoulli_ uniform_ normal_ randn rand randn_like rand_like randint eye scalar_tensor
    linspace randperm
    """
)
# Operators that read some rows of a table: as many bytes as they write, and the indices.
GATHERS = {"aten.embedding", "aten.index", "aten.index_select", "aten.gather", "aten.take"}
# Operators that add their other inputs to rows of the first one, or write over them, in place.
SCATTERS = _aten(
    """
    index_put_ _index_put_impl_ index_add_ scatter_ scatter_add_ index_copy_
    """
)
# Operators whose second argument are indices, which may be masks.
INDEXING = _aten("index index_put index_put_ _index_put_impl_ _unsafe_index")
# Operators that only move memory, and that torch marks neither as pointwise nor as a reduction.
MEMORY = _aten(
    """
    native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward
    native_group_norm native_group_norm_backward native_batch_norm native_batch_norm_backward
    _native_batch_norm_legit _native_batch_norm_legit_functional cudnn_batch_norm
    cudnn_batch_norm_backward _batch_norm_with_update _softmax _softmax_backward_data
    _log_softmax _log_softmax_backward_data nll_loss_forward nll_loss_backward
    nll_loss2d_forward nll_loss2d_backward native_dropout native_dropout_backward cat stack
    clone copy_ _to_copy constant_pad_nd repeat roll flip tril triu tril_ triu_ cumsum cumprod
    sort topk slice_backward select_backward embedding_dense_backward max_pool2d_with_indices
    max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d
    _adaptive_avg_pool2d_backward upsample_nearest2d upsample_nearest2d_backward
    upsample_bilinear2d upsample_bilinear2d_backward upsample_bicubic2d
    upsample_bicubic2d_backward reflection_pad2d reflection_pad2d_backward im2col col2im one_hot
    unfold_backward mse_loss mse_loss_backward glu glu_backward repeat_interleave scatter
    scatter_add index_add index_put mean sum _foreach_add_ bincount logsumexp var_mean
    linalg_vector_norm argsort slice_scatter select_scatter split_with_sizes_copy pixel_shuffle
    pixel_unshuffle channel_shuffle as_strided_copy as_strided_scatter nonzero masked_select
    masked_scatter
    """
)


def matrices(left: Tensor, right: Tensor) -> list[Product]:
    """The products of left […, m, k] by right […, k, n]."""
    *batch, m, k = map(float, left.shape)
    return [(math.prod(batch), m, k, float(right.shape[-1]))]


def convolution_product(
    x: Tensor, weight: Tensor, transposed: bool, groups: int, out: Tensor
) -> Product:
    """A convolution as the product of its patches with its kernel; a transposed one as the product
    of its inputs with its kernel."""
    window = float(math.prod(weight.shape[2:]))
    if transposed:
        rows = float(x.shape[0] * math.prod(x.shape[2:]))
        return float(groups), rows, float(x.shape[1] / groups), float(weight.shape[1]) * window
    rows = float(out.shape[0] * math.prod(out.shape[2:]))
    return float(groups), rows, float(weight.shape[1]) * window, float(weight.shape[0] / groups)


def convolution_backward(args: Arguments, out: Any) -> list[Product]:
    """The products dX = G W^T and dW = X^T G, as far as these gradients are needed.

    args: gradient, x, weight, bias sizes, stride, padding, dilation, transposed, output padding,
    groups, mask of the needed gradients.
    """
    gradient, x, weight, _, _, _, _, transposed, _, groups, needed = args
    count, m, k, n = convolution_product(x, weight, transposed, groups, gradient)
    products: list[Product] = []
    if needed[0]:
        products.append((count, m, n, k))
    if needed[1]:
        products.append((count, k, m, n))
    return products


def attention_product(q: Tensor, k: Tensor, v: Tensor, *, backward: bool) -> list[Product]:
    """The products of attention: the scores, and the scores by the values. A mask saves no work.

    The backward pass computes the scores again, and has two products for each of the two (Dao et
    al. 2022, Algorithm 4).
    """
    heads, rows, columns = float(q.shape[0] * q.shape[1]), float(q.shape[2]), float(k.shape[2])
    width, out = float(q.shape[3]), float(v.shape[3])
    scores = (heads, rows, width, columns)
    if not backward:
        return [scores, (heads, rows, columns, out)]
    # the scores; the gradients of the shares, of the values, of the queries and of the keys
    return [
        scores, (heads, rows, out, columns), (heads, columns, rows, out),
        (heads, rows, columns, width), (heads, columns, rows, width),
    ]  # fmt: skip


ATTENTIONS = [
    f"aten._scaled_dot_product_{kind}"
    for kind in (
        "flash_attention_for_cpu",
        "flash_attention",
        "efficient_attention",
        "cudnn_attention",
    )
]
# Operator with matrix products -> function (arguments, result) -> products.
PRODUCTS: dict[str, Callable[[Arguments, Any], list[Product]]] = {
    "aten.mm": lambda args, out: matrices(args[0], args[1]),
    "aten.addmm": lambda args, out: matrices(args[1], args[2]),
    "aten._addmm_activation": lambda args, out: matrices(args[1], args[2]),
    "aten.bmm": lambda args, out: matrices(args[0], args[1]),
    "aten.baddbmm": lambda args, out: matrices(args[1], args[2]),
    "aten.addbmm": lambda args, out: matrices(args[1], args[2]),
    "aten.mv": lambda args, out: matrices(args[0], args[1].unsqueeze(1)),
    "aten.addmv": lambda args, out: matrices(args[1], args[2].unsqueeze(1)),
    "aten.dot": lambda args, out: [(1.0, 1.0, float(args[0].numel()), 1.0)],
    # x, weight, bias, stride, padding, dilation, transposed, output padding, groups
    "aten.convolution": lambda args, out: [
        convolution_product(args[0], args[1], args[6], args[8], out)
    ],
    "aten.convolution_backward": convolution_backward,
    **dict.fromkeys(ATTENTIONS, lambda args, out: attention_product(*args[:3], backward=False)),
    **dict.fromkeys(
        (f"{name}_backward" for name in ATTENTIONS),
        lambda args, out: attention_product(*args[1:4], backward=True),
    ),
}


def numbered(path: str) -> str:
    """The path of a submodule up to its first number (`blocks.3` for `blocks.3.norm`); "" for a
    path without a number. The numbers of a weight's parametrizations, which torch gives, do not
    count: `head.parametrizations.weight.0` is a part of the head."""
    parts = path.split(".")
    if PARAMETRIZATIONS in parts:
        parts = parts[: parts.index(PARAMETRIZATIONS)]
    number_at = next((i for i, part in enumerate(parts) if part.isdigit()), -1)
    return ".".join(parts[: number_at + 1])


def name_of(operator: Any) -> str:
    """The operator's name without its overload: "aten.mm" for aten.mm.default."""
    return ".".join(str(operator).split(".")[:2])


def is_ruled(operator: Any, name: str) -> bool:
    """Whether a table above or a tag of torch says what the operator does."""
    listed = (*PRODUCTS, *FILLS, *GATHERS, *SCATTERS, *MEMORY)
    if name in listed or name.removesuffix("_") in listed:
        return True
    return not {torch.Tag.pointwise, torch.Tag.reduction}.isdisjoint(operator.tags)


def tensors(value: Any) -> list[Tensor]:
    """All tensors in arguments or results."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def bytes_of(tensor: Tensor) -> float:
    """Bytes of a tensor's elements in memory: a dimension that is broadcast counts once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    elements = math.prod(size for size, stride in sizes if stride)
    return float(elements * tensor.element_size())


def traffic(name: str, args: Arguments, kwargs: dict[str, Any], out: Any) -> tuple[float, float]:
    """(bytes read, bytes written) by an operator."""
    inputs, outputs = tensors((args, kwargs)), tensors(out)
    written = sum(map(bytes_of, outputs))
    if name in FILLS:
        return 0.0, written
    if name in GATHERS:
        indices = [tensor for tensor in inputs if not tensor.is_floating_point()]
        return written + sum(map(bytes_of, indices)), written
    if name in SCATTERS:
        # they read their other inputs and as many bytes of the rows that they change
        moved = sum(map(bytes_of, inputs[1:]))
        return 2 * moved, moved
    different_inputs = {id(tensor): tensor for tensor in inputs}
    return sum(map(bytes_of, different_inputs.values())), written


@dataclass(frozen=True)
class Call:
    """One operator that ran in a pass."""

    name: str
    layer: int  # the layer's number
    backward: bool
    read: float  # bytes
    written: float  # bytes
    products: tuple[Product, ...]  # the products of one kernel have equal work
    ruled: bool  # whether it is known what the operator does, see `is_ruled`


@dataclass
class Layers:
    """The layers of a pass, in the order in which they run."""

    names: list[str] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)  # number of each layer's first autograd node

    def enter(self, name: str) -> None:
        """Note that a layer runs from here on; nothing changes where it runs already. A layer that
        runs for the k-th time, k > 1, is named `name#k`."""
        without_numbers = [entered.partition("#")[0] for entered in self.names]
        if name in without_numbers[-1:]:
            return
        times = without_numbers.count(name)
        self.names.append(name if not times else f"{name}#{times + 1}")
        # nodes from before the first layer belong to it
        self.firsts.append(next_node() if len(self.names) > 1 else 0)

    @property
    def now(self) -> int:
        """The number of the layer that runs; 0 before the first."""
        return max(len(self.names) - 1, 0)


class Counter(TorchDispatchMode):
    """Records the operators that run inside, the storages that layers make in the forward pass, and
    the layers that use each storage.

    Storages are numbered by `storage`. own: storages that no layer makes, those of parameters and
    data.
    """

    def __init__(self, layers: Layers, own: set[int]) -> None:
        super().__init__()
        self.layers, self.own = layers, own
        self.calls: list[Call] = []
        self.makers: dict[int, tuple[int, float]] = {}  # storage -> (layer that made it, bytes)
        self.users: dict[int, list[int]] = {}  # storage -> layers that use it, in order
        self.alive: list[Tensor] = []  # keeps storages: a new one could get a freed one's number
        self.backward = False  # whether the backward pass runs
        self.last = 0  # layer of the last operator of the backward pass

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = name_of(func)
        if func.namespace == "prim":  # questions about a tensor, its device say
            return out
        layer = self._layer()
        if not self.backward:
            self._follow(layer, (args, kwargs), out)
        if not func.is_view and name not in FREE:
            read, written = traffic(name, args, kwargs, out)
            products: tuple[Product, ...] = ()
            if name in PRODUCTS:
                products = tuple(PRODUCTS[name](args, out))
            call = Call(
                name=name,
                layer=layer,
                backward=self.backward,
                read=read,
                written=written,
                products=products,
                ruled=is_ruled(func, name),
            )
            self.calls.append(call)
        return out

    def _layer(self) -> int:
        """The number of the layer to which the running operator belongs."""
        if not self.backward:
            return self.layers.now
        number = running_node()
        # operators that accumulate a parameter's gradient belong to the layer of the one before
        if number is not None and number < FIRST_ACCUMULATING:
            # the layer whose forward pass made the autograd node
            self.last = max(bisect_right(self.layers.firsts, number) - 1, 0)
        return self.last

    def _follow(self, layer: int, arguments: Any, out: Any) -> None:
        """Record which storages an operator of the forward pass uses, and which it makes."""
        for tensor in tensors(arguments):
            users = self.users.setdefault(storage(tensor), [])
            if layer not in users[-1:]:
                users.append(layer)
        for tensor in tensors(out):
            if storage(tensor) not in self.makers and storage(tensor) not in self.own:
                self.makers[storage(tensor)] = (layer, float(tensor.untyped_storage().nbytes()))
                self.alive.append(tensor)

    def crossing(self) -> list[float]:
        """[layer] bytes of the storages that are made in this layer or an earlier one, and used in
        a later one."""
        sizes = [0.0] * len(self.layers.names)
        for key, (layer, size) in self.makers.items():
            last_user = self.users.get(key, [layer])[-1]
            for k in range(layer, last_user):
                sizes[k] += size
        return sizes


class Selected(TorchDispatchMode):
    """Lets a mask that follows from the data alone select as many elements as it has, the most that
    it can: how many it does depends on values, which fake tensors do not have.

    data: storages of the data. A mask that depends on parameters, such as the choice of experts,
    selects few elements by far, and is left to torch, which refuses it.
    """

    def __init__(self, data: set[int]) -> None:
        super().__init__()
        self.data = data
        self.alive: list[Tensor] = []  # keeps storages: a new one could get a freed one's number

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = self._selected(name_of(func), func, args, kwargs)
        if all(storage(tensor) in self.data for tensor in tensors((args, kwargs))):
            self.alive += tensors(out)
            self.data.update(map(storage, tensors(out)))
        return out

    def _selected(self, name: str, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """The output of an operator, without values."""
        if name == "aten.nonzero" and storage(args[0]) in self.data:
            return all_places(args[0])
        if name == "aten.masked_select" and storage(args[1]) in self.data:
            x, mask = args
            return x.new_empty(torch.broadcast_shapes(x.shape, mask.shape).numel())
        if name in INDEXING:
            x, indices, *more = args
            masks = [index for index in indices if index is not None and is_mask(index)]
            if all(storage(mask) in self.data for mask in masks):
                places = [place for index in indices for place in places_of(index)]
                return func(x, places, *more, **kwargs)
        return func(*args, **kwargs)


def is_mask(index: Tensor) -> bool:
    """Whether an index says of each element whether it is selected."""
    return index.dtype in (torch.bool, torch.uint8)


def all_places(mask: Tensor) -> Tensor:
    """The indices [elements, dimensions] of all elements of a mask, without values."""
    return mask.new_empty((mask.numel(), mask.dim()), dtype=torch.long)


def places_of(index: Tensor | None) -> list[Tensor | None]:
    """An index of a tensor, in whose place a mask has an index for each of its dimensions."""
    if index is None or not is_mask(index):
        return [index]
    return list(all_places(index).unbind(1))


class Fused(TorchFunctionMode):
    """Runs dropout and RMSNorm as the single kernels that GPUs have; on CPUs torch runs them as
    several operators.

    RMSNorm counts as a LayerNorm without offset, which moves and keeps the same bytes but for one
    number per row.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return FUSED.get(func, func)(*args, **(kwargs or {}))


def fused_dropout(
    x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """functional.dropout as one operator."""
    return torch.native_dropout(x, p, True)[0] if training and p else x


def fused_rms_norm(
    x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """functional.rms_norm as one operator. Fake tensors have no values, so that a missing eps, for
    which torch takes one by the type, may be any number."""
    return torch.native_layer_norm(x, list(normalized_shape), weight, None, eps or 0.0)[0]


FUSED: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.dropout: fused_dropout,
    torch.nn.functional.rms_norm: fused_rms_norm,
    torch.rms_norm: fused_rms_norm,
}


def storage(tensor: Tensor) -> int:
    """The number of a tensor's storage. Fake tensors, whose storages have no address, have one,
    too."""
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def saved_by_autograd(own: Set[int], saved: Callable[[float], None]) -> Iterator[None]:
    """Call `saved` with the bytes of every distinct storage that autograd saves inside. own:
    storages that do not count, those of parameters."""
    alive: dict[int, Tensor] = {}  # keeps storages: a new one could get a freed one's number

    def pack(tensor: Tensor) -> Tensor:
        key = storage(tensor)
        if key not in own and key not in alive:
            alive[key] = tensor.detach()
            saved(float(tensor.untyped_storage().nbytes()))
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield
