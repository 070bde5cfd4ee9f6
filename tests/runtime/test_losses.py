"""Losses of training code add up over micro-batches to those of one process, or are refused in one
line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")

from fakes.losses import LAYERS, REFUSED, RIGHT, ROWS, Net, rows  # noqa: E402
from hetplan.errors import UnsupportedError  # noqa: E402
from hetplan.runtime.engine.chain import Chain, describe  # noqa: E402
from hetplan.runtime.engine.totals import added_up as of_batches  # noqa: E402
from parity.asking import run_forked  # noqa: E402
from parity.lossy import alone  # noqa: E402

MICRO_BATCHES = ((0, 3), (3, 4), (4, 8))
# A trace takes half a second. By default one loss of each kind runs.
DEFAULT = (
    "class weights", "two means halved", "boolean mean", "clamped count", "weights by their mean",
    "by the batch's size", "added in place", "an inner head", "learned weight",
)  # fmt: skip
DEFAULT_REFUSED = ("perplexity", "own threshold", "no mean", "centred", "in order")


def some_wide(names: Iterable[str], default: Sequence[str]) -> list[Any]:
    """All names; those that do not run by default are marked wide."""
    return [
        name if name in default else pytest.param(name, marks=pytest.mark.wide) for name in names
    ]


@pytest.fixture(autouse=True)
def fp64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def chain_of(act: Any, **options: Any) -> tuple[Net, Chain]:
    """A net with a loss, and its chain, from one sample of another step."""
    torch.manual_seed(3)
    net = Net(act)
    example = rows(9, 0, 1), None
    return net, describe(net, LAYERS, example, **options)


def added_up(chain: Chain, data: Any) -> Any:
    """The loss of a global batch by its micro-batches. data: (first, last) -> the data."""
    totals = of_batches(chain.source, [partial(data, *part) for part in MICRO_BATCHES])
    loss: Any = 0.0
    for part in MICRO_BATCHES:
        read = chain.read(data, part, 0, len(LAYERS), "cpu", totals.values)
        values: Any = ()
        for layer, inputs in enumerate(read):
            values = chain.call(layer, (*values, *inputs))
        loss = loss + values[0] / totals.weight
    return loss


def gradients_of(net: Net, loss: Any) -> dict[str, Any]:
    """Name -> gradient of each parameter that has one."""
    net.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def assert_equal(net: Net, ours: Any, expected: Any) -> None:
    """Both losses are the same, with the same gradients."""
    assert float(ours.detach()) == pytest.approx(float(expected.detach()), rel=1e-11)
    told, right = gradients_of(net, ours), gradients_of(net, expected)
    for name, gradient in right.items():
        assert torch.allclose(told[name], gradient, rtol=1e-9, atol=1e-13), name


@pytest.mark.parametrize("name", some_wide(RIGHT, DEFAULT))
def test_micro_batches_add_up_to_the_loss_of_one_process(name: str) -> None:
    net, chain = chain_of(RIGHT[name])
    data = lambda first, last: (rows(1, first, last), None)  # noqa: E731
    expected = net(**rows(1, 0, ROWS))
    assert_equal(net, added_up(chain, data), expected)
    # without totals, some rows are a batch of their own
    read = chain.read(data, (2, 7), 0, len(LAYERS), "cpu")
    values: Any = ()
    for layer, inputs in enumerate(read):
        values = chain.call(layer, (*values, *inputs))
    assert_equal(net, values[0], net(**rows(1, 2, 7)))


@pytest.mark.parametrize("name", some_wide(REFUSED, DEFAULT_REFUSED))
def test_what_does_not_add_up_is_refused_with_what_was_seen(name: str) -> None:
    act, seen = REFUSED[name]
    with pytest.raises(UnsupportedError, match=seen) as refused:
        chain_of(act)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300


@pytest.mark.parametrize(
    "name",
    some_wide(["clamped count", "class weights", "boolean mean", "masked mean"], ["clamped count"]),
)
def test_a_step_without_labels_has_a_loss_of_zero(name: str) -> None:
    net, chain = chain_of(RIGHT[name])

    def data(first: int, last: int) -> Any:
        of_rows = rows(1, first, last)
        changed = {"labels": of_rows["labels"].fill_(-100), "mask": of_rows["mask"].zero_()}
        return of_rows | changed, None

    totals = of_batches(chain.source, [partial(data, *part) for part in MICRO_BATCHES])
    assert chain.source.lacks_labels(totals.values)
    assert not chain.source.lacks_labels(dict.fromkeys(totals.values, 1))
    loss = added_up(chain, data)
    assert float(loss.detach()) == 0.0
    assert all(not bool(gradient.any()) for gradient in gradients_of(net, loss).values())


def test_a_sum_is_divided_by_what_count_says() -> None:
    def counted(data: Any) -> Any:
        return (data["labels"] != -100).sum()

    net, chain = chain_of(RIGHT["sum"], count=counted)
    data = lambda first, last: (rows(1, first, last), None)  # noqa: E731
    batch = rows(1, 0, ROWS)
    assert_equal(net, added_up(chain, data), net(**batch) / counted(batch))
    with pytest.raises(UnsupportedError, match="`count` is for a loss that is a sum"):
        chain_of(RIGHT["masked mean"], count=counted)


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Loss -> losses and weights of two ranks."""
    folder = tmp_path_factory.mktemp("losses")
    run_forked("parity.lossy", folder)
    return torch.load(folder / "told.pt")


@pytest.mark.engine
@pytest.mark.parametrize("name", RIGHT)
def test_two_ranks_train_as_one_process(name: str, on_ranks: Any) -> None:
    losses, weights = alone(name)
    told, trained = on_ranks[name]
    assert told == pytest.approx(losses, rel=1e-9)
    for key, weight in weights.items():
        assert torch.allclose(trained[key], weight, rtol=1e-9, atol=1e-12), key
