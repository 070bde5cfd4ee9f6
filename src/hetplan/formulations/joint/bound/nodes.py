"""A bound by nodes: a linear programme of what nodes compute, receive and join.

It sees what the inequalities of single stages cannot see: layers that several nodes hold are joined
through the few cards of these nodes, and all their seconds add up. evidence/speed/joint_bound.md,
Section 7, proves it.

Weights that several devices hold are joined after their last backward pass: a ring over these
devices sums the gradients, or ZeRO shares gradients and weights.

Sets   k nodes, l layers. Homes hold some layer alone. Cases: the homes; one replica, or several
       (R = 1 or 2); one chunk, or several (C = 1 or 2).
Data   n[k] devices; c[k] bytes per second that a card receives; I[k] bytes per second that a ring
       inside the node joins; G samples; w[l, k] least device-seconds of a sample; f[l, k] those of
       its forward pass alone; W[l] bytes of weights that are joined; a[l] bytes of an activation
       that enters layer l; tied: bytes of weights that the first layer shares with a later one, e.
Decide u[l, k] share of a layer's samples that a node computes; x[l, k] it alone holds the layer;
       y[l, k] it and others hold it; s[l] the layer is shared; v[l, k], z[l, k] shares of samples
       that enter the node before layer l, forward and backward; t[k] whether tied weights are
       joined through the card; first: when the last forward pass ends; T.
Min    T, subject to
(1) sum_k u = 1, sum_k x + s = 1, sum_k y >= 2 s, y <= s, x <= u <= x + y; x = 0 but in homes, and
    every home holds a layer alone. One replica: a shared layer has holders of one type.
(2) v[l, k] >= u[l, k] - u[l - 1, k], z[l, k] >= u[l - 1, k] - u[l, k]
(3) sum_l G w u + waits[k] + rings[k] + [R > 1] sum_l 2 (R - 1) W x / I <= n T,
    waits[k] = sum_l G a (v + z) / c, rings[k] = sum_l W y / c
(4) sum_l G f u + sum_l G a v / c <= n first
(5) first + rings[k] + tied t[k] / c <= T and waits[k] + rings[k] + tied t[k] / c <= T
(6) t[k] >= x[0, k] - x[e, k], t[k] >= x[e, k] - x[0, k] - y[0, k]
(7) several homes, and k is one of them: (3) and (5) with (2 C - 1) G min(a) / c for waits[k]

The linear programme treats alike nodes as one with the sum of their shares: if they differ, their
mean is a solution, too. With whole x, y and s every node has shares of its own.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.joint.bound.tables import Homes, NodeClass, Relaxation
from hetplan.replays.arrays import Floats
from hetplan.solvers.expressions import Linear
from hetplan.solvers.general import minimise
from hetplan.solvers.highs import iteration_seconds
from hetplan.solvers.model import SMALLEST, Model
from hetplan.solvers.run import NativeValue, Run, Stop

# Larger coefficients of a share are lowered to this, which only relaxes a row. In the model's unit,
# the seconds of computing alone, a share of a millionth then takes 1.
LARGEST_COEFFICIENT = 1e6


class NodeModel:
    """The bounds by nodes of one instance, computed when they are asked for.

    A case is homes, whether there are several replicas, and whether a stage has several chunks.

    alone: seconds that computing alone takes, which are the model's unit. run: HiGHS ends with it.
    Iterations of the simplex count towards its budget, and the budget limits them, so that a clock
    does not decide what the bound is.
    """

    def __init__(self, of: Relaxation, alone: float, run: Run) -> None:
        self.of, self.unit, self.run = of, alone, run
        self.known: dict[tuple[Homes, bool, bool], float] = {}
        # Iterations of the simplex that the linear programme of a case took.
        self.iterations: dict[tuple[Homes, bool, bool], int] = {}

    def seconds(self, homes: Homes, several: bool, chunks: bool) -> float:
        """Seconds that no plan of this case replays below. At least those of computing alone."""
        case = homes, several, chunks
        if case not in self.known:
            self.known[case] = self.by_linear_programme(homes, several, chunks)
        return self.known[case]

    def by_linear_programme(self, homes: Homes, several: bool, chunks: bool) -> float:
        """The bound by the linear programme, as `seconds` keeps it."""
        one_node = not self.of.several  # then no card is in use
        if self.unit <= 0 or one_node:
            return self.unit
        programme = NodeProgramme(self.of, homes, several, chunks, self.unit, whole=False)
        most = self.most_iterations(programme)
        limits = {} if most is None else {"simplex_iteration_limit": most}
        seconds, iterations = self.minimum(programme, limits)
        self.iterations[homes, several, chunks] = iterations
        return seconds

    def whole(self, homes: Homes, several: bool, chunks: bool, nodes: int) -> float:
        """`seconds` with whole x, y and s, after at most `nodes` nodes of HiGHS's search tree, and
        no more than the budget allows. Where the homes are not chosen, `seconds` itself: the tree
        would be too large."""
        linear = self.seconds(homes, several, chunks)
        iterations = self.iterations.get((homes, several, chunks), 0)
        if not homes.chosen or not iterations:
            return linear
        programme = NodeProgramme(self.of, homes, several, chunks, self.unit, whole=True)
        most = self.most_iterations(programme)
        if most is not None:
            # A node takes no more iterations than the linear programme did, on the average.
            nodes = min(nodes, most // iterations)
        if nodes < 1:
            return linear
        seconds, _ = self.minimum(programme, {"mip_max_nodes": nodes})
        return max(linear, seconds)

    def most_iterations(self, programme: "NodeProgramme") -> int | None:
        """The iterations of the simplex that are left of the budget; None without a budget."""
        if self.run.budget is None:
            return None
        return int(self.run.remaining / iteration_seconds(programme.model))

    def minimum(
        self, programme: "NodeProgramme", limits: Mapping[str, NativeValue]
    ) -> tuple[float, int]:
        """(the bound that HiGHS proves of a programme, iterations of the simplex), which count
        towards the budget. limits: HiGHS's options for them."""
        run_left = self.run.part()
        native = {"highs": {**run_left.options.native.get("highs", {}), **limits}}
        run = Run(replace(run_left.options, native=native), cancel=run_left.cancel)
        answer = minimise("milp", programme.model, run, lambda incumbent, bound: None)
        iterations = int(str(answer.statistics.get("iterations", 0)))
        self.run.count(iterations * iteration_seconds(programme.model))
        if answer.stop is Stop.INFEASIBLE:
            return math.inf, iterations
        return self.unit * max(1.0, answer.bound or 0.0), iterations


