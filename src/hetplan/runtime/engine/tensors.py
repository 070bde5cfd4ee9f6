"""Layers of users' models on several ranks at once, by torch's DTensor.

The graphs that `tracing.split` makes have the sizes of whole tensors, so that DTensor can run them:
each rank holds columns or rows of a weight, as `tracing.split` says, and DTensor moves what an
operator needs. What it has no rule for is computed whole on every rank, from gathered values.
Attention runs on whole sequences of some heads: where tokens are divided, they are exchanged for
heads; or keys and values of all tokens go round a ring of context ranks. Random numbers are drawn
for whole tensors, so that ranks drop what one process does.

Between layers a value lies whole on every rank; under context and sequence parallelism its tokens
(dimension 1) are divided. Source of the latter: Korthikanti et al. 2022, Section 4.2.2.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.fx import Node

from hetplan.errors import UnsupportedError, require
from hetplan.plans.places import Place
from hetplan.runtime.engine.chain import Chain
from hetplan.runtime.engine.layout import Layout
from hetplan.runtime.engine.transport import Group, mirrored
from hetplan.runtime.tracing.split import RESHAPES, Split, mapped, name_of

ATTENTION = "scaled_dot_product_attention"
Form = Sequence[Any]  # placements, one for each dimension of a mesh


def tidy(x: Any) -> Any:
    """The same with contiguous memory on this rank, as views take for granted."""
    here = x.to_local()
    if here.is_contiguous():
        return x
    return DTensor.from_local(
        here.contiguous(),
        x.device_mesh,
        x.placements,
        shape=x.shape,
        stride=torch.empty(x.shape, device="meta").stride(),
    )


def own_use(x: Any) -> Any:
    """What is here of x, for work that differs from rank to rank. Where x is whole, the gradients
    here are summands: each rank has those of its own part of the work alone."""
    gradients = [Partial() if form.is_replicate() else form for form in x.placements]
    return x.to_local(grad_placements=gradients)


def tidied(x: Any) -> Any:
    """x with contiguous memory here, and so are its gradients."""
    return mirrored(tidy, tidy, x) if isinstance(x, DTensor) else x


class Spread(fx.Interpreter):
    """A layer's graph on the ranks of a mesh.

    parameters: name inside -> its form. before, after: forms of the values that come from the layer
    before and that pass on. form_of: shape of a value of one sample -> the form that it has between
    products. context: whether the mesh's first dimension is of context ranks. ring: the group of
    these, where keys and values go round it.
    """

    def __init__(
        self,
        layer: fx.GraphModule,
        mesh: DeviceMesh,
        parameters: Mapping[str, Form],
        before: Sequence[Form],
        after: Sequence[Form],
        form_of: Callable[[Sequence[int]], Form],
        *,
        context: bool,
        ring: Group | None,
    ) -> None:
        super().__init__(layer)
        self.mesh, self.parameters, self.before, self.after = mesh, parameters, before, after
        self.form_of, self.context, self.ring = form_of, context, ring
        self.whole: Form = [Replicate()] * mesh.ndim

    def __call__(self, *values: Any) -> tuple[Tensor, ...]:
        """The layer's pass: of local parts, as `before` and `after` say."""
        forms = zip_longest(values, self.before, fillvalue=self.whole)
        made = self.run(*(self.enter(value, form) for value, form in forms))
        return tuple(
            self.settled(self.enter(y, self.whole)).redistribute(placements=form).to_local()
            for y, form in zip(made, self.after, strict=True)
        )

    def enter(self, value: Any, form: Form) -> Any:
        """A tensor of this rank as a part of a whole one."""
        plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
        return DTensor.from_local(value, self.mesh, form) if plain else value

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A parameter, a buffer or a constant."""
        value, form = (
            super().get_attr(target, args, kwargs),
            self.parameters.get(target, self.whole),
        )
        if not (self.context and isinstance(value, nn.Parameter)):
            return self.enter(value, form)
        return mirrored(
            lambda x: self.enter(x, form), lambda gradient: self.own_part(gradient, form), value
        )

    def own_part(self, gradient: Any, form: Form) -> Tensor:
        """This context rank's contribution to a gradient, which is summed behind the passes."""
        summands = gradient.placements[0] == Partial()
        kept = gradient.placements[0] if summands else Replicate()
        here = gradient.redistribute(placements=[kept, *form[1:]]).to_local()
        first = summands or self.mesh.get_local_rank(0) == 0
        return here if first else torch.zeros_like(here)

    def run_node(self, n: Node) -> Any:
        """An operator on distributed tensors."""
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        kind = name_of(n)
        if kind == "getitem":
            return n.target(*args)
        if kind not in RESHAPES:
            args = mapped(args, self.settled)
        if kind == "cat":  # caches that are empty have one dimension
            args = ([x for x in args[0] if x.dim() > 1 or x.numel()], *args[1:])
        made = self._special(kind, n, args, kwargs)
        if made is None:
            made = self._usual(kind, n, args, kwargs)
        return mapped(made, lambda y: self.enter(y, self.whole))

    def settled(self, x: Any) -> Any:
        """A value that ranks have summands of, summed up; else what reads it would gather weights
        to pass the summands on. Along other dimensions of the mesh it stays as it is: those of a
        divided table's rows are summed where they were looked up."""
        if not isinstance(x, DTensor) or not any(p.is_partial() for p in x.placements):
            return x
        both = zip(x.placements, self.form_of(x.shape[1:]), strict=True)
        form = [edge if placement.is_partial() else placement for placement, edge in both]
        return tidied(x.redistribute(placements=form))

    def _special(self, kind: str, n: Node, args: Any, kwargs: Any) -> Any:
        """What is not left to DTensor; None: nothing."""
        if kind == ATTENTION:
            return self._attention(n, args, kwargs)
        if kind == "dropout" and args[1] > 0 and args[2]:
            kept = torch.ones(args[0].shape, dtype=args[0].dtype, device=self.mesh.device_type)
            return args[0] * self.enter(n.target(kept, *args[1:]), self.whole)
        if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()):
            return self._moved(self.whole, n, args, kwargs)
        name, blocks = n.meta.get("blocks", ("", 1))
        form = [one for one in self.parameters.get(name, ()) if not one.is_replicate()]
        if form:  # a rank has its columns of each block, one behind the other
            x = args[0]
            assert Shard(x.dim() - 1) in x.placements, "columns of blocks lie where they were made"
            parts = x.to_local().chunk(blocks, -1)
            return tuple(self.enter(part.contiguous(), x.placements) for part in parts)
        return None

    def _usual(self, kind: str, n: Node, args: Any, kwargs: Any) -> Any:
        """By DTensor's rule, else whole on every rank."""
        if kind in RESHAPES:
            args = (tidied(args[0]), *args[1:])
        try:
            made = n.target(*args, **kwargs)
        except (RuntimeError, AssertionError):
            return self._moved(self.whole, n, args, kwargs)
        return tidied(made) if kind in RESHAPES else made

    def _attention(self, n: Node, args: Any, kwargs: Any) -> Any:
        """By heads where all ranks get equally many; dropout in it is drawn for all heads."""
        values: dict[str, Any] = {
            a.name: x for a, x in zip(n.target._schema.arguments, args, strict=False)
        }
        values |= kwargs
        q, k, v = (values[name] for name in ("query", "key", "value"))
        mask = values.get("attn_mask")
        ring = self.ring.process.size() if self.ring else 1
        sizes = [x.shape[1:3] for x in (q, k, v) if x.dim() == 4]
        parts = self.mesh.size() // ring
        even = len(sizes) == 3 and all(h % parts == 0 and t % ring == 0 for h, t in sizes)
        if not even or values.get("dropout_p", 0.0) > 0:
            return self._moved(self.whole, n, args, kwargs)
        divided: list[Any] = [Shard(1)] * self.mesh.ndim
        form = [Replicate(), *divided[1:]] if self.ring else divided
        if mask is not None:
            mask = mask[(None,) * (4 - mask.dim())]  # as attention broadcasts it
            own = mask.shape[1] > 1
            values["attn_mask"] = mask.redistribute(placements=form if own else self.whole)
        divided = [Shard(2), *divided[1:]] if self.ring else divided
        for name, x in zip(("query", "key", "value"), (q, k, v), strict=True):
            values[name] = tidied(tidied(x).redistribute(placements=divided))
        local = mapped(values, lambda x: own_use(x) if isinstance(x, DTensor) else x)
        here = in_ring(self.ring, self.mesh.get_local_rank(0), **local) if self.ring else None
        made = tidied(self.enter(n.target(**local) if here is None else here, divided))
        back = Shard(2) in q.placements  # heads for tokens again
        return tidied(made.redistribute(placements=q.placements)) if back else made

    def _moved(self, form: Form, n: Node, args: Any, kwargs: Any) -> Any:
        """An operator on this rank's parts of values in a form."""

        def local(x: Any) -> Any:
            return (
                tidied(tidied(x).redistribute(placements=form)).to_local()
                if isinstance(x, DTensor)
                else x
            )

        made = n.target(*mapped(args, local), **mapped(kwargs, local))
        return mapped(made, lambda y: self.enter(y, form))


