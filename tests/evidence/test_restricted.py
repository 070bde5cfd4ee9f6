"""Parts of joint's space (`evidence/speed/restricted.py`): what is found in a part keeps to its
rules, read off the decision."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from evidence.speed import restricted
from fakes.workloads import small
from hetplan.formulations.joint.annealing import Parameters
from hetplan.formulations.joint.data import JointDecision
from hetplan.formulations.joint.design import design_of
from hetplan.formulations.joint.evaluate import decision_of, evaluate
from hetplan.formulations.joint.search import search
from hetplan.planner.ranking import make_plans
from hetplan.planner.strategy import make_strategies
from hetplan.replays.pose import pose
from hetplan.solvers.run import Options, Run
from present import present

pytestmark = pytest.mark.evidence

# Two kinds of nodes in turn, so that placement matters; a slow network, so that it pays.
NODES = [
    {"count": 1, "devices": 2, "device": kind, "intra_node_gbit_per_s": 170,
     "network_gbit_per_s": 1}
    for kind in ("V100-SXM2-16GB", "T4", "V100-SXM2-16GB")
]  # fmt: skip
WORKLOAD = small(nodes=NODES)
DATA = pose(WORKLOAD, ("none", "full"))
STEPS = Parameters(steps=600)
KINDS = [kind for kind, _ in DATA.devices]


def forms(decision: JointDecision) -> list[list[tuple[int, int]]]:
    """Rows and tensor ranks of every stage of every replica."""
    return [
        [(len(s.devices), len(s.devices[0])) for s in replica.stages]
        for replica in decision.replicas
    ]


def alike(decision: JointDecision) -> bool:
    """Whether replicas differ in nothing but their devices."""
    first = decision.replicas[0]
    return all(
        [s.layers for s in replica.stages] == [s.layers for s in first.stages]
        and replica.micro_batches == first.micro_batches
        for replica in decision.replicas
    ) and all(form == forms(decision)[0] for form in forms(decision))


def kinds_by_stage(decision: JointDecision) -> list[list[str]]:
    """Device types of every replica's stages."""
    return [[KINDS[s.devices[0][0]] for s in replica.stages] for replica in decision.replicas]


def one_shape(decision: JointDecision) -> bool:
    """One tensor degree everywhere, and one row."""
    shapes = {shape for form in forms(decision) for shape in form}
    return len(shapes) == 1 and max(shapes)[0] == 1


RULES: dict[str, Callable[[JointDecision], bool]] = {
    "amp": lambda d: (
        (d.schedule, d.zero) == ("1f1b", 0)
        and alike(d)
        and one_shape(d)
        and len(design_of(d).used) == len(KINDS)
    ),
    "astra": lambda d: (
        d.schedule != "gpipe"
        and d.zero <= 1
        and alike(d)
        and one_shape(d)
        and all(kinds == kinds_by_stage(d)[0] for kinds in kinds_by_stage(d))
    ),
    "ditto": lambda d: (d.schedule, d.zero, len(d.replicas)) == ("1f1b", 0, 1),
    "poplar": lambda d: all(form == [(1, 1)] for form in forms(d)),
    "nothing": lambda d: True,
    "placement": lambda d: all(kinds == sorted(kinds, reverse=True) for kinds in kinds_by_stage(d)),
    "schedule": lambda d: d.schedule == "1f1b",
    "uneven replicas": alike,
    "ZeRO": lambda d: d.zero == 0,
    "recomputation": lambda d: d.recomputation == "none",
    "tensor parallelism": lambda d: all(width == 1 for form in forms(d) for _, width in form),
    "idle devices": lambda d: len(design_of(d).used) == len(KINDS),
}


@pytest.fixture(scope="module")
def starts() -> list[JointDecision]:
    """As in the study, the papers' plans are among the starts; the constructions hold none of
    Poplar's."""
    candidates = make_plans(WORKLOAD, make_strategies(["poplar"])).candidates
    return [decision_of(candidate.plan) for candidate in candidates if candidate.plan]


@pytest.fixture(scope="module")
def whole() -> JointDecision:
    """The best plan without restriction."""
    run = Run(Options(time_limit=None))
    return present(search(DATA, run, parameters=Parameters(steps=2000)).decision)


@pytest.mark.parametrize("name", [*restricted.SPACES, *restricted.WITHOUT])
def test_answers_keep_to_the_rules_of_their_part(
    name: str, whole: JointDecision, starts: list[JointDecision]
) -> None:
    part = {**restricted.SPACES, **restricted.WITHOUT}[name]
    run = Run(Options(time_limit=None))
    found = restricted.search_within(DATA, part, run, [whole, *starts], STEPS)
    decision = present(found.decision)
    assert RULES[name](decision)
    seconds, best = (present(evaluate(DATA, d).objective) for d in (decision, whole))
    if RULES[name](whole):  # a plan of the part to begin with is never lost
        assert seconds <= best * (1 + 1e-9)


def test_rules_bind(whole: JointDecision) -> None:
    """The best plan of all is none of several parts, so that the test above can fail."""
    assert sum(not RULES[name](whole) for name in RULES) >= 4
