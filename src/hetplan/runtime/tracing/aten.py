"""ATen's operators as operators of a single-device program, and the routing of a mixture of experts
as one operator of torch.

A rule takes the walker and an operator's arguments, and writes what it is made of. Values along the
way are tensors of the program, constants (what depends on no input and no parameter is computed at
once), or tuples of these. An operator without a rule is written down and stands in as data, so that
one walk finds all of them. Routing written
out in sorts, cumulative sums and comparisons has no rule; `hetplan::route` is one operator, which
the tracer knows: gates [b, s, e] -> weights [b, s, e, c] as the operator `route` has them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch

from hetplan.programs.operators.operator import Shape
from hetplan.programs.operators.routing import places_of_tokens
from hetplan.programs.program import Writer


class MissingRule(Exception):
    """A rule says that it does not cover a call; the text says what is missing."""


def refuse(where: object, what: str) -> None:
    """Raise MissingRule where a call has what its rule does not cover."""
    if where:
        raise MissingRule(what)


@dataclass(frozen=True)
class Tensor:
    """A tensor of the program."""

    name: str
    shape: Shape


@dataclass(frozen=True)
class Unsupported:
    """operator: ATen's name; where: path of the module that calls it; missing: the rule that would
    be needed."""

    operator: str
    where: str
    missing: str


# (walker, arguments of the ATen operator) -> Tensor, tuple of them or constant
Rule = Callable[..., Any]


@dataclass
class Walker:
    """What a rule writes to. data: values of constants, by placeholder; notes: what was left out;
    made: the shape of what the call gives."""

    writer: Writer
    unsupported: list[Unsupported] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    where: str = ""
    made: Sequence[int] = ()
    _taken: dict[str, int] = field(default_factory=dict)

    def fresh(self, name: str) -> str:
        """`name`, numbered where it is taken."""
        name = name.replace("|", "/")
        count = self._taken.get(name, 0)
        self._taken[name] = count + 1
        return name if count == 0 else self.fresh(f"{name}:{count}")

    def apply(self, kind: str, *inputs: Any, label: str | None = None, **attributes: Any) -> Tensor:
        """Write an operator; constants among the inputs become placeholders."""
        names = [self.tensor(value).name for value in inputs]
        name = self.fresh(".".join(filter(None, (self.where, label or kind))))
        self.writer.apply(kind, name, *names, **attributes)
        return Tensor(name, self.writer.shape(name))

    def tensor(self, value: Any) -> Tensor:
        """A tensor of the program; a constant is written as data."""
        if isinstance(value, Tensor):
            return value
        if value is None or isinstance(value, (int, float, bool, tuple, list)):
            raise MissingRule(f"a tensor in place of {value!r}")
        name = self.fresh(".".join(filter(None, (self.where, "constant"))))
        self.writer.placeholder(
            name, tuple(value.shape), below=None if value.is_floating_point() else 2
        )
        if not value.is_meta:  # a module without numbers gives a program without them
            self.data[name] = value.detach().clone()
        return Tensor(name, tuple(value.shape))

    def same(self, value: Tensor, note: str | None = None) -> Tensor:
        """The value itself; `note` says what was left out."""
        if note is not None:
            self.notes[note] = self.notes.get(note, 0) + 1
        return value

    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """x in another shape; nothing is written where it has it."""
        wanted = tuple(int(n) for n in shape)
        return x if wanted == x.shape else self.apply("reshape", x, shape=wanted)

    def refuse(self, operator: str, missing: str, where: str | None = None) -> None:
        """Write an operator (or a parameter) down as unsupported, once."""
        entry = Unsupported(operator, where or self.where or "the module itself", missing)
        if entry not in self.unsupported:
            self.unsupported.append(entry)

    def stand_in(self, operator: str, missing: str, shape: Any) -> Any:
        """Write an operator down as unsupported; data of its shape (or shapes) takes its place."""
        self.refuse(operator, missing)
        if shape and isinstance(shape[0], list):
            return tuple(self.stand_in(operator, missing, one) for one in shape)
        name = self.fresh("unsupported")
        self.writer.placeholder(name, tuple(shape))
        return Tensor(name, tuple(shape))


def scalar(value: Any) -> float | None:
    """The number that a constant of one entry, or a plain number, stands for; None for anything
    else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, Tensor) or not hasattr(value, "numel"):
        return None
    return float(value) if value.numel() == 1 else None


BATCH = "abcdefg"  # leading dimensions; x, y, z are those of the product


def linear(w: Walker, x: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
    """x [..., i] weight [o, i] bias [o]."""
    lead = BATCH[: len(x.shape) - 1]
    return (
        w.apply("contract", x, weight, label="linear", equation=f"{lead}x,yx->{lead}y")
        if bias is None
        else w.apply("contract", x, weight, bias, label="linear", equation=f"{lead}x,yx,y->{lead}y")
    )


def matmul(w: Walker, left: Tensor, right: Tensor) -> Tensor:
    """[..., i, j] @ [..., j, k], equal leading dimensions, or a matrix on the right."""
    left, right = w.tensor(left), w.tensor(right)
    refuse(len(left.shape) < 2 or len(right.shape) < 2, "a product with a vector")
    lead = BATCH[: len(left.shape) - 2]
    if len(right.shape) == 2:
        return w.apply("contract", left, right, label="matmul", equation=f"{lead}xy,yz->{lead}xz")
    refuse(
        left.shape[:-2] != right.shape[:-2],
        f"a product that repeats leading dimensions ({left.shape} and {right.shape})",
    )
    return w.apply("contract", left, right, label="matmul", equation=f"{lead}xy,{lead}yz->{lead}xz")


def addmm(
    w: Walker, bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """bias + left @ right."""
    refuse(beta != 1 or alpha != 1, "addmm with factors")
    return (
        w.apply("add", matmul(w, left, right), bias)
        if len(bias.shape) != 1
        else w.apply("contract", left, right, bias, label="addmm", equation="xy,yz,z->xz")
    )


def einsum(w: Walker, equation: str, tensors: Sequence[Any], *, path: Any = None) -> Tensor:
    """Two tensors, every letter once in each."""
    equation = equation.replace(" ", "")
    left, _, output = equation.partition("->")
    terms = left.split(",")
    refuse(
        len(terms) != 2 or "." in equation or not equation.count("->"),
        f"einsum {equation} (two tensors, all letters written out)",
    )
    refuse(
        any(len(set(term)) < len(term) for term in (*terms, output)),
        f"einsum {equation} (a letter twice in one tensor)",
    )
    refuse(
        any(x not in left for x in output)
        or any(
            x not in output and x not in other for term, other in (terms, terms[::-1]) for x in term
        ),
        f"einsum {equation} (a sum over one tensor alone)",
    )
    return w.apply("contract", *tensors, label="einsum", equation=equation)


def equal_figures(value: Any) -> int:
    """The one number that a list repeats, one entry a direction."""
    numbers = [value] if isinstance(value, int) else list(value)
    refuse(len(set(numbers)) != 1, f"different figures for the two directions ({numbers})")
    return int(numbers[0])


def conv2d(
    w: Walker, x: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    """A convolution without dilation and groups."""
    refuse(
        isinstance(padding, str)
        or equal_figures(dilation) != 1
        or groups != 1
        or len(x.shape) != 4,
        "convolution with dilation, groups or padding by name",
    )
    return w.apply(
        "convolve",
        *([x, weight] if bias is None else [x, weight, bias]),
        label="conv2d",
        padding=equal_figures(padding),
        stride=equal_figures(stride),
    )


def attention(
    w: Walker, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """scaled_dot_product_attention of [samples, heads, tokens, d], with grouped queries too."""
    refuse(attn_mask is not None, "attention with a mask (only is_causal has a rule)")
    refuse(len(q.shape) != 4, f"attention over {len(q.shape)} dimensions (expected 4)")
    q = w.same(q, "dropout in attention" if dropout_p else None)
    if scale is not None and not math.isclose(scale * math.sqrt(q.shape[3]), 1.0, rel_tol=1e-12):
        q = w.apply("scale", q, factor=scale * math.sqrt(q.shape[3]))
    if k.shape[1] != q.shape[1]:
        k, v = repeated_heads(w, k, q.shape[1]), repeated_heads(w, v, q.shape[1])
    return w.apply("attention", q, k, v, causal=bool(is_causal))


def repeated_heads(w: Walker, x: Tensor, heads: int) -> Tensor:
    """[b, g, s, d] -> [b, heads, s, d], each head repeated for its group of queries."""
    b, g, s, d = x.shape
    x = w.reshape(x, (b, g, 1, s, d))
    return w.reshape(w.apply("repeat", x, shape=(b, g, heads // g, s, d)), (b, heads, s, d))


def offset(w: Walker, x: Tensor, number: float) -> Tensor:
    """x plus a number; nothing is written for 0."""
    return w.apply("offset", x, number=number) if number else x


def add(w: Walker, left: Any, right: Any, *, alpha: float = 1) -> Tensor:
    """left + alpha * right, tensors or numbers."""
    number = scalar(right)
    if number is not None:
        return offset(w, left, alpha * number)
    if alpha != 1:
        right = w.apply("scale", right, factor=float(alpha))
    number = scalar(left)
    return w.apply("add", left, right) if number is None else offset(w, right, number)


def mul(w: Walker, left: Any, right: Any) -> Tensor:
    """A product of entries, or with a number."""
    for one, other in ((left, right), (right, left)):
        number = scalar(other)
        if number is not None and isinstance(one, Tensor):
            return w.apply("scale", one, factor=number)
    return w.apply("multiply", left, right)


def div(w: Walker, left: Any, right: Any, *, rounding_mode: Any = None) -> Tensor:
    """A quotient."""
    refuse(rounding_mode is not None, "division with rounding")
    number = scalar(right)
    return (
        w.apply("scale", left, factor=1 / number)
        if number is not None
        else mul(w, left, w.apply("power", right, exponent=-1.0))
    )


def power(w: Walker, x: Any, exponent: Any) -> Tensor:
    """x to a number."""
    number = scalar(exponent)
    if number is None or not isinstance(x, Tensor):
        raise MissingRule("a power with a tensor as exponent")
    return w.apply("power", x, exponent=number)


def entrywise(kind: str, w: Walker, x: Tensor, **attributes: Any) -> Tensor:
    """An operator of one tensor that exists under that kind."""
    return w.apply(kind, x, **attributes)


def greater(w: Walker, x: Tensor, other: Any) -> Tensor:
    """1 where an entry is more than 0."""
    refuse(scalar(other) != 0, "a comparison with anything but 0")
    return w.apply("positive", x)


def masked_fill(w: Walker, x: Tensor, mask: Any, value: Any) -> Tensor:
    """Minus infinity where a constant mask says so: a sum with a constant."""
    number = scalar(value)
    refuse(
        isinstance(mask, Tensor) or number is None or number > -1e30,
        "masked_fill (only a constant mask with minus infinity has a rule)",
    )
    hidden = mask.double().masked_fill(mask, -math.inf).masked_fill(~mask, 0.0)
    return w.apply("add", x, hidden)


def over_the_last(kind: str, w: Walker, x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """softmax, log_softmax."""
    refuse(dim % len(x.shape) != len(x.shape) - 1, f"{kind} over another dimension than the last")
    return w.apply(kind, x)


def layer_norm(
    w: Walker, x: Tensor, shape: Sequence[int], weight: Any = None, bias: Any = None,
    eps: float = 1e-5, cudnn_enable: bool = True,
) -> Tensor:  # fmt: skip
    """Over the last dimension, with scale and shift."""
    refuse(
        len(shape) != 1 or weight is None or bias is None,
        "layer norm over several dimensions, or without scale or shift",
    )
    return w.apply("layer-norm", x, weight, bias, epsilon=float(eps))


def rms_norm(
    w: Walker, x: Tensor, shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> Tensor:
    """Over the last dimension, with scale."""
    if len(shape) != 1 or weight is None or eps is None:
        raise MissingRule("RMS norm over several dimensions, without scale, or without eps")
    return w.apply("rms-norm", x, weight, epsilon=float(eps))


def embedding(
    w: Walker, table: Tensor, ids: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:  # fmt: skip
    """Rows of a table."""
    refuse(
        padding_idx >= 0 or scale_grad_by_freq,
        "embedding with a padding index or gradients by frequency",
    )
    return w.apply("embed", ids, table)


def cross_entropy(
    w: Walker, logits: Tensor, labels: Any, weight: Any = None, reduction: int = 1,
    ignore_index: int = -100, label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """The mean or the sum over rows of [rows, classes]."""
    labels = w.tensor(labels)
    refuse(
        weight is not None or reduction == 0 or label_smoothing != 0 or ignore_index >= 0,
        "cross-entropy with weights, smoothing, an index to ignore, or row by row",
    )
    refuse(
        len(logits.shape) != 2 or len(labels.shape) != 1,
        "cross-entropy of more than two dimensions, or with probabilities as labels",
    )
    return w.apply("cross-entropy", logits, labels, count=labels.shape[0] if reduction == 1 else 1)


def nll_loss(
    w: Walker,
    x: Tensor,
    labels: Any,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: int = -100,
) -> Tensor:
    """Of log_softmax: both together are the cross-entropy."""
    behind = w.writer.node(x.name)
    refuse(behind.kind != "log-softmax", "nll_loss of anything but log_softmax")
    return cross_entropy(
        w, Tensor(behind.inputs[0], x.shape), labels, weight, reduction, ignore_index
    )


def mean(
    w: Walker,
    x: Tensor,
    dim: Sequence[int] | int | None = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Tensor:
    """Over some dimensions, one after the other."""
    rank, whole = len(x.shape), x.shape
    dims = range(rank) if dim is None else [dim] if isinstance(dim, int) else dim
    for d in sorted({d % rank for d in dims}, reverse=True):
        x = w.apply("mean", x, dimension=d, length=whole[d])
    return w.reshape(x, w.made)


def total(
    w: Walker,
    x: Tensor,
    dim: Sequence[int] | int | None = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Tensor:
    """A sum as a multiple of the mean."""
    return w.apply("scale", mean(w, x, dim), factor=math.prod(x.shape) / max(1, math.prod(w.made)))


def max_pool2d(
    w: Walker, x: Tensor, window: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False,
) -> Tensor:  # fmt: skip
    """Squares, side by side or not."""
    refuse(equal_figures(dilation) != 1 or ceil_mode, "pooling with dilation, or rounded up")
    size = equal_figures(window)
    apart, around = equal_figures(stride or size), equal_figures(padding)
    return w.apply("max-pool", x, window=size, stride=apart, padding=around)


def batch_norm(
    w: Walker, x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool,
    momentum: float, eps: float,
) -> tuple[Any, ...]:  # fmt: skip
    """By the statistics of the batch; running ones follow from no step and are not kept."""
    refuse(
        not training or weight is None or bias is None,
        "batch norm by fixed statistics, or without scale and shift",
    )
    moments = w.apply("batch-moments", x, label="moments", count=math.prod(x.shape) // x.shape[1])
    made = w.apply("batch-norm", x, moments, weight, bias, epsilon=float(eps))
    return w.same(made, "running statistics of a batch norm"), None, None, mean, variance


def adaptive_avg_pool2d(w: Walker, x: Tensor, size: Sequence[int]) -> Tensor:
    """To one value per channel, to the size that is there, or from one value to many."""
    height, width = (int(n) for n in size)
    if (height, width) == x.shape[2:]:
        return x
    if x.shape[2:] == (1, 1):
        return w.apply("repeat", x, shape=(*x.shape[:2], height, width))
    refuse((height, width) != (1, 1), f"pooling of {x.shape[2:]} to {(height, width)}")
    return w.reshape(w.apply("mean-pool", x), (*x.shape[:2], 1, 1))


def native_dropout(w: Walker, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, None]:
    """Left out: it costs a pass over memory, and changes no shape. No mask is made."""
    return w.same(x, "dropout" if p and train else None), None


def expand(w: Walker, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """Dimensions of length 1 repeated, new ones in front."""
    x = w.reshape(x, (*[1] * (len(w.made) - len(x.shape)), *x.shape))
    return x if tuple(w.made) == x.shape else w.apply("repeat", x, shape=tuple(w.made))


def narrow(w: Walker, x: Tensor, d: int, start: int, stop: int) -> Tensor:
    """The range [start, stop) of dimension d."""
    return (
        x
        if (start, stop) == (0, x.shape[d])
        else w.apply("select", x, label="slice", dimension=d, start=start, stop=stop)
    )


def slice_(
    w: Walker,
    x: Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Tensor:
    """A slice with step 1."""
    refuse(step != 1, "slices with a step")
    d = dim % len(x.shape)
    first, last, _ = slice(start, end).indices(x.shape[d])
    return narrow(w, x, d, first, last)


def select(w: Walker, x: Tensor, dim: int, index: int) -> Tensor:
    """One index of a dimension, which is left out."""
    d = dim % len(x.shape)
    i = index % x.shape[d]
    return w.reshape(narrow(w, x, d, i, i + 1), (*x.shape[:d], *x.shape[d + 1 :]))


def split_with_sizes(
    w: Walker, x: Tensor, sizes: Sequence[int], dim: int = 0
) -> tuple[Tensor, ...]:
    """Ranges one after the other."""
    d = dim % len(x.shape)
    return tuple(narrow(w, x, d, *ends) for ends in pairwise(accumulate(sizes, initial=0)))


def cat(w: Walker, tensors: Sequence[Any], dim: int = 0) -> Tensor:
    """One after the other."""
    parts = [w.tensor(part) for part in tensors]
    return w.apply("join", *parts, label="cat", dimension=dim % len(parts[0].shape))


def _forward(gates: Any, active: int, capacity: int) -> Any:
    return gates.unsqueeze(-1) * places_of_tokens(gates, active, capacity)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:  # torch passes these by name
    gates, ctx.active, ctx.capacity = inputs
    ctx.save_for_backward(gates)


def _backward(ctx: Any, gradient: Any) -> Any:
    (gates,) = ctx.saved_tensors
    chosen = gradient * places_of_tokens(gates, ctx.active, ctx.capacity)
    return chosen.sum(dim=-1), None, None


route = torch.library.custom_op(
    "hetplan::route",
    _forward,
    mutates_args=(),
    schema="(Tensor gates, int active, int capacity) -> Tensor",
)
route.register_fake(lambda gates, active, capacity: gates.new_empty((*gates.shape, capacity)))
route.register_autograd(_backward, setup_context=_keep)


RULES: dict[str, Rule] = {
    "aten.linear": linear,
    "aten.matmul": matmul,
    "aten.mm": matmul,
    "aten.bmm": matmul,
    "aten.addmm": addmm,
    "aten.einsum": einsum,
    "aten.conv2d": conv2d,
    "aten.scaled_dot_product_attention": attention,
    "hetplan.route": lambda w, gates, active, capacity: w.apply(
        "route", gates, active=int(active), capacity=int(capacity)
    ),
    "aten.add": add,
    "aten.sub": lambda w, left, right, *, alpha=1: add(w, left, right, alpha=-alpha),
    "aten.mul": mul,
    "aten.div": div,
    "aten.neg": partial(entrywise, "scale", factor=-1.0),
    "aten.pow": power,
    "aten.rsqrt": partial(entrywise, "power", exponent=-0.5),
    "aten.sqrt": partial(entrywise, "power", exponent=0.5),
    "aten.reciprocal": partial(entrywise, "power", exponent=-1.0),
    "aten.relu": partial(entrywise, "relu"),
    "aten.silu": partial(entrywise, "silu"),
    "aten.tanh": partial(entrywise, "tanh"),
    "aten.sigmoid": partial(entrywise, "sigmoid"),
    "aten.gelu": lambda w, x, *, approximate="none": w.apply(
        "gelu" if approximate == "tanh" else "gelu-erf", x
    ),
    "aten.gt": greater,
    "aten.masked_fill": masked_fill,
    "aten.softmax": partial(over_the_last, "softmax"),
    "aten.log_softmax": partial(over_the_last, "log-softmax"),
    "aten.layer_norm": layer_norm,
    "aten._native_batch_norm_legit_functional": batch_norm,
    "aten.rms_norm": rms_norm,
    "aten.embedding": embedding,
    "aten.cross_entropy_loss": cross_entropy,
    "aten.nll_loss_nd": nll_loss,
    "aten.mean": mean,
    "aten.sum": total,
    "aten.max_pool2d": max_pool2d,
    "aten.adaptive_avg_pool2d": adaptive_avg_pool2d,
    "aten.native_dropout": native_dropout,
    "aten.permute": lambda w, x, dims: w.apply(
        "permute", x, order=tuple(d % len(x.shape) for d in dims)
    ),
    "aten.expand": expand,
    "aten.slice": slice_,
    "aten.select": select,
    "aten.split_with_sizes": split_with_sizes,
    "aten.cat": cat,
    # views, copies and conversions between floating types: the entries in the output's shape
    **dict.fromkeys(
        (
            "aten.view",
            "aten._unsafe_view",
            "aten.unsqueeze",
            "aten.squeeze",
            "aten.clone",
            "aten.alias",
            "aten._to_copy",
        ),
        lambda w, x, *_, **__: w.reshape(x, w.made),
    ),
}
