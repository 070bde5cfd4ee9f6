"""What AMP is compared with: Megatron's rules (§4.1), random strategies (§4.5), annealing (§4.2).

The first two list a few strategies, price each exactly, as a real trial would, and return the
fastest that fits in memory; the mean over those that fit stands in `details`, since the paper
reports least and mean (Tables 3-5).

Simulated annealing goes over placements. A state is a tile (h, w), a random tiling of the node x
device grid by it, a tensor degree and a micro-batch. Each tile is a stage of h w devices, read row
by row: tensor ranks lie next to each other.
Neighbour: another divisor for h or for w, with a random tiling, tensor degree and micro-batch.
Temperature 10 (1 - i/50) seconds in step i of 50; a worse neighbour is taken with chance exp(-rise
/ T).
Energy: the exact T with the cut of the slowest pipeline (cuts.try_placement); +inf where none fits
in memory.
Generalised to nodes of unequal size: the grid is folded to rows of the sizes' common divisor.
(Exchanges of two devices in half of the steps were better on 4 of 16 such instances, with six and
eight devices, and worse on 8; there are none.)
Source AMP (NeurIPS 2022), §4.2, §6.3, and the annealing of its published code.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from hetplan.formulations.amp.cuts import parameter_cut, try_placement, uniform_cut
from hetplan.formulations.amp.data import AmpData, AmpDecision
from hetplan.formulations.amp.problem import (
    NO_CONFIGURATION,
    AmpProblem,
    Configuration,
    Ints,
    Strategy,
    by_node,
    compile_problem,
    divisors,
    megatron_placement,
    place,
)
from hetplan.solvers.branch_and_bound import Incumbent
from hetplan.solvers.run import Outcome, Run, Stop, stop_reason
from hetplan.text import grouped

# How many random strategies the paper tries (§4.5).
DRAWS = 50
# Annealing, as in the published code: steps, and seconds of the first temperature.
STEPS = 50
START_TEMPERATURE = 10.0
# Attempts at a random tiling before the straight one serves.
TILINGS = 20


@dataclass(frozen=True)
class Trial:
    """A strategy and its exact T in seconds; None where it does not fit in memory."""

    strategy: Strategy
    seconds: float | None


def try_out(problem: AmpProblem, strategy: Strategy) -> Trial:
    """Price one strategy."""
    placed = place(problem, strategy.configuration, strategy.placement)
    return Trial(strategy, placed.seconds(strategy.cut) if placed.fits(strategy.cut) else None)


def megatron(data: AmpData, run: Run) -> Outcome[AmpDecision]:
    """Megatron's rules (§4.1): least tensor x pipeline, tensor groups in nodes, equal layers or
    parameters.

    For each micro-batch size, of the degrees whose tensor groups are no larger than the smallest
    node, those with the least tp pp (with memory: the least at which a strategy fits) in Megatron's
    order, each cut both by the number of layers and by parameters.
    """
    return best_of(
        data, run, megatron_trials, "no usable degrees with tensor groups within the smallest node"
    )


def megatron_trials(data: AmpData, problem: AmpProblem, run: Run) -> Iterator[Trial]:
    """Megatron's proposals, micro-batch after micro-batch; those too big for the memory
    included."""
    nodes = [device.node for device in data.devices]
    smallest = min(map(len, by_node(nodes)))
    allowed = [chosen for chosen in problem.configurations() if chosen.tensor <= smallest]
    allowed.sort(key=lambda each: (each.micro_batch, each.tensor * each.pipeline))
    for _, same_batch in groupby(allowed, key=lambda each: each.micro_batch):
        for _, same_product in groupby(same_batch, key=lambda each: each.tensor * each.pipeline):
            trials = [
                try_out(problem, Strategy(chosen, megatron_placement(nodes, chosen), cut))
                for chosen in same_product
                for cut in (
                    uniform_cut(problem.layers, chosen.pipeline),
                    parameter_cut(problem.params, chosen.pipeline),
                )
            ]
            yield from trials
            if run.should_stop:
                return
            if any(trial.seconds is not None for trial in trials):
                break


def random(data: AmpData, run: Run) -> Outcome[AmpDecision]:
    """The best of 50 strategies drawn at random: configuration, bijection and cut, each uniformly
    (§4.5).

    Draws that do not fit in memory count as draws; the run's seed decides them all.
    """
    return best_of(data, run, random_trials, NO_CONFIGURATION)


def random_trials(data: AmpData, problem: AmpProblem, run: Run) -> Iterator[Trial]:
    """50 random strategies."""
    rng = np.random.default_rng(run.options.seed)
    choices = list(problem.configurations())
    for _ in range(DRAWS if choices else 0):
        yield try_out(problem, random_strategy(problem, choices[rng.integers(len(choices))], rng))
        if run.should_stop:
            return


def random_strategy(
    problem: AmpProblem, chosen: Configuration, rng: np.random.Generator
) -> Strategy:
    """A uniformly random bijection and a uniformly random cut for `chosen`."""
    shape = (chosen.pipeline, chosen.data, chosen.tensor)
    inner = 1 + np.sort(rng.choice(problem.layers - 1, size=chosen.pipeline - 1, replace=False))
    return Strategy(
        chosen,
        rng.permutation(problem.devices).reshape(shape),
        np.concatenate([[0], inner, [problem.layers]]).astype(np.int64),
    )


def best_of(
    data: AmpData,
    run: Run,
    trials: Callable[[AmpData, AmpProblem, Run], Iterator[Trial]],
    nothing: str,
) -> Outcome[AmpDecision]:
    """The fastest of a rule's strategies that fits, and how the others did; proves no bound.

    nothing: the message where the rule lists no strategy at all.
    """
    problem = compile_problem(data)
    count, fitting = 0, list[tuple[float, Strategy]]()
    for trial in trials(data, problem, run):
        count += 1
        if trial.seconds is not None:
            fitting.append((trial.seconds, trial.strategy))
            run.report(incumbent=trial.seconds)
    details: dict[str, object] = {"strategies": count, "fitting": len(fitting)}
    best = None
    if fitting:
        best = min(fitting, key=lambda each: each[0])[1].decision()
        details["mean_seconds"] = sum(seconds for seconds, _ in fitting) / len(fitting)
    reason = f"none of {count} strategies fits in memory" if count else nothing
    return Outcome(
        stop=stop_reason(run) if run.should_stop else Stop.DONE,
        decision=best,
        message="" if best else reason,
        details=details,
    )


@dataclass(frozen=True)
class State:
    """A tile, the configuration that it carries, and the devices [pp, dp, tp]."""

    tile: tuple[int, int]
    configuration: Configuration
    placement: Ints


class Moves:
    """Random states and neighbours for one instance."""

    def __init__(self, data: AmpData, problem: AmpProblem, rng: np.random.Generator) -> None:
        nodes = [device.node for device in data.devices]
        self.rng = rng
        self.grid = device_grid(nodes)
        # by devices per stage
        self.configurations = grouped((c.data * c.tensor, c) for c in problem.configurations())
        rows, columns = map(divisors, self.grid.shape)
        self.tiles = [(h, w) for h in rows for w in columns if h * w in self.configurations]

    def start(self) -> State:
        """Any tile and any tiling. A stage of n devices always has a tile: h = gcd(n, rows), w = n
        / h."""
        return self.with_tile(self.tiles[self.rng.integers(len(self.tiles))])

    def with_tile(self, tile: tuple[int, int]) -> State:
        """A random tiling, tensor degree and micro-batch for `tile`."""
        choices = self.configurations[tile[0] * tile[1]]
        chosen = choices[self.rng.integers(len(choices))]
        shape = (self.grid.shape[0], self.grid.shape[1])
        stages = [self.grid[area].reshape(-1) for area in random_tiling(shape, tile, self.rng)]
        placement = np.stack(stages).reshape(chosen.pipeline, chosen.data, chosen.tensor)
        return State(tile, chosen, placement)

    def neighbour(self, state: State) -> State:
        """Another tile that shares one coordinate (any tile where there is none)."""
        near = [
            tile for tile in self.tiles if (tile[0] == state.tile[0]) != (tile[1] == state.tile[1])
        ]
        near = near or self.tiles
        return self.with_tile(near[self.rng.integers(len(near))])


def annealing(data: AmpData, run: Run) -> Outcome[AmpDecision]:
    """The best state seen in 50 steps; the run's seed decides them all. Proves no bound."""
    problem = compile_problem(data)
    moves = Moves(data, problem, np.random.default_rng(run.options.seed))
    incumbent = Incumbent[Strategy](run)
    accepted = step = 0
    if moves.tiles:
        state = moves.start()
        energy = energy_of(problem, state, incumbent)
        while step < STEPS and not run.should_stop:
            candidate = moves.neighbour(state)
            energy_there = energy_of(problem, candidate, incumbent)
            temperature = START_TEMPERATURE * (1 - step / STEPS)
            if accepts(energy, energy_there, temperature, moves.rng.random()):
                state, energy = candidate, energy_there
                accepted += 1
            step += 1
    best = incumbent.decision
    reason = f"none of {step + 1} placements fits in memory" if moves.tiles else NO_CONFIGURATION
    return Outcome(
        stop=stop_reason(run) if run.should_stop else Stop.DONE,
        decision=None if best is None else best.decision(),
        message="" if best else reason,
        details={"steps": step, "accepted": accepted},
    )


