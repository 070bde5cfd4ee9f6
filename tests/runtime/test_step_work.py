"""What a step does besides the passes: it asks for what the plan says only once, and copies and
sums no more than it needs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")

from hetplan.plans.shares import split  # noqa: E402
from hetplan.runtime import distribute  # noqa: E402
from hetplan.runtime.engine import data, layout as layouts, pipeline  # noqa: E402
from hetplan.runtime.engine.buckets import Bucket, BucketPlan, Piece  # noqa: E402
from hetplan.runtime.engine.chain import Cut  # noqa: E402
from hetplan.runtime.engine.data import HASHED_BYTES, WORD_BYTES, tensor_checksum  # noqa: E402
from hetplan.runtime.engine.layout import Layout  # noqa: E402
from hetplan.runtime.engine.pipeline import Mail  # noqa: E402
from parity.cases import Case, Perceptron, R, S, even, zero  # noqa: E402

TWO_STAGES = Case("pipeline", "perceptron", [R(even([0, 2, 4]), [(2, 2), (1, 1)])]).plan


def test_small_data_are_hashed_without_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(data, "place_factors")
    assert tensor_checksum(torch.arange(256)) != tensor_checksum(torch.arange(1, 257))
    with pytest.raises(NameError):
        tensor_checksum(torch.arange(HASHED_BYTES))


@pytest.mark.parametrize("words", [0, 1])
def test_every_bit_counts_on_both_sides_of_the_limit(words: int) -> None:
    count = HASHED_BYTES // WORD_BYTES + words
    x = torch.arange(2 * count).view(count, 2)[:, 0]
    seen = {tensor_checksum(x), tensor_checksum(x.view(torch.float64)), tensor_checksum(x[None])}
    for place in (0, 1, count - 1):
        changed = x.clone()
        changed[place] ^= 1
        seen.add(tensor_checksum(changed))
    assert len(seen) == 6
    assert tensor_checksum(x) == tensor_checksum(x.contiguous())


def test_rows_are_divided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def counted(*given: Any) -> Any:
        asked.append(given)
        return split(*given)

    monkeypatch.setattr(layouts, "split", counted)
    layout = Layout(TWO_STAGES)
    first = [layout.rows(0, stage, batch) for stage in (0, 1) for batch in (0, 1, 2)]
    again = [layout.rows(0, stage, batch) for stage in (0, 1) for batch in (0, 1, 2)]
    assert first == again == [[(0, 2)], [(2, 4)], [(4, 5)]] * 2
    assert len(asked) == 6


class Outbox:
    """A transport that keeps what it should send."""

    def __init__(self) -> None:
        self.posted: list[tuple[list[float], int]] = []

    def pending(self, sent: list[Any]) -> list[Any]:
        return sent

    def post(self, rows: list[tuple[Any, int]], tag: int) -> list[Any]:
        self.posted += [(x.tolist(), rank) for x, rank in rows]
        return []


def test_messages_of_a_hop_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Any] = []
    messages = pipeline.messages

    def counted(*given: Any, **options: Any) -> Any:
        planned.append(given)
        return messages(*given, **options)

    monkeypatch.setattr(pipeline, "messages", counted)
    outbox: Any = Outbox()
    mail = Mail(Layout(TWO_STAGES), TWO_STAGES.places[0], outbox)
    for value in (1.0, 2.0):
        for batch in (0, 1):
            mail.send([torch.full((2,), value)], 0, batch, forward=True)
    assert outbox.posted == [([value] * 2, 1) for value in (1.0, 1.0, 2.0, 2.0)]
    assert len(planned) == 2


class Doubling:
    """Collectives of two owners with equal tensors."""

    def totalling(self, flat: Any) -> Any:
        return lambda: flat.mul_(2)


def test_whole_gradients_are_views_of_their_sum() -> None:
    """Part of a parameter, and one that is divided along another dimension, are copied."""
    shapes = {"whole": (3, 2), "number": (), "across": (2, 3), "without": (2,)}
    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    dims = {"across": 1}
    both = frozenset({0, 1})
    pieces, cuts = [], {}
    for name, shape in shapes.items():
        dim = dims.get(name, 0)
        length = (shape or (1,))[dim]
        size = parameters[name].numel()
        pieces.append(Piece(name, dim, 0, length, size // length, size, both))
        cuts[name] = Cut(dim, ((0, length),))
    plan = BucketPlan((0, 1), ((0, 1),), torch.float32, (), tuple(pieces), True)
    collectives: Any = Doubling()
    bucket = Bucket(
        plan=plan, rank=0, shard_group=(0, 1), owner_collectives=collectives,
        shard_collectives=None, copy_collectives=None, parameters=parameters, cuts=cuts, ranges=[],
    )  # fmt: skip
    given = {}
    for number, (name, parameter) in enumerate(parameters.items()):
        if name != "without":
            parameter.grad = torch.rand(parameter.shape) + number
            given[name] = parameter.grad.clone()
    before = {name: parameters[name].grad.data_ptr() for name in given}
    bucket.sum_gradients()()
    for name, gradient in given.items():
        assert torch.equal(parameters[name].grad, 2 * gradient), name
        assert (parameters[name].grad.data_ptr() == before[name]) == (name != "whole"), name
    assert parameters["without"].grad is None


@pytest.fixture
def single(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("level", "bucket_bytes", "spans"),
    [
        (0, 4 << 20, [(0, 4)]),  # one bucket, which is summed behind the first layer
        (0, 0, [(0, 1), (1, 3), (3, 4)]),  # the third layer has no parameters
        (3, 4 << 20, [(0, 1), (1, 2), (2, 3), (3, 4)]),
    ],
)
def test_each_span_of_layers_has_one_backward_call(
    level: int,
    bucket_bytes: int,
    spans: list[Any],
    single: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case("one", "perceptron", [R([S((0, 4))], [(2, 2)])], zero(level))
    calls: list[Any] = []
    backward = torch.autograd.backward

    def counted(*given: Any, **options: Any) -> None:
        calls.append(given)
        backward(*given, **options)

    monkeypatch.setattr(torch.autograd, "backward", counted)
    alone = Perceptron()
    model: Any = distribute(copy.deepcopy(alone), case.plan, bucket_bytes=bucket_bytes, probe=False)
    model.train_step()
    assert model.pipeline.spans == [spans]
    assert len(calls) == 2 * len(spans)
    x, y = alone.batch(0, 0, 4)
    for layer in list(alone.layers.values())[:-1]:
        x = layer(x)
    loss = list(alone.layers.values())[-1](x, y) / 4
    backward(loss)
    expected = {name.removeprefix("layers."): p.grad for name, p in alone.named_parameters()}
    for name, parameter in model.updated():
        torch.testing.assert_close(parameter.grad.flatten(), expected[name].flatten())
