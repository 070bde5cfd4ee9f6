"""The methods that AMP is compared with: Megatron's rules (§4.1), random strategies (§4.5) and
simulated annealing (§4.2).

Megatron's rules and the random method list some strategies and compute the exact T of each, as a
real trial would measure it. They return the fastest strategy that fits in memory. `details` also
holds the mean T of the strategies that fit, since the paper reports minimum and mean (Tables 3-5).

Simulated annealing searches placements on the grid of devices, one row per node.
State        a tile (h, w), a random tiling of the grid by it, a tensor degree and a micro-batch.
             Each tile is a stage of h w devices. The stage's ranks are the devices of the tile row
             by row, so that the ranks of a tensor group lie next to each other.
Neighbour    another divisor for h or for w, with a random tiling, tensor degree and micro-batch.
Energy       the exact T with the cut of `cuts.try_placement`; +inf where no cut fits in memory.
Temperature  10 (1 - i/50) seconds in step i of 50. A neighbour whose energy is higher by `rise` is
             accepted with probability exp(-rise / temperature).
hetplan generalises this to nodes of unequal size: the rows of the grid then have the greatest
common divisor of the sizes as their length. (Moves that exchange two devices, in half of the steps,
improved 4 of 16 instances of six and eight devices and worsened 8; the method has no such moves.)
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

# Seconds that a trial counts towards the budget of a run.
TRIAL_SECONDS = 1e-3

DRAWS = 50  # random strategies that the paper tries (§4.5)
STEPS = 50  # annealing steps, as in the published code
START_TEMPERATURE = 10.0  # seconds, as in the published code
TILINGS = 20  # attempts at a random tiling; after them annealing uses the straight tiling

Area = tuple[slice, slice]  # rows and columns of the grid that one tile covers


@dataclass(frozen=True)
class Trial:
    """A strategy that `megatron` or `random` has tried."""

    strategy: Strategy
    seconds: float | None  # exact T; None where the strategy does not fit in memory


def try_out(problem: AmpProblem, strategy: Strategy) -> Trial:
    """The trial of one strategy."""
    placed = place(problem, strategy.configuration, strategy.placement)
    if not placed.fits(strategy.cut):
        return Trial(strategy, None)
    return Trial(strategy, placed.seconds(strategy.cut))


def megatron(data: AmpData, run: Run) -> Outcome[AmpDecision]:
    """The best strategy by Megatron's rules (§4.1).

    Tensor groups are no larger than the smallest node. For each micro-batch size the rules allow
    the degrees with the least product tp pp at which some strategy fits in memory. Devices stand in
    Megatron's order. Each configuration is cut in two ways: into equally many layers, and into
    parts of equal parameters.
    """
    return best_of(
        data, run, megatron_trials, "no usable degrees with tensor groups within the smallest node"
    )


def megatron_trials(data: AmpData, problem: AmpProblem, run: Run) -> Iterator[Trial]:
    """Trials of Megatron's strategies in ascending order of micro-batch and of tp pp.

    A micro-batch ends with the first product tp pp at which a strategy fits in memory.
    """
    nodes = [device.node for device in data.devices]
    smallest_node = min(map(len, by_node(nodes)))

    def micro_batch(configuration: Configuration) -> int:
        return configuration.micro_batch

    def product(configuration: Configuration) -> int:
        return configuration.tensor * configuration.pipeline

    allowed = [chosen for chosen in problem.configurations() if chosen.tensor <= smallest_node]
    allowed.sort(key=lambda chosen: (micro_batch(chosen), product(chosen)))
    for _, same_micro_batch in groupby(allowed, key=micro_batch):
        for _, same_product in groupby(same_micro_batch, key=product):
            trials = []
            for chosen in same_product:
                placement = megatron_placement(nodes, chosen)
                by_layers = uniform_cut(problem.layers, chosen.pipeline)
                by_parameters = parameter_cut(problem.params, chosen.pipeline)
                for cut in (by_layers, by_parameters):
                    trials.append(try_out(problem, Strategy(chosen, placement, cut)))
            yield from trials
            run.count(TRIAL_SECONDS * len(trials))
            if run.should_stop:
                return
            if any(trial.seconds is not None for trial in trials):
                break


def random(data: AmpData, run: Run) -> Outcome[AmpDecision]:
    """The best of 50 random strategies (§4.5): configuration, placement and cut are each drawn
    uniformly.

    Strategies that do not fit in memory count among the 50. The run's seed determines all draws.
    """
    return best_of(data, run, random_trials, NO_CONFIGURATION)


def random_trials(data: AmpData, problem: AmpProblem, run: Run) -> Iterator[Trial]:
    """Trials of 50 random strategies; none where the instance has no configuration."""
    rng = np.random.default_rng(run.options.seed)
    configurations = list(problem.configurations())
    if not configurations:
        return
    for _ in range(DRAWS):
        chosen = configurations[rng.integers(len(configurations))]
        yield try_out(problem, random_strategy(problem, chosen, rng))
        run.count(TRIAL_SECONDS)
        if run.should_stop:
            return


def random_strategy(
    problem: AmpProblem, chosen: Configuration, rng: np.random.Generator
) -> Strategy:
    """A strategy of the configuration `chosen` with a uniformly random placement and cut."""
    shape = (chosen.pipeline, chosen.data, chosen.tensor)
    boundaries = rng.choice(problem.layers - 1, size=chosen.pipeline - 1, replace=False)
    inner = 1 + np.sort(boundaries)
    placement = rng.permutation(problem.devices).reshape(shape)
    cut = np.concatenate([[0], inner, [problem.layers]]).astype(np.int64)
    return Strategy(chosen, placement, cut)


def best_of(
    data: AmpData,
    run: Run,
    trials: Callable[[AmpData, AmpProblem, Run], Iterator[Trial]],
    nothing: str,
) -> Outcome[AmpDecision]:
    """The fastest of the tried strategies that fit in memory. Proves no bound.

    trials: lists the method's trials. nothing: the message where it lists none.
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
        _, fastest = min(fitting, key=lambda pair: pair[0])
        best = fastest.decision()
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
    """A state of the annealing."""

    tile: tuple[int, int]  # height and width
    configuration: Configuration  # dp tp is the number of devices in the tile
    placement: Ints  # [pp, dp, tp] devices


