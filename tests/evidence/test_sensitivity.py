"""Plans under profiles that are wrong on purpose."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from evidence.truth.__main__ import main
from evidence.truth.sensitivity import relative_spread, scenarios, sensitivity
from fakes.workloads import cluster_document, pipeline, small
from hetplan.errors import InputError
from hetplan.planner.amp import DataParallel
from hetplan.planner.proposals import propose
from hetplan.plans.plan import save_plan
from hetplan.profiling.models.operators import DEFAULT_STACK
from hetplan.profiling.profiles.profile import Profile, Readings, perturbed
from hetplan.profiling.workload import Workload
from hetplan.replays.replay import replay
from hetplan.solvers.run import Run

pytestmark = pytest.mark.evidence

FAST, SLOW = "V100-SXM2-16GB", "T4"


@cache
def workload() -> Workload:
    return small(stack=DEFAULT_STACK)


def with_spread(profile: Profile, share: float) -> Profile:
    """Readings whose spread is `share` of each layer's forward and backward seconds, both ways
    together."""
    tables = []
    for table in profile.tables:
        readings = Readings(
            forward_spread_seconds=[2 * share * s for s in table.forward_seconds],
            backward_spread_seconds=[2 * share * s for s in table.backward_seconds],
            optimizer_seconds=[0.0] * len(profile.layers),
            saved_bytes=[0.0] * len(profile.layers),
        )
        tables.append(table.model_copy(update={"readings": readings}))
    return profile.model_copy(update={"tables": tables})


def test_times_are_scaled_by_device_and_layer() -> None:
    profile = workload().profile
    factors = np.linspace(0.5, 1.5, len(profile.layers))
    result = perturbed(profile, {SLOW: factors})
    for before, after in zip(profile.tables, result.tables, strict=True):
        ratio = np.array(after.layer_seconds()) / np.array(before.layer_seconds())
        assert ratio == pytest.approx(factors if after.device == SLOW else np.ones(len(factors)))


def test_the_measured_spread_replaces_the_assumed_one() -> None:
    profile = workload().profile
    assert relative_spread(profile)[FAST] == pytest.approx([0.1] * len(profile.layers))
    assert relative_spread(with_spread(profile, 0.03))[FAST] == pytest.approx(
        [0.03] * len(profile.layers)
    )


def test_draws_stay_within_the_spread_and_can_be_had_again() -> None:
    profile = workload().profile
    first, again, other = (scenarios(profile, 5, seed) for seed in (1, 1, 2))
    assert len(first) == 2 * 2 + 5
    for one, same in zip(first, again, strict=True):
        for device, factors in one.factors.items():
            assert np.abs(factors - 1).max() <= 0.1 + 1e-12
            assert (factors == same.factors[device]).all()
    assert any(
        (a.factors[FAST] != b.factors[FAST]).any()
        for a, b in zip(first[4:], other[4:], strict=True)
    )


def test_a_pipeline_of_one_type_follows_that_type() -> None:
    plan = pipeline(workload(), 7)  # both stages on the first node
    result = sensitivity([plan], workload(), draws=0)
    seconds = {outcome.scenario: outcome.seconds[0] for outcome in result.outcomes}
    nominal = result.nominal.seconds[0]
    assert nominal == replay(plan, workload()).seconds
    assert seconds[f"{SLOW} slower"] == seconds[f"{SLOW} faster"] == nominal
    assert nominal < seconds[f"{FAST} slower"] <= 1.1 * nominal
    figures = result.figures(0)
    assert figures["lowest_seconds"] == seconds[f"{FAST} faster"]
    assert figures["highest_seconds"] == seconds[f"{FAST} slower"]
    assert not result.measured and figures["regret"] == 0


def test_ranks_change_where_the_profile_decides() -> None:
    w = workload()
    # the second plan leaves more to the slow devices, which pays where they are faster than thought
    plans = [pipeline(w, 6, 12, 13), pipeline(w, 5, 11, 13)]
    result = sensitivity(plans, w, draws=30, unmeasured=0.8)
    assert {o.winner for o in result.outcomes} == {0, 1}
    first, second = result.figures(0), result.figures(1)
    assert first["wins"] + second["wins"] == len(result.outcomes)
    assert max(first["regret"], second["regret"]) > 0


@pytest.mark.parametrize("arguments", [{"unmeasured": 0.0}, {"unmeasured": 0.95}])
def test_what_is_not_usable(arguments: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        sensitivity([pipeline(workload(), 7)], workload(), **arguments)


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    """The workload's cluster as a file."""
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(cluster_document()))
    return str(path)


def document_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    """What `python -m evidence.truth sensitivity` prints as JSON."""
    capsys.readouterr()
    assert main(["sensitivity", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_command_line(tmp_path: Path, cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = [str(tmp_path / f"plan{i}.json") for i in range(2)]
    for name, cuts in zip(names, ((7,), (4, 8, 12)), strict=True):
        save_plan(pipeline(workload(), *cuts), name)
    arguments = [*names, "--cluster", cluster, "--draws", "3"]
    document = document_of(capsys, *arguments)
    assert document["spread"] == "assumed" and len(document["scenarios"]) == 7
    assert [p["name"] for p in document["plans"]] == ["plan0.json", "plan1.json"]
    for entry in document["plans"]:
        assert entry["lowest_seconds"] <= entry["seconds"] <= entry["highest_seconds"]
    assert main(["sensitivity", *arguments]) == 0
    assert "nothing is measured" in capsys.readouterr().out
    assert main(["sensitivity", *arguments, "--spread", "95"]) == 2
    candidates = tmp_path / "candidates.json"
    planned = {"strategy": "s", "method": "m", "plan": json.loads(Path(names[0]).read_text())}
    candidates.write_text(json.dumps({"winner": 1, "candidates": [{"strategy": "x"}, planned]}))
    named = document_of(capsys, candidates, "--cluster", cluster, "--draws", 0)
    assert named["plans"][0]["name"] == "s/m"


def test_planning_anew_finds_the_plan_again_that_it_began_with(
    tmp_path: Path, cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = propose(DataParallel(), workload(), Run())[0].plan
    assert own is not None
    save_plan(own, tmp_path / "plan.json")
    more = ("--cluster", cluster, "--draws", 0, "--strategies", "dp")
    anew = document_of(capsys, tmp_path / "plan.json", *more)["planned_anew"]
    assert [row["strategy"] for row in anew] == ["dp"] * 4
    for row in anew:
        assert row["gain"] == pytest.approx(row["given_seconds"] / row["new_seconds"] - 1)
        assert row["gain"] > -0.05
