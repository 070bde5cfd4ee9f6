"""Who holds what: parameters by unsplit names, cut into pieces that sets of ranks own together.

Every rank computes this from plan and model alone, the same everywhere. A piece is an interval of a
parameter's split dimension that no rank's cut divides further; ranks that hold it are its owners.
Gradients are joined piece by piece, whatever the replicas' cuts, widths and shares: pieces with the
same owners lie behind each other in one flat bucket.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hetplan.errors import InputError
from hetplan.runtime.execution.chain import Chain, Parameter
from hetplan.runtime.execution.places import Layout
from hetplan.runtime.execution.tensor import Cut
from hetplan.runtime.plan import Place

Held = dict[str, Cut]  # name -> what a rank holds of it


@dataclass(frozen=True)
class Piece:
    """Rows [first, last) of dimension `dim` of a parameter; `row` elements each. contributors: one
    owner of each unit (see `Place.unit`), whose gradient counts."""

    name: str
    dim: int
    first: int
    last: int
    row: int
    contributors: frozenset[int]

    @property
    def size(self) -> int:
        """Elements."""
        return (self.last - self.first) * self.row


@dataclass(frozen=True)
class BucketPlan:
    """Pieces of the same owners (ranks), dtype and layers."""

    owners: tuple[int, ...]
    dtype: Any
    layers: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return sum(piece.size for piece in self.pieces)

    @property
    def units(self) -> int:
        """How many gradients are added up, at most."""
        return max(len(piece.contributors) for piece in self.pieces)


def held_by(layout: Layout, chain: Chain, place: Place) -> Held:
    """What a rank holds; raises InputError where two of its layers cut a shared parameter
    differently."""
    part, held = layout.part(place), Held()
    for first, last in layout.layers(place):
        for k in range(first, last):
            for name, cut in chain.cuts(k, part).items():
                if held.setdefault(name, cut) != cut:
                    raise InputError(
                        "shared parameter is cut in two ways",
                        where=name,
                        got=cut,
                        expected=f"{held[name]}",
                    )
    return held


def bucket_plans(layout: Layout, chain: Chain, *, by_layer: bool) -> list[BucketPlan]:
    """All buckets in one order; by_layer: parameters of different layers in different buckets (ZeRO
    3)."""
    held: dict[tuple[Any, ...], Held] = {}
    holders: dict[str, list[tuple[Place, Cut]]] = defaultdict(list)
    for place in layout.places:
        key = (tuple(layout.layers(place)), layout.part(place))
        if key not in held:
            held[key] = held_by(layout, chain, place)
        for name, cut in held[key].items():
            holders[name].append((place, cut))
    found: dict[tuple[Any, ...], list[Piece]] = defaultdict(list)
    for name, parameter in chain.parameters.items():
        layers = parameter.layers if by_layer else ()
        for owners, piece in pieces_of(parameter, holders[name]):
            found[owners, parameter.dtype, layers].append(piece)
    ordered = sorted(found.items(), key=lambda item: (item[0][2], item[0][0], str(item[0][1])))
    return [
        BucketPlan(owners, dtype, layers, tuple(pieces))
        for (owners, dtype, layers), pieces in ordered
    ]


def pieces_of(
    parameter: Parameter, holders: list[tuple[Place, Cut]]
) -> list[tuple[tuple[int, ...], Piece]]:
    """(owners, piece) for each piece of a parameter."""
    name, dim, shape = parameter.name, parameter.dim, parameter.shape or (1,)
    row = 1
    for d, length in enumerate(shape):
        row *= 1 if d == dim else length
    ranges = [(p, cut.ranges if cut.dim == dim else ((0, shape[dim]),)) for p, cut in holders]
    ends = sorted({0, shape[dim], *(end for _, cuts in ranges for both in cuts for end in both)})
    found = []
    for first, last in pairwise(ends):
        owning = [p for p, cuts in ranges if any(a <= first and last <= b for a, b in cuts)]
        units: dict[tuple[int, int, int], int] = {}
        for place in sorted(owning, key=lambda p: p.rank):
            units.setdefault(place.unit, place.rank)
        if not owning:
            raise InputError(
                "nobody holds a part of a parameter", where=name, got=f"[{first}, {last})"
            )
        owners = tuple(sorted(p.rank for p in owning))
        found.append((owners, Piece(name, dim, first, last, row, frozenset(units.values()))))
    return found
