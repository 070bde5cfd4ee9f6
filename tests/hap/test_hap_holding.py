"""Bytes of real networks' theories: by hand, in the planner's problem, and where each parameter is
read in one way."""

from __future__ import annotations

from typing import Any

import pytest

from fakes.links import measured_by_hap
from fakes.programs import two_layers
from fakes.workloads import cluster
from hetplan.formulations.hap.data import Device
from hetplan.formulations.hap.pose import pose
from hetplan.formulations.hap.pricing import Theory, theory_of
from hetplan.planner.hap import Hap, HapSettings
from hetplan.planner.proposals import propose
from hetplan.profiling.models.model import load_model
from hetplan.profiling.workload import Workload, make_workload
from hetplan.programs.holding import holding_of
from hetplan.programs.program import SingleProgram
from hetplan.solvers.run import Options, Run as SolverRun

DEVICES = [Device(name="a", flops_per_second=2e12), *[Device(name="b", flops_per_second=1e12)] * 2]


def limited_to(program: SingleProgram, device_bytes: float, **options: Any) -> Theory:
    """Its theory on one fast and two slow devices with memory."""
    holding = holding_of(program, element_bytes=4, **options)
    room = [device_bytes] * len(DEVICES)
    return theory_of(program, DEVICES, measured_by_hap(3), holding=holding, device_bytes=room)


def test_bytes_by_hand() -> None:
    """16 bytes per entry of a parameter, 4 of what is computed; slices share, wholes do not,
    summands are not kept."""
    b, i, o = 60, 600, 300
    theory = limited_to(two_layers(b, i, o), 1e9)
    found = {t.instruction: (t.fixed_bytes or 0, t.shared_bytes or 0) for t in theory.data.triples}
    assert found["first(All-Gather(0), Identity)"] == (16 * i * o, 4 * b * o)
    assert found["first(Identity, Identity)"] == (16 * i * o + 4 * b * o, 0)
    assert found["first(Identity, All-Gather(0))"] == (0, 16 * i * o + 4 * b * o)
    # a summand of the product
    assert found["second(All-Gather(1), All-Gather(1))"] == (0, 16 * o * o)
    assert found["All-Reduce(first)"] == (4 * b * o, 0) == found["All-Gather(first, 0)"]
    assert found["Reduce-Scatter(first, 0)"] == (0, 4 * b * o) == found["All-To-All(first, 0, 1)"]
    assert found["Slice(first, 0)"] == (0, 0) == found["All-Reduce gradient(first.weight)"]
    assert found["first(All-Gather(0), Identity) by factors"] == (16 * i * o, 4 * b * o)
    plain = theory_of(two_layers(b, i, o), DEVICES, measured_by_hap(3)).data
    assert plain.memory is None and all(
        t.fixed_bytes is None and t.shared_bytes is None for t in plain.triples
    )


@pytest.mark.wide
def test_plans_fit_where_data_parallelism_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that hold little more than one copy of the states: only programs that slice
    parameters are plans.

    The instance charges a tied table as one of its readers wants it, so that a plan may need more
    when it is counted; the planner then solves again with the table whole.
    """
    links = {"intra_node_gbit_per_s": 80.0, "network_gbit_per_s": 10.0, "devices": 2}
    nodes = [{"device": name, **links} for name in ("V100-SXM2-16GB", "T4")]
    given = make_workload(load_model("gpt2", attention="standard"), cluster(nodes=nodes), 8)
    limit = 1.2 * given.state_bytes
    monkeypatch.setattr(
        Workload, "device_bytes", lambda self: dict.fromkeys(self.cluster.types, limit)
    )
    posed = pose(given)
    assert posed.theory.data.memory is not None
    assert posed.theory.data.memory.device_bytes == [limit] * 4
    found = {
        c.label: c
        for c in propose(Hap(HapSettings(seconds=4.0)), given, SolverRun(Options(threads=1)))
    }
    assert found["dp-even"].plan is None and "memory" in found["dp-even"].message
    plans = [c for c in found.values() if c.plan is not None and c.peak_bytes is not None]
    assert found["auto"] in plans and found["auto"].fits_memory
    for c in plans:
        assert c.peak_bytes is not None and c.fits_memory == (max(c.peak_bytes) <= limit)
        assert c.fits_memory or "does not fit" in c.message
