"""Experts spread over ranks: one process's losses, gradients and weights; what ranks exchange."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")
pytest.importorskip("transformers", reason="transformers is an extra of the tests")

from fakes.hugging import CONFIGURED, FACTORIES  # noqa: E402
from hetplan.errors import UnsupportedError  # noqa: E402
from hetplan.plans.plan import Plan, load_plan  # noqa: E402
from hetplan.plans.refusals import check_executed  # noqa: E402
from hetplan.runtime.engine.chain import describe  # noqa: E402
from hetplan.runtime.engine.distributed import example_of  # noqa: E402
from hetplan.runtime.tracing.layers import Called  # noqa: E402
from parity import commanded  # noqa: E402
from parity.asking import HUGGING, request, run_forked, served  # noqa: E402
from parity.spread import (  # noqa: E402 (needs torch)
    CASES,
    EACH,
    ROWS,
    TOKENS,
    WIDTH,
    WORLDS,
    Spread,
    alone,
)

BYTES = 8  # of an element


Written = dict[str, list[Any]]  # case -> [ranks] what they told


def written_by(cases: list[Spread], folder: Path) -> Written:
    """What the ranks tell of all cases of at most as many ranks as these."""
    worlds = sorted({case.world for case in cases})
    run_forked("parity.spread", folder, imports=HUGGING, PARITY_RANKS=str(worlds[-1]))
    told = {
        world: [torch.load(folder / f"written-{world}-{rank}.pt") for rank in range(world)]
        for world in worlds
    }
    named = {case.name: [one[case.name] for one in told[case.world]] for case in cases}
    return named | {"no token": [one["no token"] for one in told[WORLDS[0]]]}


@pytest.fixture(scope="module")
def written_by_two(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """What two ranks tell."""
    return written_by([case for case in CASES if case.world == 2], tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """What the ranks of all cases tell."""
    return written_by(CASES, tmp_path_factory.mktemp("spread"))


@cache
def reference(model: str) -> list[dict[str, Any]]:
    """Two steps of one process."""
    return alone(model, 2)


@pytest.mark.engine
@pytest.mark.parametrize("case", [case for case in CASES if case.world == 2], ids=["two ranks"])
def test_two_ranks_train_as_one_process(case: Spread, written_by_two: Written) -> None:
    check(case, written_by_two)


@pytest.mark.engine
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_losses_gradients_and_weights_are_those_of_one_process(
    case: Spread, written: Written
) -> None:
    check(case, written)


def check(case: Spread, written: Written) -> None:
    """Every element of every gradient once; the last case is the second step, from a checkpoint."""
    ranks, expected = written[case.name], reference(case.model)[int(bool(case.before))]
    assert [rank["loss"] for rank in ranks] == pytest.approx([expected["loss"]] * len(ranks), 1e-10)
    gradients = expected["gradients"]
    seen = dict.fromkeys(gradients, 0)
    for name, dim, first, values in (box for rank in ranks for box in rank["gradients"]):
        whole = gradients[name].movedim(dim, 0).reshape(-1)
        seen[name] += len(values)
        error = (values - whole[first : first + len(values)]).abs().max() / whole.abs().max()
        assert error < 1e-10, (name, first, float(error))
    assert seen == {name: whole.numel() for name, whole in gradients.items()}
    norm = sum(float(whole.square().sum()) for whole in gradients.values()) ** 0.5
    assert [rank["norm"] for rank in ranks] == pytest.approx([norm] * len(ranks), 1e-10)
    for name, value in expected["state"].items():  # AdamW magnifies rounding
        assert torch.allclose(ranks[0]["state"][name], value, rtol=1e-7, atol=1e-10), name


@pytest.mark.engine
def test_each_rank_holds_its_experts_alone(written: dict[str, Any]) -> None:
    def held(case: str) -> list[set[int]]:
        return [
            {shape[0] for name, shape in rank["held"].items() if ".experts." in name}
            for rank in written[case]
        ]

    assert held("two ranks") == held("two groups, ZeRO 2 in two groups")[:2] == [{2}, {2}]
    assert held("uneven experts, ZeRO 3") == [{1}, {1}, {2}, {2}]
    assert held("without") == [{4}] * 4


@pytest.mark.engine
def test_tokens_go_to_the_ranks_of_their_experts(
    written: dict[str, Any],
) -> None:
    """Three exchanges of a layer's forward pass and two of its backward pass, with the bytes that
    one process's routing asks for: two ranks with two experts each, two micro-batches of two
    rows."""
    routing = reference("mixtral")[0]["chosen"]
    assert len(routing) == 3 and routing[0].shape == (ROWS, TOKENS, EACH)

    def leaving(rank: int, batch: int, layer: Any) -> list[int]:
        """Bytes for each rank."""
        first = rank * ROWS // 2 + 2 * batch
        experts = layer[first : first + 2]
        return [int((experts // 2 == to).sum()) * WIDTH * BYTES for to in range(2)]

    for rank, told in enumerate(written["two ranks"]):
        expected: list[list[int]] = []
        for batch in range(2):
            out = [leaving(rank, batch, layer) for layer in routing]
            back = [[leaving(of, batch, layer)[rank] for of in range(2)] for layer in routing]
            assert {sum(one) for one in out} == {2 * TOKENS * EACH * WIDTH * BYTES}
            for tokens, results in zip(out, back, strict=True):
                expected += [[2 * BYTES] * 2, tokens, results]
            for tokens, results in zip(out[::-1], back[::-1], strict=True):
                expected += [tokens, results]  # gradients of the results, then of the tokens
        assert told["sent"] == expected
    assert not written["without"][0]["sent"]


@pytest.mark.engine
def test_a_rank_without_a_token_takes_part(written_by_two: Written) -> None:
    for told in written_by_two["no token"]:
        errors: Any = told  # numbers here, not a document
        assert max(errors) < 1e-12


@pytest.mark.engine
def test_the_first_blocks_of_a_stage_are_computed_again(written: dict[str, Any]) -> None:
    """Of the two sparse blocks of the second stage one: it exchanges tokens again in both
    micro-batches."""
    forward, backward = 3, 2
    exchanges = [len(rank["sent"]) for rank in written["pipelines, recomputed"]]
    assert exchanges == [0, 2 * (3 * forward + 2 * backward)] * 2


CLUSTER = """format: hetplan-cluster
version: 1
name: four
nodes:
  - {count: 1, devices: 4, device: T4, intra_node_gbit_per_s: 100, network_gbit_per_s: 10}