class Moves:
    """Draws the first state of the annealing and the neighbours of a state."""

    def __init__(self, data: AmpData, problem: AmpProblem, rng: np.random.Generator) -> None:
        nodes = [device.node for device in data.devices]
        self.rng = rng
        self.grid = device_grid(nodes)
        # number of devices of a stage -> the configurations with such stages
        self.configurations = grouped((c.data * c.tensor, c) for c in problem.configurations())
        rows, columns = map(divisors, self.grid.shape)
        # (h, w) of every tile: h divides the rows, w the columns, some stage has h w devices
        self.tiles = [(h, w) for h in rows for w in columns if h * w in self.configurations]

    def start(self) -> State:
        """A state with a random tile.

        A stage of n devices always has a tile: h = gcd(n, rows), w = n / h.
        """
        return self.with_tile(self.tiles[self.rng.integers(len(self.tiles))])

    def with_tile(self, tile: tuple[int, int]) -> State:
        """A state with `tile` and a random tiling, tensor degree and micro-batch."""
        choices = self.configurations[tile[0] * tile[1]]
        chosen = choices[self.rng.integers(len(choices))]
        shape = (self.grid.shape[0], self.grid.shape[1])
        stages = [self.grid[area].reshape(-1) for area in random_tiling(shape, tile, self.rng)]
        placement = np.stack(stages).reshape(chosen.pipeline, chosen.data, chosen.tensor)
        return State(tile, chosen, placement)

    def neighbour(self, state: State) -> State:
        """A state whose tile differs from the state's tile either in height or in width; any tile
        where no tile does."""
        height, width = state.tile
        near = [(h, w) for h, w in self.tiles if (h == height) != (w == width)]
        if not near:
            near = self.tiles
        return self.with_tile(near[self.rng.integers(len(near))])


