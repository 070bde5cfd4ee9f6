"""Exact optimisation of `joint` on few devices, with a proof; a bound on more.

A best-first branch and bound divides plans by

1. layout (which devices make which stages of which replicas), schedule, chunks, recomputation;
2. samples and micro-batches of every replica;
3. cuts between stages: these plans are replayed under every ZeRO level.

Each is bounded by the longest path through its tasks without waiting for ports, and by what its
gradients and updates take behind it. evidence/speed/joint_bound.md says which plans are left out as
alike.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetplan.compiled import kernel
from hetplan.formulations.joint.bound import Ints, Relaxation, lower_bound
from hetplan.formulations.joint.data import MOST_CHUNKS, JointData, JointDecision
from hetplan.formulations.joint.design import SCHEDULES, Design, Pipe as Replica, Space
from hetplan.formulations.joint.evaluate import decision_of, plan_of
from hetplan.formulations.joint.search import Parameters as SearchParameters, search as local_search
from hetplan.plans.plan import Recomputation
from hetplan.replays.costs import UPDATE_BYTES, Floats
from hetplan.replays.simulator.pipeline import Schedule, order
from hetplan.solvers import branch_and_bound
from hetplan.solvers.branch_and_bound import Expansion, Incumbent
from hetplan.solvers.highs import check_native
from hetplan.solvers.run import Outcome, Run, Stop, stop_reason

Rows = tuple[tuple[int, ...], ...]  # devices of a stage, as in a plan file
Pipe = tuple[Rows, ...]
Taken = tuple[tuple[int, ...], int]  # devices of a stage by node, and its tensor degree


@dataclass(frozen=True)
class Parameters:
    """What is enumerated. devices: of more, only a bound is given. cuts: of one layout; layouts
    with more stay open. Of more than `at_once`, chunks are first bounded by computing alone. share:
    of the time limit, of at most `longest` seconds, for the local search; `short` steps of it where
    all is enumerated at once. rounding: of what must be better, relative."""

    devices: int = 6
    at_once: int = 5_000
    cuts: int = 500_000
    share: float = 0.5
    longest: float = 200.0
    short: int = 300
    rounding: float = 1e-9


class Node(NamedTuple):
    """Plans of a layout; with samples and micro-batch sizes, and with cuts once they are set."""

    pipes: tuple[Pipe, ...]
    schedule: Schedule
    chunks: int
    mode: Recomputation
    batches: tuple[tuple[int, int], ...] = ()  # samples and micro-batch of every replica
    cuts: tuple[tuple[int, ...], ...] = ()


def layouts(data: JointData) -> Iterator[tuple[Pipe, ...]]:
    """Ways to make replicas of stages; devices of a node, alike nodes and replicas are
    interchangeable, and so one of each is listed."""
    first = np.cumsum([0, *(node.devices for node in data.nodes)]).tolist()
    alike = [node.model_dump_json() for node in data.nodes]
    seen = set()
    for taken in replicas(data, tuple(node.devices for node in data.nodes), None):
        names: dict[int, tuple[str, int]] = {}
        for stage, _ in itertools.chain.from_iterable(taken):
            for n in np.flatnonzero(stage).tolist():
                if n not in names:
                    names[n] = alike[n], sum(kind == alike[n] for kind, _ in names.values())
        key = tuple(
            tuple((tuple((names[n], k) for n, k in enumerate(s) if k), t) for s, t in pipe)
            for pipe in taken
        )
        if not taken or key in seen:
            continue
        seen.add(key)
        free, made = list(first), []
        for pipe in taken:
            stages = []
            for counts, t in pipe:
                rows: list[tuple[int, ...]] = []
                for n, count in enumerate(counts):
                    begin, free[n] = free[n], free[n] + count
                    rows += [tuple(range(d, d + t)) for d in range(begin, begin + count, t)]
                stages.append(tuple(rows))
            made.append(tuple(stages))
        yield tuple(made)


def replicas(
    data: JointData, free: tuple[int, ...], last: tuple[Taken, ...] | None
) -> Iterator[tuple[tuple[Taken, ...], ...]]:
    """Replicas on free devices by node, in descending order, none above `last`."""
    yield ()
    for pipe, left in pipelines(data, free):
        if pipe and (last is None or pipe <= last):
            yield from ((pipe, *rest) for rest in replicas(data, left, pipe))


def pipelines(
    data: JointData, free: tuple[int, ...]
) -> Iterator[tuple[tuple[Taken, ...], tuple[int, ...]]]:
    """(stages, devices left) of one replica; also of none."""
    yield (), free
    for kind in sorted({node.device for node in data.nodes}):
        own = [node.device == kind for node in data.nodes]
        for counts in itertools.product(
            *(range(n * o + 1) for n, o in zip(free, own, strict=True))
        ):
            left = tuple(n - c for n, c in zip(free, counts, strict=True))
            for t in data.tensor_degrees if any(counts) else ():
                if not any(count % t for count in counts):
                    yield from ((((counts, t), *rest), end) for rest, end in pipelines(data, left))


@lru_cache(maxsize=1000)
def sequence(schedule: Schedule, S: int, C: int, M: int) -> Ints:
    """[2 S C M, 4] every pass (stage, backward, chunk, micro-batch), behind all that it needs."""
    queues = [np.array(order(schedule, S, s, M, C)).T.tolist() for s in range(S)]
    at, done, made = [0] * S, set[Any](), list[Any]()
    while len(made) < 2 * S * C * M:
        for s, queue in enumerate(queues):
            while at[s] < len(queue):
                backward, c, m = queue[at[s]]
                v = c * S + s
                needs = (0, v - 1, m) if not backward else (1, v + 1, m)
                if backward and v == S * C - 1:
                    needs = (0, v, m)
                if needs[1] >= 0 and needs not in done:
                    break
                done.add((backward, v, m))
                made.append((s, backward, c, m))
                at[s] += 1
    return np.array(made)


@lru_cache(maxsize=10_000)
def in_flight(schedule: Schedule, S: int, s: int, M: int, C: int, rows: int, last: int) -> Floats:
    """[moments, C] samples of each chunk that a stage keeps after its forward passes, with so many
    rows of a micro-batch and of the last one."""
    backward, chunk, batch = order(schedule, S, s, M, C)
    change = np.zeros((len(chunk), C))
    size = np.where(batch == M - 1, last, rows)
    change[np.arange(len(chunk)), chunk] = np.where(backward, -size, size)
    return np.unique(change.cumsum(axis=0)[backward == 0], axis=0)


@kernel
def longest(
    passes: Ints, seconds: Floats, hops: Floats, sent: Floats, cuts: Ints, shape: Ints
) -> Floats:
    """[N, S] when every stage has done its passes, where no port is waited for. seconds
    [S, 2, 2, L + 1, L + 1]: of a run of layers, by direction, of a micro-batch and of the last one.
    hops [V - 1, 2, 2, 2]: per byte and in all, by direction and size. sent [L + 1]; cuts
    [N, V + 1]. shape: S, M."""
    S, M = shape
    V = cuts.shape[1] - 1
    ends = np.zeros((len(cuts), S))
    done = np.zeros((2, V, M))
    for n in range(len(cuts)):
        free = np.zeros(S)
        for i in range(len(passes)):
            s, backward, c, m = passes[i]
            v, size = c * S + s, int(m == M - 1)
            here, start = v - 1 + backward, free[s]
            if here >= 0 and here < V - 1:
                start = max(start, done[backward, v + 1 if backward else v - 1, m])
                hop = hops[here, backward, size]
                start += hop[0] * sent[cuts[n, here + 1]] + hop[1]
            start += seconds[s, backward, size, cuts[n, v], cuts[n, v + 1]]
            done[backward, v, m] = free[s] = start
        ends[n] = free
    return ends


@dataclass
class Search:
    """What the steps share."""

    data: JointData
    run: Run
    parameters: Parameters
    incumbent: Incumbent[JointDecision]
    space: Space
    relaxation: Relaxation
    replays: int = 0
    tables: dict[Any, Any] = field(default_factory=dict)

    def begin(self, starts: Sequence[JointDecision], steps: int | None) -> None:
        """A plan from the local search, in a part of the time and at most so many steps (None: its
        own number)."""
        limit = self.parameters.share * min(self.run.remaining, self.parameters.longest)
        part = self.run.part(time_limit=limit)
        parameters = None if steps is None else SearchParameters(steps=steps)
        outcome = local_search(self.data, part, starts, parameters)
        if outcome.decision is not None:
            plan = plan_of(self.data, outcome.decision)
            self.incumbent.offer(self.space.replayer.seconds(plan), outcome.decision)

    def seconds(self, rows: Rows, mode: Recomputation, samples: int) -> Floats:
        """[2, L + 1, L + 1] of a pass over every run of layers."""
        costs, L = self.space.replayer.costs(mode), len(self.data.layers)
        kinds = tuple((costs.kind[row[0]], costs.node[row[0]]) for row in rows)
        key = (kinds, len(rows[0]), mode, samples)
        if key not in self.tables:
            stage, made = self.space.stage(rows, (0, 1)), np.zeros((2, L + 1, L + 1))
            for a, b in itertools.combinations(range(L + 1), 2):
                joined = costs.reduces(stage, (a, b), samples)
                both = zip(costs.passes(stage, (a, b), samples), joined, strict=True)
                made[:, a, b] = [alone + more.seconds for alone, more in both]
            self.tables[key] = made
        return np.asarray(self.tables[key])

    def hop(self, here: Rows, there: Rows, samples: int) -> tuple[float, float]:
        """Seconds per byte of one sample's activation, and in all."""
        largest = int(np.argmax(self.relaxation.sent[0][1:]))
        size = self.data.layers[largest].activation_bytes
        first, second = (self.space.stage(rows, (0, 1)) for rows in (here, there))
        sent = self.space.replayer.costs("none").transfer(first, second, largest, samples)
        return (sent.seconds / size if size else 0.0), sent.latency

    def behind(self, node: Node, i: int) -> Floats:
        """[S] seconds per byte of weights behind the last passes of a replica's stages."""
        own = node.pipes[i]
        others = [pipe for k, pipe in enumerate(node.pipes) if k != i]
        ranks = sum(len(rows) for pipe in node.pipes for rows in pipe)
        rates = []
        for rows in own:
            curve = self.data.types[self.space.kind[rows[0][0]]].update
            moved = UPDATE_BYTES / self.data.element_bytes / len(rows[0])
            update = moved / (curve.bytes_per_second * max(curve.share))
            if len(rows) == 1 and not others:
                rates.append(update)
                continue
            sets = [(rows, *partners) for partners in itertools.product(*others)]
            loads = [self.loads([row for rows in holders for row in rows]) for holders in sets]
            ports = set(loads[0]).intersection(*loads[1:])  # several collectives take turns there
            rate = max(min(load[port] for load in loads) for port in ports) if ports else 0.0
            rates.append(rate * self.relaxation.grown + update / ranks)
        return np.array(rates)

    def loads(self, groups: Sequence[tuple[int, ...]]) -> dict[int, float]:
        """Seconds per byte of weights for which row groups that join them hold each port."""
        costs, width = self.space.replayer.costs("none"), max(map(len, groups))
        rings = [[group[r * len(group) // width] for group in groups] for r in range(width)]
        ring = costs.ring(rings, 1e9 / width)
        return {port: share * ring.seconds / 1e9 for port, share in ring.ports}

    def paths(self, node: Node, i: int, g: int, b: int) -> tuple[Ints, Floats]:
        """(cuts [N, V + 1], bounds [N]) of a replica that takes g samples, b at a time."""
        pipe, C = node.pipes[i], node.chunks
        S, M, L = len(pipe), -(-g // b), len(self.data.layers)
        sizes = (b, g - (M - 1) * b)
        seconds = np.stack(
            [np.stack([self.seconds(rows, node.mode, n) for n in sizes], axis=1) for rows in pipe]
        )
        hops = np.zeros((max(S * C - 1, 1), 2, 2, 2))
        if S > 1:
            for v, size in itertools.product(range(S * C - 1), range(2)):
                here, there = pipe[v % S], pipe[(v + 1) % S]
                hops[v, 0, size] = self.hop(here, there, sizes[size])
                hops[v, 1, size] = self.hop(there, here, sizes[size])
        cuts = all_cuts(L, S * C)
        passes = sequence(node.schedule, S, C, M)
        ends = longest(passes, seconds, hops, self.relaxation.sent[0], cuts, np.array([S, M]))
        params = np.array(self.space.replayer.costs("none").param_sums)[cuts]
        held = np.diff(params, axis=1).reshape(len(cuts), C, S).sum(axis=1)
        starts = [
            self.data.types[self.space.kind[rows[0][0]]].update.start_seconds for rows in pipe
        ]
        bounds = (ends + held * self.behind(node, i) + starts).max(axis=1)
        bounds[self.crowded(node, i, g, b, cuts, held)] = np.inf
        return cuts, np.asarray(bounds)

    def crowded(
        self, node: Node, i: int, g: int, b: int, cuts: Ints, held: Floats
    ) -> NDArray[np.bool_]:
        """[N] whether some stage's states and what it keeps from forward to backward passes are
        more than its memory under every ZeRO level."""
        M = -(-g // b)
        data, pipe, costs = self.data, node.pipes[i], self.space.replayer.costs(node.mode)
        share = 1 / sum(len(rows) for pipe in node.pipes for rows in pipe)
        deepest = 3 if max(map(len, node.pipes)) == 1 else max(data.framework.pipeline_levels)
        states = min(
            sum(data.framework.held_bytes(1.0, 0.0, data.element_bytes, level, share)[:3])
            for level in range(deepest + 1)
        )
        full = np.zeros(len(cuts), bool)
        for s, rows in enumerate(pipe):
            width, sizes = len(rows[0]), [-(-n // len(rows)) for n in (b, g - (M - 1) * b)]
            flying = in_flight(node.schedule, len(pipe), s, M, node.chunks, *sizes)
            sums = [costs.saved_bytes((0, l), width) for l in range(len(data.layers) + 1)]
            kept = (np.diff(np.array(sums)[cuts], axis=1)[:, s :: len(pipe)] @ flying.T).max(axis=1)
            if s == len(pipe) - 1:
                kept = kept - b / len(rows) * data.logit_bytes / width
            room = data.types[costs.kind[rows[0][0]]].memory_bytes * (1 + 1e-9)
            full |= held[:, s] * states / width + np.maximum(kept, 0.0) > room
        return full

    def quick(self, node: Node) -> float:
        """No plan of the layout is faster: stages share the layers at their best speeds."""
        speed = 0.0
        for pipe in node.pipes:
            best = 0.0
            for b in range(1, self.data.global_batch + 1):
                each = [self.seconds(rows, node.mode, b)[:, 0, -1].sum() for rows in pipe]
                best = max(best, sum(b / seconds if seconds else np.inf for seconds in each))
            speed += best
        return float(self.data.global_batch / speed) if speed < np.inf else 0.0

    def many(self, node: Node, limit: int) -> bool:
        """Whether there are more cuts than that."""
        widest = max(map(len, node.pipes)) * node.chunks
        return math.comb(len(self.data.layers) - 1, widest - 1) > limit

    def options(self, node: Node, i: int, g: int) -> list[tuple[float, int]]:
        """(bound, micro-batch) of a replica that takes g samples."""
        key = (i, *node[:4], g)
        if key not in self.tables:
            made, rounds = [], len(node.pipes[i]) if node.schedule == "interleaved-1f1b" else 1
            for b in (size for size in range(1, g + 1) if -(-g // size) % rounds == 0):
                self.run.check()
                if node.chunks > 1 and self.many(node, self.parameters.at_once):
                    made.append((self.quick(node), b))
                else:
                    made.append((float(self.paths(node, i, g, b)[1].min()), b))
            self.tables[key] = sorted(made)
        return list(self.tables[key])

    def batches(
        self, node: Node, left: int, limit: float
    ) -> Iterator[tuple[float, tuple[tuple[int, int], ...]]]:
        """(bound, samples and micro-batch of every replica) of all that may cost less."""
        i = len(node.batches)
        more = len(node.pipes) - i - 1
        if more < 0:
            yield 0.0, ()
            return
        for g in range(1, left - more + 1) if more else (left,):
            for bound, b in self.options(node, i, g):
                if not bound < limit:
                    break
                longer = node._replace(batches=(*node.batches, (g, b)))
                yield from (
                    (max(bound, other), ((g, b), *rest))
                    for other, rest in self.batches(longer, left - g, limit)
                )

    def expand(self, node: Node, threshold: float) -> Expansion[Node]:
        """The node's children; a plan is replayed."""
        if node.cuts:
            return self.replay(node)
        if not node.batches:
            if self.many(node, self.parameters.cuts) and node.chunks == 1:
                return Expansion(dropped_bound=self.quick(node))
            every = self.batches(node, self.data.global_batch, threshold)
            return Expansion([(bound, node._replace(batches=batches)) for bound, batches in every])
        if self.many(node, self.parameters.cuts):
            return Expansion(dropped_bound=0.0)  # its own
        sets = []
        for i, (g, b) in enumerate(node.batches):
            cuts, bounds = self.paths(node, i, g, b)
            less = np.flatnonzero(bounds < threshold)
            sets.append([(float(bounds[n]), tuple(cuts[n].tolist())) for n in less])
        return Expansion(self.products(node, sets), progress=True)

    def products(
        self, node: Node, sets: list[list[tuple[float, tuple[int, ...]]]]
    ) -> Iterator[tuple[float, Node]]:
        """(bound, plan) of every choice of cuts, one of each set."""
        for each in itertools.product(*sets):
            self.run.check()
            yield max(bound for bound, _ in each), node._replace(cuts=tuple(c for _, c in each))

    def replay(self, node: Node) -> Expansion[Node]:
        """Offers the plan under every ZeRO level."""
        pipes = tuple(
            Replica(pipe, cuts[1:-1], b, g)
            for pipe, (g, b), cuts in zip(node.pipes, node.batches, node.cuts, strict=True)
        )
        in_step = max(map(len, node.pipes)) == node.chunks == 1
        for zero in range(4 if in_step else min(max(self.data.framework.pipeline_levels), 3) + 1):
            if zero > 1 and len({pipe.steps for pipe in pipes}) > 1:
                break
            plan = self.space.plan(Design(pipes, node.schedule, node.chunks, zero, node.mode))
            self.replays += 1
            replayed = self.space.replayer.replay(plan)
            if replayed.fits and replayed.seconds < self.incumbent.objective:
                self.incumbent.offer(replayed.seconds, decision_of(plan))
        return Expansion(progress=True)


@cache
def all_cuts(layers: int, runs: int) -> Ints:
    """[N, runs + 1] ways to cut a chain of layers."""
    inner = list(itertools.combinations(range(1, layers), runs - 1))
    cuts = np.zeros((len(inner), runs + 1), np.int64)
    cuts[:, 1:-1] = np.array(inner, np.int64).reshape(len(inner), runs - 1)
    cuts[:, -1] = layers
    return cuts


def solve(
    data: JointData,
    run: Run,
    parameters: Parameters = Parameters(),
    starts: Sequence[JointDecision] = (),
) -> Outcome[JointDecision]:
    """The fastest plan with its proof, or the best one so far and a bound when time runs out.
    starts: plans that the local search begins with."""
    from hetplan import __version__

    check_native(run.options)
    incumbent = Incumbent[JointDecision](run, parameters.rounding)
    search = Search(data, run, parameters, incumbent, Space(data), Relaxation(data))
    devices, inner = sum(node.devices for node in data.nodes), len(data.layers) - 1
    few = devices <= parameters.devices
    large = math.comb(inner, min(MOST_CHUNKS * devices - 1, inner // 2)) > parameters.cuts
    search.begin(starts, None if large or not few else parameters.short)
    general, part = 0.0, run.part(time_limit=parameters.share * run.remaining) if few else run
    if large or not few:
        general = lower_bound(search.relaxation, part, incumbent.objective)
    roots = []
    for pipes in layouts(data) if few else ():
        deepest, enough = max(map(len, pipes)), len(pipes) <= data.global_batch
        for (schedule, C), mode in itertools.product(SCHEDULES, data.modes):
            as_1f1b = deepest == C == 1 and schedule == "interleaved-1f1b"
            if enough and deepest * C <= len(data.layers) and not as_1f1b:
                node = Node(pipes, schedule, C, mode)
                # out of time: 0 bounds every node
                roots.append((0.0 if run.should_stop else search.quick(node), node))
    proof = branch_and_bound.search(roots, search.expand, incumbent, run)
    stop, bound = stop_reason(run), max(general, proof.bound or 0.0 if few else 0.0) or None
    if few and proof.proven:
        stop, bound = Stop.INFEASIBLE if proof.empty else Stop.OPTIMAL, proof.bound
    return Outcome(
        stop=stop,
        decision=incumbent.decision,
        bound=bound,
        solver=f"hetplan {__version__}",
        message="no plan fits into memory" if stop is Stop.INFEASIBLE else "",
        details={"layouts": len(roots), "nodes": proof.expanded, "replays": search.replays},
    )
