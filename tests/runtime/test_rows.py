"""Data of another form than the trace's are refused in one line; a step without labels is one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")

import torch.distributed as dist  # noqa: E402

from fakes.losses import RIGHT, ROWS, Net, plan_of, rows  # noqa: E402
from hetplan.errors import InputError  # noqa: E402
from hetplan.runtime import distribute  # noqa: E402


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    """A net under a plan of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield distribute(Net(RIGHT["sum over items"]), plan_of("one"), example=rows(9, 0, 1))
    dist.destroy_process_group()


def test_rows_of_the_traces_form_train(model: Any) -> None:
    loss = model.train_step(lambda first, last: rows(1, first, last))
    net = Net(RIGHT["sum over items"])
    net.load_state_dict({**net.state_dict(), **dict(model.gather().named_parameters())})
    assert loss == pytest.approx(float(net(**rows(1, 0, ROWS)).detach()), rel=1e-5)


def test_a_step_without_labels_is_noted(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def unlabelled(first: int, last: int) -> Any:
        data = rows(1, first, last)
        none = torch.full_like(data["labels"], -100)
        return data | {"labels": none, "number": torch.tensor(0)}

    step = model.step
    assert model.train_step(unlabelled) == 0.0
    assert capsys.readouterr().err == f"hetplan: note: step {step} has no label: its loss is 0\n"


def test_a_count_that_divides_no_loss_is_refused(model: Any) -> None:
    counts = {
        0.0: "the losses of a batch are divided by 0 .got 'losses with a sum of",
        -1.0: "`count` of a batch is no number of losses .got '-3', expected a finite",
        float("nan"): "no number of losses .got 'nan'",
    }
    count = 1.0
    summed = distribute(
        Net(RIGHT["sum"]), plan_of("one"), example=rows(9, 0, 1), probe=False,
        count=lambda data: count,
    )  # fmt: skip
    for count, message in counts.items():  # noqa: B007 (the function above reads it)
        with pytest.raises(InputError, match=message):
            summed.train_step(lambda first, last: rows(1, first, last))


def shorter(data: dict[str, Any]) -> dict[str, Any]:
    return {name: x[:, :3] if x.dim() > 1 else x for name, x in data.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            shorter,
            "ids of rows 0 to 3 of step .: the data have 3 tokens where the trace has 5; pad",
        ),
        (
            lambda d: d | {"share": d["share"][:, None]},
            r"share of .* another shape .*got 'sizes \[1\] of a sample', expected sizes \[\] of a",
        ),
        (lambda d: d | {"number": d["ids"]}, r"number of .* expected one number for the batch"),
        (lambda d: d | {"number": 7}, r"number of .*got 'no tensor', expected one number for"),
        (
            lambda d: d | {"number": (d["labels"] != -100).sum()},
            "step ., number: a number for the whole batch differs from rows to rows",
        ),
        (lambda d: d | {"more": d["ids"]}, r"other parts than those of the trace .*mask, more, n"),
        (lambda d: {k: x for k, x in d.items() if k != "mask"}, "other parts than those of"),
    ],
)
def test_data_of_another_form_are_refused(change: Any, message: str, model: Any) -> None:
    with pytest.raises(InputError, match=message) as refused:
        model.train_step(lambda first, last: change(rows(1, first, last)))
    assert "\n" not in str(refused.value)


class Scaled(Net):
    """A net that takes a number besides tensors."""

    def forward(self, factor: float, **data: Any) -> Any:  # type: ignore[override]
        return factor * super().forward(**data)


def test_numbers_that_are_no_tensors_stay_those_of_the_trace(model: Any) -> None:
    example = rows(9, 0, 1) | {"factor": 2.0}
    scaled = distribute(Scaled(RIGHT["sum over items"]), plan_of("one"), example=example)
    scaled.train_step(lambda first, last: rows(1, first, last) | {"factor": 2.0})
    with pytest.raises(InputError, match=r"factor of .*got '3.0', expected 2.0; a tensor of one"):
        scaled.train_step(lambda first, last: rows(1, first, last) | {"factor": 3.0})
