"""Learned efficiency of links: a rule found again, errors on messages kept apart, and predictions
that follow."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fakes.workloads import small
from hetplan.cli.main import main
from hetplan.errors import InputError
from hetplan.profiling.collectives import (
    OPERATIONS,
    Collectives,
    FittedCollective,
    SizePoint,
    fit_line,
)
from hetplan.profiling.efficiency import (
    LearnedLinks,
    load_link_efficiency,
    moved_share,
    train_links,
)
from hetplan.profiling.profile import Provenance
from hetplan.runtime.costs import Costs

BANDWIDTH, LATENCY = 1e9, 4e-4
SIZES = [2.0**p for p in range(10, 27)]


def measured(ranks: int, device: str = "X") -> Collectives:
    """Collectives that take what a ring needs and, below a megabyte, half as long again."""

    def seconds(operation: str, size: float) -> float:
        slow = 1.5 if size < 2**20 else 1.0
        return LATENCY + slow * moved_share(operation, ranks) * size / BANDWIDTH

    fits = []
    for operation in OPERATIONS:
        times = [seconds(operation, size) for size in SIZES]
        line = fit_line(SIZES, times)
        points = [
            SizePoint(bytes=n, seconds=t, median_seconds=t)
            for n, t in zip(SIZES, times, strict=True)
        ]
        fits.append(
            FittedCollective(
                operation=operation, group="node", ranks=ranks, latency_seconds=line.latency,
                bytes_per_second=line.bandwidth, r_squared=line.r_squared, points=points,
            )
        )  # fmt: skip
    return Collectives(
        backend="gloo", device=device, ranks=ranks, fits=fits,
        provenance=Provenance(kind="measured", source="made up", date="2026-01-01"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("operation", "share"),
    [
        ("send", 1),
        ("all-reduce", 1.5),
        ("all-gather", 3),
        ("reduce-scatter", 0.75),
        ("all-to-all", 0.75),
    ],
)
def test_bytes_that_pass_a_link(operation: str, share: float) -> None:
    assert moved_share(operation, 4) == share


class TestTrees:
    @pytest.fixture(autouse=True)
    def library(self) -> None:
        pytest.importorskip("xgboost", reason="xgboost is an extra of hetplan")

    def test_a_rule_is_found_again(self) -> None:
        found = train_links([measured(2), measured(4)])
        assert found.bytes_per_second["node"] == pytest.approx(BANDWIDTH, rel=0.01)
        assert found.trained_on + found.kept_apart == 2 * len(OPERATIONS) * len(SIZES)
        assert found.error < 0.15 < found.plain_error
        links = LearnedLinks(found)
        shares = [links.share("all-reduce", "node", 4, size) for size in SIZES]
        assert (
            shares == sorted(shares) and shares[-1] == pytest.approx(1, rel=0.1) and shares[0] < 0.1
        )
        assert links.share("all-reduce", "between", 4, 2.0**20) == links.share(
            "all-reduce", "node", 4, 2.0**20
        )

    def test_files_must_be_of_one_kind_of_device(self) -> None:
        with pytest.raises(InputError, match="another device"):
            train_links([measured(2), measured(4, device="Y")])
        few = measured(2)
        with pytest.raises(InputError, match="too few"):
            train_links([few.model_copy(update={"fits": few.fits[:1]})])

    def test_costs_follow_the_trees(self) -> None:
        plain = small()
        learned = replace(plain, links=LearnedLinks(train_links([measured(2), measured(4)])))
        before, after = Costs(plain), Costs(learned)
        for size in (1e4, 1e8):
            share = after.workload.links.share("send", "node", 2, size)  # type: ignore[union-attr]
            one, other = (c.messages([(0, 1, size)]) for c in (before, after))
            assert other.seconds == pytest.approx(one.seconds / share) and other.latency == 0
        bare = before.ring([[0, 1, 2, 3]], 1e8).seconds - before.ring([[0, 1, 2, 3]], 0.0).seconds
        share = learned.links.share("all-reduce", "between", 4, 1e8)  # type: ignore[union-attr]
        assert after.ring([[0, 1, 2, 3]], 1e8).seconds == pytest.approx(bare / share)
        assert after.ring([[0, 1]], 1e3).seconds > 5 * 1e3 / before.bandwidth[0, 1]

    def test_command_line(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        files = [tmp_path / f"{ranks}.json" for ranks in (2, 4)]
        for ranks, path in zip((2, 4), files, strict=True):
            measured(ranks).save(path)
        trained = tmp_path / "links.json"
        assert main(["profile", "train", *map(str, files), "-o", str(trained)]) == 0
        assert "learned efficiency of links between X, gloo" in capsys.readouterr().out
        assert load_link_efficiency(trained).kept_apart == 41
        planning = [
            "plan",
            "--model",
            "gpt2",
            "--cluster",
            "home",
            "--global-batch",
            "12",
            "--strategies",
            "dp",
            "--json",
            "-q",
        ]
        seconds = []
        for arguments in (planning, [*planning, "--links", str(trained)]):
            assert main(arguments) == 0
            found = json.loads(capsys.readouterr().out)
            seconds.append(found["candidates"][found["winner"]]["predicted_seconds"])
        # large gradients: learned shares near 1, no latency beside them
        assert seconds[1] != seconds[0]
        document = json.loads(trained.read_text())
        document["trees"] = "{}"
        trained.write_text(json.dumps(document))
        assert main([*planning, "--links", str(trained)]) == 2
        assert "trees cannot be read" in capsys.readouterr().err
