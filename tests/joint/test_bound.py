"""No bound is ever above a replay."""

from random import Random

import numpy as np
import pytest

from hetplan.formulations.joint.bound import (
    WARM_UP,
    Homes,
    Micro,
    Parameters,
    Relaxation,
    lower_bound,
)
from hetplan.formulations.joint.data import JointData
from hetplan.formulations.joint.plan import Plan
from hetplan.formulations.joint.replay import ChainReplayer
from hetplan.solvers.options import Options
from hetplan.solvers.run import Run
from joint.enumeration import home_nodes, random_data, random_plan

SLOW = [pytest.param(seed, 200, marks=pytest.mark.slow) for seed in range(100, 150)]


def homes_of(plan: Plan, data: JointData, of: Relaxation) -> Homes:
    """The nodes that hold some layer alone in this plan, as the bound counts them."""
    alone = home_nodes(plan)
    counts = np.zeros((3, len(of.types)), int)
    for n, node in enumerate(data.nodes):
        q, is_home = of.types.index(node.device), n in alone or not of.several
        counts[:, q] += (is_home, node.devices * is_home, node.devices * (not is_home))
    nodes, home, other = (tuple(row.tolist()) for row in counts)
    return Homes(nodes, home, other, len(data.devices))


def stages_bounds(rng: Random, plan: Plan, data: JointData, of: Relaxation) -> list[float]:
    """What the bound says of each replica, at random prices."""
    homes, alone, values = homes_of(plan, data, of), home_nodes(plan), []
    prices = np.array([rng.uniform(0.2, 2.0) for _ in of.types])
    both = (
        prices * (np.array(homes.home) > 0),
        prices * rng.choice((1, 0.3)) * np.array([count > 0 for count in homes.other]),
    )
    for replica in plan.replicas:
        worth = 0.0
        for device in (d for stage in replica.stages for d in stage.all_devices):
            kind, node = data.devices[device]
            worth += both[of.several and node not in alone][of.types.index(kind)]
        b = max(batch.samples for batch in replica.micro_batches)
        micro = Micro(of, homes, both, b, replica.samples)
        S, C = len(replica.stages), len(replica.stages[0].layers)
        schedules = ["any", plan.schedule]
        if S > 1 and C > 1:
            schedules = ["early", "late"]
        elif S == 1:
            schedules, C = list(WARM_UP), 1
        values += [
            micro.best((worth, worth), S, C, Parameters(), [schedule])[-1] for schedule in schedules
        ]
    return values


@pytest.mark.parametrize(("seed", "plans"), [*((seed, 20) for seed in (*range(20), 42)), *SLOW])
def test_no_replica_is_faster_than_its_bound(seed: int, plans: int) -> None:
    rng = Random(seed)
    data = random_data(rng)
    of, replayer = Relaxation(data), ChainReplayer.of(data)
    checked = 0
    for _ in range(10 * plans):
        plan = random_plan(rng, data)
        if plan is None or checked == plans:
            continue
        checked += 1
        seconds = replayer.seconds(plan)
        for bound in stages_bounds(rng, plan, data, of):
            assert bound <= seconds * (1 + 1e-9), plan.model_dump_json()
    assert checked


@pytest.mark.parametrize("seed", range(20))
def test_no_plan_is_faster_than_the_bound(seed: int) -> None:
    rng = Random(seed)
    data = random_data(rng, batch=6)
    replayer = ChainReplayer.of(data)
    plans = (random_plan(rng, data) for _ in range(200))
    best = min(replayer.seconds(plan) for plan in plans if plan is not None)
    bound = lower_bound(data, Run(Options(time_limit=1.0)))
    assert 0.02 * best < bound <= best
