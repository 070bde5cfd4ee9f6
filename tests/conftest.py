"""Settings for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# The first example of a property may compile a kernel, which takes seconds: no per-example
# deadline.
settings.register_profile("hetplan", deadline=None)
settings.load_profile("hetplan")

# Files that take longest, first: with several processes (`pytest -n`) one of them, begun last,
# would run on alone.
FIRST = (
    "runtime/test_parity.py",
    "test_readme.py",
    "runtime/test_run_faults.py",
    "runtime/test_rehearsal.py",
    "cli/test_cli_profile.py",
    "runtime/test_spmd_run.py",
    "test_tutorials.py",
)
HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sixth problem's search takes all the time that it may: here, little."""
    from hetplan.planner import joint

    brief = joint.JointSettings(seconds=0.5)
    monkeypatch.setattr(joint, "JointSettings", lambda: brief)


def pytest_configure(config: pytest.Config) -> None:
    """pytest-xdist would begin with the files of most tests."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files of FIRST to the front; all else as it was."""
    place = {HERE / name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.path, len(FIRST)))
