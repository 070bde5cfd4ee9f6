"""Bytes that tensor ranks keep of layers, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fakes.workloads import small
from hetplan.profiling.models.model import load_model
from hetplan.profiling.models.operators import REPEATED
from hetplan.profiling.models.transformer import Experts
from hetplan.profiling.models.zoo import llama, text_model
from hetplan.replays.costs import Costs
from hetplan.replays.data import Kept
from hetplan.replays.memory import gathered_for_experts, on_a_rank
from hetplan.replays.pose import pose, table_of


def test_what_a_rank_keeps() -> None:
    """8 bytes that all ranks divide, 4 between products, of which ranks gather 2."""
    assert on_a_rank(8.0, 4.0, 2.0, 4, False) == 8 / 4 + 4
    assert on_a_rank(8.0, 4.0, 2.0, 4, True) == 8 / 4 + 4 / 4 + 2 * 3 / 4
    assert on_a_rank(8.0, 4.0, 2.0, 1, True) == 8 + 4
    many = on_a_rank(8.0, 4.0, 2.0, np.array([4, 4, 1]), np.array([False, True, True]))
    assert many.tolist() == [6.0, 4.5, 12.0]


def test_ranks_that_divide_an_experts_columns_keep_its_input() -> None:
    shape = llama(2, 16, 4, 32, experts=Experts(count=4, active=2, every=2))
    dense, mixture = load_model(text_model("little", "test", 8, shape)).layers[1:3]
    tokens = 8 * 2 * 16 * 2  # every token visits two experts; 16 wide, 16 bits
    assert gathered_for_experts(mixture, "fp16", 4, 4) == tokens
    assert gathered_for_experts(mixture, "fp16", 4, 2) == pytest.approx(tokens / 3)
    assert gathered_for_experts(mixture, "fp16", 4, 1) == 0.0
    assert gathered_for_experts(mixture, "fp16", 1, 1) == 0.0
    assert gathered_for_experts(dense, "fp16", 4, 4) == 0.0
    many = gathered_for_experts(mixture, "fp16", np.array([4, 1]), np.array([2, 1]))
    assert many.tolist() == pytest.approx([tokens / 3, 0.0])


def test_one_layer_is_computed_again_at_a_time() -> None:
    """The larger of 100 / 2 and of 40 / 2 + 40 / 2, not the most of both parts together."""
    data = pose(small())
    first = Kept(saved_bytes=100.0, working_bytes=100.0)
    second = Kept(
        saved_bytes=40.0, working_bytes=40.0, gathered_bytes=40.0, gathered_working_bytes=40.0
    )
    nothing = Kept(saved_bytes=0.0)
    layers = [
        layer.model_copy(update={"kept": {"none": kept}})
        for layer, kept in zip(data.layers, [first, second, *[nothing] * 12], strict=True)
    ]
    framework = data.framework.model_copy(update={"sequence_parallel": True})
    costs = Costs(data.model_copy(update={"layers": layers, "framework": framework}))
    assert costs.working_bytes((0, 3), 2) == 50.0
    assert costs.working_bytes((1, 3), 2) == 40.0
    assert costs.saved_bytes((0, 3), 2) == 50.0 + 40.0


def test_layers_of_equal_operators_and_another_kind_repeat_apart() -> None:
    """The last layer of a traced module may have the operators of the middle ones. Its backward
    pass follows at once, and nothing of it is computed again."""
    on = small()
    *first, last = on.model.layers
    alike = replace(last, operators=first[-1].operators)
    traced = replace(on, model=replace(on.model, layers=(*first, alike)))
    (repeated,) = table_of(traced, on.profile.tables[0], ["full"]).repeated.values()
    assert repeated == [float(layer.kind in REPEATED) for layer in traced.model.layers]
    assert repeated[-2:] == [1.0, 0.0]
