"""The variables of the CP-SAT model of `joint`, and the small constraints that tell one variable
of another: an entry of a table, a condition as a 0-1 variable.

`cp.py` names all variables in its docstring and states its numbered constraints by them.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
from ortools.sat.python.cp_model import Domain, IntervalVar, IntVar, LinearExprT

from hetplan.formulations.joint.data import MOST_CHUNKS
from hetplan.formulations.joint.prices import Prices
from hetplan.plans.passes import WHOLE_SCHEDULES
from hetplan.solvers.constraint_model import ConstraintModel

INTERLEAVED = WHOLE_SCHEDULES.index("interleaved-1f1b")
Pass = tuple[int, int, int, int]  # (side, stage, chunk, micro-batch)


class Variables:
    """The variables of the docstring and the constants of an instance, by their names there."""

    def __init__(self, model: ConstraintModel, prices: Prices) -> None:
        self.model, self.prices, data = model, prices, prices.data
        cp = model.cp
        self.D, self.L, self.G = len(prices.kind), prices.layers, prices.samples
        self.C = min(MOST_CHUNKS, self.L)
        self.stages, self.chunks_of = range(self.D), range(self.C)
        groups = len(prices.groups) - 1

        def ints(low: int, high: int, name: str, *shape: int) -> Any:
            array = np.empty(shape, dtype=object)
            for place in np.ndindex(*shape):
                array[place] = cp.new_int_var(low, high, "_".join([name, *map(str, place)]))
            return array

        D, C, G, L = self.D, self.C, self.G, self.L
        self.run = np.array(
            [
                [cp.new_int_var_from_domain(self._runs(c), f"run_{s}_{c}") for c in range(C)]
                for s in range(D)
            ]
        )
        self.held = ints(0, len(prices.runs) - 1, "held", D, C)  # see `know_what_runs_mean`
        self.first, self.last = ints(0, L, "first", D, C), ints(0, L, "last", D, C)
        self.tail = ints(0, L, "tail", D, C)  # end of the chunk on the replica's last stage
        self.group = ints(0, groups, "group", D)
        self.tail_group = ints(0, groups, "tail_group", D)  # of the replica's last stage
        self.head_group = ints(0, groups, "head_group", D)  # of the replica's first stage
        self.used, self.opens = ints(0, 1, "used", D), ints(0, 1, "opens", D)
        self.closes = ints(0, 1, "closes", D)
        self.before, self.after = ints(0, D - 1, "before", D), ints(0, D - 1, "after", D)
        self.depth = ints(0, D, "depth", D)  # stages of the replica; 0: not used
        self.samples, self.size = ints(0, G, "samples", D), ints(0, G, "size", D)
        self.count, self.size_of = ints(0, G, "count", D), ints(0, G, "size_of", D, G)
        self.schedule = cp.new_int_var(0, len(WHOLE_SCHEDULES) - 1, "schedule")
        self.chunks = cp.new_int_var(1, C, "chunks")
        self.zero = cp.new_int_var(0, 3, "zero")
        self.mode = cp.new_int_var(0, len(data.modes) - 1, "mode")
        self.active = ints(0, 1, "active", C)  # whether the plan has this chunk
        self.replicas = cp.new_int_var(1, D, "replicas")
        self.total = model.time("total")
        self.present = ints(0, 1, "present", D, C, G)
        self.begin = self._times("begin", 2, D, C, G)
        self.seconds = self._times("seconds", 2, D, C, G)
        self.end = self._times("end", 2, D, C, G)
        # Ends of the chunk's forward passes on the replica's last stage, and of its backward
        # passes on the first one.
        self.far_end = self._times("far_end", 2, D, C, G)
        self.done = self._times("done", D)  # the last backward pass
        self.in_steps = cp.new_bool_var("in_steps")  # every replica is one stage of one chunk
        self.divide = ints(1, D, "divide", D)  # row groups that divide the stage's states
        self.hops, self.hop_ticks, self.hop_shape = self._hops()
        self.turn: dict[Pass, IntVar] = {}  # of (8); none where the order is free
        self.intervals: dict[int, list[IntervalVar]] = {s: [] for s in self.stages}

    def _times(self, name: str, *shape: int) -> Any:
        array = np.empty(shape, dtype=object)
        for place in np.ndindex(*shape):
            array[place] = self.model.time("_".join([name, *map(str, place)]))
        return array

    def _runs(self, chunk: int) -> Domain:
        """No run, and those before which each earlier chunk can have a layer."""
        runs = enumerate(self.prices.runs)
        return Domain.from_values([r for r, run in runs if r == 0 or run.first >= chunk])

    def _hops(self) -> tuple[list[tuple[int, int, int, int]], list[int], tuple[int, int]]:
        """(rows (sender, receiver, layer, kind) of the messages that there may be, ticks by kind
        and samples, their shape). A message of kind 0 takes nothing."""
        groups, messages = self.prices.groups, self.prices.messages
        rows, seconds = [], [np.zeros(self.G + 1)]
        kind: dict[tuple[int, int, int], int] = {}
        for q, p, l in product(range(len(groups)), range(len(groups)), range(self.L + 1)):
            if q in (0, p):
                rows.append((q, p, l, 0))
            elif p > 0 and 0 < l < self.L and not set(groups[q].devices) & set(groups[p].devices):
                both = min(q, p), max(q, p), l  # an activation takes as long as its gradient
                if both not in kind:
                    kind[both] = len(seconds)
                    seconds.append(messages[q, p, l])
                rows.append((q, p, l, kind[both]))
        return rows, self.model.ticks(seconds), (len(seconds), self.G + 1)

    def shape(self) -> list[IntVar]:
        """The variables that make up the shape of a plan: its runs and the samples of replicas.
        The plans of a shape differ in schedule, ZeRO level, mode and sizes of micro-batches."""
        return [self.chunks, *self.opens, *self.samples, *self.run.ravel()]

    def passes(self) -> Iterator[Pass]:
        """All passes that a plan may have."""
        return product(range(2), self.stages, self.chunks_of, range(self.G))

    def look_up(
        self, table: Sequence[int], shape: Sequence[int], place: Sequence[LinearExprT], name: str
    ) -> IntVar:
        """The entry of a table of this shape at a place, which is one variable for each axis."""
        self.model.check()  # CP-SAT copies the table, entry by entry in Python
        cp = self.model.cp
        index = cp.new_int_var(0, len(table) - 1, f"index_{name}")
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        cp.add(index == sum(at * stride for at, stride in zip(place, strides, strict=True)))
        value = cp.new_int_var(min(table), max(table), name)
        cp.add_element(index, table, value)
        return value

    def both(self, name: str, *literals: Any) -> IntVar:
        """A 0-1 variable that is 1 where all literals are."""
        cp = self.model.cp
        all_of_them = cp.new_bool_var(name)
        cp.add_min_equality(all_of_them, list(literals))
        return all_of_them

    def at_least(self, variable: Any, value: int, name: str) -> IntVar:
        """A 0-1 variable that is 1 where a variable has a value or more."""
        cp = self.model.cp
        literal = cp.new_bool_var(name)
        cp.add(variable >= value).only_enforce_if(literal)
        cp.add(variable < value).only_enforce_if(~literal)
        return literal

    def equals(self, variable: Any, value: int, name: str) -> IntVar:
        """A 0-1 variable that is 1 where a variable has a value."""
        cp = self.model.cp
        literal = cp.new_bool_var(name)
        cp.add(variable == value).only_enforce_if(literal)
        cp.add(variable != value).only_enforce_if(~literal)
        return literal
