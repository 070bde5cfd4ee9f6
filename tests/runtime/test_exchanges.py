"""What ranks exchange in a step is what the plan says, in one order on all ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")

from parity.asking import run_forked  # noqa: E402

WIDTH = 8  # bytes of fp64
LAYERS = [6 * 5 + 5, 5 * 5 + 5, 5 * 3 + 3]  # elements of those that have parameters
ALL, BATCHES = sum(LAYERS), 2
AGREED = [("all_reduce", WIDTH)]  # one number: what targets weigh, and the loss


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[tuple[str, int]]]]:
    """[ranks] case -> (name, bytes) of a step."""
    folder = tmp_path_factory.mktemp("exchanges")
    run_forked("parity.recorded", folder)
    return [torch.load(folder / f"told-{rank}.pt") for rank in range(2)]


def half(elements: int) -> int:
    """Bytes of the larger share of two."""
    return WIDTH * -(-elements // 2)


def test_collectives_are_those_of_the_plan(told: list[dict[str, Any]]) -> None:
    whole, shares = ("all_reduce", WIDTH * ALL), ("all_gather", half(ALL))
    gathers = [("all_gather", half(n)) for n in LAYERS]
    sums = [("all_reduce", WIDTH * n) for n in LAYERS]
    passes = [*gathers, *(both for pair in zip(gathers[::-1], sums[::-1]) for both in pair)]  # noqa: B905
    expected = {
        "data parallel": [*AGREED, whole, *AGREED],
        "ZeRO 1": [shares, *AGREED, whole, *AGREED],
        "ZeRO 2": [shares, *AGREED, *[whole] * BATCHES, *AGREED],
    }
    for rank in told:
        for name, exchanged in expected.items():
            assert rank[name] == exchanged, name
        # 1F1B of one stage: a forward pass, its backward pass, the next
        assert rank["ZeRO 3"] == [*AGREED, *passes * BATCHES, *AGREED]


def test_messages_are_the_activations_and_their_gradients(told: list[dict[str, Any]]) -> None:
    """Each micro-batch once in each direction; what one sends the other receives, in order."""
    sizes = Counter(WIDTH * 5 * rows for rows in (2, 2, 1))
    for one, other in (told, told[::-1]):
        sent = [size for name, size in one["pipeline"] if name == "isend"]
        received = [size for name, size in other["pipeline"] if name == "recv"]
        assert sent == received and Counter(sent) == sizes
        assert [e for e in one["pipeline"] if e[0] not in ("isend", "recv")] == AGREED * 2
