"""The order of passes of a pipeline as a decision: the order in which every stage computes its
passes such that one iteration is shortest, with a proven bound."""
