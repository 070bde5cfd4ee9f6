"""The operators that programs are made of: a table of their shapes, ways to be sharded, and work.

What an operator computes stands in `runtime/spmd/kernels.py`. Work is in FLOP.
Elementwise operators wait for memory, not for arithmetic: an element moved counts as
`ELEMENT_FLOPS`, which is what a device could compute meanwhile.

Sources of the ways: HAP, Fig. 9 and its released rules. Any dimension of an elementwise operator
can be sliced. Of a product, a dimension of the output is batch or output parallelism, a dimension
that is summed over is reduction parallelism (HAP's released code lacks it), whose results are
summands. Operators that are linear in a tensor take its summands as well.

The forms in which the devices hold a tensor, the ways in which an operator works on them, and
what the triples of a theory stand for.

HAP, Section 4.2: a distributed tensor has the property `e | I` where running the instruction I on
it gives `e` on every device. Forms and what a device holds of the tensor and, going backward, of
its gradient:

    form            property           value on device j          gradient on device j
    WHOLE           e|Identity         e                          one summand of it all
    PARTIAL         e|All-Reduce       a summand of e             the whole gradient
    d = 0, 1, …     e|All-Gather(d)    its slice along d          the same slice of the gradient

Gradients of whole tensors are summands because every operator's backward pass is linear in the
gradient: wherever a whole tensor is read by a device that computes a slice, its gradient comes out
as a summand anyway. Instructions say what each device does forward and, mirrored, backward.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hetplan.errors import InputError, look_up, require

Form = int
Shape = tuple[int, ...]
WHOLE: Form = -1
PARTIAL: Form = -2


def form_name(form: Form) -> str:
    """HAP's name of a form."""
    return {WHOLE: "Identity", PARTIAL: "All-Reduce"}.get(form, f"All-Gather({form})")


def property_name(tensor: str, form: Form) -> str:
    """`e|All-Gather(0)`."""
    return f"{tensor}|{form_name(form)}"


@dataclass(frozen=True)
class Way:
    """One rule of an operator: with inputs in these forms, running it on every device gives the
    output's form."""

    inputs: tuple[Form, ...]
    output: Form

    @property
    def shared(self) -> bool:
        """Whether the devices share the work (they repeat it where no tensor is sliced)."""
        return any(form >= 0 for form in (*self.inputs, self.output))


def whole_way(count: int) -> Way:
    """Replicated computation of an operator of `count` inputs. Source: HAP, Section 4.4."""
    return Way((WHOLE,) * count, WHOLE)


def along(letter: str, inputs: tuple[str, ...], output: str) -> Way:
    """The way that slices every tensor that has the dimension `letter`; without it in the output,
    sums remain."""
    return Way(
        tuple(t.find(letter) for t in inputs), output.find(letter) if letter in output else PARTIAL
    )


Collective = Literal[
    "All-Reduce",
    "Reduce-Scatter",
    "All-Gather",
    "Grouped-Broadcast",
    "All-To-All",
    "Slice",
    "Share",
    "Repartition",
]

Gather = Literal["All-Reduce", "All-Gather factors", "Grouped-Broadcast factors"]


@dataclass(frozen=True)
class Run:
    """An operator on every device. factors: the gradients of its parameters are computed from
    gathered factors."""

    node: str
    way: Way
    after: str
    factors: bool = False

    def text(self) -> str:
        """`fc1(All-Gather(0), Identity)`: the output's tensor, the inputs' forms."""
        forms = ", ".join(form_name(form) for form in self.way.inputs)
        return f"{self.node}({forms})" + (" by factors" if self.factors else "")


@dataclass(frozen=True)
class Change:
    """A tensor from one form to another: by a collective, or for nothing (Slice, Share)."""

    how: Collective
    tensor: str
    source: Form
    target: Form
    before: str
    after: str

    def text(self) -> str:
        """`All-Gather(fc1, 0)`."""
        dims = ", ".join(str(form) for form in (self.source, self.target) if form >= 0)
        return f"{self.how}({self.tensor}{', ' + dims if dims else ''})"


