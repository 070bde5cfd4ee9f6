"""Make the certificate of a bound: multipliers of inequalities that `check` verifies.

HiGHS finds the multipliers, as the dual solutions of the programmes over nodes. They are rounded to
few digits: any multipliers prove something, and `check` says what. Where the linear programme of a
part proves less than the bound that is to be certified, the part is divided by columns that are 0
or 1, the weakest piece first.
"""

import heapq
import math
from collections import defaultdict
from dataclasses import dataclass, field, replace

import highspy
import numpy as np

from hetplan.formulations.joint.bound.alone import best_prices, computing_alone
from hetplan.formulations.joint.bound.driver import Part, all_parts
from hetplan.formulations.joint.bound.nodes import NodeProgramme
from hetplan.formulations.joint.bound.replicas import STANDARD
from hetplan.formulations.joint.bound.tables import Relaxation
from hetplan.formulations.joint.certificate.check import check
from hetplan.formulations.joint.certificate.document import (
    Branch,
    Certificate,
    Leaf,
    Nodes,
    PartProof,
    rounded_down,
)
from hetplan.formulations.joint.certificate.write_chains import certified_chains
from hetplan.formulations.joint.data import JointData
from hetplan.replays.arrays import Floats
from hetplan.solvers import highs
from hetplan.solvers.run import Options, Run, Stopped

DIGITS = 10  # of multipliers; what rounding loses is far below the share 1e-6 of a bound
# The most pieces of a part.
PIECES = 64
# Seconds that a piece counts towards the budget for each row of its programme.
ROW_SECONDS = 1e-4
# Rows that are in seconds. The programmes divide them by their unit.
IN_SECONDS = {"devices", "turns", "first", "behind", "cards", "homes"}
# A column nearer to 0 or 1 than this is taken to be whole.
WHOLE = 1e-6


def certify(data: JointData, instance: str, claimed: float | None, run: Run) -> Certificate:
    """A certificate of the bound of all plans, as near to `claimed` as it can be proven before the
    run should stop. instance: its name. claimed: a bound that a method has found; None: none."""
    of = Relaxation(data)
    goal = math.inf if claimed is None else claimed
    work = data.global_batch * of.least_works
    prices = best_prices(work, of.counts, run.options)
    alone = computing_alone(work, of.counts, run.options)
    proofs = []
    if 0 < alone < goal:
        for part in all_parts(of, run, alone, STANDARD):
            try:
                run.check()
                proof = certified_part(part, goal, run)
            except Stopped:
                break
            proofs.append(proof)
    certificate = Certificate(
        instance=instance,
        bound=0.0,
        claimed=claimed,
        alone=[rounded(price) for price in prices.tolist()],
        parts=proofs,
    )
    proven = check(data.model_dump(mode="json"), certificate.model_dump(mode="json"))
    return certificate.model_copy(update={"bound": rounded_down(proven)})


def certified_part(part: Part, goal: float, run: Run) -> PartProof:
    """Multipliers, and lumps, that show that the plans of a part take `goal` seconds, or nearly as
    much."""
    nodes, chains, proven = None, None, 0.0
    if part.of.several:
        pieces = Pieces(part, run, whole=False)
        nodes, proven = Nodes(apart=False, tree=pieces.tree()), pieces.least
    if proven < goal < math.inf and not part.chunks:
        chains = certified_chains(part, goal, run)
        proven = goal if chains is not None else proven
    if proven < goal and part.homes.chosen:
        pieces = Pieces(part, run, whole=True)
        pieces.divide(goal)
        if pieces.least > proven:
            nodes = Nodes(apart=True, tree=pieces.tree())
    return PartProof(
        homes=list(part.homes.chosen) or None,
        several=part.several,
        chunks=part.chunks,
        nodes=nodes,
        chains=chains,
    )


@dataclass(order=True)
class Piece:
    """Plans of a part in which some columns are chosen to be 0 or 1.

    seconds: what the linear programme proves of them. column: the column that divides the piece, by
    its number; None where all columns that may are whole. zero, one: its two pieces.
    """

    seconds: float
    number: int
    chosen: dict[int, int] = field(compare=False)
    multipliers: dict[str, list[float]] = field(compare=False)
    column: int | None = field(compare=False)
    zero: "Piece | None" = field(compare=False, default=None)
    one: "Piece | None" = field(compare=False, default=None)


