"""docs/coverage.md says which frameworks each degree is written for: those write it, others refuse
it by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from export.by_hand import cut, plan_of
from hetplan.adapters.exports import EXPORTERS, export
from hetplan.errors import UnsupportedError
from hetplan.plans.plan import Plan

NAMES = {
    "Megatron-LM": "megatron", "Megatron Bridge": "bridge", "torchtitan": "torchtitan",
    "DeepSpeed": "deepspeed", "FlagScale": "flagscale", "torchrun": "torchrun",
}  # fmt: skip


def divided(**degrees: object) -> Plan:
    """Two stages of 2 x 2 ranks on 8 devices, fully sharded, with those degrees."""
    document = plan_of(cut(6, 6), data=2, tensor=2, zero=3).model_dump(mode="json")
    return Plan.model_validate(document | {"degrees": {"expert_tensor": 2, **degrees}})


CASES = {
    "sequence parallelism beside it": divided(sequence_parallel=True),
    "expert parallelism, whole experts on tensor ranks": divided(
        expert=4, expert_tensor=1, sequence_parallel=True
    ),
    "fully sharded stages in pipelines (FSDP)": divided(),
    "optimizer states on the host": divided(offloaded=0.5),
}


@pytest.mark.parametrize("row", CASES)
def test_what_coverage_says_is_exported(row: str) -> None:
    page = Path(__file__).parents[2] / "docs" / "coverage.md"
    (line,) = (one for one in page.read_text().splitlines() if one.startswith(f"| {row} |"))
    said = {NAMES[name] for name in NAMES if name in line.split("|")[-2]}
    written = set()
    for to in EXPORTERS:
        try:
            export(CASES[row], to)
            written.add(to)
        except UnsupportedError:
            pass
    assert written == said
