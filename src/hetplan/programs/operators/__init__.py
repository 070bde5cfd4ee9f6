"""The operators that programs are made of, each stated once: the shape of its output, the ways in
which it can be sharded, its work, and its kernel.

`operator` describes the parts of an operator; each of the other modules holds a group of operators;
`table` has all of them by name.
"""
