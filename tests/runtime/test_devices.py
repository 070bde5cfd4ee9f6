"""Which device a rank computes on, which way its tensors go, and how messages share the ways that
know no tags."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")

from hetplan.errors import InputError, UnsupportedError  # noqa: E402
from hetplan.runtime.engine import transport  # noqa: E402
from hetplan.runtime.engine.layout import Layout  # noqa: E402
from hetplan.runtime.engine.pipeline import messages, streams  # noqa: E402
from hetplan.runtime.engine.transport import Transport  # noqa: E402
from hetplan.runtime.events import Watch  # noqa: E402
from hetplan.runtime.job import Job, StepReport  # noqa: E402
from hetplan.runtime.launch import devices  # noqa: E402
from hetplan.runtime.launch.devices import local_device  # noqa: E402
from hetplan.runtime.measured import Measured  # noqa: E402
from parity.cases import CASES, Case  # noqa: E402
from parity.faulty import PLAN  # noqa: E402

JOB = Job(plan=PLAN)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine with two GPUs; which one was made torch's current."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return chosen


def test_ranks_go_round_the_gpus(two_gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert [local_device(d) for d in ("cuda", "auto", "cuda:0", "cpu")] == [
        "cuda:1",
        "cuda:1",
        "cuda:0",
        "cpu",
    ]
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert local_device("auto") == "cuda:0"
    assert two_gpus == [1, 1, 0, 0]
    for wrong in ("cuda:2", "cuda:x", "tpu", "cpu:0"):
        with pytest.raises(
            InputError, match=r"no such device here .*expected cpu or cuda:0 or cuda:1"
        ):
            local_device(wrong)


def test_without_gpus_everything_is_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert local_device("auto") == "cpu"
    with pytest.raises(InputError, match=r"\(got 'cuda', expected cpu\)"):
        local_device("cuda")


def test_a_job_gets_its_device_before_ranks_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpus", lambda: 0)
    assert devices.on_devices(JOB).device == "cpu"
    with pytest.raises(InputError, match="no GPU that torch can use here"):
        devices.on_devices(replace(JOB, device="cuda"))
    monkeypatch.setattr(devices, "gpus", lambda: 3)
    assert devices.on_devices(replace(JOB, device="cpu")).device == "cpu"
    placed = devices.on_devices(JOB)
    assert (placed.device, placed.shared_gpus) == ("cuda", 3)
    assert devices.on_devices(JOB, local_ranks=3).shared_gpus == 0
    assert any("ranks share 3 GPUs" in note for note in notes(placed))


def notes(job: Job) -> tuple[str, ...]:
    """Of a run's table."""
    report = StepReport(0, 1.0, 0.0, 1.0, 0.5, 0.5, 0.0, 1)
    return Measured(job, [[report]] * PLAN.world_size).table().notes


def test_rehearsals_stay_on_the_cpu_and_programs_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpus", lambda: 1)
    rehearsed = replace(JOB, virtual=True)
    assert devices.on_devices(rehearsed).device == "cpu"
    with pytest.raises(UnsupportedError, match="compute on the CPU"):
        devices.on_devices(replace(rehearsed, device="cuda"))
    program = replace(JOB, plan=PLAN.model_copy(update={"schedule": "spmd"}))
    assert devices.on_devices(program).device == "cuda"


def test_gpus_are_counted_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    assert devices.gpus() == 5


@pytest.mark.parametrize(
    ("identities", "backend"),
    [(["a", "b", "c"], "nccl"), (["a", "b", "a"], "gloo"), (["a", "b", None], "gloo")],
)
def test_nccl_needs_a_gpu_for_every_rank(
    identities: list[str | None], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise tensors are staged, the mixture of CPUs and GPUs included."""
    monkeypatch.setattr(transport, "identity", lambda device: "mine")
    monkeypatch.setattr(transport, "gather_objects", lambda own: identities)
    assert Transport.over("cuda:1").backend == backend
    assert Transport.over("cuda:1", "always").backend == "gloo"


def test_times_end_when_the_device_is_done() -> None:
    watch, waited = Watch(), []
    watch.settle = lambda: waited.append(watch.state()["what"])
    watch.begins("forward", 0, 0)
    watch.ends("forward", 0, 0)
    assert waited == ["start", "forward"]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_two_ranks_use_a_tag_for_one_hop_in_one_direction(case: Case) -> None:
    layout = Layout(case.plan)
    hops: dict[tuple[int, frozenset[int]], set[tuple[int, bool, int]]] = {}
    for i, replica in enumerate(case.plan.replicas):
        count = len(replica.stages) * len(replica.stages[0].layers) - 1
        for hop, batch, forward in product(range(count), range(replica.steps), (False, True)):
            for (tag, sender, receiver), _ in messages(layout, i, hop, batch, forward=forward):
                if sender != receiver:
                    used = hops.setdefault((tag, frozenset((sender, receiver))), set())
                    used.add((hop, forward, sender))
    assert all(len(used) == 1 for used in hops.values())
    assert {(tag, ranks) for tag, ranks in hops} == {
        (tag, frozenset(ranks)) for tag, *ranks in streams(layout)
    }
    one_chunk = all(len(replica.stages[0].layers) == 1 for replica in case.plan.replicas)
    if one_chunk:
        assert {tag for tag, _ in hops} <= {0, 1}
