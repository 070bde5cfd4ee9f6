"""Packing samples of unequal length into the micro-batches of unequal replicas. The planner poses
these problems from plans (`planner.lengths`); no files state them, and `FAMILIES` does not list
them."""
