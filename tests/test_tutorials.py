"""The pages that a reader works through: their commands run in order and print what is shown.

A block marked `<!-- slow -->` is left to the slow tests, which run the whole page.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from markdown_pages import PAGES, blocks
from page_commands import prepare, run_as_shown

TUTORIALS = [page for page in PAGES if page.name.startswith("tutorial-")]


def names(pages: list[Path]) -> list[str]:
    """What the tests are called."""
    return [page.stem for page in pages]


@pytest.mark.parametrize("page", TUTORIALS, ids=names(TUTORIALS))
def test_commands_print_what_is_shown(page: Path, tmp_path: Path) -> None:
    folder = prepare(page, tmp_path)
    for block in blocks(page, "console"):
        if block.mark != "slow":
            run_as_shown(block, folder)


def slow_pages() -> list[Path]:
    """Pages with a block that the default tests leave out."""
    return [page for page in TUTORIALS if any(b.mark == "slow" for b in blocks(page, "console"))]


@pytest.mark.slow
@pytest.mark.parametrize("page", slow_pages(), ids=names(slow_pages()))
def test_slow_commands_too(page: Path, tmp_path: Path) -> None:
    folder = prepare(page, tmp_path)
    for block in blocks(page, "console"):
        run_as_shown(block, folder)


def test_there_is_a_tutorial_for_each_kind_of_user() -> None:
    assert names(TUTORIALS) == ["tutorial-cluster", "tutorial-or", "tutorial-research"]
    for page in TUTORIALS:
        assert len(blocks(page, "console")) >= 4, page.name