@dataclass(frozen=True)
class Synchronise:
    """The gradients of whole parameters, all-reduced; or, for sufficient factors, the gathering of
    what they are computed from. Only the backward pass has it."""

    node: str
    parameters: tuple[str, ...]
    how: Gather
    before: str
    after: str

    def text(self) -> str:
        """`All-Reduce(gradient of fc1.weight)`."""
        return f"{self.how} gradient({', '.join(self.parameters)})"


Instruction = Run | Change | Synchronise


def reading_segment(change: Change) -> int:
    """The segment that a repartitioned tensor moves to."""
    return int(change.after.rpartition("|")[0].rpartition("@")[2])


def changes(cuts: Sequence[int]) -> Iterator[tuple[Collective, Form, Form]]:
    """Every change of form of a tensor that can be sliced along the dimensions `cuts`."""
    yield "All-Reduce", PARTIAL, WHOLE
    for d in cuts:
        yield "Reduce-Scatter", PARTIAL, d
        yield "All-Gather", d, WHOLE
        yield "Grouped-Broadcast", d, WHOLE
        for other in cuts:
            if other != d:
                yield "All-To-All", d, other
        yield "Slice", WHOLE, d


Shapes = Sequence[Shape]
Attributes = Mapping[str, Any]
# A V100 computes 3.9e12 FLOP/s (measured, HAP's artefact) while it moves 0.9e12 bytes/s: 17 FLOP
# per element of 4 bytes; a P100 2.15e12 and 0.73e12: 12.
ELEMENT_FLOPS = 16.0


def size(shape: Shape) -> int:
    """Entries of a tensor of that shape."""
    return math.prod(shape)


def summands(inputs: int = 1) -> Way:
    """Summands of all inputs give summands of the output."""
    return Way((PARTIAL,) * inputs, PARTIAL)


# Shapes and ways of operators whose output is like their first input.


def unchanged(whole: Shapes, attributes: Attributes) -> Shape:
    """The first input's shape."""
    return whole[0]


def each_dimension(whole: Shapes, attributes: Attributes) -> list[Way]:
    """Any dimension of the only input can be sliced."""
    return [Way((d,), d) for d in range(len(whole[0]))]


def all_but_the_last(whole: Shapes, attributes: Attributes) -> list[Way]:
    """Any dimension of the first input but the last; the other inputs are whole."""
    rest = (WHOLE,) * (len(whole) - 1)
    return [Way((d, *rest), d) for d in range(len(whole[0]) - 1)]


def first_two(whole: Shapes, attributes: Attributes) -> list[Way]:
    """Samples and channels, or samples and heads, of all inputs alike."""
    return [Way((d,) * len(whole), d) for d in range(2)]


# Work.


def moved(whole: Shapes, output: Shape, attributes: Attributes) -> tuple[float, list[float]]:
    """Elements read and written, forward and for each input's gradient."""
    forward = ELEMENT_FLOPS * (sum(size(s) for s in whole) + size(output))
    return forward, [ELEMENT_FLOPS * (size(output) + 2 * size(s)) for s in whole]


def nothing(whole: Shapes, output: Shape, attributes: Attributes) -> tuple[float, list[float]]:
    """Of operators that only move entries."""
    return 0.0, [0.0] * len(whole)


def output_moved(whole: Shapes, output: Shape, attributes: Attributes) -> tuple[float, list[float]]:
    """The output read and written in each pass; whole numbers have no gradient."""
    moved = 2 * ELEMENT_FLOPS * size(output)
    return moved, [0.0] * (len(whole) - 1) + [moved]


@dataclass(frozen=True)
class Operator:
    """One kind of operator. `whole` are the inputs' undivided shapes."""

    shape: Callable[[Shapes, Attributes], Shape]
    """The output's shape; raises InputError where the inputs do not fit."""
    ways: Callable[[Shapes, Attributes], list[Way]]
    """The ways to run it on slices."""
    work: Callable[[Shapes, Shape, Attributes], tuple[float, list[float]]] = moved
    """(whole, output) -> FLOP forward, and FLOP backward for each input's gradient."""
    differentiable: bool = True
    """Whether gradients pass it."""
    linear: bool = False
    """Whether it maps summands of its inputs to summands of its output; its gradients do not depend
    on what it reads."""

    def all_ways(self, whole: Shapes, attributes: Attributes) -> list[Way]:
        """The ways to run it other than replicated, on summands too where it is linear."""
        ways = self.ways(whole, attributes)
        return [*ways, summands(len(whole))] if self.linear else ways


