"""The exact method against all plans of tiny instances."""

from random import Random

import pytest

from hetplan.formulations.joint.bound.driver import lower_bound
from hetplan.formulations.joint.bound.tables import Relaxation
from hetplan.formulations.joint.data import JointData
from hetplan.formulations.joint.exact import solve
from hetplan.replays.chains import ChainReplayer
from hetplan.solvers.run import Options, Run, Stop
from joint.enumeration import all_plans, random_data
from stopping import cancelled_after

QUICK = [
    pytest.param(seed, 2, 3, 3, marks=pytest.mark.wide if seed >= 8 else ()) for seed in range(20)
]
SLOW = [
    pytest.param(seed, 3, 3 + seed % 2, 3, marks=pytest.mark.wide) for seed in range(1000, 1200)
]


def tightened(rng: Random, data: JointData) -> JointData:
    """With less memory in some, down to where no plan fits."""
    room = 10 ** rng.uniform(6.5, 8.5) if rng.random() < 0.4 else 1e12
    types = {
        name: kind.model_copy(update={"memory_bytes": room}) for name, kind in data.types.items()
    }
    return data.model_copy(update={"types": types})


@pytest.mark.parametrize(("seed", "devices", "layers", "batch"), [*QUICK, *SLOW])
def test_equal_to_full_enumeration(seed: int, devices: int, layers: int, batch: int) -> None:
    rng = Random(seed)
    drawn = random_data(rng, devices=devices, layers=layers, batch=batch)
    data = tightened(rng, drawn)
    replayer = ChainReplayer.of(data)
    replays = [replayer.replay(plan) for plan in all_plans(data)]
    best = min((replay.seconds for replay in replays if replay.fits), default=None)
    bound = lower_bound(Relaxation(data), cancelled_after(300))
    assert bound <= min(replay.seconds for replay in replays)
    run = Run(Options(time_limit=600))
    outcome = solve(data, run)
    assert outcome.stop is (Stop.INFEASIBLE if best is None else Stop.OPTIMAL)
    if best is not None and outcome.decision is not None and outcome.bound is not None:
        assert run.incumbent == pytest.approx(best, rel=1e-9)
        assert outcome.bound == pytest.approx(best, rel=1e-6)
        fields = outcome.decision.model_dump()
        assert replayer.replay(data.plan(fields.pop("replicas"), **fields)).seconds == run.incumbent