"""
FULLY_SHARDED = {
    "overlap": "false", "offload": "false", "recompute": "none", "tensor": "1", "pipeline": "1",
    "micro_batch": "1", "expert": "2", "fsdp": "true", "shard_groups": "1",
}  # fmt: skip


@pytest.mark.engine
def test_commands_take_a_mixture_from_its_configuration_to_trained_experts(tmp_path: Path) -> None:
    """`plan search --write-plan`, then `run --factory`: experts over two of four ranks, each of
    which holds a shard of everything; losses are one process's."""
    module = commanded.made("mixtral")
    module.config.save_pretrained(tmp_path)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    plan = tmp_path / "plan.json"
    words: list[Any] = ["plan", "search", "-m", tmp_path / "config.json", "-b", ROWS]
    words += ["--cluster", tmp_path / "cluster.yaml", "--sequence", TOKENS, "--precision", "fp32"]
    words += ["--no-default-rules", "--top", 1, "--write-plan", plan]
    for name, value in FULLY_SHARDED.items():
        words += ["--param", f"{name}={value}"]
    words += ["&&", "run", plan, "--factory", "parity.commanded:mixtral", "--steps", 2]
    words += ["--learning-rate", 0.01, "--device", "cpu", "--json"]
    answer = served([request("all", *words)], tmp_path, 1)["all"]
    assert answer["code"] == 0, answer["err"]
    written = load_plan(plan)
    assert written.world_size == 4 and written.zero == 3
    assert written.degrees is not None and written.degrees.expert == 2
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    expected = []
    for step in range(2):
        loss = Called(module)(*module.batch(step, 0, ROWS))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
    told = re.findall(r'"loss": ([^,\s}]+)', answer["out"])
    assert [float(loss) for loss in told] == pytest.approx(expected, rel=1e-5)


def changed(case: str, **more: Any) -> Plan:
    """A case's plan with other fields."""
    (plan,) = (one.plan for one in CASES if one.name == case)
    return Plan.model_validate(plan.model_dump(mode="json") | more)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"degrees": {"expert": 2, "expert_tensor": 2}}, "experts in tensor parts"),
        (
            {"degrees": {"expert": 4, "sequence_parallel": True}},
            "experts over ranks that divide tokens",
        ),
        ({"degrees": {"offloaded": 0.5}}, "optimizer states on the host"),
        (
            {"degrees": {"recompute_method": "uniform", "recompute_layers": 2}},
            "layers that are computed again together",
        ),
        (
            {"degrees": {"shard_groups": 2}, "zero_shares": [1.0, 2.0, 1.0, 2.0]},
            "groups of unequal shards",
        ),
    ],
)
def test_what_the_runtime_does_not_execute_is_refused_by_name(
    more: dict[str, Any], message: str
) -> None:
    check_executed(changed("uneven experts, ZeRO 3"))
    with pytest.raises(UnsupportedError, match=f"`hetplan run` has no {message} "):
        check_executed(changed("uneven experts, ZeRO 3", **more))


def test_experts_need_replicas_with_the_same_passes() -> None:
    plan = changed("two ranks").model_dump(mode="json")
    first, second = plan["replicas"]
    uneven = [first, second | {"micro_batches": [{"count": 1, "samples": 4}]}]
    with pytest.raises(UnsupportedError, match="experts over replicas whose passes differ"):
        check_executed(changed("two ranks", replicas=uneven))
    unequal = [first, second | {"micro_batches": [{"count": 2, "samples": 3}]}]
    workload = plan["workload"] | {"global_batch": 10}
    check_executed(changed("two ranks", replicas=unequal, workload=workload))


@pytest.mark.parametrize(
    ("model", "ranks", "message"),
    [
        ("mixtral", 8, "over more ranks than there are .got 8, expected 4 at most"),
        ("llama", 2, "the model has none that are stacked"),
    ],
)
def test_models_whose_experts_cannot_be_spread_are_refused(
    model: str, ranks: int, message: str
) -> None:
    module: Any = FACTORIES[model]()
    with pytest.raises(UnsupportedError, match=message):
        describe(module, CONFIGURED, example_of(module), spread=ranks)
