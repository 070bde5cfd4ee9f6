"""Links as others measured them."""

from __future__ import annotations

from hetplan.programs.links import Links


def measured_by_hap(devices: int) -> Links:
    """The figures in HAP's artefact, for GPUs of machines on 10.4 Gbit/s (Section 7.1)."""
    return Links(devices, 9.46e9, 9.15e9, 5.91e9, 9.74e9, 2.46e10)
