"""`hetplan plan --set`: settings of one strategy, and what is said of those that it does not
have."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.cli import Call

BASE = (
    "plan",
    "--model",
    "llama2-7b",
    "--cluster",
    "poplar-a",
    "--global-batch",
    64,
    "--threads",
    1,
)


def test_settings_reach_the_strategy(hetplan: Call, tmp_path: Path) -> None:
    more = (
        "--strategies",
        "poplar",
        "--set",
        "poplar.zero=2",
        "--set",
        "poplar.shards=memory",
        "-q",
    )
    ran = hetplan(*BASE, *more, "--json")
    assert ran.code == 0
    assert {c["method"].partition("+")[0] for c in ran.json["candidates"]} == {
        "auto-zero2",
        "paper-zero2",
    }
    best = next(c for c in ran.json["candidates"] if c["method"] == "auto-zero2")
    assert len(best["plan"]["zero_shares"]) == 8
    assert "times the speed of equal ones" in best["message"]
    told = hetplan(*BASE, *more)
    assert "times the speed of equal ones" in told.out and "once per iteration" in told.out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ("--set", "poplar.x=1"),
            "no such setting (got 'poplar.x', expected one of poplar.zero, poplar.shards",
        ),
        (("--set", "poplar.shards=many"), "setting poplar: shards: not usable (got 'many'"),
        (("--set", "poplar.overlap=2"), "setting poplar: overlap: not usable (got 2"),
        (("--set", "poplar.zero=4"), "setting poplar: zero"),
        (("--set", "poplar.curves=nowhere.json"), "nowhere.json"),
        (
            ("--set", "shards=memory"),
            "--set: not usable (got 'shards=memory', expected STRATEGY.NAME=VALUE)",
        ),
        (("--set", "poplar.zero=1", "--set", "poplar.zero=2"), "--set: poplar.zero is given twice"),
        (("--set", "dp.x=1", "--strategies", "dp,poplar"), "no such setting (got 'dp.x'"),
        (("--set", "hap.seconds=1", "--strategies", "dp"), "expected none: these strategies have"),
    ],
)
def test_settings_that_do_not_exist(hetplan: Call, more: tuple[str, ...], message: str) -> None:
    strategies = () if "--strategies" in more else ("--strategies", "poplar")
    ran = hetplan(*BASE, *strategies, *more, "-q")
    assert message in ran.error, ran.err