def annealing(data: AmpData, run: Run) -> Outcome[AmpDecision]:
    """The best strategy that 50 steps of annealing meet; the run's seed determines all draws.
    Proves no bound."""
    problem = compile_problem(data)
    moves = Moves(data, problem, np.random.default_rng(run.options.seed))
    incumbent = Incumbent[Strategy](run)
    accepted = step = 0
    if moves.tiles:
        state = moves.start()
        energy = energy_of(problem, state, incumbent)
        while step < STEPS and not run.should_stop:
            run.count(TRIAL_SECONDS)
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
    """Whether annealing moves to a neighbour, by Metropolis' rule.

    A neighbour of equal or lower energy is always accepted, another one where `draw` <
    exp(-rise / temperature). A state and a neighbour that both do not fit in memory have equal
    energies, +inf, and the first comparison accepts. A rise to +inf has the probability 0.

    energy: seconds, of the present state. energy_there: seconds, of the neighbour. draw: uniform
    in [0, 1).
    """
    return energy_there <= energy or draw < math.exp((energy - energy_there) / temperature)


def energy_of(problem: AmpProblem, state: State, incumbent: Incumbent[Strategy]) -> float:
    """T in seconds of a state with its cut; +inf where no cut fits in memory. The strategy is
    offered as the incumbent."""
    priced = try_placement(problem, state.configuration, state.placement)
    if priced is None:
        return math.inf
    seconds, strategy = priced
    incumbent.offer(seconds, strategy)
    return seconds


def device_grid(nodes: Sequence[int]) -> Ints:
    """Devices [rows, columns]; every row lies within a node.

    A row is a whole node where all nodes have equally many devices. Otherwise its length is the
    greatest common divisor of these numbers. nodes: [D] node of each device.
    """
    members = by_node(nodes)
    columns = math.gcd(*map(len, members))
    devices = [device for node in members for device in node]
    return np.array(devices, dtype=np.int64).reshape(-1, columns)


def random_tiling(
    shape: tuple[int, int], tile: tuple[int, int], rng: np.random.Generator
) -> list[Area]:
    """A random tiling of a grid by `tile` (h, w), in the order of the tiles' first positions. Each
    tile lies upright, h high and w wide, or turned.

    h divides the rows and w the columns, so that a tiling exists. The first free position of the
    grid takes a tile in a random orientation, or in the other one where that does not fit. Where
    neither fits, the tiling is begun anew; after TILINGS attempts it is the straight tiling.
    """
    tile_size = tile[0] * tile[1]
    for _ in range(TILINGS):
        free = np.ones(shape, dtype=bool)
        tiling = list[Area]()
        while free.any():
            row, column = divmod(int(free.argmax()), shape[1])
            orientations = rng.permuted([tile, tile[::-1]], axis=0).tolist()
            areas = [(slice(row, row + h), slice(column, column + w)) for h, w in orientations]
            # at the border of the grid `free[area]` is smaller than the tile
            fitting = [area for area in areas if free[area].sum() == tile_size]
            if not fitting:
                break
            free[fitting[0]] = False
            tiling.append(fitting[0])
        if not free.any():
            return tiling
    return straight_tiling(shape, tile)


def straight_tiling(shape: tuple[int, int], tile: tuple[int, int]) -> list[Area]:
    """The tiling of a grid in which all tiles lie upright, row by row."""
    height, width = tile
    return [
        (slice(row, row + height), slice(column, column + width))
        for row in range(0, shape[0], height)
        for column in range(0, shape[1], width)
    ]
