"""Astra's whole search (Section 3.2-3.6): space, rules, memory filter, pricing, money, Pareto
set."""
