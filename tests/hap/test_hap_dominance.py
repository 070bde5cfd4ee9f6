"""Which labels stand for which: never one that is worse somewhere in the cell, after whatever may
follow."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.hap.exact import labelling

Floats = NDArray[np.float64]


@dataclass
class Partial:
    """Stages [s, 2] of work closed so far, open work [2], seconds of communication: fixed, per
    largest ratio."""

    stages: Floats
    open: Floats
    fixed: float
    top: float

    def cost(self, ratios: Floats, slow: Floats, more: Floats) -> float:
        """With `more` [2] in the open stage, at ratios [K]."""
        rows = np.vstack([self.stages, self.open + more])
        busy = (rows[:, :1] + rows[:, 1:] * ratios) * slow
        return float(self.fixed + self.top * ratios[-1] + busy.max(axis=1).sum())


class Case:
    """A cell, and two partial programs that share a beginning, as labels 1 and 2 of the kernels."""

    def __init__(self, draw: np.random.Generator) -> None:
        self.draw, self.K = draw, int(draw.integers(2, 5))
        speeds = np.sort(draw.uniform(1, 8, self.K))
        self.slow = speeds[-1] / speeds
        steps = np.cumsum(np.sort(draw.dirichlet(np.ones(self.K))))
        around = steps / steps.sum()
        cell = np.sort(
            around + draw.choice([0.3, 0.05, 0.005]) * draw.uniform(-1, 1, (self.K, self.K)), axis=1
        )
        self.x = np.maximum(cell, 0.0)
        self.beginning = Partial(
            self.works(int(draw.integers(0, 4))), np.zeros(2), *draw.uniform(0, 1, 2)
        )
        self.both = [self.follow(), self.follow()]
        self.blends: dict[tuple[float, float], Floats] = {}

    def works(self, count: int) -> Floats:
        """Stages of shared, replicated and mixed work."""
        share = self.draw.choice([0.0, 0.0, 1.0, 0.1, 0.5], count)
        size = self.draw.uniform(0.2, 1.0, count)
        return np.stack([share * size, 4 * (1 - share) * size], axis=1)

    def follow(self) -> Partial:
        """Something that comes after the common beginning."""
        stages = np.vstack([self.beginning.stages, self.works(int(self.draw.integers(0, 3)))])
        fixed, top = (
            self.beginning.fixed + self.draw.uniform(0, 1),
            self.beginning.top + self.draw.uniform(0, 1),
        )
        return Partial(
            stages, self.works(1)[0] * self.draw.choice([0, 1]), float(fixed), float(top)
        )

    def excess(self) -> float:
        """By how much the first may turn out dearer than the second, over ratios and ways to go on,
        sampled."""
        worst = -np.inf
        for _ in range(30):
            mu = self.draw.dirichlet(np.full(self.K, 0.3))
            for more in (
                np.zeros(2),
                *(self.draw.choice([0.0, 1.0, 9.0], (4, 2)) * self.draw.uniform(0, 3, (4, 2))),
            ):
                one, other = (p.cost(mu @ self.x, self.slow, more) for p in self.both)
                worst = max(worst, one - other)
        return worst

    def never_worse(self) -> bool:
        """What the kernel says."""
        partials = [self.beginning, *self.both]
        upper, lower = np.zeros((3, self.K)), np.zeros((3, self.K))
        sums = np.zeros((3, 6))
        for n, p in enumerate(partials):
            upper[n] = lower[n] = p.fixed + p.top * self.x[:, -1]
            for work in p.stages:
                busy = (work[0] + work[1] * self.x) * self.slow
                upper[n] += busy.max(axis=1)
                lower[n] += busy @ self.blend(work)
            shared = p.stages[:, 1] > 0
            alone = p.stages[~shared, 0].sum() * self.slow[0]
            sums[n] = (
                *p.open,
                p.fixed + alone,
                p.top,
                p.stages[shared, 1].sum(),
                p.stages[shared, 0].sum(),
            )
        unit = self.x * self.slow
        return bool(
            labelling._never_worse(
                1, 2, np.array([-1, 0, 0]), upper, lower, sums, self.x, self.slow, unit.max(axis=1),
                unit @ self.blend(np.array([0.0, 1.0])), 0.0,
            )
        )  # fmt: skip

    def blend(self, work: Floats) -> Floats:
        """The type that is slowest in the middle, or any blend, the same for the same mixture."""
        mixture = round(float(work[0] / work.sum()), 9)
        if (mixture, 0.0) not in self.blends:
            busy = (work[0] + work[1] * self.x.mean(axis=0)) * self.slow
            drawn = self.draw.dirichlet(np.ones(self.K))
            self.blends[mixture, 0.0] = (
                np.eye(self.K)[busy.argmax()] if self.draw.random() < 0.7 else drawn
            )
        return self.blends[mixture, 0.0]


def test_no_label_stands_for_a_better_one() -> None:
    """Pairs of which the first is dearer somewhere by a little (a few percent of their work), or
    cheaper by more."""
    draw = np.random.default_rng(11)
    said = 0
    for _ in range(500):
        case = Case(draw)
        excess = case.excess()
        for wanted in (0.003, 0.02, 0.1):
            case.both[0].fixed += wanted - excess
            excess = wanted
            assert not case.never_worse()
        for wanted in (-0.02, -0.1, -0.5):
            case.both[0].fixed += wanted - excess
            excess = wanted
            said += case.never_worse()
    assert said > 500


def test_the_beginning_in_common_does_not_blur_the_comparison() -> None:
    """However much two programs have in common, the shorter of two ways on is recognised."""
    draw = np.random.default_rng(12)
    for _ in range(200):
        case = Case(draw)
        begun = case.beginning = Partial(case.works(40), np.zeros(2), 0.0, 0.0)
        case.both = [Partial(begun.stages, np.zeros(2), fixed, 0.0) for fixed in (0.0, 1e-6)]
        assert case.never_worse()


def test_twins_have_the_same_stages() -> None:
    """In another order, not one of them different."""
    draw = np.random.default_rng(13)
    for _ in range(300):
        count = int(draw.integers(2, 6))
        works = np.round(draw.uniform(0.2, 1.0, (count, 2)), 3)
        for change in (False, True):
            order = draw.permutation(count)
            other = works[order].copy()
            if change:  # sums agree, stages do not
                other[0] += (0.01, -0.02)
                other[1] -= (0.01, -0.02)
            parent, arc, sums = [-1], [-1], [np.zeros(6)]
            ends = []
            for rows in (works, other):
                at = 0
                for F, S in rows:
                    # one label with open work, one after it is closed
                    for work in ((F, S), (0.0, 0.0)):
                        row = sums[at].copy()
                        row[:2] = work
                        if work == (0.0, 0.0):
                            row[4:] += (S, F)
                        parent.append(at)
                        arc.append(int(work == (0.0, 0.0)))
                        sums.append(row)
                        at = len(parent) - 1
                ends.append(at)
            one, two = ends
            told = labelling._twins(
                one, two, np.array(parent), np.array(arc), np.array([False, True]), np.array(sums), 1e-12,
                np.empty((64, 2)), np.empty((64, 2)),
            )  # fmt: skip
            assert told is not change