def in_ring(
    ring: Group,
    own: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    **_: Any,
) -> Tensor:
    """Attention of a rank's queries [samples, heads, tokens, width] to the keys and values of all
    ranks, which go round the ring; own: the rank's number in it. Only the values of one rank are
    here at a time, and their part of the result counts by its share of the sum of exponentials.

    Source: Liu et al. 2023 (Ring Attention), Section 3; every rank has successive tokens.
    """
    tokens, ranks, width = query.shape[-2], ring.process.size(), key.shape[-1]
    there, before = ([n == (own + step) % ranks for n in range(ranks)] for step in (1, -1))

    def moved(to: Sequence[bool], back: Sequence[bool], x: Tensor) -> Tensor:
        leaving, coming = ([side * x.numel() for side in sides] for sides in (to, back))
        return ring.swap(x.reshape(-1), leaving, coming).view(x.shape)

    both, columns, sums, parts = torch.cat([key, value], -1), key.shape[-2], [], []
    least = torch.finfo(query.dtype).min  # not -inf: a row may see nothing in a block
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*attn_mask.shape[:-2], tokens * ranks, columns * ranks)
        attn_mask = attn_mask.narrow(-2, own * tokens, tokens)
    for hop in range(ranks):
        first = (own - hop) % ranks * columns
        seen = query.new_ones(tokens, columns, dtype=torch.bool)
        block = (
            seen.tril(own * tokens - first if is_causal else columns)
            if attn_mask is None
            else attn_mask.narrow(-1, first, columns)
        )
        here = both.repeat_interleave(query.shape[1] // key.shape[1], 1)
        scores = query @ here[..., :width].mT * (width**-0.5 if scale is None else scale)
        hides = block.dtype == torch.bool
        scores = scores.masked_fill(~block, least) if hides else (scores + block).clamp(least)
        sums.append(scores.logsumexp(-1, keepdim=True))
        parts.append(scores.softmax(-1) @ here[..., width:])
        if hop + 1 < ranks:
            both = mirrored(partial(moved, there, before), partial(moved, before, there), both)
    shares = torch.cat(sums, -1).softmax(-1).split(1, -1)
    return torch.stack([s * part for s, part in zip(shares, parts, strict=True)]).sum(0)


def spread(
    chain: Chain, layout: Layout, place: Place, groups: Mapping[tuple[int, ...], Group]
) -> Chain:
    """The chain whose layers a stage's ranks compute together, with what passes on between them
    here; of a model that says itself how it is divided, as it is. Raises UnsupportedError where
    the ranks cannot."""
    check_spread(chain, layout, place)
    if not isinstance(chain.source, Split) or layout.plan.further.expert > 1:
        return chain
    for layer in chain.layers:
        layer.__dict__.pop("forward", None)  # of another plan
    axes, ranks = axes_of(layout, place), layout.ranks_of(place.replica, place.stage)
    cuts = {k: chain.cuts(k, layout.part(place)) for k in layout.layers(place)}
    held = {
        name: cut.dim for own in cuts.values() for name, cut in own.items()
        if cut.size < (*chain.parameters[name].shape, 1)[cut.dim]
    }  # fmt: skip
    parts = prod(len(own) for own, divides in axes if divides)
    if parts == 1 and not held:
        if axes and layout.reports_loss(place):
            print(
                f"hetplan: {layout.plan.rank_text(place.rank)}: all of its tensor ranks compute "
                "whole layers; equal shares and the model's `tensor_plan` would divide them",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        return chain
    mesh = DeviceMesh.from_group(
        [groups[tuple(own)].process for own, _ in axes], torch.device(chain.source.device).type,
        mesh=torch.tensor(ranks if len(axes) > 1 else axes[0][0]),
        mesh_dim_names=tuple(f"axis {k}" for k in range(len(axes))),
    )  # fmt: skip

    def form_of(shape: Sequence[int]) -> Form:
        tokens = len(shape) > 1 and shape[0] == layout.plan.workload.sequence
        return [Shard(1) if tokens and divides else Replicate() for _, divides in axes]

    edges: list[list[Form]] = [
        [], *([form_of(shape) for shape, _ in shapes] for shapes in chain.outputs), [form_of(())]
    ]  # fmt: skip
    for k in cuts:
        weights = {
            inside: [*[Replicate()] * (len(axes) - 1), Shard(held[name])]
            for inside, name in chain.parameter_names[k].items() if name in held
        }  # fmt: skip
        chain.layers[k].forward = Spread(
            chain.layers[k],
            mesh,
            weights,
            edges[k],
            edges[k + 1],
            form_of,
            context=layout.context > 1,
            ring=groups[tuple(axes[0][0])] if in_a_ring(layout) else None,
        )
    here = [
        tuple(
            ((shape[0] // parts, *shape[1:]) if Shard(1) in form else shape, dtype)
            for (shape, dtype), form in zip(shapes, made, strict=True)
        )
        for shapes, made in zip(chain.outputs, edges[1:], strict=False)
    ]
    return replace(chain, outputs=tuple(here))


def in_a_ring(layout: Layout) -> bool:
    """Whether keys and values go round a ring of context ranks."""
    return layout.context > 1 and layout.plan.further.exchange == "ring"


def axes_of(layout: Layout, place: Place) -> list[tuple[list[int], bool]]:
    """Context ranks and tensor ranks that compute a rank's layers with it, and whether they divide
    tokens; those of several ranks only."""
    ranks = layout.ranks_of(place.replica, place.stage)
    context = [row[place.tensor] for row in ranks] if layout.context > 1 else []
    both = ((context, True), (ranks[place.group], layout.sequence_parallel))
    return [(own, divides) for own, divides in both if len(own) > 1]


def check_spread(chain: Chain, layout: Layout, place: Place) -> None:
    """Raise UnsupportedError where a stage's ranks cannot compute its layers together."""
    axes, sequence = axes_of(layout, place), layout.plan.workload.sequence
    parts = prod(len(own) for own, divides in axes if divides)
    together, split = prod(len(own) for own, _ in axes), isinstance(chain.source, Split)
    together //= layout.context if in_a_ring(layout) else 1
    heads = {
        value.meta["val"].shape[1]
        for k in layout.layers(place) if split and layout.context > 1
        for node in chain.layers[k].graph.nodes if name_of(node) == ATTENTION
        for value in node.args[:3]
    }  # fmt: skip
    refusals = {
        "a model that says itself how it is divided does not divide tokens": parts > 1
        and not split,
        f"{parts} ranks do not divide the tokens of a sample": (sequence or 1) % parts > 0,
        f"{together} ranks do not divide the heads of attention": any(h % together for h in heads),
        "ranks that share a split model's layers are not in order": split
        and any(own != sorted(own) for own, _ in axes),
    }
    for what, refused in refusals.items():
        require(not refused, what, where=layout.plan.rank_text(place.rank), kind=UnsupportedError)
