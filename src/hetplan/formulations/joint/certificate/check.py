"""Verify a certificate: what seconds it proves that no plan of an instance replays below.

Nothing here is taken from the code that computes bounds, nor from a solver, nor from numpy. All
numbers are fractions. The instance gives every coefficient; a certificate gives nothing but
multipliers of inequalities that hold for every plan. Whatever they are, what is proven holds.
evidence/speed/joint_bound.md derives the inequalities: Sections 4, 7 and 11.

Replays are computed in floating point, so every bound is lowered by the share `ROUNDING`.

Plans are divided into parts: by their homes (nodes that hold some layer alone), by one replica or
several, and by one chunk of a stage or several. What is proven is the least over all parts, which
this module lists itself. A part that the certificate leaves out has the bound of computing alone.

(A) Computing alone. w[q, l]: least device-seconds of a sample of layer l on type q. For prices
    y[q] >= 0 of a device:   T sum_q n[q] y[q] >= sum_l G min_q y[q] w[q, l].
(B) Nodes. `node_rows` states linear inequalities that hold for every plan of a part of T seconds.
    Each is  sum_j c[j] x[j] + d T >= r  with  0 <= x[j] <= u[j].  Their sum with multipliers, >= 0
    for inequalities and any for equations, says  T sum d >= sum r - sum_j max(0, c[j]) u[j].
    A part may be divided again by columns that are 0 or 1.
(C) Chains. `chains.py` shows that no plan of a part, with one chunk a stage, is as fast as T.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import product
from typing import Any, NamedTuple

from hetplan.formulations.joint.certificate.chains import Links, Uncovered, chains_are_slower
from hetplan.formulations.joint.certificate.reading import Instance, Kind

ROUNDING = Fraction(1, 10**9)
# Patterns of homes, at most, of which a certificate may speak one by one.
MOST_PATTERNS = 10_000

# A column of the inequalities: its name, and its layer, kind of node or type.
Column = tuple[Any, ...]
# The time of the iteration, and the end of the last forward pass, which is no later.
T: Column = ("T",)
FIRST: Column = ("first",)


class Damaged(ValueError):
    """A certificate that does not fit the instance; the message says where."""


class Part(NamedTuple):
    """Plans with so many homes of each class of nodes (None: any), with several replicas or one,
    and with several chunks or one."""

    homes: tuple[int, ...] | None
    several: bool
    chunks: bool


def check(data: Mapping[str, Any], certificate: Mapping[str, Any]) -> Fraction:
    """Seconds that no plan of the instance replays below, by the certificate.

    data: `data` of an instance file of problem `joint`, as parsed JSON. certificate: as `write`
    makes it. Raises Damaged where it does not fit the instance.
    """
    instance = Instance(data)
    links = Links(instance)
    alone = seconds_alone(instance, certificate["alone"])
    proofs = proofs_by_part(instance, certificate["parts"])
    general = any(part.homes is None for part in proofs)
    least: Fraction | float = math.inf
    for part in parts(instance, general=general):
        least = min(least, max(alone, seconds_of_part(links, part, proofs.get(part))))
    if not isinstance(least, Fraction):
        return Fraction(0)  # no plan at all: nothing is claimed
    return least * (1 - ROUNDING)


def proofs_by_part(
    instance: Instance, stated: Sequence[Mapping[str, Any]]
) -> dict[Part, Mapping[str, Any]]:
    """The parts of which the certificate speaks, each with its proof."""
    proofs: dict[Part, Mapping[str, Any]] = {}
    for number, proof in enumerate(stated):
        homes = proof.get("homes")
        if homes is not None:
            homes = tuple(homes)
            fits = len(homes) == len(instance.classes) and all(
                0 <= chosen <= alike.nodes
                for chosen, alike in zip(homes, instance.classes, strict=True)
            )
            if not fits:
                raise Damaged(f"parts[{number}].homes: not so many nodes of each class")
        part = Part(homes, proof["several"], proof["chunks"])
        if part in proofs:
            raise Damaged(f"parts[{number}]: the same part as one before")
        proofs[part] = proof
    if len({part.homes is None for part in proofs}) > 1:
        raise Damaged("parts: some tell homes apart, and others do not")
    if any(part.homes is not None for part in proofs) and instance.patterns > MOST_PATTERNS:
        raise Damaged("parts: too many patterns of homes")
    return proofs


def parts(instance: Instance, *, general: bool) -> Iterator[Part]:
    """All parts that have plans. general: whether homes are not told apart."""
    patterns: list[tuple[int, ...] | None] = [None]
    if not general and instance.patterns <= MOST_PATTERNS:
        patterns = list(product(*(range(alike.nodes + 1) for alike in instance.classes)))
    for homes, several, chunks in product(patterns, (False, True), (False, True)):
        if may_have_plans(instance, part := Part(homes, several, chunks)):
            yield part


def may_have_plans(instance: Instance, part: Part) -> bool:
    """Whether there may be plans of the part.

    Every home holds a layer that no other node holds. Every replica has this layer, so it has a
    stage on each home. Where a single replica has no home, a stage lies across nodes of a type.
    With chunks, some replica has two stages of two chunks at least.
    """
    layers, devices = len(instance.layers), sum(instance.counts)
    homes = sum(part.homes or ())
    if homes > layers:
        return False
    if part.several:
        of_homes = [
            alike.devices
            for alike, chosen in zip(instance.classes, part.homes or (), strict=False)
            if chosen
        ]
        if instance.samples < 2 or min(of_homes, default=devices) < 2:
            return False
    elif part.homes is not None and homes == 0 and len(instance.classes) > 0:
        types = [node["device"] for node in instance.nodes]
        if len(set(types)) == len(types) > 1:
            return False
    stages = max(homes, 2)
    return not part.chunks or (layers >= 2 * stages and devices >= stages)


def seconds_of_part(links: Links, part: Part, proof: Mapping[str, Any] | None) -> Fraction | float:
    """Seconds that no plan of the part replays below, by the proof."""
    seconds: Fraction | float = Fraction(0)
    if proof is None:
        return seconds
    where = f"part {part}"
    if proof.get("nodes") is not None:
        seconds = seconds_by_nodes(links.instance, part, proof["nodes"], where)
    if proof.get("chains") is not None and not part.chunks:
        chains = proof["chains"]
        try:
            slower = chains_are_slower(links, part.homes, several=part.several, proof=chains)
        except Uncovered as error:
            raise Damaged(f"{where}: {error}") from None
        seconds = max(seconds, Fraction(chains["seconds"]) if slower else Fraction(0))
    return seconds


def seconds_by_nodes(
    instance: Instance, part: Part, proof: Mapping[str, Any], where: str
) -> Fraction | float:
    """(B) of the part."""
    kinds = instance.kinds(part.homes, apart=proof["apart"])
    if not kinds:
        raise Damaged("parts: nodes receive nothing where there is only one")
    rows = Rows()
    node_rows(instance, part, kinds, rows)
    return rows.seconds(proof["tree"], {}, where)


def seconds_alone(instance: Instance, prices: Sequence[float]) -> Fraction:
    """(A)."""
    if len(prices) != len(instance.types):
        raise Damaged("alone: not one price for each type of devices")
    exact = [not_negative(price, "alone") for price in prices]
    worth = sum(
        (price * count for price, count in zip(exact, instance.counts, strict=True)), Fraction(0)
    )
    if worth == 0:
        return Fraction(0)
    works = [instance.work(q) for q in range(len(instance.types))]
    paid = sum(
        (
            min(price * work[l] for price, work in zip(exact, works, strict=True))
            for l in range(len(instance.layers))
        ),
        Fraction(0),
    )
    return instance.samples * paid / worth


def not_negative(value: float, where: str) -> Fraction:
    """The number as a fraction."""
    exact = Fraction(value)
    if exact < 0:
        raise Damaged(f"{where}: a negative number")
    return exact


class Rows:
    """Inequalities, and equations, of the plans of one part, by name."""

    def __init__(self) -> None:
        self.upper: dict[Column, Fraction] = {}  # of each column; 0 is the lower bound of all
        self.rows: dict[str, list[tuple[dict[Column, Fraction], Fraction]]] = {}
        self.equations: set[str] = set()

    def columns(self, name: str, numbers: Iterator[Any], most: int = 1) -> None:
        """Columns between 0 and `most`."""
        for number in numbers:
            self.upper[name, *number] = Fraction(most)

    def at_least(
        self, name: str, terms: Mapping[Column, Fraction | int], right: Fraction | int = 0
    ) -> None:
        """sum of terms >= right."""
        exact = {column: Fraction(value) for column, value in terms.items() if value}
        self.rows.setdefault(name, []).append((exact, Fraction(right)))

    def equal(
        self, name: str, terms: Mapping[Column, Fraction | int], right: Fraction | int = 0
    ) -> None:
        """sum of terms == right."""
        self.equations.add(name)
        self.at_least(name, terms, right)

    def seconds(
        self, proof: Mapping[str, Any], chosen: dict[Column, int], where: str
    ) -> Fraction | float:
        """(B). Seconds that T is not below, where some columns are chosen to be 0 or 1; infinite
        where the rows contradict each other."""
        if "branch" in proof:
            column = tuple(proof["branch"])
            # of several nodes together, two may hold a layer
            if column[0] not in ("alone", "together") or self.upper.get(column, 2) > 1:
                raise Damaged(f"{where}: branch: no column that is 0 or 1")
            zero = self.seconds(proof["zero"], {**chosen, column: 0}, where)
            one = self.seconds(proof["one"], {**chosen, column: 1}, where)
            return min(zero, one)
        terms, right = self.combination(proof["multipliers"], where)
        # FIRST is at most T, so that its term is at most its positive part times T.
        of_time = terms.pop(T, Fraction(0)) + max(Fraction(0), terms.pop(FIRST, Fraction(0)))
        for column, value in terms.items():
            if column in chosen:
                right -= value * chosen[column]
            elif value > 0:
                right -= value * self.upper[column]
        if right <= 0:
            return Fraction(0)
        return right / of_time if of_time > 0 else math.inf

    def combination(
        self, multipliers: Mapping[str, Sequence[float]], where: str
    ) -> tuple[dict[Column, Fraction], Fraction]:
        """The sum of the rows, each times its multiplier."""
        total: dict[Column, Fraction] = {}
        right = Fraction(0)
        for name, values in multipliers.items():
            rows = self.rows.get(name, [])
            if len(values) != len(rows):
                raise Damaged(f"{where}: {name}: {len(values)} multipliers, expected {len(rows)}")
            for value, (terms, of_row) in zip(values, rows, strict=True):
                if not value:
                    continue
                factor = Fraction(value)
                if factor < 0 and name not in self.equations:
                    raise Damaged(f"{where}: {name}: a negative multiplier of an inequality")
                right += factor * of_row
                for column, coefficient in terms.items():
                    total[column] = total.get(column, Fraction(0)) + factor * coefficient
        return total, right


def node_rows(instance: Instance, part: Part, kinds: list[Kind], rows: Rows) -> None:
    """The inequalities (B) of a part, for k kinds of nodes of N[k] nodes each, with n[k] devices in
    all. A column of a kind is the sum over its nodes.

    u, x, y ("computes", "alone", "together") [l, k]: share of a layer's samples that k computes; k
    alone holds the layer; k and others hold it. s ("shared") [l]: several nodes hold it. v, z
    ("enters", "returns") [l, k]: shares of samples that enter k before layer l, forward and back.
    t ("tied") [k]: tied weights are joined through the card. FIRST: end of the last forward pass.
    """
    layers, K = range(len(instance.layers)), range(len(kinds))
    both = list(product(layers, K))
    for name in ("computes", "alone", "enters", "returns"):
        rows.columns(name, iter(both))
    for k in K:
        rows.columns("together", ((l, k) for l in layers), kinds[k].nodes)
        # one node holds the first layer alone, one each tied layer
        rows.columns("tied", iter([(k,)]), 1 + len(instance.tied_layers))
    rows.columns("shared", ((l,) for l in layers))
    if part.homes is not None:
        for l, k in both:
            if not kinds[k].is_home:
                rows.upper["alone", l, k] = Fraction(0)
    hold_every_layer(instance, part, kinds, rows)
    move_samples(layers, K, rows)
    spend_seconds(instance, part, kinds, rows)


def hold_every_layer(instance: Instance, part: Part, kinds: list[Kind], rows: Rows) -> None:
    """Every sample of a layer is computed somewhere, by one who holds the layer. One node holds it
    alone, or at least two hold it together. The holders in one replica are a stage, which has one
    type. Every home holds a layer alone."""
    layers, K = range(len(instance.layers)), range(len(kinds))
    for l in layers:
        rows.equal("computed", {("computes", l, k): 1 for k in K}, 1)
        rows.equal("held", {("shared", l): 1, **{("alone", l, k): 1 for k in K}}, 1)
        for k in K:
            u, x, y = ("computes", l, k), ("alone", l, k), ("together", l, k)
            rows.at_least("some", {u: 1, x: -1})
            rows.at_least("only", {x: 1, y: 1, u: -1})
            rows.at_least("shared", {("shared", l): kinds[k].nodes, y: -1})
    for k in K:
        if kinds[k].is_home:
            rows.at_least("home", {("alone", l, k): 1 for l in layers}, kinds[k].nodes)
    if part.several:
        for l in layers:
            rows.at_least("two", {("shared", l): -2, **{("together", l, k): 1 for k in K}})
        return
    types = range(len(instance.types))
    for l, q in product(layers, types):
        single = sum(node["device"] == instance.types[q] for node in instance.nodes) == 1
        rows.columns("of_type", iter([(l, q)]), 0 if single else 1)
    for l in layers:
        rows.equal("one_type", {("shared", l): -1, **{("of_type", l, q): 1 for q in types}})
    for q in types:
        of_type = [k for k in K if kinds[k].type == q]
        for l in layers:
            together = {("together", l, k): 1 for k in of_type}
            rows.at_least("two", {("of_type", l, q): -2, **together})
        for l, k in product(layers, of_type):
            rows.at_least("type", {("of_type", l, q): kinds[k].nodes, ("together", l, k): -1})


def move_samples(layers: range, K: range, rows: Rows) -> None:
    """Samples that a node computes of a layer, and not of the one before, enter it; and back."""
    for l, k in product(layers[1:], K):
        here, before = ("computes", l, k), ("computes", l - 1, k)
        rows.at_least("forward", {("enters", l, k): 1, here: -1, before: 1})
        rows.at_least("backward", {("returns", l, k): 1, before: -1, here: 1})


def spend_seconds(instance: Instance, part: Part, kinds: list[Kind], rows: Rows) -> None:
    """Devices compute, wait for messages, and join weights, one after the other. Rings through a
    card follow the last forward pass, and one another. A card receives all that enters its node."""
    layers, G = range(len(instance.layers)), instance.samples
    several_homes = sum(part.homes or ()) > 1
    turns = 3 if part.chunks else 1  # a home is entered so often, forward and back
    for k, kind in enumerate(kinds):
        work, forward = instance.work(kind.type), instance.forward_work(kind.type)
        busy: dict[Column, Fraction] = {}
        rings: dict[Column, Fraction] = {}
        waits: dict[Column, Fraction] = {}
        passes: dict[Column, Fraction] = {}
        for l in layers:
            busy["computes", l, k] = -G * work[l]
            passes["computes", l, k] = -G * forward[l]
            rings["together", l, k] = -instance.joined[l] / kind.card
            if l:
                entering = G * instance.sent[l - 1] / kind.card
                waits["enters", l, k] = waits["returns", l, k] = -entering
                passes["enters", l, k] = -entering
            if part.several:
                busy["alone", l, k] = -2 * instance.joined[l] / kind.fabric
        tied = {("tied", k): -instance.tied / kind.card}
        devices, nodes = kind.nodes * kind.devices, kind.nodes
        rows.at_least("devices", {**busy, **waits, **rings, T: devices})
        rows.at_least("first", {**passes, FIRST: devices})
        rows.at_least("behind", {**rings, **tied, FIRST: -nodes, T: nodes})
        rows.at_least("cards", {**waits, **rings, **tied, T: nodes})
        entered = Fraction(0)
        if kind.is_home and several_homes:
            entered = turns * nodes * G * min(instance.sent) / kind.card
        rows.at_least("turns", {**busy, **rings, T: devices}, entered)
        rows.at_least("homes", {**rings, **tied, T: nodes}, entered)
        for e in instance.tied_layers:
            first, other = ("alone", 0, k), ("alone", e, k)
            rows.at_least("tied_first", {("tied", k): 1, first: -1, other: 1})
            joined = ("together", 0, k)
            rows.at_least("tied_other", {("tied", k): 1, other: -1, first: 1, joined: 1})
