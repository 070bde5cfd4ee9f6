"""The pages that a reader works through: their commands run in order and print what is shown.

A block marked `<!-- slow -->` is left to the slow tests, which run the whole page.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from markdown_pages import PAGES, blocks
from page_commands import prepare, run_as_shown

TUTORIALS = [page for page in PAGES if page.name.startswith("tutorial-")]


def with_slow_blocks(page: Path) -> bool:
    """Whether the default tests leave out some of the page's commands."""
    return any(block.mark == "slow" for block in blocks(page, "console"))


LONG = ("tutorial-commands",)  # a minute and more

CASES = [
    *(
        pytest.param(page, False, id=page.stem, marks=pytest.mark.slow if page.stem in LONG else ())
        for page in TUTORIALS
    ),
    *(
        pytest.param(page, True, id=f"{page.stem} whole", marks=pytest.mark.slow)
        for page in TUTORIALS
        if with_slow_blocks(page)
    ),
]


@pytest.mark.parametrize(("page", "whole"), CASES)
def test_commands_print_what_is_shown(page: Path, whole: bool, tmp_path: Path) -> None:
    folder = prepare(page, tmp_path)
    for block in blocks(page, "console"):
        if whole or block.mark != "slow":
            run_as_shown(block, folder)


def test_there_is_a_tutorial_for_each_kind_of_user() -> None:
    names = [page.stem for page in TUTORIALS]
    assert names == [
        "tutorial-cluster",
        "tutorial-commands",
        "tutorial-or",
        "tutorial-research",
    ]
    for page in TUTORIALS:
        assert len(blocks(page, "console")) >= 4, page.name
