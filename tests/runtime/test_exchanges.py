"""What ranks exchange in a step is what the plan says, in one order on all ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")

from parity.asking import run_forked  # noqa: E402
from parity.recorded import PASS  # noqa: E402 (needs torch)

pytestmark = pytest.mark.engine

WIDTH = 8  # bytes of fp64
LAYERS = [6 * 5 + 5, 5 * 5 + 5, 5 * 3 + 3]  # elements of those that have parameters
ALL, BATCHES = sum(LAYERS), 2
AGREED = [("all_reduce", WIDTH)]  # one number: what targets weigh, and the loss
BOTH_READ = 3  # micro-batches of the pipeline, of which both stages read the data
COMPARED = [("all_reduce", 2 * BOTH_READ * WIDTH)]  # the least and the largest checksum of each


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[tuple[str, int]]]]:
    """[ranks] case -> (name, bytes) of a step."""
    folder = tmp_path_factory.mktemp("exchanges")
    run_forked("parity.recorded", folder)
    return [torch.load(folder / f"told-{rank}.pt") for rank in range(2)]


def parts(elements: int, *shares: int) -> list[int]:
    """Bytes of two shares, equal ones by default."""
    first = round(elements * shares[0] / sum(shares)) if shares else elements // 2
    return [WIDTH * first, WIDTH * (elements - first)]


def scattered(*elements: int, shares: tuple[int, ...] = ()) -> list[tuple[str, int]]:
    """Sums, each share for its owner."""
    return [("reduce", size) for n in elements for size in parts(n, *shares)]


def test_collectives_are_those_of_the_plan(told: list[dict[str, Any]]) -> None:
    whole, shares = ("all_reduce", WIDTH * ALL), ("all_gather", max(parts(ALL)))
    expected = {
        "data parallel": [*AGREED, whole, *AGREED],
        "ZeRO 1": [shares, *AGREED, *scattered(ALL), *AGREED],
        "ZeRO 2": [shares, *AGREED, *scattered(ALL) * BATCHES, *AGREED],
    }
    for rank in told:
        for name, exchanged in expected.items():
            assert [e for e in rank[name] if e != PASS] == exchanged, name
        others = [e for e in rank["ZeRO 2, unequal"] if e not in (PASS, *AGREED)]
        of_layers = scattered(*reversed(LAYERS), shares=(2, 1))
        assert [e for e in others if e[0] != "all_gather"] == of_layers * BATCHES


def test_collectives_go_on_beside_the_passes(told: list[dict[str, Any]]) -> None:
    """A layer's gradients are summed as soon as they are there; ZeRO 3 gathers one layer ahead, and
    keeps one whose next pass follows. The layers 0, 1 and 3 have parameters."""
    gathers = [("all_gather", max(parts(n))) for n in LAYERS]
    sums = [scattered(n) for n in LAYERS]
    (first, middle, last), (low, mid, high) = gathers, sums
    forward = [middle, PASS, PASS, last, PASS, PASS]
    backward = [PASS, *high, middle, PASS, first, PASS, *mid, PASS, *low]
    totals = [("all_reduce", WIDTH * n) for n in reversed(LAYERS)]
    overlapped = [PASS, totals[0], PASS, PASS, totals[1], PASS, totals[2]]
    for rank in told:
        assert rank["ZeRO 3"] == [*AGREED, first, *[*forward, *backward] * BATCHES, *AGREED]
        assert rank["data parallel, by layers"] == [*AGREED, *[PASS] * 12, *overlapped, *AGREED]


def test_messages_are_the_activations_and_their_gradients(told: list[dict[str, Any]]) -> None:
    """Each micro-batch once in each direction; what one sends the other receives, in order."""
    sizes = Counter(WIDTH * 5 * rows for rows in (2, 2, 1))
    for one, other in (told, told[::-1]):
        sent = [size for name, size in one["pipeline"] if name == "isend"]
        received = [size for name, size in other["pipeline"] if name == "irecv"]
        assert sent == received and Counter(sent) == sizes
        assert [e for e in one["pipeline"] if e[0] == "all_reduce"] == [*COMPARED, *AGREED * 2]
    # the last stage has posted the second micro-batch's receive before it goes back with the first
    names = [name for name, _ in told[1]["pipeline"][2:]]
    assert names[:7] == ["irecv", "pass", "pass", "irecv", "pass", "pass", "isend"]
