"""What frameworks hold: the table in the documentation, and arithmetic by hand."""

from __future__ import annotations

import pytest

from hetplan.profiling.frameworks import DEEPSPEED, FRAMEWORKS, FSDP, HETPLAN, MEGATRON, Framework
from markdown_pages import ROOT


@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=lambda one: one.name)
def test_the_table_says_what_the_constants_are(framework: Framework) -> None:
    page = (ROOT / "docs" / "profiling.md").read_text(encoding="utf-8")
    rows = page.partition("## Memory")[2].partition("\n## ")[0].splitlines()
    (row,) = [line for line in rows if line.startswith(f"| `{framework.name}` |")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    weights, gradients, optimizer = framework.state_bytes(2)
    assert cells[1] == f"{weights:g} + {gradients:g} + {optimizer:g}"
    assert cells[2] == (f"{framework.shard_bytes:g}" if 3 in framework.levels else "–")
    assert cells[4].startswith(f"{framework.logit_bytes or 4:g}")
    assert cells[6] == ", ".join(framework.recomputation)
    assert cells[7] == f"{framework.reserved_bytes / 1e9:.2f} GB"
    assert framework.origin


# (level, share 1/4): bytes of a model of 1000 parameters, its largest layer having 100
BY_HAND = [
    (HETPLAN, 0, (2000, 2000, 12000, 0)),
    (HETPLAN, 1, (2000, 2000, 3000, 0)),
    (HETPLAN, 2, (2000, 500, 3000, 200)),
    (HETPLAN, 3, (500, 500, 3000, 3 * 200)),
    (MEGATRON, 0, (2000, 4000, 12000, 0)),
    (MEGATRON, 1, (2000, 4000, 3000, 0)),  # 6 + 12 / 4 bytes a parameter
    (FSDP, 3, (0, 1000, 3000, 2 * 200 + 600)),  # 16 / 4 bytes; two layers and a gradient
    (DEEPSPEED, 1, (2000, 2000, 3000, 2000)),  # a bucket no larger than the model
]


@pytest.mark.parametrize(("framework", "level", "expected"), BY_HAND)
def test_states_by_hand(framework: Framework, level: int, expected: tuple[float, ...]) -> None:
    share = 0.25 if level else 1.0
    assert framework.held_bytes(2000.0, 200.0, 2, level, share) == pytest.approx(expected)


@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=lambda one: one.name)
def test_in_fp32_all_hold_sixteen_bytes(framework: Framework) -> None:
    held = framework.held_bytes(4000.0, 0.0, 4, framework.levels[0], 1.0)
    assert sum(held[:3]) == 16000
