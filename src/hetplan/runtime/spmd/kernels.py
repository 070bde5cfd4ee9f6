"""What the operators of `formulations.hap.spmd.operators` compute, on torch tensors.

A kernel computes one device's part of an operator's output. Its gradients are torch's. Kernels run
on slices of any length, none included: what a device has nothing of still takes part in the
backward pass, with gradients of zeros, so that all ranks join the same collectives.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hetplan.errors import InputError
from hetplan.formulations.hap.spmd.operators import Shape, operator, parsed
from hetplan.formulations.hap.spmd.program import Node

Inputs = Sequence[Tensor]
Attributes = Mapping[str, Any]
NORM_EPSILON = 1e-5


@dataclass(frozen=True)
class Place:
    """Where an operator runs."""

    shape: Shape
    """The output's shape on this device."""
    starts: tuple[int, ...]
    """Where each input's slice begins along the dimension that it is sliced on; 0 for others."""
    partial: bool = False
    """Whether the output is one summand of several."""
    first: bool = True
    """Whether this device adds what must be added once."""

    @property
    def once(self) -> float:
        """The factor of what must be added once: a bias keeps its gradient, of zeros."""
        return 1.0 if self.first or not self.partial else 0.0


Kernel = Callable[[Inputs, Attributes, Place], Tensor]


def compute(node: Node, inputs: Inputs, place: Place) -> Tensor:
    """A node's output on one device."""
    if 0 in place.shape and node.kind != "batch-moments":  # which are in fp64, empty or not
        passing = operator(node.kind).differentiable
        return zeros(place.shape, inputs if passing else [x.detach() for x in inputs])
    return KERNELS[node.kind](inputs, node.attributes, place)


def zeros(shape: Shape, inputs: Inputs) -> Tensor:
    """Zeros that depend on the inputs, with gradients of zeros."""
    real = [x for x in inputs if x.is_floating_point()]
    return real[0].new_zeros(shape) + sum(0 * x.sum() for x in real if x.requires_grad)


def contract(inputs: Inputs, attributes: Attributes, place: Place) -> Tensor:
    """Sum of products over the letters that `equation` leaves out, plus a bias if there is one."""
    terms, output = parsed(attributes["equation"])
    result = torch.einsum(f"{terms[0]},{terms[1]}->{output}", inputs[0], inputs[1])
    if len(inputs) == 2:
        return result
    kept = [x for x in output if x in terms[2]]
    assert list(terms[2]) == kept, "a bias keeps the order of the output"
    lengths = iter(inputs[2].shape)
    shape = [next(lengths) if x in terms[2] else 1 for x in output]
    return result + place.once * inputs[2].view(shape)


def convolve(inputs: Inputs, attributes: Attributes, place: Place) -> Tensor:
    """Zero padding and a stride, alike both ways."""
    x, weight = inputs[:2]
    if 0 in x.shape or 0 in weight.shape:  # none of the input channels
        result = zeros(place.shape, inputs[:2])
    else:
        padding, stride = attributes.get("padding", 0), attributes.get("stride", 1)
        result = F.conv2d(x, weight, padding=padding, stride=stride)
    return result if len(inputs) == 2 else result + place.once * inputs[2][:, None, None]


def attention(inputs: Inputs, attributes: Attributes, place: Place) -> Tensor:
    """softmax(q k^T / sqrt(d)) v; `causal` hides later tokens, `rotary` turns q and k first."""
    r = attributes.get("queries", 1)
    q, k, v = inputs if len(inputs) == 3 else by_query(inputs[0], r)
    if attributes.get("rotary", False):
        q, k = turned(q), turned(k)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=attributes.get("causal", False))
    return mixed.unflatten(1, (-1, r)).transpose(2, 3).flatten(3)


