"""What collectives cost: measured ones in the planner's problem, and segments with ratios of their
own."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.workloads import cluster, small_model
from hetplan.errors import UnsupportedError
from hetplan.files import write_text
from hetplan.planner.hap import Hap, HapSettings
from hetplan.planner.proposals import propose
from hetplan.planner.search import replay_candidate
from hetplan.profiling.profiles.measured_collectives import (
    OPERATIONS,
    Collectives,
    FittedCollective,
    SizePoint,
)
from hetplan.profiling.profiles.profile import Provenance
from hetplan.profiling.workload import Workload, make_workload
from hetplan.programs.links import links_of, measured_links
from hetplan.replays.replay import replay
from hetplan.solvers.run import Options, Run

LATENCY = 1e-3


def measured(ranks: int, speed: float = 1e9) -> Collectives:
    """Every operation with a bandwidth and a latency of its own, in the order of `OPERATIONS`."""
    points = [SizePoint(bytes=n, seconds=1.0, median_seconds=1.0) for n in (1.0, 2.0)]
    return Collectives(
        backend="gloo", device="cpu", ranks=ranks,
        provenance=Provenance(kind="measured", source="a test", date="2026-01-01"),
        fits=[
            FittedCollective(
                operation=name, group="all", ranks=ranks, latency_seconds=(i + 1) * LATENCY,
                bytes_per_second=(i + 1) * speed, r_squared=1.0, points=points,
            )
            for i, name in enumerate(OPERATIONS)
        ],
    )  # fmt: skip


def test_prices_are_what_was_measured() -> None:
    """Of a tensor of 8 MB on four ranks, slices of a quarter: a rank's own bytes over bandwidth."""
    size, links = 8e6, measured_links(measured(4), 4)

    def seconds(how: str) -> float:
        price = links.price(how, size)
        return price.fixed + price.shared / 4

    assert seconds("All-Reduce") == pytest.approx(2 * LATENCY + size / 2e9)
    assert seconds("All-Gather") == pytest.approx(3 * LATENCY + size / 4 / 3e9)
    assert seconds("Grouped-Broadcast") == pytest.approx(4 * LATENCY + size / 4 / 4e9)
    assert seconds("Reduce-Scatter") == pytest.approx(5 * LATENCY + size / 5e9)
    assert seconds("All-To-All") == seconds("Repartition")
    assert seconds("All-To-All") == pytest.approx(6 * LATENCY + size / 4 / 6e9, rel=1e-12)
    assert seconds("All-Gather factors") == seconds("All-Gather")
    # padding counts, exact slices do not
    assert links.price("All-Gather", size).shared > 0 == links.price("All-Gather", 0.0).shared
    assert links.price("Grouped-Broadcast", size).shared == 0
    with pytest.raises(UnsupportedError, match=r"got '4 ranks', expected all-reduce, .* on 3"):
        measured_links(measured(4), 3)


def test_rings_wait_for_every_hop() -> None:
    """Over the slowest link, gradients as data parallelism pays for them."""
    on = cluster()
    links = links_of(on)
    slow = on.bandwidth().min()
    latency = 3 * on.latency().max()
    price = links.price("All-Reduce", 1e6)
    assert price.fixed == pytest.approx(latency + 2 * 3 / 4 * 1e6 / slow)
    grouped = links.price("Grouped-Broadcast", 1e6)
    assert grouped.fixed == pytest.approx(4 * latency + 1e6 / slow)


@pytest.fixture(scope="module")
def workload() -> Workload:
    """A small model on two V100 and two T4."""
    return make_workload(small_model(layers=1), cluster(), 8)


def test_measured_collectives_decide_and_predict(workload: Workload, tmp_path: Path) -> None:
    """Slow ones cost what they cost, in the problem and in the iteration; of another number of
    ranks they are refused by name, and other strategies go on."""
    run = Run(Options(threads=1))
    plain = {c.label: c for c in propose(Hap(HapSettings(seconds=2.0)), workload, run)}
    for speed, ranks in ((1e6, 4), (1e12, 4), (1e9, 8)):
        file = str(tmp_path / f"{speed:g}-{ranks}.json")
        write_text(file, measured(ranks, speed).model_dump_json())
        hap = Hap(HapSettings(seconds=2.0, collectives=file))
        found = {c.label: c for c in propose(hap, workload, run)}
        even, before = found["dp-even"], plain["dp-even"]
        if ranks != 4:
            assert even.plan is None and "not measured on all devices" in even.message
            continue
        assert even.objective is not None and before.objective is not None
        syncs = (
            2
            * LATENCY
            * sum(
                step.do == "All-Reduce gradient"
                for step in even.plan.program.instructions  # type: ignore[union-attr]
            )
        )
        assert even.objective > syncs
        assert (even.objective > before.objective) == (speed < 1e9 or syncs > before.objective)
        after = replay_candidate(even, workload)
        assert even.measured and after.predicted_seconds == even.predicted_seconds
        assert even.predicted_seconds == pytest.approx(even.closed_form_seconds, rel=0.05)
        auto = found["auto"]
        assert auto.objective is not None and auto.objective <= even.objective * (1 + 1e-9)


def test_segments_have_ratios_of_their_own(workload: Workload) -> None:
    """The plan says which operators belong to which, so that it is replayed without being told."""
    run = Run(Options(threads=1))
    hap = Hap(HapSettings(seconds=5.0, steps=1, segments=2))
    found = {c.label: c for c in propose(hap, workload, run)}
    auto = found["auto"]
    assert auto.plan is not None and auto.plan.program is not None
    assert len(auto.plan.program.ratios) == 2
    segment = {s.tensor: s.segment for s in auto.plan.program.instructions if s.do == "Run"}
    assert set(segment.values()) == {0, 1}
    assert any(s.do == "Repartition" for s in auto.plan.program.instructions)
    assert replay(auto.plan, workload).seconds > 0
    assert auto.objective is not None and auto.bound is not None
    assert auto.bound <= auto.objective * (1 + 1e-9)
