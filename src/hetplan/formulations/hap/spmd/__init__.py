"""From a single-device program to a theory of triples, and from a synthesised program back to its
numbers."""
