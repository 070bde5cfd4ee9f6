"""Hooks of mkdocs.yml: pages and files outside docs/, and links to them, for the site.

Links in the Markdown files are those of the repository (`docs/files.md` in the README,
`../README.md` in docs/), so that they work wherever it is read. On the site all pages lie side by
side: three of the root's become pages of other names, whatever else is linked outside docs/ is
copied to `source/`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
ROOT_PAGES = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
}

_FENCE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def site_target(target: str, folder: str) -> str:
    """Where a link of a page in `folder` of the repository ("" or "docs") leads to on the site."""
    path, hash_sign, anchor = target.partition("#")
    if "://" in target or not path:
        return target
    whole = posixpath.normpath(posixpath.join(folder, path))
    if whole in ROOT_PAGES:
        found = ROOT_PAGES[whole]
    elif whole.startswith("docs/"):
        found = whole.removeprefix("docs/")
    else:
        found = f"source/{whole}"
    return found + hash_sign + anchor


def relinked(text: str, change: Callable[[str], str]) -> str:
    """A Markdown text with every link's target changed, outside fenced blocks."""
    parts = _FENCE.split(text)
    for i in range(0, len(parts), 2):
        parts[i] = _LINK.sub(lambda link: link[1] + change(link[2]) + link[3], parts[i])
    return "".join(parts)


def outside(text: str, folder: str) -> list[str]:
    """The files of the repository that a page links to and that are no pages: paths from the root,
    sorted."""
    found: set[str] = set()

    def note(target: str) -> str:
        path = site_target(target, folder).partition("#")[0]
        if path.startswith("source/"):
            found.add(path.removeprefix("source/"))
        return target

    relinked(text, note)
    return sorted(found)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the root's pages, and the files that any page links to."""
    from mkdocs.structure.files import File, InclusionLevel

    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in ROOT_PAGES}
    wanted = {path for text in texts.values() for path in outside(text, "")}
    for page in files.documentation_pages():
        wanted.update(outside(page.content_string, "docs"))
    for path in sorted(wanted):  # a page outside docs/ brings what it links to beside it
        if path.endswith(".md") and (ROOT / path).is_file():
            text = (ROOT / path).read_text(encoding="utf-8")
            wanted.update(outside(text, posixpath.dirname(path)))
    for name, text in texts.items():
        changed = relinked(text, lambda target: site_target(target, ""))
        files.append(File.generated(config, ROOT_PAGES[name], content=changed))
    for path in sorted(wanted):
        if (ROOT / path).is_file():  # mkdocs tells of those that are not
            copy = File.generated(config, f"source/{path}", content=(ROOT / path).read_bytes())
            in_nav = not path.endswith(".md")
            copy.inclusion = InclusionLevel.INCLUDED if in_nav else InclusionLevel.NOT_IN_NAV
            files.append(copy)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links out of docs/, as the site has them; the root's own pages are done already,
    and those in source/ stand as in the repository."""
    if page.file.src_uri in ROOT_PAGES.values() or page.file.src_uri.startswith("source/"):
        return markdown
    return relinked(markdown, lambda target: site_target(target, "docs"))
