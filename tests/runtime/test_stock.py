"""Plans on stock torch's engines: the same as on ours, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")

from hetplan.errors import UnsupportedError  # noqa: E402
from hetplan.plans.plan import save_plan  # noqa: E402
from hetplan.runtime.engine.chain import describe  # noqa: E402
from hetplan.runtime.stock import check_stock  # noqa: E402
from parity.asking import losses, refused, request, run_forked, served  # noqa: E402
from parity.cases import MODELS, Case, R, S, even, names_of, zero  # noqa: E402
from parity.stocked import CASES, ON_A_V  # noqa: E402


@pytest.mark.engine
def test_both_engines_train_all_plans_alike(tmp_path: Path) -> None:
    """Dropout, recomputation, and going on from the other one's checkpoint included."""
    run_forked("parity.stocked", tmp_path)
    for world in {case.world for case in CASES}:
        for rank in range(world):
            told = torch.load(tmp_path / f"losses-{world}-{rank}.pt")
            for case in (case for case in CASES if case.world == world):
                ours, stock = (told[case.name, engine] for engine in ("Distributed", "Stock"))
                close = 1e-12 if case.dtype == "float64" else 1e-6
                assert ours == pytest.approx(stock, rel=close), case.name
                assert len(set(ours)) == 4


@pytest.mark.engine
def test_a_run_goes_from_stock_torch_to_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command line; what stock torch has no engine for is refused before a process starts,
    rehearsals too."""
    whole, cut = tmp_path / "whole.json", tmp_path / "cut.json"
    save_plan(Case("whole", "two", [R([S((0, 2))], [(2, 2)])] * 2).plan, whole)
    save_plan(Case("cut", "two", [R(even([0, 1, 2]), [(2, 2)])]).plan, cut)
    run = ["run", whole, "--factory", "parity.cases:two", "--device", "cpu", "--steps"]
    kept = ["--checkpoint", tmp_path / "kept"]
    stock = [*run, 2, *kept, "--backend", "torch", "&&", *run, 2, *kept, "--resume"]
    answers = served([request("stock", *stock), request("ours", *run, 4)], tmp_path, 2)
    assert [answer["code"] for answer in answers.values()] == [0, 0], answers
    told, expected = losses(answers["stock"]), losses(answers["ours"])
    assert sorted(told) == [0, 1, 2, 3] and told == pytest.approx(expected, rel=1e-5)
    for plan, more, message in (
        (cut, (), "stock torch has no engine for this plan (got 'parameters of several stages'"),
        (whole, ("--virtual",), "--virtual devices are for hetplan's own engine"),
    ):
        again = ["run", plan, "--factory", "parity.cases:two", "--backend", "torch", *more]
        assert message in refused(capsys, *again)


ONE = [R([S((0, 4))], [(2, 2)])] * 2


@pytest.mark.parametrize(
    ("model", "replicas", "options", "message"),
    [
        ("untied", [*ONE, R([S((0, 4))], [(1, 2)])], {}, "different numbers of micro-batches"),
        (
            "untied",
            [R(even([0, 2, 4]), [(4, 1)]), R(even([0, 1, 4]), [(4, 1)])],
            {},
            "different stages",
        ),
        ("untied", [R([S((0, 4), tensor=(1, 1))], [(2, 2)])], {}, "tensor groups"),
        ("perceptron", ONE, zero(1), "ZeRO 1"),
        ("perceptron", ONE, zero(3, 2, 1), "unequal ZeRO shards"),
        ("untied", [R(even([0, 2, 4]), [(1, 2)])], {}, "fewer micro-batches"),
        ("gpt", [R(even([0, 2, 5]), [(4, 2)])], {}, "parameters of several stages"),
        ("untied", [R([S((0, 4))], [(1, 2)])] * 3, zero(3), "uneven shards of parameters"),
        ("untied", ONE, {"recomputation": "selective"}, "recomputation of the scores"),
        ("untied", ON_A_V * 2, {"schedule": "zbv"}, "replicas whose backward passes are split"),
        ("untied", [R(even([0, 2, 4]), [(4, 1)])], {"schedule": "zb-h1"}, "the schedule zb-h1"),
    ],
)
def test_what_stock_torch_cannot_say_is_refused(
    model: str, replicas: list[R], options: dict[str, Any], message: str
) -> None:
    with torch.device("meta"):
        module = MODELS[model]()
    chain = describe(module, names_of(model), module.batch(0, 0, 1))
    with pytest.raises(UnsupportedError, match=f"{message}.*expected hetplan's own engine"):
        check_stock(Case("refused", model, replicas, options).plan, chain)