# Sums and products of entries.


def broadcast(whole: Shapes, attributes: Attributes) -> Shape:
    """numpy's rule."""
    try:
        return tuple(int(n) for n in np.broadcast_shapes(*whole))
    except ValueError:
        shapes = " and ".join(map(str, whole))
        raise InputError("shapes do not fit", where="add or multiply", got=shapes) from None


def broadcast_ways(whole: Shapes, attributes: Attributes) -> list[Way]:
    """Any dimension of the output; inputs that lack it, or have length 1 there, are whole."""
    output = broadcast(whole, attributes)

    def form(shape: Shape, d: int) -> Form:
        at = d - len(output) + len(shape)
        return at if at >= 0 and shape[at] == output[d] else WHOLE

    return [Way(tuple(form(shape, d) for shape in whole), d) for d in range(len(output))]


def gated_shape(whole: Shapes, attributes: Attributes) -> Shape:
    """The pair of gate and value in the last dimension becomes one entry."""
    require(whole[0][-1] == 2, "last dimension", where="gated", got=whole[0][-1], expected="2")
    return whole[0][:-1]


# Matrix products.


def parsed(equation: str) -> tuple[tuple[str, ...], str]:
    """`ab,bc,c->ac` as (("ab", "bc", "c"), "ac")."""
    left, _, output = equation.partition("->")
    return tuple(left.split(",")), output


def contract_shape(whole: Shapes, attributes: Attributes) -> Shape:
    """By the letters; every letter has one length."""
    where = attributes["equation"]
    terms, output = parsed(where)
    require(
        len(terms) == len(whole) and len(terms) in (2, 3),
        "number of tensors",
        where=where,
        got=len(whole),
        expected="2 or 3",
    )
    lengths: dict[str, int] = {}
    for term, shape in zip(terms, whole, strict=True):
        require(
            len(term) == len(shape),
            f"{term} has {len(term)} letters",
            where=where,
            got=shape,
            expected="as many dimensions",
        )
        for letter, length in zip(term, shape, strict=True):
            require(
                lengths.setdefault(letter, length) == length,
                f"length of {letter}",
                where=where,
                got=length,
                expected=str(lengths[letter]),
            )
    return tuple(lengths[letter] for letter in output)


def contract_ways(whole: Shapes, attributes: Attributes) -> list[Way]:
    """Along every letter of the factors and the output."""
    terms, output = parsed(attributes["equation"])
    return [along(x, terms, output) for x in dict.fromkeys("".join((*terms[:2], output)))]


def contract_work(
    whole: Shapes, output: Shape, attributes: Attributes
) -> tuple[float, list[float]]:
    """A product in each direction; a bias only moves."""
    terms, _ = parsed(attributes["equation"])
    pairs = zip("".join(terms[:2]), (*whole[0], *whole[1]), strict=True)
    flops = 2.0 * float(math.prod(dict(pairs).values()))
    return flops, [flops, flops, *[ELEMENT_FLOPS * size(output)] * (len(whole) - 2)]


