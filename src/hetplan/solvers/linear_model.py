"""Old names, for formulations that are not stated by `hetplan.solvers.model` yet."""

from hetplan.solvers.model import SMALLEST, Columns, LinearArrays, Model, ModelAnswer

LinearModel = Model
MilpAnswer = ModelAnswer

__all__ = ["SMALLEST", "Columns", "LinearArrays", "LinearModel", "MilpAnswer"]
