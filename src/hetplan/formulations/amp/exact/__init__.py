"""AMP, exact: joint search over degrees, micro-batch, cut and placement, with a proof."""

from hetplan.formulations.amp.exact.joint import solve

__all__ = ["solve"]
