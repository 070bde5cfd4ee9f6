"""Settings for all tests, and how many seeds of a test run by default."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# The first example of a property may compile a kernel, and other programs may have the processor:
# no deadline of an example, and no complaint that drawing examples is slow.
settings.register_profile(
    "hetplan", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("hetplan")

# Some environments forbid byte code. Then each of the hundreds of processes that tests start, ranks
# and commands, would compile hetplan again, and pytest would rewrite the assertions again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Threads of torch that wait for each other on busy processors cost more than they bring to tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")

LAYERS = ("wide", "engine", "pages", "evidence")
DEFAULT_SEEDS = 5


class ProcessorClock:
    """The processor seconds of this process, up to a millisecond.

    Methods look at the clock in their inner loops, and the system takes long to tell these seconds.
    Within a millisecond of the last time that it was asked, all seconds count.
    """

    def __init__(self) -> None:
        self.asked_at = -1.0
        self.processor = 0.0  # seconds, when the system was asked
        self.latest = 0.0  # seconds, as returned: they never go back

    def __call__(self) -> float:
        now = time.perf_counter()
        if now - self.asked_at > 1e-3:
            self.asked_at = now
            self.processor = time.process_time()
        self.latest = max(self.latest, self.processor + now - self.asked_at)
        return self.latest


@pytest.fixture(autouse=True, scope="session")
def processor_time() -> Iterator[None]:
    """Time limits of methods count the processor seconds of this process.

    Other programs at work then cut off no method. General solvers keep a clock of their own, and
    so do processes that a test starts.
    """
    from hetplan.clock import CLOCK

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CLOCK, "now", ProcessorClock())
        yield


@pytest.fixture(autouse=True, scope="session")
def no_progress() -> Iterator[None]:
    """Commands show no progress, which they else do from the second second on: what they show says
    that they have just begun."""
    from hetplan.solvers.run import Progress

    def begun(seconds: float, *state: Any) -> Progress:
        return Progress(0.0, *state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetplan.cli.output.Progress", begun)
        yield


@pytest.fixture(autouse=True)
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sixth problem's search takes all the time that it may: here, little."""
    from hetplan.planner import joint

    brief = joint.JointSettings(seconds=0.5)
    monkeypatch.setattr(joint, "JointSettings", lambda: brief)


def left_out(metafunc: pytest.Metafunc, layer: str) -> bool:
    """Whether the expression after `-m` leaves out all tests of the layer."""
    return f"not {layer}" in metafunc.config.option.markexpr


def is_quick(value: object) -> bool:
    """Whether a value of a parameter belongs to the default layer."""
    return all(mark.name != "wide" for mark in getattr(value, "marks", ()))


@pytest.hookimpl(tryfirst=True)  # before pytest reads the marks `parametrize` of the test
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make no test items for values of the layer `wide` where that layer is left out.

    They are three quarters of all items, and pytest would make all of them only to leave them out.
    """
    if not left_out(metafunc, "wide"):
        return
    own_layer = any(metafunc.definition.get_closest_marker(layer) for layer in LAYERS)
    parametrize = metafunc.parametrize

    def parametrize_quickly(
        argnames: str | Sequence[str], argvalues: Iterable[Any], *options: Any, **named: Any
    ) -> None:
        values = list(argvalues)
        quick = [number for number, value in enumerate(values) if is_quick(value)]
        if argnames == "seed" and not own_layer:
            quick = quick[:DEFAULT_SEEDS]
        # those behind the last one; others stay, so that pytest numbers the rest as in `wide`
        end = quick[-1] + 1 if quick else len(values)
        if isinstance(named.get("ids"), Sequence):
            named["ids"] = named["ids"][:end]
        parametrize(argnames, values[:end], *options, **named)

    metafunc.parametrize = parametrize_quickly  # type: ignore[method-assign]


def pytest_collection_finish() -> None:
    """Python's garbage collector looks from here on through what tests make, and no longer through
    the modules and the tens of thousands of test items that stay to the end."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first five values of a test's parameter `seed` run by default, the others with `wide`.

    A test that belongs to another layer than the default one keeps all its seeds there.
    """
    seeds_of_test: dict[str, set[object]] = defaultdict(set)
    for item in items:
        call = getattr(item, "callspec", None)
        if call is None or "seed" not in call.params:
            continue
        if any(item.get_closest_marker(layer) for layer in LAYERS):
            continue
        seed = call.params["seed"]
        seeds = seeds_of_test[item.nodeid.partition("[")[0]]
        if len(seeds) < DEFAULT_SEEDS:
            seeds.add(seed)
        elif seed not in seeds:
            item.add_marker(pytest.mark.wide)
