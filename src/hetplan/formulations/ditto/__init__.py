"""Ditto: the pipeline template of a heterogeneous cluster, on Oobleck's cost model."""
