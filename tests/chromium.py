"""Pages in a real headless Chromium: what it makes of them, what it complains about, and a picture.

Debian's package `chromium` is enough; without a browser the tests that need one are skipped, and
say so.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Of a browser that nobody sits at: no first-run pages, and no connections of its own.
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--enable-logging=stderr",
)
# Console messages and failed loads of the page, as the log on standard error has them:
# `[…:INFO:CONSOLE:12] "text", source: file:///…`
CONSOLE = re.compile(r"^\[[^\]]*:CONSOLE[:(]\d+\)?\] (.*)$", re.MULTILINE)
SECONDS = 600


def chromium() -> str | None:
    """A Chromium on this machine."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


needs_chromium = pytest.mark.skipif(
    chromium() is None, reason="no Chromium on this machine (Debian: apt-get install chromium)"
)


@dataclass(frozen=True)
class Rendered:
    """dom: the document after loading, as HTML. console: what the page logged, errors among it.
    png: its picture."""

    dom: str
    console: tuple[str, ...]
    png: bytes


def rendered(page: Path, *, width: int = 1200, height: int = 1600) -> Rendered:
    """The page of that file; fails the test where the browser itself does."""
    browser = chromium()
    assert browser is not None, "ask for it with the mark needs_chromium"
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "shot.png"
        where = (
            f"--user-data-dir={folder}/profile",
            f"--window-size={width},{height}",
            f"--screenshot={shot}",
        )
        ran = subprocess.run(
            [browser, *FLAGS, *where, "--dump-dom", page.resolve().as_uri()],
            capture_output=True, text=True, check=False, timeout=SECONDS,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        assert shot.exists(), ran.stderr
        return Rendered(ran.stdout, tuple(CONSOLE.findall(ran.stderr)), shot.read_bytes())
