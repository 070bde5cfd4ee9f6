"""What frameworks hold: the table in the documentation, and arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hetplan.errors import InputError
from hetplan.profiling.frameworks import (
    DEEPSPEED,
    FRAMEWORKS,
    FSDP,
    HETPLAN,
    MEGATRON,
    Framework,
    StateBytes,
)
from hetplan.replays.memory import Passes, UnusedGradients, held_on
from markdown_pages import ROOT


@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=lambda one: one.name)
def test_the_table_says_what_the_constants_are(framework: Framework) -> None:
    page = (ROOT / "docs" / "costs.md").read_text(encoding="utf-8")
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


def test_stages_of_fsdp_keep_weights_and_gradients_whole() -> None:
    """torchtitan's pipelines: 2 bytes of weights and 4 of gradients beside the shards, and the
    gradient that is scattered; other frameworks' stages hold what others do."""
    held = FSDP.held_bytes(2000.0, 200.0, 2, 3, 0.25, staged=True)
    assert held == pytest.approx((0, 1000, 3000, 2000 + 4000 + 600))
    assert FSDP.held_bytes(2000.0, 200.0, 2, 2, 0.25, staged=True).buffers == 4000 + 600
    for level in (0, 1, 2, 3):
        alone = HETPLAN.held_bytes(2000.0, 200.0, 2, level, 0.25)
        assert HETPLAN.held_bytes(2000.0, 200.0, 2, level, 0.25, staged=True) == alone


@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=lambda one: one.name)
def test_numbers_and_arrays_are_held_alike(framework: Framework) -> None:
    """The search counts many strategies at once what the replay counts for one device."""
    sizes = np.array([2e9, 3e8]), np.array([2e8, 1e8]), np.array([0.25, 0.5])
    for level in (0, 1, 2, 3):
        frozen: Any = {"frozen": 7e8, "largest_frozen": 5e7, "staged": True}
        every = framework.held_bytes(*sizes[:2], 2, level, sizes[2], **frozen)
        each = [
            framework.held_bytes(*row[:2], 2, level, row[2], **frozen)
            for row in zip(*sizes, strict=True)
        ]
        assert pytest.approx(np.array(each)) == np.array(every).T
    # the peak is at the loss, in a block's backward pass, or in that of the head
    moments = ((3.0, 1.0), (9.0, 1.0), (3.0, 8.0))
    passes = [
        Passes(saved=8.0, working=working, logits=2.0, loss=6.0, head=head, boundary=1.0)
        for working, head in moments
    ]
    states, unused = StateBytes(1.0, 2.0, 3.0, 4.0), UnusedGradients(5.0, 7.0)
    one_by_one = [
        held_on(framework, states, of_one, 16.0, 2.0, 0.0, unused, 3.0).allocated
        for of_one in passes
    ]
    working: Any
    head: Any
    working, head = (np.array(column) for column in zip(*moments, strict=True))
    both: Any = replace(passes[0], working=working, head=head)
    at_once = held_on(framework, states, both, 16.0, 2.0, 0.0, unused, 3.0).allocated
    assert at_once.tolist() == one_by_one
    assert len(set(one_by_one)) == 3


@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=lambda one: one.name)
def test_in_fp32_all_hold_sixteen_bytes(framework: Framework) -> None:
    held = framework.held_bytes(4000.0, 0.0, 4, framework.levels[0], 1.0)
    assert sum(held[:3]) == 16000


@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=lambda one: one.name)
def test_a_run_has_types_and_a_loss_of_its_own(framework: Framework) -> None:
    """1000 parameters in 16 bit: 2 bytes of gradients, and moments of 2 bytes beside 4 of fp32
    weights."""
    changed = framework.with_choices(gradient_bytes=2, moment_bytes=2, loss="compiled")
    held = changed.held_bytes(2000.0, 0.0, 2, 0, 1.0)
    assert (held.gradients, held.optimizer) == (2000, 8000)
    assert changed.loss_bytes(10.0, 40.0, 1) == 40
    assert changed.loss_bytes(10.0, 40.0, 2) == 80
    assert framework.with_choices() == framework
    with pytest.raises(InputError, match="unknown loss 'ego'"):
        framework.with_choices(loss="ego")


def test_moments_of_other_types_count_in_fp32_too() -> None:
    held = HETPLAN.with_choices(moment_bytes=2).held_bytes(4000.0, 0.0, 4, 0, 1.0)
    assert (held.weights, held.gradients, held.optimizer) == (4000, 4000, 4000)


def test_stages_that_reshard_keep_shards_alone() -> None:
    never = FSDP.with_choices(reshard="never")
    always = FSDP.with_choices(reshard="always")
    whole, shards = (
        one.held_bytes(2000.0, 200.0, 2, 3, 0.25, staged=True).buffers for one in (never, always)
    )
    # 2 bytes of weights and 4 of gradients, beside the gradient of the layer at work; or this
    # layer, the next one and the gradient
    assert whole == 2000 + 4000 + 3 * 200
    assert shards == 2 * 200 + 3 * 200
