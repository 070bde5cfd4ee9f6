"""Verify that no plan of a part, whose stages have one chunk, takes so few seconds.

Give every device a price. Replicas take G samples together, so some replica with g samples has
devices of price P <= g times all prices over G. Replicas are divided into lumps by the samples b of
a micro-batch and by g. Of a replica with stages s, take: f, b: seconds of a micro-batch's passes on
a stage, with the message that each waits for; W: what one micro-batch takes through all stages and
back. If T seconds suffice, every stage satisfies

(1) way in + all its passes + (way out, or what is joined behind them) <= T,
(2) the same, where way in, the passes that do not fit into the waiting time, and the way of one
    micro-batch through the later stages and back follow one another,
(3) W + its passes that do not fit into the waiting time <= T.

Under 1F1B, GPipe and interleaved 1F1B with one chunk, at most 2 (stages behind) forward passes fit
into the time for which a stage waits for its first backward pass (joint_bound.md, Section 2).

W is least on a shortest path over runs of layers that (1) to (3) allow. The larger W is known to
be, the fewer runs (3) allows. A price costs a fee: W >= (least W + fee times price) - fee P. The
state of the path is the number of stages behind, and of changes between nodes, of which there must
be as many as homes need.

All seconds are whole ticks, T / 2 ** TICKS: what plans take is rounded down, what they may take up.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from hetplan.formulations.joint.certificate.reading import Instance, Numbers

TICKS = 50
# Where a stage lies: inside a home, inside another node, or across several nodes.
HOME, OTHER, ACROSS = "home", "other", "across"
# Where a message to a stage comes from: its own node, another one of its type, one of another type;
# between a stage across nodes and the only node of another type; or anywhere.
SAME, ALIKE, UNLIKE, SOLE, OPEN = range(5)

Ticks = list[int]
# (type, or number of types where it lies across nodes; source of the message to the stage)
Place = tuple[int, int]
# (stages behind, changes between nodes) -> least cost of the path
Costs = dict[tuple[int, int], int]


class Uncovered(ValueError):
    """Lumps that leave out some replicas; the message says which."""


class Lump(NamedTuple):
    """Replicas whose micro-batches have `least` to `most` samples, and that take `low` to `high` of
    them in all. exact: whether the last micro-batch counts, if it is smaller than others; then all
    of these replicas have the same. fees: of the paths to take one after the other, for each case
    of changes between nodes."""

    least: int
    most: int
    low: int
    high: int
    exact: bool
    fees: Sequence[Sequence[float]]


class Way(NamedTuple):
    """A stage of r row groups of t tensor ranks each."""

    where: str
    type: int
    t: int
    r: int


class Homes(NamedTuple):
    """Numbers by type: nodes that are homes, devices in them, and devices in other nodes."""

    nodes: list[int]
    inside: list[int]
    other: list[int]


def chains_are_slower(
    links: "Links",
    homes: Sequence[int] | None,
    *,
    several: bool,
    proof: Mapping[str, Any],
) -> bool:
    """Whether all plans of the part without chunks take more than `proof["seconds"]`.

    Raises Uncovered where the lumps leave out replicas.
    """
    instance = links.instance
    lumps = [Lump(**lump) for lump in proof["lumps"]]
    check_covered(lumps, instance.samples, several=several)
    seconds, prices = Fraction(proof["seconds"]), [Fraction(price) for price in proof["prices"]]
    if len(prices) != len(instance.types) or min(prices) < 0:
        raise Uncovered("prices: not one for each type, or a negative one")
    if seconds <= 0:
        return False
    of_types, clock = homes_by_type(instance, homes), Clock(links, seconds)
    return all(
        Chains(clock, of_types, prices, lump, several=several).are_slower() for lump in lumps
    )


def check_covered(lumps: Sequence[Lump], G: int, *, several: bool) -> None:
    """Raise Uncovered unless every replica is in some lump: with b <= g samples, g = G of a single
    replica, g < G of several."""
    for lump in lumps:
        fits = 1 <= lump.least <= min(lump.most, lump.high) and 1 <= lump.low <= lump.high <= G
        one = lump.least == lump.most and lump.low == lump.high
        if not fits or (lump.exact and not one):
            raise Uncovered(f"a lump of {lump.least} to {lump.most} samples a micro-batch is none")
    for b in range(1, G + (not several)):
        reached = b if several else G  # all g below are in a lump
        for lump in sorted(lumps, key=lambda lump: lump.low):
            if lump.least <= b <= lump.most and lump.low <= reached:
                reached = max(reached, lump.high + 1)
        if reached < G + (not several):
            raise Uncovered(f"no lump has {reached} samples in micro-batches of {b}")


def homes_by_type(instance: Instance, homes: Sequence[int] | None) -> Homes:
    """The homes of a part, by type. Where nothing is said of them, all devices are in homes, as far
    as this bound is concerned, and there is no node that every replica has to pass."""
    types = range(len(instance.types))
    nodes, inside = [0 for _ in types], [0 for _ in types]
    if homes is None or len(instance.nodes) == 1:
        return Homes(nodes, list(instance.counts), inside)
    for alike, chosen in zip(instance.classes, homes, strict=True):
        nodes[alike.type] += chosen
        inside[alike.type] += alike.devices * chosen
    other = [n - m for n, m in zip(instance.counts, inside, strict=True)]
    return Homes(nodes, inside, other)


class Clock:
    """Whole ticks of passes and messages."""

    def __init__(self, links: "Links", seconds: Fraction) -> None:
        self.links = links
        self.unit: Fraction = seconds / 2**TICKS
        # bytes of a sample that pass each cut between layers
        self.sent = [Fraction(0), *links.instance.sent, Fraction(0)]
        self.passes = lru_cache(None)(self._passes)
        self.messages = lru_cache(None)(self._messages)

    def down(self, seconds: Fraction) -> int:
        """Ticks, rounded down."""
        return math.floor(seconds / self.unit)

    def _passes(self, q: int, t: int, rows: int) -> tuple[Ticks, Ticks]:
        """[L] ticks of forward and backward passes, if the largest row group has so many rows."""
        slowest = self.links.instance.slowest_pass(q, t, rows)
        return [self.down(x) for x in slowest.forward], [self.down(x) for x in slowest.backward]

    def _messages(self, wait: Fraction) -> Ticks:
        """[L + 1] ticks of a message at each cut that takes so many seconds for each byte."""
        return [self.down(wait * size) for size in self.sent]


class Chains:
    """A lump of replicas without chunks, and whether T seconds suffice for one of them."""

    def __init__(
        self, clock: Clock, homes: Homes, prices: Numbers, lump: Lump, *, several: bool
    ) -> None:
        self.clock, self.links, self.homes, self.several = clock, clock.links, homes, several
        self.instance = instance = clock.links.instance
        self.lump = lump
        self.L, self.types = len(instance.layers), range(len(instance.types))
        total = sum((p * n for p, n in zip(prices, instance.counts, strict=True)), Fraction(0))
        self.prices, self.worth = prices, total * lump.high / instance.samples
        self.joined = list(accumulate(instance.joined, initial=Fraction(0)))
        self.count_samples()
        self.ways = list(self.all_ways())
        self.stages = [Stage(self, way) for way in self.ways]
        self.find_ways_in_and_out()

    def count_samples(self) -> None:
        """Samples that the replicas' passes have, at least: in all, and without one micro-batch."""
        lump = self.lump
        self.pairs = []  # (samples of a micro-batch, samples of all that count)
        for b in range(lump.least, min(lump.most, lump.high) + 1):
            g = max(lump.low, b)
            self.pairs.append((b, g if lump.exact else g // b * b))
        self.all = min(g for _, g in self.pairs)
        self.but_one = self.behind(1)

    def behind(self, passes: int) -> int:
        """Samples behind so many passes of whole micro-batches, at least."""
        return min(max(g - passes * b, 0) for b, g in self.pairs)

    @property
    def last(self) -> int:
        """Samples of the last micro-batch that counts, at least."""
        b, g = self.lump.least, self.lump.low
        return g - (-(-g // b) - 1) * b if self.lump.exact else b

    def all_ways(self) -> Iterator[Way]:
        """Every way to hold a run of layers. A row group without samples would gain nothing. A
        replica leaves a device of every home to another one; a single replica has no layer inside a
        node without holding it alone."""
        instance, homes = self.instance, self.homes
        for q in self.types:
            most = max(n["devices"] for n in instance.nodes if n["device"] == instance.types[q])
            inside = homes.inside[q] - (homes.nodes[q] if self.several else 0)
            other = homes.other[q] if self.several else 0
            for t in instance.degrees(q):
                for r in range(1, min(inside, most) // t + 1):
                    yield Way(HOME, q, t, r)
                for r in range(1, min(other, most) // t + 1):
                    yield Way(OTHER, q, t, r)
                if self.links.nodes[q] > 1:
                    for r in range(2, instance.counts[q] // t + 1):
                        yield Way(ACROSS, q, t, r)

    def find_ways_in_and_out(self) -> None:
        """Ticks of a micro-batch's forward passes through the layers before l, of the last one's
        backward passes through them, and of one's way from l to the end and back, at least."""
        way_in: Ticks = [0]
        way_out: Ticks = [0]
        rest: Ticks = [0]
        for l in range(self.L if self.stages else 0):
            first = min(stage.first.forward[l] for stage in self.stages)
            last = min(stage.last.backward[l] for stage in self.stages)
            either = min(min(s.first.forward[l], s.last.forward[l]) for s in self.stages)
            back = min(stage.first.backward[l] for stage in self.stages)
            way_in.append(way_in[-1] + first)
            way_out.append(way_out[-1] + last)
            rest.append(rest[-1] + either + back)
        self.way_in, self.way_out = way_in, way_out
        self.rest = [rest[-1] - before for before in rest]
        # behind the last gradient, a replica beside others joins the weights of the first layer
        self.tail = 0
        if self.several and self.ways:
            rate = min(self.links.join(w.where, w.type, w.t) for w in self.ways)
            self.tail = self.clock.down(rate * self.instance.joined[0])

    def cases(self) -> list[tuple[int, int]]:
        """(changes between nodes, ticks that plans have), of which one holds for each plan. The
        path visits every home. Weights that the last layer shares with the first one are in one
        home, to which the path returns, or they pass a card behind all else."""
        homes, T = sum(self.homes.nodes), 2**TICKS
        if homes < 2:
            return [(0, T)]
        tied = self.instance.tied_ends
        if not tied or len(self.instance.layers) == 1:
            return [(homes - 1, T)]
        through_card = self.clock.down(tied / self.links.second_card)
        return [(homes, T), (homes - 1, T - max(through_card - self.tail, 0))]

    def are_slower(self) -> bool:
        """Whether T seconds suffice for none of them."""
        if not self.ways:
            return True  # there are no such replicas
        cases = self.cases()
        if len(self.lump.fees) != len(cases):
            raise Uncovered(f"fees: {len(self.lump.fees)} lists of them, expected {len(cases)}")
        return all(
            self.exceeds(changes, limit, fees)
            for (changes, limit), fees in zip(cases, self.lump.fees, strict=True)
        )

    def exceeds(self, changes: int, limit: int, fees: Sequence[float]) -> bool:
        """Whether W is more than the limit, by paths with these fees for each price."""
        if any(fee < 0 for fee in fees):
            raise Uncovered("fees: a negative one")
        return all(
            self.schedule_exceeds(changes, limit, fees, gpipe=gpipe)
            for gpipe in (False, True)
            if self.lump.exact or not gpipe
        )

    def schedule_exceeds(
        self, changes: int, limit: int, fees: Sequence[float], *, gpipe: bool
    ) -> bool:
        """The same under GPipe, or under the others. GPipe's way through later stages is the last
        micro-batch's, and nothing fills its waiting. Where all micro-batches that count are alike,
        it is not the fastest."""
        known = 0
        for fee in fees:
            if known > limit:
                break
            exact = Fraction(fee) / self.clock.unit
            known = max(known, self.least_way(changes, limit, known, exact, gpipe=gpipe))
        return known > limit

    def least_way(self, changes: int, limit: int, known: int, fee: Fraction, *, gpipe: bool) -> int:
        """Ticks of W, at least; more than the limit if there is no path. known: ticks that W has at
        least. fee: ticks for each price."""
        paid = math.ceil(fee * self.worth)
        deepest = min(self.L, sum(self.instance.counts))
        filled = 0 if gpipe else 2  # passes for each stage behind
        free = [self.behind(1 + filled * stages) for stages in range(deepest + 1)]
        end = len(self.types)
        # what the cheapest path from layer l on costs, by the stage before it
        best: list[dict[Place, Costs]] = [{} for _ in range(self.L + 1)]
        best[self.L] = {(kind, OPEN): {(0, 0): 0} for kind in range(end + 1)}
        for l in reversed(range(self.L)):
            for stage in self.stages:
                fixed = math.floor(fee * self.prices[stage.way.type] * stage.way.t * stage.way.r)
                for into in stage.sources(l):
                    reached: Costs = {}
                    step = stage.is_across or into in (ALIKE, UNLIKE)
                    for run in self.runs(stage, into, l, limit, best):
                        cost = run.way + fixed
                        if gpipe:
                            cost = run.last_way + fixed
                        for (behind, done), value in run.costs.items():
                            passes = free[behind] * run.forward + self.but_one * run.backward
                            if passes > min(run.room, limit - known - self.tail):
                                continue
                            if value + cost > limit + paid:
                                continue  # it is as good as none
                            state = min(behind + 1, deepest), min(done + step, changes)
                            if value + cost < reached.get(state, limit + paid + 1):
                                reached[state] = value + cost
                    if reached:
                        self.keep(best[l], stage, into, reached, first=l == 0)
        ends = [
            value
            for costs in best[0].values()
            for (_, done), value in costs.items()
            if done == changes
        ]
        return min(ends) - paid if ends else limit + 1

    def runs(
        self, stage: "Stage", into: int, l: int, limit: int, best: Sequence[dict[Place, Costs]]
    ) -> Iterator["Run"]:
        """The runs from layer l on that the stage may hold by (1) and (2)."""
        for end in range(l + 1, self.L + 1):
            behind = max(self.way_out[l], stage.joins[end] - stage.joins[l] - 1)
            left = limit - self.way_in[l] - behind
            if self.all * stage.average.of(l, end) > left:
                return
            for back in stage.sources(end):
                costs = best[end].get((stage.kind, back))
                if costs is None:
                    continue
                forward = stage.average.forward_of(l, end, into)
                backward = stage.average.backward_of(l, end, back)
                if self.all * (forward + backward) > left:
                    continue
                way_back = stage.last.backward_of(l, end, back)
                way = stage.first.forward_of(l, end, into) + way_back
                last_way = stage.last.forward_of(l, end, into) + way_back
                room = left - last_way - self.rest[end]
                yield Run(way, last_way, forward, backward, room, costs)

    def keep(
        self, at: dict[Place, Costs], stage: "Stage", into: int, reached: Costs, *, first: bool
    ) -> None:
        """Keep the costs for every stage that may stand before this one, such that the message
        comes from there."""
        across = len(self.types)
        for before in range(across + 1):
            if not first and into not in self.sources_between(stage, before):
                continue
            costs = at.setdefault((before, into), {})
            for state, value in reached.items():
                costs[state] = min(value, costs.get(state, value))
            drop_dominated(costs)

    def sources_between(self, stage: "Stage", before: int) -> tuple[int, ...]:
        """Where a message between two stages comes from. before: type of the earlier one, or the
        number of types where it lies across nodes."""
        across = len(self.types)
        if before == across or stage.is_across:
            single = any(
                kind < across and self.links.nodes[kind] == 1 for kind in (before, stage.kind)
            )
            return (SOLE,) if single else (OPEN,)
        return (SAME, ALIKE) if before == stage.kind else (UNLIKE,)


class Run(NamedTuple):
    """A run of layers on a stage, in ticks: its part of W, and of the last micro-batch's way;
    forward and backward passes for each sample; what (2) leaves for them. costs: of the path behind
    it."""

    way: int
    last_way: int
    forward: int
    backward: int
    room: int
    costs: Costs


def drop_dominated(costs: Costs) -> None:
    """Leave out states that cost no less than one with as many stages and changes. With more stages
    behind, fewer passes count, and more changes are closer to those that are needed."""
    kept: list[tuple[int, int]] = []
    for state in sorted(costs, key=lambda state: (costs[state], -state[0], -state[1])):
        if any(state[0] <= other[0] and state[1] <= other[1] for other in kept):
            del costs[state]
        else:
            kept.append(state)


class Durations:
    """Ticks of a stage's passes through single layers, and of the messages that they wait for.

    forward, backward: [L]. waits: by source, [L + 1] of a message at each cut; None where no
    message comes from there.
    """

    def __init__(self, forward: Ticks, backward: Ticks, waits: list[Ticks | None]) -> None:
        self.forward, self.backward, self.waits = forward, backward, waits
        self.forward_sums = list(accumulate(forward, initial=0))
        self.backward_sums = list(accumulate(backward, initial=0))

    def of(self, l: int, end: int) -> int:
        """Both passes of a run, without messages."""
        forward = self.forward_sums[end] - self.forward_sums[l]
        return forward + self.backward_sums[end] - self.backward_sums[l]

    def forward_of(self, l: int, end: int, source: int) -> int:
        """The forward pass of a run with the message before it."""
        waits = self.waits[source]
        assert waits is not None
        return self.forward_sums[end] - self.forward_sums[l] + waits[l]

    def backward_of(self, l: int, end: int, source: int) -> int:
        """The backward pass of a run with the message before it, which comes from behind."""
        waits = self.waits[source]
        assert waits is not None
        return self.backward_sums[end] - self.backward_sums[l] + waits[end]


class Stage:
    """One way to hold a run of layers, for the replicas of a lump.

    first, last: of their first and last micro-batch. average: of a sample, on the average of all
    passes, or of those behind some of them. joins: of weights.
    """

    def __init__(self, chains: Chains, way: Way) -> None:
        self.chains, self.way, self.is_across = chains, way, way.where == ACROSS
        self.kind = len(chains.types) if self.is_across else way.type
        b, last = chains.lump.least, chains.last
        self.first = self.durations([[(1, b)]])
        self.last = self.durations([[(1, last)]])
        self.sources_inside = [n for n in range(5) if self.first.waits[n] is not None]
        if chains.lump.exact:
            whole = -(-chains.lump.low // b) - 1
            behind = [(1, last)]
            choices = [[(whole, b), (1, last)], behind] if whole else [behind]
        else:
            # of all numbers of rows of the largest row group, each with the most samples
            fewest, most = -(-b // way.r), -(-chains.lump.most // way.r)
            rows = range(fewest, most + 1)
            choices = [[(1, min(n * way.r, chains.lump.most))] for n in rows]
        self.average = self.durations(choices, by_samples=True)
        # ticks of the joins of the layers before l; a difference of two may be one too many
        join = self.seconds_of_join()
        self.joins = [chains.clock.down(join * size) for size in chains.joined]

    def sources(self, cut: int) -> list[int]:
        """Where a message at a cut may come from; anywhere, at the ends of the chain."""
        if cut in (0, self.chains.L):
            return [OPEN]
        return self.sources_inside

    def durations(
        self, choices: Sequence[Sequence[tuple[int, int]]], *, by_samples: bool = False
    ) -> Durations:
        """The least over choices of the sums of passes, each a number of them and their samples.
        by_samples: divided by all samples of a choice."""
        way, clock = self.way, self.chains.clock
        forward: list[Ticks] = []
        backward: list[Ticks] = []
        waits: list[list[Fraction | None]] = []
        for choice in choices:
            samples = sum(n * size for n, size in choice) if by_samples else 1
            rows = [-(-size // way.r) for _, size in choice]
            passes = [clock.passes(way.type, way.t, each) for each in rows]
            counts = [n for n, _ in choice]
            forward.append(average(counts, [p[0] for p in passes], samples))
            backward.append(average(counts, [p[1] for p in passes], samples))
            each_wait = [
                self.chains.links.waits(way, size, of_size)
                for (_, size), of_size in zip(choice, rows, strict=True)
            ]
            waits.append(
                [mean(counts, of_source, samples) for of_source in zip(*each_wait, strict=True)]
            )
        return Durations(
            [min(of_layer) for of_layer in zip(*forward, strict=True)],
            [min(of_layer) for of_layer in zip(*backward, strict=True)],
            [self.at_cuts(of_source) for of_source in zip(*waits, strict=True)],
        )

    def at_cuts(self, waits: Sequence[Fraction | None]) -> Ticks | None:
        """Ticks of a message at each cut, with the least of some seconds for each byte."""
        known = [wait for wait in waits if wait is not None]
        return self.chains.clock.messages(min(known)) if known else None

    def seconds_of_join(self) -> Fraction:
        """Seconds for each byte of weights until their holders have joined them, at least: of n
        ranks' ring 2 (n - 1) / n of the bytes leave a rank, or a node."""
        way, several = self.way, self.chains.several
        if way.where == HOME:
            if way.r == 1 and not several:
                return Fraction(0)  # nobody else holds them
            ranks = 2
        else:
            ranks = way.r + (way.where == OTHER)
        share = 2 - Fraction(2, ranks)
        return share * self.chains.links.join(way.where, way.type, way.t)


def average(counts: Sequence[int], passes: Sequence[Ticks], samples: int) -> Ticks:
    """[L] ticks of so many passes of each kind together, for each of so many samples."""
    together = [0] * len(passes[0])
    for count, ticks in zip(counts, passes, strict=True):
        together = [x + count * y for x, y in zip(together, ticks, strict=True)]
    return [x // samples for x in together]


def mean(counts: Sequence[int], waits: Sequence[Fraction | None], samples: int) -> Fraction | None:
    """The same of seconds for each byte; None where some are unknown."""
    total = Fraction(0)
    for count, wait in zip(counts, waits, strict=True):
        if wait is None:
            return None
        total += count * wait
    return total / samples


class Links:
    """What cards and links of an instance allow."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.several = len(instance.nodes) > 1
        of_types = [
            [node for node in instance.nodes if node["device"] == name] for name in instance.types
        ]
        self.of_types, self.nodes = of_types, [len(nodes) for nodes in of_types]
        self.cards = [
            sorted((Fraction(node["network_bandwidth"]) for node in nodes), reverse=True)
            for nodes in of_types
        ]
        every = sorted((card for cards in self.cards for card in cards), reverse=True)
        self.second_card = every[1] if self.several else Fraction(0)
        self.fabrics = [
            max(
                fabric
                for node, fabric in zip(instance.nodes, instance.fabrics, strict=True)
                if node["device"] == name
            )
            for name in instance.types
        ]
        self.waits = lru_cache(10_000)(self._waits)

    def _waits(self, way: Way, samples: int, rows: int) -> list[Fraction | None]:
        """Seconds for each byte of a sample until a stage has a micro-batch, by the source of the
        message; None where none can come from there. rows: of its largest row group."""
        q = way.type
        anywhere = self.from_anywhere(way, rows)
        if way.where == ACROSS:
            # all samples pass the card of the only node of another type
            single = [c[0] for k, c in enumerate(self.cards) if len(c) == 1 and k != q]
            sole = max(anywhere, samples / max(single)) if single else None
            return [None, None, None, sole, anywhere]
        # A stage beside this one in its node needs another device there.
        inside = [
            way.t * Fraction(node["intra_bandwidth"])
            for node in self.of_types[q]
            if node["devices"] > way.t * way.r
        ]
        cards = self.cards[q]
        others = [c[0] for k, c in enumerate(self.cards) if k != q]
        return [
            rows / max(inside) if inside else None,
            samples / cards[1] if len(cards) > 1 else None,
            samples / min(cards[0], max(others)) if others else None,
            max(anywhere, samples / cards[0]) if len(cards) == 1 else None,
            anywhere,
        ]

    def from_anywhere(self, way: Way, rows: int) -> Fraction:
        """Seconds for each byte of a sample until a tensor group has its rows, through its devices'
        links and its node's card."""
        seconds = []
        for node in self.of_types[way.type]:
            inside = way.t * Fraction(node["intra_bandwidth"])
            if node["devices"] <= way.t:
                inside = Fraction(0)
            card = Fraction(node["network_bandwidth"]) if self.several else Fraction(0)
            if inside:
                seconds.append(rows / inside)
            if card:  # from inside / card rows on, some may come through it meanwhile
                seconds.append(max(Fraction(rows), inside / card) / (inside + card))
        return min(seconds, default=Fraction(0))

    def join(self, where: str, q: int, t: int) -> Fraction:
        """Seconds for each byte of weights that holders join, in one node or in several."""
        cards = self.cards[q]
        if where == HOME:
            return 1 / (t * self.fabrics[q] + (cards[0] if self.several else 0))
        if not self.several:
            return Fraction(0)
        return 1 / (cards[1] if where == ACROSS and len(cards) > 1 else cards[0])
