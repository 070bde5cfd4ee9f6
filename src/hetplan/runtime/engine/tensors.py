"""Runs the layers of users' models on several ranks at once, by torch's DTensor.

The graphs that `tracing.split` makes have the sizes of whole tensors, so that DTensor can run them.
Each rank has columns or rows of a weight, as `tracing.split` says, and DTensor moves the values
that an operator needs. An operator for which DTensor has no rule is computed on every rank, from
gathered values.

Attention runs on whole sequences of some heads. Where tokens are divided, an all-to-all exchanges
tokens for heads, or keys and values of all tokens go round a ring of context ranks. Random numbers
are drawn for whole tensors, so that the ranks drop the elements that one process drops.

Between layers a value is whole on every rank; under context and sequence parallelism its tokens
(dimension 1) are divided. Source of the division: Korthikanti et al. 2022, Section 4.2.2.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from hetplan.runtime.tracing.losses import name_of
from hetplan.runtime.tracing.split import RESHAPES, Shape, Split, mapped

ATTENTION = "scaled_dot_product_attention"
# Operators along dimensions for which DTensor's rules fail where ranks divide one of these: a
# cumulative sum along a negative dimension is that of each part, and the gradients of the others
# have placements that do not go together.
ALONG_WHOLE = ("cumsum", "cumprod", "logcumsumexp", "mean", "std", "var")
Form = Sequence[Any]  # the placements of a DTensor, one for each dimension of its mesh


def contiguous(x: Any) -> Any:
    """A distributed tensor with contiguous memory on this rank, which views require."""
    local = x.to_local()
    if local.is_contiguous():
        return x
    return DTensor.from_local(
        local.contiguous(),
        x.device_mesh,
        x.placements,
        shape=x.shape,
        stride=torch.empty(x.shape, device="meta").stride(),  # of the whole tensor, contiguous
    )


def contiguous_both_ways(x: Any) -> Any:
    """x with contiguous memory on this rank, and so its gradient; x itself if not distributed."""
    return mirrored(contiguous, contiguous, x) if isinstance(x, DTensor) else x


def in_form(x: Any, form: Form) -> Any:
    """A distributed tensor redistributed to a form, in contiguous memory; others as they are."""
    if not isinstance(x, DTensor):
        return x
    return contiguous_both_ways(contiguous_both_ways(x).redistribute(placements=form))


def local_for_part(x: Any) -> Any:
    """This rank's part of a distributed tensor, for work that differs from rank to rank.

    Where x is whole, the gradients on the ranks are summands, since each rank has the gradient of
    its own part of the work alone.
    """
    if not isinstance(x, DTensor):
        return x
    of_gradient = [Partial() if part.is_replicate() else part for part in x.placements]
    return x.to_local(grad_placements=of_gradient)


def goes_along_divided(args: Sequence[Any]) -> bool:
    """Whether ranks divide a dimension along which an operator goes. args: its tensor, and the
    dimension or dimensions; without them it goes along all."""
    x, *others = args
    if not isinstance(x, DTensor):
        return False
    dims: Sequence[int] = range(x.dim())
    if others and isinstance(others[0], (int, list, tuple)) and not isinstance(others[0], bool):
        stated = [others[0]] if isinstance(others[0], int) else others[0]
        dims = [dim % x.dim() for dim in stated] or dims
    return any(Shard(dim) in x.placements for dim in dims)


class LayerOnMesh(fx.Interpreter):
    """Runs a layer's graph on the ranks of a mesh."""

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
        """parameters: name within the layer -> form of the parameter; a parameter left out is
        whole. before: forms of the values from the layer before. after: forms of the outputs.
        form_of: shape of a value of one sample -> form of the value between products. context:
        whether the ranks along the mesh's first dimension are context ranks. ring: the group of
        these ranks, where keys and values go round a ring."""
        super().__init__(layer)
        self.mesh, self.parameters, self.before, self.after = mesh, parameters, before, after
        self.form_of, self.context, self.ring = form_of, context, ring
        self.whole: Form = [Replicate()] * mesh.ndim

    def __call__(self, *values: Any) -> tuple[Tensor, ...]:
        """The layer's pass: this rank's parts of the inputs in the forms `before` -> this rank's
        parts of the outputs in the forms `after`. The data, which follow the values from the layer
        before, are whole."""
        forms = zip_longest(values, self.before, fillvalue=self.whole)
        outputs = self.run(*(self.distributed(value, form) for value, form in forms))
        local = []
        for output, form in zip(outputs, self.after, strict=True):
            summed = self.without_summands(self.distributed(output, self.whole))
            local.append(summed.redistribute(placements=form).to_local())
        return tuple(local)

    def distributed(self, value: Any, form: Form) -> Any:
        """The distributed tensor of which this rank has the part `value`, in a form; anything but a
        plain tensor as it is."""
        if isinstance(value, DTensor) or not isinstance(value, Tensor):
            return value
        return DTensor.from_local(value, self.mesh, form)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A parameter, a buffer or a constant of the graph, as a distributed tensor."""
        value = super().get_attr(target, args, kwargs)
        form = self.parameters.get(target, self.whole)
        if not (self.context and isinstance(value, nn.Parameter)):
            return self.distributed(value, form)
        return mirrored(
            lambda x: self.distributed(x, form),
            lambda gradient: self.context_summand(gradient, form),
            value,
        )

    def context_summand(self, gradient: Any, form: Form) -> Tensor:
        """This context rank's summand of a parameter's gradient. The summands of all ranks are
        added up after the passes.

        Where every context rank has the whole gradient, the first one's summand is the gradient and
        the others' are zeros.
        """
        are_summands = gradient.placements[0] == Partial()
        context_placement = Partial() if are_summands else Replicate()
        local = gradient.redistribute(placements=[context_placement, *form[1:]]).to_local()
        if are_summands or self.mesh.get_local_rank(0) == 0:
            return local
        return torch.zeros_like(local)

    def run_node(self, n: Node) -> Any:
        """Run one node of the graph on distributed tensors."""
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        kind = name_of(n)
        if kind == "getitem":
            return n.target(*args)
        if kind not in RESHAPES:
            args = mapped(args, self.without_summands)
        if kind == "cat":  # caches that are empty have one dimension
            args = ([x for x in args[0] if x.dim() > 1 or x.numel()], *args[1:])
        output = self._without_rule(kind, n, args, kwargs)
        if output is None:
            output = self._by_rule(kind, n, args, kwargs)
        return mapped(output, lambda y: self.distributed(y, self.whole))

    def without_summands(self, x: Any) -> Any:
        """A value in which the summands on the ranks are added up. Otherwise an operator that reads
        the value would gather its weight, to compute with each summand.

        Along the dimensions of the mesh where the value has no summands its placements stay. For
        example, the output of a divided embedding is summed over the ranks that looked up rows of
        the table.
        """
        if not isinstance(x, DTensor):
            return x
        if not any(placement.is_partial() for placement in x.placements):
            return x
        between = self.form_of(x.shape[1:])
        form = [
            summed if placement.is_partial() else placement
            for placement, summed in zip(x.placements, between, strict=True)
        ]
        return contiguous_both_ways(x.redistribute(placements=form))

    def _without_rule(self, kind: str, n: Node, args: Any, kwargs: Any) -> Any:
        """The output of an operator that DTensor's rules would compute otherwise; None: the rules
        apply."""
        if kind == ATTENTION:
            return self._attention(n, args, kwargs)
        if kind == "dropout" and args[1] > 0 and args[2]:  # (x, probability, in training)
            # every rank draws the mask of the whole tensor, which is the same on all of them
            ones = torch.ones(args[0].shape, dtype=args[0].dtype, device=self.mesh.device_type)
            return args[0] * self.distributed(n.target(ones, *args[1:]), self.whole)
        if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()):
            return self._on_whole_values(n, args, kwargs)
        if kind in ALONG_WHOLE and goes_along_divided(args):
            return self._on_whole_values(n, args, kwargs)
        # An operator that splits a product's columns into the blocks of its weight. A rank has its
        # columns of each block, one after the other.
        name, blocks = n.meta.get("blocks", ("", 1))
        divided = any(not placement.is_replicate() for placement in self.parameters.get(name, ()))
        if divided:
            x = args[0]
            assert Shard(x.dim() - 1) in x.placements, "the columns have not been gathered"
            parts = x.to_local().chunk(blocks, -1)
            return tuple(self.distributed(part.contiguous(), x.placements) for part in parts)
        return None

    def _by_rule(self, kind: str, n: Node, args: Any, kwargs: Any) -> Any:
        """The output of an operator by DTensor's rule; where it has none, from whole values."""
        if kind in RESHAPES:
            args = (contiguous_both_ways(args[0]), *args[1:])
        try:
            output = n.target(*args, **kwargs)
        except (RuntimeError, AssertionError):  # as DTensor says that it has no rule
            return self._on_whole_values(n, args, kwargs)
        return contiguous_both_ways(output) if kind in RESHAPES else output

    def _attention(self, n: Node, args: Any, kwargs: Any) -> Any:
        """Attention with the heads divided over the ranks. It is computed from whole values where
        the heads do not divide evenly, and with dropout, which is drawn for all heads."""
        names = [argument.name for argument in n.target._schema.arguments]
        values: dict[str, Any] = dict(zip(names, args, strict=False)) | kwargs
        q, k, v = (values[name] for name in ("query", "key", "value"))
        ring_ranks = self.ring.process.size() if self.ring else 1
        head_ranks = self.mesh.size() // ring_ranks
        evenly = all(
            x.dim() == 4 and x.shape[1] % head_ranks == 0 and x.shape[2] % ring_ranks == 0
            for x in (q, k, v)
        )
        if not evenly or values.get("dropout_p", 0.0) > 0:
            return self._on_whole_values(n, args, kwargs)
        # Values are [samples, heads, tokens, width]. The mesh divides the heads; with a ring, its
        # first dimension divides the tokens, and the others divide the heads.
        by_heads: list[Any] = [Shard(1)] * self.mesh.ndim
        divided = [Shard(2), *by_heads[1:]] if self.ring else by_heads
        mask = values.get("attn_mask")
        if mask is not None:
            mask = mask[(None,) * (4 - mask.dim())]  # as attention broadcasts it
            mask_form = self.whole
            has_heads = mask.shape[1] > 1
            # a ring divides the mask's tokens itself, see `in_ring`
            if has_heads:
                mask_form = [Replicate(), *by_heads[1:]] if self.ring else by_heads
            values["attn_mask"] = mask.redistribute(placements=mask_form)
        for name, x in (("query", q), ("key", k), ("value", v)):
            values[name] = in_form(x, divided)
        local = mapped(values, local_for_part)
        if self.ring:
            output = in_ring(self.ring, self.mesh.get_local_rank(0), **local)
        else:
            output = n.target(**local)
        result = contiguous_both_ways(self.distributed(output, divided))
        if Shard(2) in q.placements:  # tokens were exchanged for heads
            return contiguous_both_ways(result.redistribute(placements=q.placements))
        return result

    def _on_whole_values(self, n: Node, args: Any, kwargs: Any) -> Any:
        """The output of an operator that every rank computes from gathered values."""

        def gathered(x: Any) -> Any:
            return in_form(x, self.whole).to_local() if isinstance(x, DTensor) else x

        output = n.target(*mapped(args, gathered), **mapped(kwargs, gathered))
        return mapped(output, lambda y: self.distributed(y, self.whole))


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
    """Attention of this rank's queries to the keys and values of all ranks of a ring.

    query, key, value: [samples, heads, tokens, width], successive tokens on successive ranks. own:
    this rank's number in the ring. The other arguments are those of
    `scaled_dot_product_attention`; of the ignored ones `dropout_p` is 0, and `enable_gqa` has no
    other effect than the repetition of keys and values, which is done where they have fewer heads.

    A block is the keys and values of one rank. The blocks go round the ring, so that each rank has
    one block at a time. The result for a block is weighed by the block's share of the sum of
    exponentials.

    Source: Liu et al. 2023 (Ring Attention), Section 3.
    """
    queries, keys, width = query.shape[-2], key.shape[-2], key.shape[-1]
    ranks = ring.process.size()
    is_next = [rank == (own + 1) % ranks for rank in range(ranks)]
    is_previous = [rank == (own - 1) % ranks for rank in range(ranks)]

    def passed_on(receivers: Sequence[bool], senders: Sequence[bool], x: Tensor) -> Tensor:
        """The x of the sender. receivers, senders: [rank] whether this rank sends its x to it, and
        receives from it; one of each."""
        leaving = [x.numel() * receives for receives in receivers]
        coming = [x.numel() * sends for sends in senders]
        return ring.swap(x.reshape(-1), leaving, coming).view(x.shape)

    lowest = torch.finfo(query.dtype).min  # not -inf: a row may see nothing in a block
    if attn_mask is not None:  # [..., this rank's queries, keys of all ranks]
        attn_mask = attn_mask.expand(*attn_mask.shape[:-2], queries * ranks, keys * ranks)
        attn_mask = attn_mask.narrow(-2, own * queries, queries)
    factor = width**-0.5 if scale is None else scale
    keys_and_values = torch.cat([key, value], -1)
    sums, parts = [], []  # [block] logarithms of the sums of exponentials, and results
    for hop in range(ranks):
        first_key = (own - hop) % ranks * keys
        if attn_mask is not None:
            mask = attn_mask.narrow(-1, first_key, keys)
        else:
            mask = query.new_ones(queries, keys, dtype=torch.bool)
            if is_causal:
                # query i of this rank sees key j of the block where
                # first_key + j <= own * queries + i
                mask = mask.tril(own * queries - first_key)
        block = keys_and_values.repeat_interleave(query.shape[1] // key.shape[1], 1)
        scores = query @ block[..., :width].mT * factor
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, lowest)
        else:
            scores = (scores + mask).clamp(lowest)
        sums.append(scores.logsumexp(-1, keepdim=True))
        parts.append(scores.softmax(-1) @ block[..., width:])
        if hop + 1 < ranks:
            keys_and_values = mirrored(
                partial(passed_on, is_next, is_previous),
                partial(passed_on, is_previous, is_next),
                keys_and_values,
            )
    shares = torch.cat(sums, -1).softmax(-1).split(1, -1)
    weighed = [share * part for share, part in zip(shares, parts, strict=True)]
    return torch.stack(weighed).sum(0)