def accepts(energy: float, energy_there: float, temperature: float, draw: float) -> bool:
    """Metropolis' rule: a better or equal neighbour always, a worse one where `draw` < exp(-rise /
    T).

    Both +inf (nothing fits in memory) count as equal: any move is as good as staying.
    """
    return energy_there <= energy or draw < math.exp((energy - energy_there) / temperature)


def energy_of(problem: AmpProblem, state: State, incumbent: Incumbent[Strategy]) -> float:
    """T of a state with its best cut, which may be the incumbent; +inf where no cut fits in
    memory."""
    priced = try_placement(problem, state.configuration, state.placement)
    if priced is None:
        return math.inf
    incumbent.offer(*priced)
    return priced[0]


def device_grid(nodes: Sequence[int]) -> Ints:
    """Devices [rows, columns]: a row per node where nodes are equal, else rows of the common
    divisor.

    Every row lies within a node, so a rectangle w wide uses w neighbours; nodes [D] names each
    device's node.
    """
    members = by_node(nodes)
    return np.array([device for node in members for device in node], dtype=np.int64).reshape(
        -1, math.gcd(*map(len, members))
    )


def random_tiling(
    shape: tuple[int, int], tile: tuple[int, int], rng: np.random.Generator
) -> list[tuple[slice, slice]]:
    """A random tiling of a grid by `tile` (h, w), each one upright or turned, ordered by their
    first cells.

    h divides the rows and w the columns, so that a tiling exists. The first free cell takes a tile
    in one of the two orientations at random, in the other where the first does not fit. What comes
    to a dead end is begun anew; after TILINGS attempts the straight tiling serves.
    """
    for _ in range(TILINGS):
        free, tiling = np.ones(shape, dtype=bool), list[tuple[slice, slice]]()
        while free.any():
            row, column = divmod(int(free.argmax()), shape[1])
            turned = rng.permuted([tile, tile[::-1]], axis=0).tolist()
            areas = [(slice(row, row + h), slice(column, column + w)) for h, w in turned]
            fitting = [a for a in areas if free[a].size == tile[0] * tile[1] and free[a].all()]
            if not fitting:
                break
            free[fitting[0]] = False
            tiling.append(fitting[0])
        if not free.any():
            return tiling
    return straight_tiling(shape, tile)


def straight_tiling(shape: tuple[int, int], tile: tuple[int, int]) -> list[tuple[slice, slice]]:
    """All tiles upright, row by row."""
    height, width = tile
    return [
        (slice(row, row + height), slice(column, column + width))
        for row in range(0, shape[0], height)
        for column in range(0, shape[1], width)
    ]
