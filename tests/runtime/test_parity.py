"""Loss and every gradient of a plan equal those of one process, for all plan shapes of
`parity.cases`; in half precision within the rounding of the type."""

from __future__ import annotations

from collections import defaultdict
from math import prod
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")

from hetplan.files import read_json  # noqa: E402
from parity.asking import run_forked  # noqa: E402
from parity.cases import CASES, DRAWN, Case  # noqa: E402 (needs torch)
from parity.curves import (  # noqa: E402
    OPTIMIZERS,
    PLANS,
    STEPS,
    Curves,
    check_equal,
    check_resumed,
    loaded,
)
from parity.frozen import alone  # noqa: E402
from parity.gradients import QUICK, STAGED, Written, check_case, read, single  # noqa: E402
from parity.halves import (  # noqa: E402
    AUTOCAST,
    CURVE,
    PRECISIONS,
    WORLDS,
    cast,
    chosen,
    error_of,
)

FEW = [case for case in CASES if case.name in QUICK]


def written_by(target: str, cases: list[Case], folder: Path) -> Written:
    """World size -> [rank] -> case -> (loss, fragments), of all sizes up to the cases'."""
    sizes = sorted({case.world for case in cases})
    run_forked(target, folder, PARITY_RANKS=str(sizes[-1]))
    return read(folder, sizes)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """What the ranks of one plan of each kind wrote."""
    return written_by("parity.gradients:quick", FEW, tmp_path_factory.mktemp("parity"))


@pytest.fixture(scope="module")
def all_written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """What the ranks of all plans wrote."""
    return written_by("parity.gradients", CASES, tmp_path_factory.mktemp("all"))


@pytest.mark.parametrize("case", FEW, ids=[case.name for case in FEW])
def test_loss_and_gradients_equal_one_process(case: Case, written: Written) -> None:
    check_case(case, written)


@pytest.mark.engine
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_loss_and_gradients_of_all_plans_equal_one_process(
    case: Case, all_written: Written
) -> None:
    check_case(case, all_written)


@pytest.fixture(scope="module")
def drawn_written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """What the ranks of all random orders wrote."""
    return written_by("parity.gradients:drawn", DRAWN, tmp_path_factory.mktemp("drawn"))


@pytest.mark.engine
@pytest.mark.parametrize("case", DRAWN, ids=[case.name for case in DRAWN])
def test_random_orders_end_with_the_gradients_of_one_process(
    case: Case, drawn_written: Written
) -> None:
    check_case(case, drawn_written)


@pytest.mark.parametrize("case", [case for case in FEW if case.name in STAGED])
def test_staging_and_lanes_change_nothing(case: Case, written: Written) -> None:
    """Copies to other buffers and back, and no tags: the same numbers, bit by bit."""
    check_staged(case, written)


@pytest.mark.engine
@pytest.mark.parametrize("case", [case for case in CASES if case.name in STAGED])
def test_staging_and_lanes_change_nothing_in_all_plans(case: Case, all_written: Written) -> None:
    check_staged(case, all_written)


def check_staged(case: Case, written: Written) -> None:
    """With and without, bit by bit."""
    name = case.name
    for rank in written[case.world]:
        (loss, fragments), (again, staged) = rank[name], rank[f"staged: {name}"]
        assert loss == again and len(fragments) == len(staged)
        for one, other in zip(fragments, staged, strict=True):
            assert {**one, "values": None} == {**other, "values": None}
            assert torch.equal(one["values"], other["values"])


def test_there_are_enough_shapes() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 60
    assert {case.world for case in CASES} == set(range(2, 9))
    assert len(FEW) == len(QUICK) and {case.world for case in FEW} == {2, 3}


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Curves]:
    """The folder with checkpoints, and (plan, optimizer) -> losses."""
    folder = tmp_path_factory.mktemp("curves")
    run_forked("parity.curves", folder)
    return folder, loaded(folder, "curves")


@pytest.mark.engine
def test_any_two_plans_give_the_same_loss_curve(curves: tuple[Path, Curves]) -> None:
    """Ten steps, with momentum and with AdamW."""
    check_equal(curves[1])


@pytest.mark.engine
def test_a_checkpoint_goes_on_under_another_plan(curves: tuple[Path, Curves]) -> None:
    """Other cuts, widths, shares, ZeRO levels and numbers of ranks."""
    run_forked("parity.curves:resume", curves[0])
    check_resumed(*curves)


def test_frozen_parameters_stay_as_they_are(tmp_path: Path) -> None:
    """Whatever the ZeRO level and the optimizer, and across checkpoints."""
    run_forked("parity.frozen", tmp_path)
    written = torch.load(tmp_path / "frozen.pt")
    for name in OPTIMIZERS:
        losses = alone(name)
        assert written[name] == pytest.approx(losses, rel=1e-9)
        assert losses[-1] < 0.9 * losses[0]


@pytest.mark.engine
def test_a_checkpoint_has_the_unsplit_names(curves: tuple[Path, Curves]) -> None:
    """What is stored can be read without hetplan's plans: every tensor once, whole."""
    folder = curves[0] / "ZeRO 3-adamw" / f"step-{STEPS // 2}"
    stored: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for file in folder.glob("*.pt"):
        for name, (first,), _, values in torch.load(file, weights_only=True):
            stored[name].append((first, first + len(values)))
    shapes = read_json(folder / "hetplan.json")["shapes"]
    assert {f"model.{name}" for name in shapes} == {
        key for key in stored if key.startswith("model.")
    }
    for name, shape in shapes.items():
        for key in (f"model.{name}", f"optimizer.{name}.exp_avg", f"optimizer.{name}.exp_avg_sq"):
            begins, ends = zip(*sorted(stored[key]), strict=True)
            assert [0, *ends] == [*begins, prod(shape)]


# Relative errors of the losses of ten steps: docs/engine.md has them.
LOSSES = {"bf16": 5e-3, "fp16": 2e-3}


@pytest.fixture(scope="module")
def written_in_halves(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """World size -> [rank] -> (case, precision) -> (loss, fragments)."""
    folder = tmp_path_factory.mktemp("halves")
    run_forked("parity.halves", folder)
    return read(folder, WORLDS)


@pytest.mark.engine
@pytest.mark.parametrize("case", chosen(), ids=[case.name for case in chosen()])
def test_loss_and_gradients_are_those_of_one_process(
    case: Case, written_in_halves: Written
) -> None:
    bf16, fp16 = (error_of(case, precision, written_in_halves) for precision in PRECISIONS)
    assert 1e-5 < fp16 < bf16  # it was rounded, as either type does


@pytest.mark.engine
@pytest.mark.parametrize("case", cast(), ids=[case.name for case in cast()])
def test_a_step_inside_of_autocast_is_that_of_one_process_there(
    case: Case, written_in_halves: Written
) -> None:
    error_of(case, AUTOCAST, written_in_halves)
    (loss, _), fp32 = written_in_halves[case.world][0][case.name, AUTOCAST], single(case)[0]
    assert loss != pytest.approx(fp32, rel=1e-6)  # it was rounded


@pytest.mark.engine
def test_training_has_the_curve_of_fp32(
    written_in_halves: Written,
) -> None:
    curves = written_in_halves[PLANS[CURVE].world_size][0]["curves"]
    assert curves["fp32"][-1] < 0.8 * curves["fp32"][0]
    for precision in PRECISIONS:
        assert curves[precision] == pytest.approx(curves["fp32"], rel=LOSSES[precision])
        assert curves[precision] != curves["fp32"]
