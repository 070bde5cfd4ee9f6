"""The pages that a reader works through: their commands run in order and print what is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from markdown_pages import PAGES, blocks
from page_commands import prepare, run_as_shown

TUTORIALS = [page for page in PAGES if page.name.startswith("tutorial-")]
SHOWN = [
    *TUTORIALS,
    *(page for page in PAGES if page.stem in {"commands", "howto-papers", "method-hap"}),
]


@pytest.mark.pages
@pytest.mark.parametrize("page", SHOWN, ids=[page.stem for page in SHOWN])
def test_commands_print_what_is_shown(page: Path, tmp_path: Path) -> None:
    folder = prepare(page, tmp_path)
    for block in blocks(page, "console"):
        run_as_shown(block, folder)


def test_there_is_a_tutorial_for_each_kind_of_user() -> None:
    names = [page.stem for page in TUTORIALS]
    assert names == [
        "tutorial-cluster",
        "tutorial-or",
        "tutorial-research",
    ]
    for page in TUTORIALS:
        assert len(blocks(page, "console")) >= 4, page.name