def by_query(x: Tensor, r: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [b, groups r, tokens, d] from one tensor [b, groups, tokens, (r + 2) d]."""
    d = x.shape[3] // (r + 2)
    q, k, v = x.split([r * d, d, d], dim=3)
    queries = q.unflatten(3, (r, d)).transpose(2, 3).flatten(1, 2)
    return queries, k.repeat_interleave(r, dim=1), v.repeat_interleave(r, dim=1)


def turned(x: Tensor, base: float = 10_000.0) -> Tensor:
    """Pairs of entries of x [b, n, tokens, d] turned by angles that grow with the token, halves
    paired; of an odd number the last one stays.

    Source: Su et al. 2021.
    """
    half = x.shape[3] // 2
    steps = torch.arange(half, dtype=torch.float64, device=x.device)
    places = torch.arange(x.shape[2], dtype=torch.float64, device=x.device)
    angle = places[:, None] * base ** (-steps / max(half, 1))
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    one, other, last = x.split((half, half, x.shape[3] % 2), dim=-1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin, last], dim=-1)


def places_of_tokens(gates: Tensor, active: int, capacity: int) -> Tensor:
    """gates [b, s, e] -> [b, s, e, c] of 0 and 1: the place that a token takes at an expert.

    Each token goes to its `active` best experts, at the next of their `capacity` places within its
    sample; tokens that find no place are dropped. Source: GShard (Lepikhin et al. 2020), Section
    2.2.
    """
    order = torch.sort(-gates, dim=-1, stable=True).indices[..., :active]
    chosen = torch.zeros_like(gates).scatter(-1, order, 1.0)
    place = (chosen.cumsum(dim=1) - chosen).long()
    free = torch.arange(capacity, device=gates.device)
    return ((place.unsqueeze(-1) == free) & (chosen.unsqueeze(-1) > 0)).to(gates.dtype)


def route(inputs: Inputs, attributes: Attributes, place: Place) -> Tensor:
    """The gate at the place that a token takes."""
    places = places_of_tokens(inputs[0].detach(), attributes["active"], attributes["capacity"])
    return inputs[0].unsqueeze(-1) * places


def embed(inputs: Inputs, attributes: Attributes, place: Place) -> Tensor:
    """Rows of a table by number; zeros for rows that are not here."""
    ids, table = inputs
    if not len(table):
        return zeros(place.shape, [table])
    rows = ids - place.starts[1] if place.partial else ids
    here = (rows >= 0) & (rows < len(table))
    return F.embedding(rows.clamp(0, len(table) - 1), table) * here.unsqueeze(-1).to(table.dtype)


def cross_entropy(inputs: Inputs, attributes: Attributes, place: Place) -> Tensor:
    """These rows' part of the mean over `count` rows.

    No label is left out (torch's `ignore_index`): how many rows count would be known at run time
    only. Raises InputError for a label outside 0 … V - 1.
    """
    logits, labels = inputs
    wrong = labels[(labels < 0) | (labels >= logits.shape[-1])]
    if wrong.numel():
        raise InputError(
            "label of a cross-entropy, which leaves none out (no ignore_index)",
            got=int(wrong[0]), expected=f"0 to {logits.shape[-1] - 1}",
        )  # fmt: skip
    return (
        F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.flatten(), reduction="sum")
        / attributes["count"]
    )


def batch_moments(inputs: Inputs, attributes: Attributes, place: Place) -> Tensor:
    """These samples' part of the means of x and x^2 over `count` entries of each channel; in fp64,
    as the variance is their difference."""
    x = inputs[0].transpose(0, 1).flatten(1)
    sums = [y.sum(1, dtype=torch.float64) for y in (x, x.square())]
    return torch.stack(sums) / attributes["count"]


def batch_norm(inputs: Inputs, attributes: Attributes, place: Place) -> Tensor:
    """Every channel less its mean, over its deviation (Ioffe and Szegedy 2015), scaled and
    shifted."""
    x, (mean, square), scale, shift = inputs
    deviation = (square - mean.square() + attributes["epsilon"]).sqrt()
    factor, mean = (scale / deviation).to(x.dtype), mean.to(x.dtype)
    each = (-1, *[1] * (x.dim() - 2))
    return (x - mean.view(each)) * factor.view(each) + shift.view(each)


def gated(inputs: Inputs, attributes: Attributes, place: Place) -> Tensor:
    """silu(x[..., 0]) * x[..., 1] (Shazeer 2020)."""
    gate, value = inputs[0].unbind(-1)
    return F.silu(gate) * value


KERNELS: dict[str, Kernel] = {
    "relu": lambda x, a, p: F.relu(x[0]),
    "gelu": lambda x, a, p: F.gelu(x[0], approximate="tanh"),
    "gelu-erf": lambda x, a, p: F.gelu(x[0]),
    "silu": lambda x, a, p: F.silu(x[0]),
    "tanh": lambda x, a, p: torch.tanh(x[0]),
    "sigmoid": lambda x, a, p: torch.sigmoid(x[0]),
    "power": lambda x, a, p: x[0] ** a["exponent"],
    "positive": lambda x, a, p: (x[0] > 0).to(x[0].dtype),
    "scale": lambda x, a, p: x[0] * a["factor"],
    "offset": lambda x, a, p: x[0] + a["number"] * p.once,
    "add": lambda x, a, p: sum(x[1:], start=x[0]),
    "multiply": lambda x, a, p: x[0] * x[1],
    "gated": gated,
    "layer-norm": lambda x, a, p: F.layer_norm(
        x[0], x[0].shape[-1:], x[1], x[2], a.get("epsilon", NORM_EPSILON)
    ),
    "rms-norm": lambda x, a, p: F.rms_norm(
        x[0], x[0].shape[-1:], x[1], a.get("epsilon", NORM_EPSILON)
    ),
    "softmax": lambda x, a, p: x[0].softmax(-1),
    "log-softmax": lambda x, a, p: x[0].log_softmax(-1),
    "contract": contract,
    "convolve": convolve,
    "attention": attention,
    "rotary": lambda x, a, p: turned(x[0]),
    "route": route,
    "batch-moments": batch_moments,
    "batch-norm": batch_norm,
    "max-pool": lambda x, a, p: F.max_pool2d(
        x[0], a["window"], a.get("stride"), a.get("padding", 0)
    ),
    "mean-pool": lambda x, a, p: x[0].mean(dim=(2, 3)),
    "embed": embed,
    "cross-entropy": cross_entropy,
    "mean": lambda x, a, p: x[0].sum(a["dimension"]) / a["length"],
    "permute": lambda x, a, p: x[0].permute(a["order"]),
    "reshape": lambda x, a, p: x[0].reshape(p.shape),
    "select": lambda x, a, p: x[0].narrow(a["dimension"], a["start"], a["stop"] - a["start"]),
    "repeat": lambda x, a, p: x[0].expand(p.shape),
    "join": lambda x, a, p: torch.cat(list(x), a["dimension"]),
}