class Pieces:
    """A part, divided into pieces by columns of its programme over nodes.

    whole: whether alike nodes are told apart. Only then columns are 0 or 1.
    """

    def __init__(self, part: Part, run: Run, *, whole: bool) -> None:
        self.run, self.unit = run, part.floor
        programme = NodeProgramme(part.of, *part.case, part.floor, whole=whole)
        self.programme = programme
        self.arrays = replace(
            programme.model.arrays(), integer=np.zeros(programme.model.size, dtype=bool)
        )
        self.highs = highs.loaded(self.arrays, highs.instance(Options(), highs.SETTINGS))
        numbers = [programme.x.numbers, programme.y.numbers] if whole else []
        self.divisible = np.concatenate([np.empty(0, np.int64), *map(np.ravel, numbers)])
        self.first = self.solved(0, {})
        self.open = [self.first]  # a heap
        self.count = 1

    @property
    def least(self) -> float:
        """Seconds that no plan of the part is below, by the pieces."""
        return self.open[0].seconds

    def divide(self, goal: float) -> None:
        """Divide the weakest piece until all of them prove the goal."""
        while self.least < goal and self.count < PIECES:
            weakest = self.open[0]
            if weakest.column is None or self.run.should_stop:
                return
            heapq.heappop(self.open)
            weakest.zero = self.solved(self.count, {**weakest.chosen, weakest.column: 0})
            weakest.one = self.solved(self.count + 1, {**weakest.chosen, weakest.column: 1})
            self.count += 2
            heapq.heappush(self.open, weakest.zero)
            heapq.heappush(self.open, weakest.one)

    def solved(self, number: int, chosen: dict[int, int]) -> Piece:
        """The piece with these columns, by the linear programme."""
        self.run.count(ROW_SECONDS * len(self.arrays.row_lower))
        lower, upper = self.arrays.lower.copy(), self.arrays.upper.copy()
        for column, value in chosen.items():
            lower[column] = upper[column] = value
        columns = np.arange(len(lower), dtype=np.int32)
        self.highs.changeColsBounds(len(columns), columns, lower, upper)
        self.highs.run()
        status = self.highs.getModelStatus()
        if status == highspy.HighsModelStatus.kOptimal:
            solution = self.highs.getSolution()
            seconds = self.unit * float(self.highs.getInfo().objective_function_value)
            x, duals = np.array(solution.col_value), np.array(solution.row_dual)
            return Piece(seconds, number, chosen, self.by_name(duals), self.fractional(x, chosen))
        if status == highspy.HighsModelStatus.kInfeasible:
            _, known, ray = self.highs.getDualRay()
            if known:
                return Piece(math.inf, number, chosen, self.by_name(np.array(ray)), None)
        return Piece(0.0, number, chosen, {}, None)

    def fractional(self, x: Floats, chosen: dict[int, int]) -> int | None:
        """The column that is farthest from 0 and 1, among those that may be divided."""
        if not len(self.divisible):
            return None
        distance = np.minimum(x[self.divisible], 1 - x[self.divisible])
        farthest = int(distance.argmax())
        column = int(self.divisible[farthest])
        return column if distance[farthest] > WHOLE and column not in chosen else None

    def by_name(self, duals: Floats) -> dict[str, list[float]]:
        """The multipliers of the rows, in the sense and the order of `check`. Names without any
        multiplier are left out."""
        by_name: dict[str, list[float]] = defaultdict(list)
        rows = zip(
            self.programme.model.row_names, duals.tolist(),
            self.arrays.row_lower.tolist(), self.arrays.row_upper.tolist(), strict=True,
        )  # fmt: skip
        for name, dual, lower, upper in rows:
            multiplier = dual
            if lower != upper:  # an inequality, which `check` states with >=
                multiplier = max(0.0, -dual if math.isinf(lower) else dual)
            unit = 1.0 if name in IN_SECONDS else self.unit
            by_name[name].append(rounded(unit * multiplier))
        return {name: values for name, values in by_name.items() if any(values)}

    def tree(self) -> Branch | Leaf:
        """The pieces as the certificate has them."""
        return self.tree_of(self.first)

    def tree_of(self, piece: Piece) -> Branch | Leaf:
        """The same of a piece."""
        if piece.zero is None or piece.one is None or piece.column is None:
            return Leaf(multipliers=piece.multipliers)
        return Branch(
            branch=self.place(piece.column),
            zero=self.tree_of(piece.zero),
            one=self.tree_of(piece.one),
        )

    def place(self, column: int) -> tuple[str, int, int]:
        """Name, layer and kind of node of a column."""
        for name, block in (("alone", self.programme.x), ("together", self.programme.y)):
            found = np.argwhere(block.numbers == column)
            if len(found):
                layer, kind = found[0].tolist()
                return name, layer, kind
        raise AssertionError(column)


def rounded(number: float) -> float:
    """The number with few digits."""
    return float(f"{number:.{DIGITS}g}")
