"""A strategy that notes what it is told."""

from __future__ import annotations

from collections.abc import Iterable

from hetplan.planner.joint import Joint, JointSettings
from hetplan.plans.plan import Plan


class Noting(Joint):
    """`joint` in a moment; `noted` are the plans that it is told to begin with, call by call."""

    def __init__(self) -> None:
        super().__init__(JointSettings(seconds=0.1))
        self.noted: list[list[Plan]] = []

    def beginning_with(self, plans: Iterable[Plan]) -> Joint:
        self.noted.append(list(plans))
        return super().beginning_with(self.noted[-1])
