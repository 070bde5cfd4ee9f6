"""Problem `ditto` to proven optimality: two-phase shortest paths inside a search over the slowest
stage."""
