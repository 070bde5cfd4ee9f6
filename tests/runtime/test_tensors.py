"""Layers of users' models on several ranks: losses, every gradient, what a rank holds and computes,
and a checkpoint that another plan goes on from, beside one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")
pytest.importorskip("transformers", reason="transformers is an extra of the tests")

from fakes.hugging import CONFIGURED  # noqa: E402
from hetplan.errors import UnsupportedError  # noqa: E402
from hetplan.plans.refusals import check_executed  # noqa: E402
from hetplan.runtime.engine.chain import Chain, Part, describe  # noqa: E402
from hetplan.runtime.engine.distributed import example_of  # noqa: E402
from hetplan.runtime.engine.layout import Layout  # noqa: E402
from hetplan.runtime.engine.tensors import check_meshes  # noqa: E402
from hetplan.runtime.tracing.split import word_of  # noqa: E402
from parity import along  # noqa: E402
from parity.asking import HUGGING, run_forked  # noqa: E402
from parity.cases import MODELS, names_of  # noqa: E402
from parity.divided import CASES, KINDS, QUICK, RATE, Case, alone, made  # noqa: E402

EXACT = 1e-10
alone = cache(alone)
Left = dict[tuple[str, str], list[Any]]  # name and model of a case -> [rank] what it left


def left_by(target: str, folder: Path, largest: int) -> Left:
    """All cases of a target."""
    run_forked(target, folder, imports=HUGGING, PARITY_RANKS=str(largest))
    left: Left = {}
    for file in sorted(folder.glob("left-*.pt")):
        for key, value in torch.load(file).items():
            left.setdefault(key, []).append(value)
    return left


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Left:
    """What two ranks left of some cases; three try the ring alone."""
    return left_by("parity.divided:quick", tmp_path_factory.mktemp("quick"), 3)


@pytest.fixture(scope="module")
def left_by_kinds(tmp_path_factory: pytest.TempPathFactory) -> Left:
    """What the ranks left of a case of each kind."""
    return left_by("parity.divided:kinds", tmp_path_factory.mktemp("kinds"), 4)


@pytest.fixture(scope="module")
def all_left(tmp_path_factory: pytest.TempPathFactory) -> Left:
    """What all ranks left of all cases."""
    return left_by("parity.divided", tmp_path_factory.mktemp("all"), 4)


def check(case: Case, left: Left) -> None:
    """By plain steps of SGD, weights are equal only where all gradients are."""
    losses, weights, flops = alone(case.model)
    ranks = left[case.name, case.model]
    assert all(rank["losses"] == pytest.approx(losses, rel=EXACT) for rank in ranks)
    for expected, ours in zip(weights, ranks[0]["weights"], strict=True):
        for name, value in expected.items():
            error = float((ours[name] - value).norm()) / RATE
            assert error <= EXACT * max(1.0, float(value.norm())), f"{name}: {error}"
    if len(case.stages) == 1:
        whole = sum(value.numel() for value in weights[0].values())
        assert max(rank["held"] for rank in ranks) <= case.holds * whole
        assert max(rank["flops"] for rank in ranks) <= case.computes * flops


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_two_ranks_train_as_one_process(case: Case, quick: Left) -> None:
    check(case, quick)


@pytest.mark.engine
@pytest.mark.parametrize("case", KINDS, ids=lambda case: f"{case.name}, {case.model}")
def test_ranks_train_as_one_process(case: Case, left_by_kinds: Left) -> None:
    check(case, left_by_kinds)


@pytest.mark.wide
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}, {case.model}")
def test_all_cases_train_as_one_process(case: Case, all_left: Left) -> None:
    check(case, all_left)


@pytest.fixture(scope="module")
def chain() -> Chain:
    """GPT-2, split."""
    module = made("gpt2")
    return describe(module, CONFIGURED, example_of(module))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case("four", "gpt2", context=4), "4 ranks do not divide the tokens of a sample"),
        (Case("both", "gpt2", context=2, tensor=2), "4 ranks do not divide the heads of attention"),
        (Case("order", "gpt2", tensor=2), "are not in order"),
    ],
)
def test_what_ranks_cannot_share_is_refused(case: Case, message: str, chain: Chain) -> None:
    plan = case.plan
    if case.name == "order":
        plan.replicas[0].stages[0].devices[0].reverse()
    with pytest.raises(UnsupportedError, match=message):
        check_meshes(chain, Layout(plan), plan.places[0])


def test_own_layers_are_refused() -> None:
    plan = Case("context", "gpt2", context=2).plan
    check_executed(plan)
    with torch.device("meta"):
        module: Any = MODELS["untied"]()
    own = describe(module, names_of("untied"), module.batch(0, 0, 1))
    with pytest.raises(UnsupportedError, match="does not divide tokens"):
        check_meshes(own, Layout(plan), plan.places[0])


def test_parts_are_equal_or_whole(chain: Chain) -> None:
    """Columns of queries, keys and values by heads; what does not divide, and unequal shares, stay
    whole."""
    name = "transformer.h.0.attn.c_attn.weight"
    assert chain.cuts(1, Part(1, (1.0, 1.0)))[name].ranges == ((8, 16), (24, 32), (40, 48))
    for shares in ((1.0, 1.0, 1.0), (2.0, 1.0)):
        assert chain.cuts(1, Part(0, shares))[name].size == 48
    assert chain.parameters["transformer.h.0.mlp.c_proj.weight"].dim == 0
    assert chain.cuts(4, Part(0, (1.0, 1.0)))["transformer.wte.weight"].size == 20


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("model.layers.0.self_attn.q_proj", "colwise"),
        ("base_model.model.model.layers.0.self_attn.q_proj.base_layer", "colwise"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.default", ""),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.default", "colwise"),
        ("base_model.model.model.layers.0.mlp.down_proj.base_layer", "rowwise"),
        ("base_model.model.model.layers.0.mlp.down_proj.lora_A.other", "rowwise"),
        ("base_model.model.model.layers.0.mlp.down_proj.lora_B.other", ""),
        ("base_model.model.model.norm", ""),
    ],
)
def test_a_tensor_plan_names_products_with_adapters_of_peft(path: str, word: str) -> None:
    """The rank between A and B stays whole."""
    plan = {"model.layers.*.self_attn.q_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}
    assert word_of(plan, path) == word


@pytest.mark.engine
def test_operators_along_a_divided_dimension_are_those_of_one_process(tmp_path: Path) -> None:
    """DTensor's own rule takes a cumulative sum of each part for the whole one."""
    run_forked("parity.along", tmp_path)
    for (kind, name), (loss, weights) in torch.load(tmp_path / "told.pt").items():
        net = along.made(name)
        expected = net(**along.data())
        expected.backward()
        torch.optim.SGD(net.parameters(), lr=1.0).step()
        assert loss == pytest.approx(float(expected.detach()), rel=EXACT), (kind, name)
        for key, weight in net.state_dict().items():
            assert torch.allclose(weights[key], weight, rtol=EXACT, atol=EXACT), (kind, name, key)
