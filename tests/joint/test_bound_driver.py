"""One T for all parts: where an attempt is given up, its part waits for more effort."""

from typing import Any, cast

import pytest

from hetplan.formulations.joint.bound.driver import Bisection, Part
from hetplan.formulations.joint.bound.nodes import NodeModel
from hetplan.formulations.joint.bound.replicas import STANDARD, Effort, TooLong
from hetplan.solvers.run import Run


class Described:
    """A part that is refuted below `most` seconds, with so much effort for each attempt."""

    case = ()

    def __init__(self, most: float, effort: float) -> None:
        self.most, self.needed, self.floor = most, effort, 1.0
        self.effort, self.whole, self.asked = Effort(), False, list[tuple[float, float]]()

    def is_slower(self, seconds: float) -> bool:
        """Notes what is asked."""
        self.asked.append((seconds, self.effort.limit))
        if self.effort.limit < self.needed:
            raise TooLong
        return seconds <= self.most


class NoNodes:
    """A programme over nodes that counts how often it is asked, and shows nothing."""

    asked = 0

    def whole(self, *_: Any) -> float:
        """Nothing."""
        self.asked += 1
        return 0.0


def raised(*parts: Described) -> tuple[float, NoNodes]:
    """The bound of these parts, and the nodes that were asked."""
    nodes = NoNodes()
    bisection = Bisection(cast("list[Part]", list(parts)), 4.0, Run(), STANDARD)
    bisection.go(cast("NodeModel", nodes))
    return bisection.bound, nodes


def test_a_part_that_is_given_up_waits_for_more_effort() -> None:
    """It is not asked again for smaller T, which takes as long."""
    hard, easy = Described(2.0, 2 * STANDARD.effort), Described(3.0, 0.0)
    bound, _ = raised(hard, easy)
    assert bound == pytest.approx(2.0, rel=2 * STANDARD.least_rise)
    assert [effort for _, effort in hard.asked].count(STANDARD.effort) == 1


def test_the_others_rise_to_the_floor_of_a_part_that_is_given_up() -> None:
    hard, easy = Described(2.0, 2 * STANDARD.effort), Described(3.0, 0.0)
    hard.floor = 1.5
    raised(hard, easy)
    with_first = [seconds for seconds, effort in easy.asked if effort == STANDARD.effort]
    assert max(with_first) == pytest.approx(1.5, rel=2 * STANDARD.least_rise)


def test_the_whole_programme_over_nodes_is_asked_where_paths_fail() -> None:
    """A part whose paths are given up for the first time may yet be refuted by them."""
    assert raised(Described(4.0, 2 * STANDARD.effort))[1].asked == 0
    assert raised(Described(2.0, 0.0))[1].asked == 1