def convolve_shape(whole: Shapes, attributes: Attributes) -> Shape:
    """x [b, c, H, W] with weight [o, c, k, l], `padding` and `stride` alike both ways."""
    (b, c, height, width), (o, inner, k, l) = whole[:2]
    require(inner == c, "input channels", where="convolve", got=c, expected=str(inner))
    pad, stride = attributes.get("padding", 0), attributes.get("stride", 1)
    return (b, o, (height + 2 * pad - k) // stride + 1, (width + 2 * pad - l) // stride + 1)


def convolve_ways(whole: Shapes, attributes: Attributes) -> list[Way]:
    """Samples, output channels, and input channels, which are summed over."""
    terms = ("bcHW", "ockl", "o")[: len(whole)]
    return [along(letter, terms, "boHW") for letter in "boc"]


def convolve_work(
    whole: Shapes, output: Shape, attributes: Attributes
) -> tuple[float, list[float]]:
    """A product in each direction."""
    flops = 2.0 * size(output) * size(whole[1][1:])
    return flops, [flops, flops, *[ELEMENT_FLOPS * size(output)] * (len(whole) - 2)]


# Batch norms in two parts. The means of x and x^2 over samples and places [2, channels], of which a
# slice of the samples gives summands: their All-Reduce synchronises the statistics. Then
# (x, means, scale, shift).


def batch_norm_ways(whole: Shapes, attributes: Attributes) -> list[Way]:
    """Channels of everything, or any other dimension of x alone."""
    alone = (WHOLE, WHOLE, WHOLE)
    return [Way((d, *((1, 0, 0) if d == 1 else alone)), d) for d in range(len(whole[0]))]


def pooled(whole: Shapes, attributes: Attributes) -> Shape:
    """Windows of `window`, `stride` apart (default side by side), `padding` alike both ways."""
    (*front, height, width), window = whole[0], attributes["window"]
    pad, stride = attributes.get("padding", 0), attributes.get("stride", window)
    return (*front, *((n + 2 * pad - window) // stride + 1 for n in (height, width)))


# Attention: q, k, v [samples, heads, tokens, d], or all three in one tensor [.., (r + 2) d], where
# each key-value head has `queries` = r query heads (Ainslie et al. 2023).


def attention_shape(whole: Shapes, attributes: Attributes) -> Shape:
    """The values' width, or r widths of one."""
    if len(whole) > 1:
        return (*whole[0][:3], whole[2][3])
    r = attributes.get("queries", 1)
    return (*whole[0][:3], whole[0][3] // (r + 2) * r)


def attention_work(
    whole: Shapes, output: Shape, attributes: Attributes
) -> tuple[float, list[float]]:
    """Two products forward, five backward (the scores again), and the softmax between them."""
    (b, n, q, e), k = output, whole[-1][2]
    if len(whole) == 1:
        r = attributes.get("queries", 1)
        n, e = n * r, e // r
    d = e if len(whole) == 1 else whole[0][3]
    scores = float(b * n * q * k)
    forward = 2 * scores * (d + e) + 4 * ELEMENT_FLOPS * scores
    # dv; dP = dO v^T and the softmax, shared by dq and dk
    through = scores * e + 3 * ELEMENT_FLOPS * scores
    parts = [through + 2 * scores * d, through + 2 * scores * d, 2 * scores * e]
    return forward, [sum(parts)] if len(whole) == 1 else parts


# Tables, means and losses.


def embed_ways(whole: Shapes, attributes: Attributes) -> list[Way]:
    """Numbers or columns; a slice of the rows gives zeros for the others, which are summands.

    Source: Shoeybi et al. 2019, Section 3.
    """
    rank = len(whole[0])
    numbers = [Way((d, WHOLE), d) for d in range(rank)]
    return [*numbers, Way((WHOLE, 1), rank), Way((WHOLE, 0), PARTIAL)]


def cross_entropy_work(
    whole: Shapes, output: Shape, attributes: Attributes
) -> tuple[float, list[float]]:
    """The logits read and written in each pass."""
    moved = 2 * ELEMENT_FLOPS * size(whole[0])
    return moved, [moved, 0.0]


def mean_ways(whole: Shapes, attributes: Attributes) -> list[Way]:
    """Slices of the dimension that is left out give summands."""
    d = attributes["dimension"]
    kept = [Way((i,), i if i < d else i - 1) for i in range(len(whole[0])) if i != d]
    return [*kept, Way((d,), PARTIAL)]


# Operators that only move entries.


def reshape_shape(whole: Shapes, attributes: Attributes) -> Shape:
    """`shape`, with as many entries."""
    shape: Shape = tuple(attributes["shape"])
    require(
        size(shape) == size(whole[0]),
        "number of entries",
        where="reshape",
        got=shape,
        expected=f"{size(whole[0])} in all",
    )
    return shape


def reshape_ways(whole: Shapes, attributes: Attributes) -> list[Way]:
    """Dimensions of which as many entries stand in front as of one of the new shape."""
    before, after = whole[0], attributes["shape"]
    place = {size(after[:e]): e for e, length in enumerate(after) if length > 1}
    in_front = {d: size(before[:d]) for d, length in enumerate(before) if length > 1}
    cuts = [Way((d,), place[front]) for d, front in in_front.items() if front in place]
    return [summands(), *cuts]  # packaged decisions count triples in this order


def other_lengths(shape: Shape, d: int, *lengths: int) -> Shape:
    """A shape with other lengths in the place of dimension d."""
    return (*shape[:d], *lengths, *shape[d + 1 :])


def other_dimensions(whole: Shapes, attributes: Attributes) -> list[Way]:
    """Any dimension but `dimension`, of all inputs alike."""
    kept = [d for d in range(len(whole[0])) if d != attributes["dimension"]]
    return [Way((d,) * len(whole), d) for d in kept]


def repeat_ways(whole: Shapes, attributes: Attributes) -> list[Way]:
    """A dimension of length 1 that is repeated is read whole."""
    after = attributes["shape"]
    return [Way((d if n == after[d] else WHOLE,), d) for d, n in enumerate(whole[0])]


ENTRYWISE = Operator(unchanged, each_dimension)
OPERATORS: dict[str, Operator] = {
    # functions of every entry; `positive` is 1 where an entry is more than 0
    **dict.fromkeys(("relu", "gelu", "gelu-erf", "silu", "tanh", "sigmoid", "power"), ENTRYWISE),
    "positive": Operator(unchanged, each_dimension, differentiable=False),
    "scale": Operator(unchanged, each_dimension, linear=True),
    "offset": Operator(unchanged, each_dimension, linear=True),
    "add": Operator(broadcast, broadcast_ways, linear=True),
    "multiply": Operator(
        broadcast,
        lambda s, a: [
            *broadcast_ways(s, a),
            Way((PARTIAL, WHOLE), PARTIAL),
            Way((WHOLE, PARTIAL), PARTIAL),
        ],
    ),
    "gated": Operator(gated_shape, all_but_the_last),
    # over the last dimension
    **dict.fromkeys(
        ("layer-norm", "rms-norm", "softmax", "log-softmax"), Operator(unchanged, all_but_the_last)
    ),
    # any dimension; all but channels are summed over
    "batch-moments": Operator(
        lambda s, a: (2, s[0][1]),
        lambda s, a: [Way((d,), d if d == 1 else PARTIAL) for d in range(len(s[0]))],
    ),
    "batch-norm": Operator(unchanged, batch_norm_ways),
    # products
    "contract": Operator(contract_shape, contract_ways, contract_work),
    "convolve": Operator(convolve_shape, convolve_ways, convolve_work),
    "attention": Operator(attention_shape, first_two, attention_work),
    "rotary": Operator(unchanged, first_two, output_moved, linear=True),
    # gates [b, s, e] -> weights [b, s, e, c]: GShard's places of tokens, samples apart
    "route": Operator(lambda s, a: (*s[0], a["capacity"]), lambda s, a: [Way((0,), 0)]),
    # pooling
    "max-pool": Operator(pooled, first_two),
    "mean-pool": Operator(lambda s, a: s[0][:2], first_two, linear=True),
    # tables, means and the loss
    "embed": Operator(lambda s, a: (*s[0], s[1][1]), embed_ways, output_moved),
    # any dimension of the labels; slices give summands of the mean
    "cross-entropy": Operator(
        lambda s, a: (),
        lambda s, a: [Way((d, d), PARTIAL) for d in range(len(s[1]))],
        cross_entropy_work,
    ),
    "mean": Operator(lambda s, a: other_lengths(s[0], a["dimension"]), mean_ways, linear=True),
    # moves
    "permute": Operator(
        lambda s, a: tuple(s[0][d] for d in a["order"]),
        lambda s, a: [Way((d,), i) for i, d in enumerate(a["order"])],
        nothing,
        linear=True,
    ),
    "reshape": Operator(reshape_shape, reshape_ways, nothing, linear=True),
    "select": Operator(
        lambda s, a: other_lengths(s[0], a["dimension"], a["stop"] - a["start"]),
        other_dimensions,
        nothing,
        linear=True,
    ),
    "repeat": Operator(lambda s, a: tuple(a["shape"]), repeat_ways, nothing, linear=True),
    "join": Operator(
        lambda s, a: other_lengths(s[0], a["dimension"], sum(x[a["dimension"]] for x in s)),
        other_dimensions,
        nothing,
        linear=True,
    ),
}


def operator(kind: str) -> Operator:
    """The operator of that kind; raises InputError listing the known ones."""
    return look_up("unknown operator", kind, OPERATORS)
