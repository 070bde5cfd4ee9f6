"""Communication beside computation, and what the optimizer moves, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from hetplan.replays.overlap import bucket_count, bucket_params, uncovered, uncovered_buckets
from hetplan.replays.updates import UPDATE_BYTES, adam_bytes, host_update_seconds


def test_half_of_what_hides_is_spent() -> None:
    assert uncovered(3.0, 0.0) == 3.0  # nothing hides
    assert uncovered(3.0, 2.0) == 1.0 + 1.0  # one is left, and half of two
    assert uncovered(3.0, 9.0) == 1.5
    assert uncovered(np.array([3.0, 3.0]), np.array([2.0, 9.0])).tolist() == [2.0, 1.5]


def test_one_bucket_never_hides() -> None:
    """100 million parameters over 50 ranks: two buckets of 50 million."""
    bucket = bucket_params(50, 40e6, 1e6)
    assert bucket == 50e6 and bucket_params(8, 40e6, 1e6) == 40e6
    assert bucket_count(100e6, bucket) == 2.0 and bucket_count(1e6, bucket) == 1.0
    assert bucket_count(1e6, np.inf) == 1.0
    assert uncovered_buckets(3.0, 2.0, 9.0) == 3.0 + 1.5
    assert uncovered_buckets(3.0, 2.0, 0.0) == 6.0
    assert uncovered_buckets(3.0, 1.0, 9.0) == 3.0


def test_adam_moves_states_gradient_and_weight() -> None:
    """Reads gradient, fp32 weight and moments; writes these, and a weight in 16 bits."""
    assert adam_bytes(weight=2, gradient=2) == 2 + 12 + 12 + 2 == UPDATE_BYTES
    assert adam_bytes(weight=2, gradient=4) == 4 + 12 + 12 + 2
    assert adam_bytes(weight=4, gradient=4) == 4 + 12 + 12  # the fp32 weight is the only one


def test_the_host_updates_what_is_there_and_links_carry_it() -> None:
    """10 parameters: 300 bytes at 100 a second; 60 over a link of 20, of which 2 s are hidden."""
    assert host_update_seconds(10.0, 30, 100.0, 6, 20.0, window=0.0) == 3.0 + 3.0
    assert host_update_seconds(10.0, 30, 100.0, 6, 20.0, window=2.0) == 3.0 + 1.0
    assert host_update_seconds(10.0, 30, 100.0, 6, 20.0, window=9.0) == 3.0
    both = host_update_seconds(np.array([0.0, 10.0]), 30, 100.0, 6, 20.0, window=0.0)
    assert both.tolist() == pytest.approx([0.0, 6.0])
