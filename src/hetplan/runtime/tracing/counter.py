"""One pass of a module on fake tensors, every operator recorded with the layer and the pass that it
belongs to, and with what it reads, writes and multiplies.

Fake tensors have shapes and no values, so an operator whose output's size depends on values cannot
be run. Operators of the backward pass belong to the layer whose forward pass made their autograd
node, known by the nodes' numbers.

Every operator reads its inputs (of broadcast ones, what is there) and writes its outputs; views do
neither. Beyond that rules say which ones are matrix products, which read less than their inputs,
and which names are known to be nothing but memory. Names are without overload: `aten.mm`.

The private names of torch that tracing needs are all here: fake tensors and dispatch modes have no
public names yet, and nothing public numbers autograd's nodes. The test of torch's names says when
one of them changes.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensorMode",
    "TorchDispatchMode",
    "next_node",
    "running_node",
    "tree_leaves",
]


def next_node() -> int:
    """The number that the next autograd node gets."""
    return int(torch.autograd._get_sequence_nr())


def running_node() -> int | None:
    """The number of the autograd node whose backward pass runs; None outside of one."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
Product = tuple[float, float, float, float]  # count, m, k, n
Arguments = Sequence[Any]


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in names.split())


# They make memory without writing it, give an input another name, or only ask about it.
FREE = _aten(
    """
    empty empty_like empty_strided new_empty new_empty_strided sym_size is_same_size
    _local_scalar_dense resize_ _unsafe_view _reshape_alias lift_fresh detach_ alias
    """
)
# They write without reading.
FILLS = _aten(
    """
    zeros zeros_like ones ones_like full full_like new_zeros new_ones new_full arange fill_
    zero_ bernoulli_ uniform_ normal_ randn rand randn_like rand_like randint eye scalar_tensor
    linspace randperm
    """
)
# They read the rows that they are asked for, not the table: as much as they write, and the indices.
GATHERS = {"aten.embedding", "aten.index", "aten.index_select", "aten.gather", "aten.take"}
# Moved in place: an input is added to or written over rows of a large tensor.
SCATTERS = _aten(
    """
    index_put_ _index_put_impl_ index_add_ scatter_ scatter_add_ index_copy_
    """
)
# Nothing but memory, and neither marked as pointwise nor as a reduction.
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
    pixel_unshuffle channel_shuffle as_strided_copy as_strided_scatter
    """
)


def matrices(left: Tensor, right: Tensor) -> list[Product]:
    """[…, m, k] by […, k, n]."""
    *batch, m, k = map(float, left.shape)
    return [(math.prod(batch), m, k, float(right.shape[-1]))]


def convolution_product(
    x: Tensor, weight: Tensor, transposed: bool, groups: int, out: Tensor
) -> Product:
    """A convolution as the product of its patches with its kernel; transposed: of its inputs."""
    window = float(math.prod(weight.shape[2:]))
    if transposed:
        rows = float(x.shape[0] * math.prod(x.shape[2:]))
        return float(groups), rows, float(x.shape[1] / groups), float(weight.shape[1]) * window
    rows = float(out.shape[0] * math.prod(out.shape[2:]))
    return float(groups), rows, float(weight.shape[1]) * window, float(weight.shape[0] / groups)


def convolution_backward(args: Arguments, out: Any) -> list[Product]:
    """dX = G W^T, dW = X^T G; args: gradient, x, weight, five of sizes, transposed, padding,
    groups, mask."""
    gradient, x, weight = args[:3]
    count, m, k, n = convolution_product(x, weight, args[7], args[9], gradient)
    mask = args[10]
    return [(count, m, n, k)] * bool(mask[0]) + [(count, k, m, n)] * bool(mask[1])


def attention_product(q: Tensor, k: Tensor, v: Tensor, *, backward: bool) -> list[Product]:
    """Scores and their product with the values; masks hide nothing of the work. Backward: the
    scores again, and two products each for them and the values (Dao et al. 2022, Algorithm 4)."""
    heads, rows, columns = float(q.shape[0] * q.shape[1]), float(q.shape[2]), float(k.shape[2])
    width, out = float(q.shape[3]), float(v.shape[3])
    scores = (heads, rows, width, columns)
    if not backward:
        return [scores, (heads, rows, columns, out)]
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
# (arguments, result) -> products
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
    """The path of a submodule up to its first number (`blocks.3`), or nothing."""
    parts = path.split(".")
    place = next((i for i, part in enumerate(parts) if part.isdigit()), -1)
    return ".".join(parts[: place + 1])


def name_of(operator: Any) -> str:
    """`aten.mm` of aten.mm.default."""
    return ".".join(str(operator).split(".")[:2])


def is_ruled(operator: Any, name: str) -> bool:
    """Whether it is known what the operator does."""
    known = (*PRODUCTS, *FILLS, *GATHERS, *SCATTERS, *MEMORY)
    return (
        name in known
        or name.removesuffix("_") in known
        or not {torch.Tag.pointwise, torch.Tag.reduction}.isdisjoint(operator.tags)
    )


def tensors(value: Any) -> list[Tensor]:
    """All tensors in arguments or results."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def bytes_of(tensor: Tensor) -> float:
    """What is there of a tensor: dimensions that are broadcast count once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return float(math.prod(size for size, stride in sizes if stride) * tensor.element_size())


def traffic(name: str, args: Arguments, kwargs: dict[str, Any], out: Any) -> tuple[float, float]:
    """(bytes read, bytes written)."""
    inputs, made = tensors((args, kwargs)), tensors(out)
    written = sum(map(bytes_of, made))
    if name in FILLS:
        return 0.0, written
    if name in GATHERS:
        return written + sum(bytes_of(t) for t in inputs if not t.is_floating_point()), written
    if name in SCATTERS:
        moved = sum(bytes_of(t) for t in inputs[1:])
        return 2 * moved, moved
    return sum(map(bytes_of, {id(t): t for t in inputs}.values())), written


@dataclass(frozen=True)
class Call:
    """One operator: layer's number, pass, bytes, products (of equal work each, as far as they are
    of one kernel)."""

    name: str
    layer: int
    backward: bool
    read: float
    written: float
    products: tuple[Product, ...]
    ruled: bool


@dataclass
class Layers:
    """Layers in the order in which they run. firsts: number of the first autograd node of each."""

    names: list[str] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)

    def enter(self, name: str) -> None:
        """The layer runs from here on, unless it does already; one that ran before gets a
        number."""
        bare = [known.partition("#")[0] for known in self.names]
        if name in bare[-1:]:
            return
        times = bare.count(name)
        self.names.append(name if not times else f"{name}#{times + 1}")
        self.firsts.append(next_node() if len(self.names) > 1 else 0)

    @property
    def now(self) -> int:
        """The layer that runs; 0 before the first."""
        return max(len(self.names) - 1, 0)


class Counter(TorchDispatchMode):
    """Records calls; which layer made which storage, and which ones used it. own: storages that no
    layer makes."""

    def __init__(self, layers: Layers, own: set[int]) -> None:
        super().__init__()
        self.layers, self.own = layers, own
        self.calls: list[Call] = []
        self.made: dict[int, tuple[int, float]] = {}  # storage -> (layer, bytes)
        self.users: dict[int, list[int]] = {}  # storage -> layers
        self.alive: list[Tensor] = []  # a storage that is gone gives its number to the next one
        self.backward, self.last = False, 0

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
        if func.namespace == "prim":
            return out
        layer = self._layer()
        if not self.backward:
            self._follow(layer, (args, kwargs), out)
        if not func.is_view and name not in FREE:
            read, written = traffic(name, args, kwargs, out)
            self.calls.append(
                Call(
                    name=name,
                    layer=layer,
                    backward=self.backward,
                    read=read,
                    written=written,
                    products=tuple(PRODUCTS[name](args, out)) if name in PRODUCTS else (),
                    ruled=is_ruled(func, name),
                )
            )
        return out

    def _layer(self) -> int:
        if not self.backward:
            return self.layers.now
        number = running_node()
        # Parameters' own nodes have the largest number there is: what they do belongs to the layer
        # before.
        if number is not None and number < 1 << 62:
            # the layer whose forward pass made the autograd node
            self.last = max(bisect_right(self.layers.firsts, number) - 1, 0)
        return self.last

    def _follow(self, layer: int, arguments: Any, out: Any) -> None:
        for tensor in tensors(arguments):
            users = self.users.setdefault(storage(tensor), [])
            if layer not in users[-1:]:
                users.append(layer)
        for tensor in tensors(out):
            if storage(tensor) not in self.made and storage(tensor) not in self.own:
                self.made[storage(tensor)] = (layer, float(tensor.untyped_storage().nbytes()))
                self.alive.append(tensor)

    def crossing(self) -> list[float]:
        """[layers] bytes that later layers need of what this one and those before made."""
        sizes = [0.0] * len(self.layers.names)
        for key, (layer, size) in self.made.items():
            for k in range(layer, self.users.get(key, [layer])[-1]):
                sizes[k] += size
        return sizes


class Fused(TorchFunctionMode):
    """Dropout and RMSNorm as the single kernels that GPUs run; on CPUs torch writes them out.

    RMSNorm counts as a LayerNorm without offset: it moves and keeps the same but for one number per
    row.
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
    """functional.dropout."""
    return torch.native_dropout(x, p, True)[0] if training and p else x


def fused_rms_norm(
    x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """functional.rms_norm."""
    return torch.native_layer_norm(x, list(normalized_shape), weight, None, eps or 0.0)[0]


FUSED: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.dropout: fused_dropout,
    torch.nn.functional.rms_norm: fused_rms_norm,
    torch.rms_norm: fused_rms_norm,
}


def storage(tensor: Tensor) -> int:
    """What tells storages apart, fake ones too, which have no address."""
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def saved_by_autograd(own: Set[int], saved: Callable[[float], None]) -> Iterator[None]:
    """`saved` is told the bytes of every distinct storage that autograd saves inside; own: storages
    that do not count, those of parameters."""
    alive: dict[int, Tensor] = {}  # a storage that is gone gives its number to the next one

    def pack(tensor: Tensor) -> Tensor:
        key = storage(tensor)
        if key not in own and key not in alive:
            alive[key] = tensor.detach()
            saved(float(tensor.untyped_storage().nbytes()))
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield
