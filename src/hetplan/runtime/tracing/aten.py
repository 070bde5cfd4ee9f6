"""The rules that turn ATen's operators into operators of a single-device program, and an operator
of torch for the routing of a mixture of experts.

A rule takes the walker and an operator's arguments, writes operators of the program, and returns
the operator's value. A value is a tensor of the program, a constant, or a tuple of these. An
operator that depends on no input and no parameter is computed at once, and its value is a constant.
An operator without a rule is recorded, and data stand in for its value, so that one walk over the
graph finds all such operators.

A rule has all parameters of its operator in ATen. It leaves unused those that choose a type, a
layout or a kernel, of which a program has none, and those whose effect is in the output's shape,
such as `keepdim`.

Routing written out in sorts, cumulative sums and comparisons has no rule. The operator
`hetplan::route` has one: gates [b, s, e] -> weights [b, s, e, c], as the program's operator `route`
defines them.
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
    """An operator's rule does not cover a call. The text says what the rule lacks."""


def refuse(condition: object, what: str) -> None:
    """Raise MissingRule where `condition` holds. what: the feature of the call that the rule does
    not cover."""
    if condition:
        raise MissingRule(what)


@dataclass(frozen=True)
class Tensor:
    """A tensor of the program."""

    name: str
    shape: Shape


@dataclass(frozen=True)
class Unsupported:
    """A call for which there is no rule."""

    operator: str  # ATen's name
    where: str  # path of the module that calls it
    missing: str  # the missing rule


# (walker, arguments of the ATen operator) -> Tensor, tuple of tensors, or constant
Rule = Callable[..., Any]


@dataclass
class Walker:
    """The program that rules write to, with the state of the walk over the graph."""

    writer: Writer
    unsupported: list[Unsupported] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)  # placeholder of a constant -> its value
    # left out of the program (dropout, say) -> how often
    notes: dict[str, int] = field(default_factory=dict)
    where: str = ""  # path of the module that calls the present operator
    output_shape: Sequence[int] = ()  # shape of the present operator's output
    _taken: dict[str, int] = field(default_factory=dict)  # name -> how often it was asked for

    def fresh(self, name: str) -> str:
        """A name that no tensor of the program has: `name`, with a number where it is taken."""
        # HAP's name of a sharded tensor has "|" between tensor and form, `e|All-Gather(0)`
        name = name.replace("|", "/")
        count = self._taken.get(name, 0)
        self._taken[name] = count + 1
        return name if count == 0 else self.fresh(f"{name}:{count}")

    def apply(self, kind: str, *inputs: Any, label: str | None = None, **attributes: Any) -> Tensor:
        """Write an operator of the program and return its output. Constants among the inputs become
        placeholders."""
        names = [self.tensor(value).name for value in inputs]
        name = self.fresh(".".join(filter(None, (self.where, label or kind))))
        self.writer.apply(kind, name, *names, **attributes)
        return Tensor(name, self.writer.shape(name))

    def tensor(self, value: Any) -> Tensor:
        """A value as a tensor of the program: a constant is written as a placeholder. Raises
        MissingRule for anything but a tensor."""
        if isinstance(value, Tensor):
            return value
        if value is None or isinstance(value, (int, float, bool, tuple, list)):
            raise MissingRule(f"a tensor in place of {value!r}")
        name = self.fresh(".".join(filter(None, (self.where, "constant"))))
        # Any `below` but None marks whole numbers. Its size matters only where data are drawn at
        # random; the values of a constant are in `data`.
        below = None if value.is_floating_point() else 2
        self.writer.placeholder(name, tuple(value.shape), below=below)
        if not value.is_meta:  # a module on the meta device gives a program without values
            self.data[name] = value.detach().clone()
        return Tensor(name, tuple(value.shape))

    def same(self, value: Tensor, note: str | None = None) -> Tensor:
        """The value itself, for an operator that is left out of the program. note: a text that says
        what is left out; it is counted in `notes`."""
        if note is not None:
            self.notes[note] = self.notes.get(note, 0) + 1
        return value

    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """x in another shape; x itself where it has this shape."""
        wanted = tuple(int(n) for n in shape)
        return x if wanted == x.shape else self.apply("reshape", x, shape=wanted)

    def refuse(self, operator: str, missing: str, where: str | None = None) -> None:
        """Record an operator (or a parameter) as unsupported, once for each place."""
        entry = Unsupported(operator, where or self.where or "the module itself", missing)
        if entry not in self.unsupported:
            self.unsupported.append(entry)

    def stand_in(self, operator: str, missing: str, shape: Any) -> Any:
        """Record an operator as unsupported, and return data of its output's shape (or shapes) in
        its place."""
        self.refuse(operator, missing)
        if shape and isinstance(shape[0], list):  # an operator of several outputs
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


BATCH = "abcdefg"  # letters of leading dimensions; x, y, z are those of the product


def linear(w: Walker, x: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
    """x @ weight^T + bias, for x [..., i], weight [o, i] and bias [o]."""
    lead = BATCH[: len(x.shape) - 1]
    if bias is None:
        return w.apply("contract", x, weight, label="linear", equation=f"{lead}x,yx->{lead}y")
    return w.apply("contract", x, weight, bias, label="linear", equation=f"{lead}x,yx,y->{lead}y")


def matmul(w: Walker, left: Tensor, right: Tensor) -> Tensor:
    """[..., i, j] @ [..., j, k] with equal leading dimensions, or with a matrix on the right."""
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
    if len(bias.shape) == 1:
        return w.apply("contract", left, right, bias, label="addmm", equation="xy,yz,z->xz")
    return w.apply("add", matmul(w, left, right), bias)


def einsum(w: Walker, equation: str, tensors: Sequence[Any], *, path: Any = None) -> Tensor:
    """einsum of two tensors, with every letter at most once in each."""
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
    first, second = set(terms[0]), set(terms[1])
    new_letters = set(output) - first - second
    in_one_term_alone = (first ^ second) - set(output)
    refuse(
        new_letters or in_one_term_alone,
        f"einsum {equation} (a sum over one tensor alone)",
    )
    return w.apply("contract", *tensors, label="einsum", equation=equation)


def equal_figures(value: Any) -> int:
    """The number that is given for both directions of an image: alone, or as a list that repeats
    it."""
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
    """scaled_dot_product_attention of [samples, heads, tokens, d]. Keys and values may have fewer
    heads than queries."""
    refuse(attn_mask is not None, "attention with a mask (only is_causal has a rule)")
    refuse(len(q.shape) != 4, f"attention over {len(q.shape)} dimensions (expected 4)")
    q = w.same(q, "dropout in attention" if dropout_p else None)
    # The program's operator scales by 1 / sqrt(d) itself. A scale counts as this one where it is
    # equal up to rounding.
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
    """left * right, entry by entry; each is a tensor or a number."""
    for tensor, other in ((left, right), (right, left)):
        number = scalar(other)
        if number is not None and isinstance(tensor, Tensor):
            return w.apply("scale", tensor, factor=number)
    return w.apply("multiply", left, right)


def div(w: Walker, left: Any, right: Any, *, rounding_mode: Any = None) -> Tensor:
    """left / right, entry by entry; right is a tensor or a number."""
    refuse(rounding_mode is not None, "division with rounding")
    number = scalar(right)
    if number is not None:
        return w.apply("scale", left, factor=1 / number)
    return mul(w, left, w.apply("power", right, exponent=-1.0))


def power(w: Walker, x: Any, exponent: Any) -> Tensor:
    """x to the power of a number."""
    number = scalar(exponent)
    if number is None or not isinstance(x, Tensor):
        raise MissingRule("a power with a tensor as exponent")
    return w.apply("power", x, exponent=number)


def entrywise(kind: str, w: Walker, x: Tensor, **attributes: Any) -> Tensor:
    """An operator of one tensor that the program has as `kind`."""
    return w.apply(kind, x, **attributes)


def greater(w: Walker, x: Tensor, other: Any) -> Tensor:
    """1 where an entry of x is more than 0, else 0."""
    refuse(scalar(other) != 0, "a comparison with anything but 0")
    return w.apply("positive", x)


def masked_fill(w: Walker, x: Tensor, mask: Any, value: Any) -> Tensor:
    """x with minus infinity where a constant mask is True: the sum of x and a constant. The lowest
    number of fp32 or bf16, about -3e38, counts as minus infinity."""
    number = scalar(value)
    refuse(
        isinstance(mask, Tensor) or number is None or number > -1e30,
        "masked_fill (only a constant mask with minus infinity has a rule)",
    )
    hidden = mask.double().masked_fill(mask, -math.inf).masked_fill(~mask, 0.0)
    return w.apply("add", x, hidden)


def over_the_last(kind: str, w: Walker, x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """An operator over the last dimension: softmax or log-softmax, as `kind` says."""
    refuse(dim % len(x.shape) != len(x.shape) - 1, f"{kind} over another dimension than the last")
    return w.apply(kind, x)


def layer_norm(
    w: Walker, x: Tensor, shape: Sequence[int], weight: Any = None, bias: Any = None,
    eps: float = 1e-5, cudnn_enable: bool = True,
) -> Tensor:  # fmt: skip
    """Layer norm over the last dimension, with scale and shift."""
    refuse(
        len(shape) != 1 or weight is None or bias is None,
        "layer norm over several dimensions, or without scale or shift",
    )
    return w.apply("layer-norm", x, weight, bias, epsilon=float(eps))


def rms_norm(
    w: Walker, x: Tensor, shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> Tensor:
    """RMS norm over the last dimension, with scale."""
    if len(shape) != 1 or weight is None or eps is None:
        raise MissingRule("RMS norm over several dimensions, without scale, or without eps")
    return w.apply("rms-norm", x, weight, epsilon=float(eps))


def embedding(
    w: Walker, table: Tensor, ids: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:  # fmt: skip
    """The rows of a table that `ids` name."""
    refuse(
        padding_idx >= 0 or scale_grad_by_freq,
        "embedding with a padding index or gradients by frequency",
    )
    return w.apply("embed", ids, table)


def cross_entropy(
    w: Walker, logits: Tensor, labels: Any, weight: Any = None, reduction: int = 1,
    ignore_index: int = -100, label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """The mean or the sum of the cross-entropies of the rows of logits [rows, classes].

    reduction: torch's number, 0 for no reduction, 1 for the mean, 2 for the sum. ignore_index: a
    negative one is no class, and the labels of a program are classes.
    """
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
    """The negative log-likelihood of the output of log_softmax; the two together are the
    cross-entropy."""
    source = w.writer.node(x.name)
    refuse(source.kind != "log-softmax", "nll_loss of anything but log_softmax")
    logits = Tensor(source.inputs[0], x.shape)
    return cross_entropy(w, logits, labels, weight, reduction, ignore_index)


def mean(
    w: Walker,
    x: Tensor,
    dim: Sequence[int] | int | None = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Tensor:
    """The mean over some dimensions, taken one after the other, the last dimension first."""
    rank, shape = len(x.shape), x.shape
    dims: Sequence[int]
    if dim is None:
        dims = range(rank)
    elif isinstance(dim, int):
        dims = [dim]
    else:
        dims = dim
    # the last dimension first: the operator drops its dimension, and the numbers of those before
    # it stay
    for d in sorted({d % rank for d in dims}, reverse=True):
        x = w.apply("mean", x, dimension=d, length=shape[d])
    return w.reshape(x, w.output_shape)


def total(
    w: Walker,
    x: Tensor,
    dim: Sequence[int] | int | None = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Tensor:
    """The sum over some dimensions: the mean times the number of summands."""
    # max: an output without entries, which has no summands either
    summands = math.prod(x.shape) / max(1, math.prod(w.output_shape))
    return w.apply("scale", mean(w, x, dim), factor=summands)


def max_pool2d(
    w: Walker, x: Tensor, window: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False,
) -> Tensor:  # fmt: skip
    """The maximum over square windows; by default the windows lie side by side."""
    refuse(equal_figures(dilation) != 1 or ceil_mode, "pooling with dilation, or rounded up")
    size = equal_figures(window)
    return w.apply(
        "max-pool",
        x,
        window=size,
        stride=equal_figures(stride or size),
        padding=equal_figures(padding),
    )


def batch_norm(
    w: Walker, x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool,
    momentum: float, eps: float,
) -> tuple[Any, ...]:  # fmt: skip
    """Batch norm by the statistics of the batch. Running statistics, on which no step depends, are
    left out."""
    refuse(
        not training or weight is None or bias is None,
        "batch norm by fixed statistics, or without scale and shift",
    )
    entries_per_channel = math.prod(x.shape) // x.shape[1]
    moments = w.apply("batch-moments", x, label="moments", count=entries_per_channel)
    normed = w.apply("batch-norm", x, moments, weight, bias, epsilon=float(eps))
    output = w.same(normed, "running statistics of a batch norm")
    saved_mean = saved_deviation = None  # only ATen's backward pass reads them
    return output, saved_mean, saved_deviation, mean, variance


def adaptive_avg_pool2d(w: Walker, x: Tensor, size: Sequence[int]) -> Tensor:
    """Average pooling to a size: to 1 by 1, to the size of x, or from 1 by 1 to any size."""
    height, width = (int(n) for n in size)
    if (height, width) == x.shape[2:]:
        return x
    if x.shape[2:] == (1, 1):
        return w.apply("repeat", x, shape=(*x.shape[:2], height, width))
    refuse((height, width) != (1, 1), f"pooling of {x.shape[2:]} to {(height, width)}")
    return w.reshape(w.apply("mean-pool", x), (*x.shape[:2], 1, 1))


def native_dropout(w: Walker, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, None]:
    """Dropout, which is left out of the program: it changes no shape. The mask is None."""
    return w.same(x, "dropout" if p and train else None), None


def expand(w: Walker, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """x with dimensions of length 1 repeated, and with new dimensions in front."""
    new_dimensions = len(w.output_shape) - len(x.shape)
    x = w.reshape(x, (*[1] * new_dimensions, *x.shape))
    if tuple(w.output_shape) == x.shape:
        return x
    return w.apply("repeat", x, shape=tuple(w.output_shape))


def narrow(w: Walker, x: Tensor, d: int, start: int, stop: int) -> Tensor:
    """The range [start, stop) of dimension d; x itself where this is all of the dimension."""
    if (start, stop) == (0, x.shape[d]):
        return x
    return w.apply("select", x, label="slice", dimension=d, start=start, stop=stop)


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
    """x at one index of a dimension, without this dimension."""
    d = dim % len(x.shape)
    i = index % x.shape[d]
    return w.reshape(narrow(w, x, d, i, i + 1), (*x.shape[:d], *x.shape[d + 1 :]))


def split_with_sizes(
    w: Walker, x: Tensor, sizes: Sequence[int], dim: int = 0
) -> tuple[Tensor, ...]:
    """Consecutive ranges of a dimension, of the given sizes."""
    d = dim % len(x.shape)
    return tuple(narrow(w, x, d, *ends) for ends in pairwise(accumulate(sizes, initial=0)))


def cat(w: Walker, tensors: Sequence[Any], dim: int = 0) -> Tensor:
    """Tensors joined along a dimension."""
    parts = [w.tensor(part) for part in tensors]
    return w.apply("join", *parts, label="cat", dimension=dim % len(parts[0].shape))


def _forward(gates: Any, active: int, capacity: int) -> Any:
    """The output of `hetplan::route`."""
    return gates.unsqueeze(-1) * places_of_tokens(gates, active, capacity)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:  # torch passes the arguments by name
    """Save the inputs of `hetplan::route` for its backward pass."""
    gates, ctx.active, ctx.capacity = inputs
    ctx.save_for_backward(gates)


def _backward(ctx: Any, gradient: Any) -> Any:
    """The gradients of the inputs of `hetplan::route`: of the gates alone."""
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


# ATen operator without overload -> rule.
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
    # views, copies and conversions between floating types: x in the output's shape
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
        lambda w, x, *_, **__: w.reshape(x, w.output_shape),
    ),
}
