"""SPMD programs on ranks: every instruction, losses and gradients those of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")

from fakes.simulated import Outcome, agree  # noqa: E402
from hetplan.runtime.devices import gpus  # noqa: E402
from parity.asking import run_forked  # noqa: E402
from parity.gradients import TOLERANCE  # noqa: E402
from parity.programs import CASES, STAGED, WORLDS, Case, kinds_used  # noqa: E402

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(gpus() == 0, reason="needs a GPU that torch can use")
    ),
]


@pytest.fixture(scope="module", params=DEVICES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks left; on a GPU that they share, where there is one."""
    made = tmp_path_factory.mktemp("programs")
    run_forked("parity.programs", made, PARITY_DEVICE=request.param)
    return made


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """[world][rank] what each case gave."""
    return {
        w: [torch.load(folder / f"programs-{w}-{rank}.pt") for rank in range(w)] for w in WORLDS
    }


def joined(parts: list[tuple[int | None, Any]]) -> Any:
    """A gradient from all ranks' parts; whole ones are the same everywhere."""
    dimension = parts[0][0]
    if dimension is None:
        assert all(torch.equal(part, parts[0][1]) for _, part in parts)
        return parts[0][1]
    return torch.cat([part for _, part in parts], dim=dimension)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_programs_on_ranks_equal_one_device(
    case: Case, found: dict[int, list[dict[str, Any]]]
) -> None:
    ranks, expected = [rank[case.name] for rank in found[case.world]], case.expected
    assert len({loss for loss, _ in ranks}) == 1
    assert all(set(parts) == set(expected.gradients) for _, parts in ranks)
    gradients = {name: joined([parts[name] for _, parts in ranks]) for name in expected.gradients}
    agree(Outcome(ranks[0][0], gradients), expected, TOLERANCE[case.dtype])


@pytest.mark.parametrize("name", STAGED)
def test_staging_changes_nothing(name: str, found: dict[int, list[dict[str, Any]]]) -> None:
    """Copies to other buffers and back: the same numbers, bit by bit."""
    (case,) = [case for case in CASES if case.name == name]
    for rank in found[case.world]:
        (loss, parts), (again, staged) = rank[name], rank[f"staged: {name}"]
        assert loss == again and parts.keys() == staged.keys()
        for key, (dimension, values) in parts.items():
            assert dimension == staged[key][0] and torch.equal(values, staged[key][1])


def test_the_cases_use_every_instruction() -> None:
    assert kinds_used() >= {
        "Run", "reduction", "All-Reduce", "Reduce-Scatter", "All-Gather", "Grouped-Broadcast",
        "All-To-All", "Slice", "Share", "Repartition", "All-Reduce gradient",
        "All-Gather factors", "Grouped-Broadcast factors",
    }  # fmt: skip
    assert {case.network for case in CASES} == {
        "vgg19",
        "vit",
        "bert",
        "bert-moe",
        "gpt2",
        "llama-blocks",
    }
    assert any(0.0 in row for case in CASES for row in case.ratios)


def test_parameters_are_sliced_where_the_program_slices_them(
    found: dict[int, list[dict[str, Any]]],
) -> None:
    """Unequal parts, none included: less is held than one copy per rank."""
    sizes = [
        [part.numel() for dimension, part in rank[case.name][1].values() if dimension is not None]
        for case in CASES
        for rank in found[case.world]
    ]
    assert any(sizes) and any(0 in row for row in sizes)


def test_a_checkpoint_goes_on_under_another_program(folder: Path) -> None:
    """Other ratios, shards, ranks and runs: the second half of the same curve, which is not
    flat."""
    whole, resumed = (torch.load(folder / f"curves-{world}.pt") for world in (2, 3))
    for name, losses in whole.items():
        assert losses[-1] < 0.97 * losses[0]
        assert resumed[name] == pytest.approx(losses[len(losses) // 2 :], rel=1e-8), name
    assert set(whole) == {"sgd", "adamw"}