class NodeProgramme:
    """The programme of one case, stated with `solvers.model`.

    kinds: [K] nodes that have one share for all of them. one_of_homes: [K] whether they are one of
    several homes. turns: 2 C - 1.
    """

    def __init__(
        self, of: Relaxation, homes: Homes, several: bool, chunks: bool, unit: float, *, whole: bool
    ) -> None:
        self.of, self.several, self.unit = of, several, unit
        self.turns = 2 * (2 if chunks else 1) - 1
        self.kinds, is_home = node_kinds(of, homes, whole)
        self.one_of_homes = is_home & (sum(homes.chosen) > 1)
        layers, K = len(of.data.layers), len(self.kinds)
        self.count = np.array([kind.nodes for kind in self.kinds], dtype=float)
        self.devices = self.count * [kind.devices for kind in self.kinds]
        self.card = np.array([kind.card for kind in self.kinds])
        model = self.model = Model("nodes")
        block = model.binary if whole else model.continuous
        self.u = model.continuous("computes", (layers, K))
        self.x, self.y = block("alone", (layers, K)), block("together", (layers, K))
        self.s = model.continuous("shared", layers)
        self.v = model.continuous("enters", (layers, K))
        self.z = model.continuous("returns", (layers, K))
        self.t = model.continuous("tied", K)
        self.first, self.T = model.continuous("first"), model.continuous("T")
        if homes.chosen:
            for k in np.flatnonzero(~is_home):
                model.fix(self.x[:, k], 0.0)
        self.hold_every_layer(is_home)
        self.move_samples()
        self.fill_devices()
        self.end_forward_passes()
        self.fill_cards()
        self.join_tied_weights()
        model.minimize(self.T)

    def hold_every_layer(self, is_home: NDArray[np.bool_]) -> None:
        """(1). is_home: see `node_kinds`."""
        model, u, x, y, s = self.model, self.u, self.x, self.y, self.s
        model.row("computed", u.sum(axis=1) == 1)
        model.row("held", x.sum(axis=1) + s == 1)
        model.row("some", x <= u)
        model.row("only", u <= x + y)
        model.row("shared", y <= self.count * s[:, None])
        for k in np.flatnonzero(is_home):
            model.row("home", x[:, k].sum() >= self.count[k])
        if self.several:
            model.row("two", y.sum(axis=1) >= 2 * s)
        else:
            self.share_within_types()

    def share_within_types(self) -> None:
        """(1) of one replica: the stage of a shared layer is across nodes of its type."""
        model, y, s = self.model, self.y, self.s
        types = np.array([kind.q for kind in self.kinds])
        of_type = model.continuous("of_type", (len(self.of.data.layers), len(self.of.types)))
        model.row("one_type", of_type.sum(axis=1) == s)
        for q, nodes in enumerate(self.of.nodes):
            of_this = np.flatnonzero(types == q)
            if len(nodes) == 1:
                model.fix(of_type[:, q], 0.0)
            model.row("two", y[:, of_this].sum(axis=1) >= 2 * of_type[:, q])
            model.row("type", y[:, of_this] <= self.count[of_this] * of_type[:, q][:, None])

    def move_samples(self) -> None:
        """(2)."""
        later, earlier = self.u[1:], self.u[:-1]
        self.model.row("forward", self.v[1:] >= later - earlier)
        self.model.row("backward", self.z[1:] >= earlier - later)

    def fill_devices(self) -> None:
        """(3), and the row that (7) makes of it."""
        joined = np.diff(self.of.sent[1])
        busy = (self.work * self.u).sum(axis=0) + self.rings
        if self.several:
            inside = np.array([kind.fabric for kind in self.kinds])
            busy = busy + (self.in_units(2 * joined[:, None] / inside) * self.x).sum(axis=0)
        self.model.row("devices", busy + self.waits <= self.devices * self.T)
        self.model.row("turns", busy + self.entered <= self.devices * self.T)

    def end_forward_passes(self) -> None:
        """(4)."""
        entered = (self.messages * self.v).sum(axis=0)
        passes = (self.forward * self.u).sum(axis=0)
        self.model.row("first", passes + entered <= self.devices * self.first)

    def fill_cards(self) -> None:
        """(5), and the row that (7) makes of its second inequality."""
        rings = self.rings + self.in_units(self.of.tied / self.card) * self.t
        self.model.row("behind", self.count * self.first + rings <= self.count * self.T)
        self.model.row("cards", self.waits + rings <= self.count * self.T)
        self.model.row("homes", self.entered + rings <= self.count * self.T)

    def join_tied_weights(self) -> None:
        """(6)."""
        for layer, data in enumerate(self.of.data.layers):
            if layer and data.tied_param_bytes:
                first, other = self.x[0], self.x[layer]
                self.model.row("tied_first", self.t >= first - other)
                self.model.row("tied_other", self.t >= other - first - self.y[0])

    def in_units(self, seconds: Floats) -> Floats:
        """Coefficients of seconds in the model's unit. Those that a solver would drop are 0."""
        scaled = np.minimum(seconds / self.unit, LARGEST_COEFFICIENT)
        return np.where(scaled >= SMALLEST, scaled, 0.0)

    @cached_property
    def work(self) -> Floats:
        """[L, K] G w."""
        G = self.of.data.global_batch
        return self.in_units(G * np.array([self.of.least_work(k.q) for k in self.kinds]).T)

    @cached_property
    def forward(self) -> Floats:
        """[L, K] G f."""
        G = self.of.data.global_batch
        least = [self.of.least_forward_work(kind.q) for kind in self.kinds]
        return self.in_units(G * np.array(least).T)

    @cached_property
    def messages(self) -> Floats:
        """[L, K] G a / c of the activation that enters layer l."""
        entering = self.of.data.global_batch * self.of.sent[0][:-1]
        return self.in_units(entering[:, None] / self.card)

    @cached_property
    def entered(self) -> Floats:
        """[K] (2 C - 1) G min(a) / c where there are several homes and this is one of them."""
        least = self.of.least_sent if math.isfinite(self.of.least_sent) else 0.0
        seconds = self.turns * self.of.data.global_batch * least / self.card
        return self.in_units(self.one_of_homes * self.count * seconds)

    @cached_property
    def waits(self) -> Linear:
        """[K] seconds for which samples enter through the cards."""
        return (self.messages * self.v).sum(axis=0) + (self.messages * self.z).sum(axis=0)

    @cached_property
    def rings(self) -> Linear:
        """[K] seconds for which shared layers are joined through the cards."""
        joined = np.diff(self.of.sent[1])[:, None]
        return (self.in_units(joined / self.card) * self.y).sum(axis=0)


def node_kinds(
    of: Relaxation, homes: Homes, whole: bool
) -> tuple[list[NodeClass], NDArray[np.bool_]]:
    """(nodes, whether they are homes): alike nodes together, homes apart from the others; each node
    by itself where x is whole. No node is a home where the homes are not chosen."""
    kinds, home = [], []
    chosen = homes.chosen or (0,) * len(of.node_classes)
    for alike, here in zip(of.node_classes, chosen, strict=True):
        for is_home, count in ((True, here), (False, alike.nodes - here)):
            groups = [count] if count > 0 else []
            if whole:
                groups = [1] * count
            kinds += [alike._replace(nodes=group) for group in groups]
            home += [is_home] * len(groups)
    return kinds, np.array(home, bool)