@dataclass(frozen=True)
class Axis:
    """Ranks that compute a rank's layers together, along one dimension of their mesh."""

    ranks: list[int]  # the rank itself included
    divides_tokens: bool  # whether the ranks divide the tokens between layers


def on_meshes(
    chain: Chain, layout: Layout, place: Place, groups: Mapping[tuple[int, ...], Group]
) -> Chain:
    """The chain with layers that this rank computes together with other ranks of its stage.

    groups: ranks -> their process group. In the returned chain, `outputs` are the shapes of this
    rank's parts. The chain is returned as it is where its layers need no mesh: those of a model
    that states its layers itself, those of a plan that spreads experts (`tracing.experts` exchanges
    the tokens, and all else is whole), and those of which this rank has all tokens and whole
    weights. Raises UnsupportedError where the ranks cannot compute the layers together.
    """
    check_meshes(chain, layout, place)
    if not isinstance(chain.source, Split) or layout.plan.further.expert > 1:
        return chain
    for layer in chain.layers:
        layer.__dict__.pop("forward", None)  # set below by an earlier call for the same layers
    axes = axes_of(layout, place)
    token_parts = token_parts_of(axes)
    sliced = sliced_dimensions(chain, layout, place)
    if token_parts == 1 and not sliced:
        if axes and layout.reports_loss(place):
            print(
                f"hetplan: {layout.plan.rank_text(place.rank)}: all of its tensor ranks compute "
                "whole layers; equal shares and the model's `tensor_plan` would divide them",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        return chain
    ranks = layout.ranks_of(place.replica, place.stage)
    # With two axes the stage has no row groups but the context ranks: [context rank][tensor rank].
    mesh = DeviceMesh.from_group(
        [groups[tuple(axis.ranks)].process for axis in axes],
        torch.device(chain.source.device).type,
        mesh=torch.tensor(ranks if len(axes) > 1 else axes[0].ranks),
        mesh_dim_names=tuple(f"axis {k}" for k in range(len(axes))),
    )

    def form_of(shape: Sequence[int]) -> Form:
        """The form of a value between layers. shape: shape of one sample of the value."""
        has_tokens = len(shape) > 1 and shape[0] == layout.plan.workload.sequence
        return [Shard(1) if has_tokens and axis.divides_tokens else Replicate() for axis in axes]

    passed_on = [[form_of(shape) for shape, _ in shapes] for shapes in chain.outputs]
    loss = form_of(())
    # [L + 1] forms of the values before each layer, and after the last one
    boundaries: list[list[Form]] = [[], *passed_on, [loss]]
    for k in layout.layers(place):
        weights: dict[str, Form] = {}
        for inside, name in chain.parameter_names[k].items():
            if name in sliced:
                # tensor ranks are the last dimension of the mesh
                weights[inside] = [*[Replicate()] * (len(axes) - 1), Shard(sliced[name])]
        chain.layers[k].forward = LayerOnMesh(
            chain.layers[k],
            mesh,
            weights,
            boundaries[k],
            boundaries[k + 1],
            form_of,
            context=layout.context > 1,
            ring=groups[tuple(axes[0].ranks)] if in_a_ring(layout) else None,
        )
    outputs = []
    for shapes, forms in zip(chain.outputs, passed_on, strict=True):
        local: list[Shape] = []
        for (shape, dtype), form in zip(shapes, forms, strict=True):
            if Shard(1) in form:  # this rank has a part of the tokens
                tokens, *rest = shape  # `check_meshes` has checked that they divide evenly
                shape = (tokens // token_parts, *rest)
            local.append((shape, dtype))
        outputs.append(tuple(local))
    return replace(chain, outputs=tuple(outputs))


def sliced_dimensions(chain: Chain, layout: Layout, place: Place) -> dict[str, int]:
    """Name -> the dimension that tensor ranks divide, for each parameter of which this rank has
    only a part."""
    part = layout.part(place)
    dimensions = {}
    for k in layout.layers(place):
        for name, cut in chain.cuts(k, part).items():
            shape = chain.parameters[name].shape or (1,)  # a single number counts as one row
            if cut.size < shape[cut.dim]:
                dimensions[name] = cut.dim
    return dimensions


def in_a_ring(layout: Layout) -> bool:
    """Whether keys and values go round a ring of context ranks."""
    return layout.context > 1 and layout.plan.further.exchange == "ring"


def axes_of(layout: Layout, place: Place) -> list[Axis]:
    """The axes of several ranks on which a rank's layers are computed: its context ranks, then its
    tensor ranks."""
    tensor_groups = layout.ranks_of(place.replica, place.stage)
    axes = [Axis(tensor_groups[place.group], divides_tokens=layout.sequence_parallel)]
    if layout.context > 1:
        context_ranks = [group[place.tensor] for group in tensor_groups]
        axes.insert(0, Axis(context_ranks, divides_tokens=True))
    return [axis for axis in axes if len(axis.ranks) > 1]


def token_parts_of(axes: Sequence[Axis]) -> int:
    """The number of parts into which the tokens of a sample are divided between layers."""
    return prod(len(axis.ranks) for axis in axes if axis.divides_tokens)


def check_meshes(chain: Chain, layout: Layout, place: Place) -> None:
    """Raise UnsupportedError where a stage's ranks cannot compute its layers together."""
    axes = axes_of(layout, place)
    token_parts = token_parts_of(axes)
    is_split = isinstance(chain.source, Split)

    def check(allowed: bool, what: str) -> None:
        where = layout.plan.rank_text(place.rank)
        require(allowed, what, where=where, kind=UnsupportedError)

    check(
        token_parts == 1 or is_split,
        "a model that says itself how it is divided does not divide tokens",
    )
    check(
        # or 1: samples without tokens have nothing that several ranks could divide
        (layout.plan.workload.sequence or 1) % token_parts == 0,
        f"{token_parts} ranks do not divide the tokens of a sample",
    )
    head_ranks = prod(len(axis.ranks) for axis in axes)
    if in_a_ring(layout):  # the context ranks, the first axis, then keep their tokens
        head_ranks //= layout.context
    if is_split and layout.context > 1:
        check(
            all(heads % head_ranks == 0 for heads in heads_of_attention(chain, layout, place)),
            f"{head_ranks} ranks do not divide the heads of attention",
        )
    # process groups have sorted ranks, and a rank must have the same number in group and mesh
    check(
        not is_split or all(axis.ranks == sorted(axis.ranks) for axis in axes),
        "ranks that share a split model's layers are not in order",
    )


def heads_of_attention(chain: Chain, layout: Layout, place: Place) -> set[int]:
    """The numbers of heads that queries, keys and values of a rank's layers have."""
    heads = set()
    for k in layout.layers(place):
        for node in chain.layers[k].graph.nodes:
            if name_of(node) == ATTENTION:
                queries_keys_values = node.args[:3]
                heads |= {value.meta["val"].shape[1] for value in queries_keys_values}
    return heads
