"""The operators of programs. Each one is described in one place: the shape of its output, its
sharding rules, its work, and its kernel.

The module `operator` describes these parts of an operator. `table` has all operators by name, and
each of the other modules defines a group of them.
"""
