"""The joint optimum over programs and ratios: labels on the graph of needs, branch and bound over
ratios."""
