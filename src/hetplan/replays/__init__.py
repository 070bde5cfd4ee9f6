"""Seconds and bytes of a plan: what a plan of a workload takes and holds, event by event."""
