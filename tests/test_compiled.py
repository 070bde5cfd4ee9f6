"""Kernels and their cache: whatever has become of its files, a kernel runs, and sound files are
there again afterwards."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import pytest
from numba.core import caching

SOURCE = """
from hetplan.compiled import kernel


@kernel
def doubled(x):
    return 2 * x
"""
Damage = Callable[[bytes], bytes]
DAMAGES: dict[str, Damage] = {
    "empty": lambda content: b"",
    "first byte": lambda content: content[:1],
    "cut in the middle": lambda content: content[: len(content) // 2],
    "last byte missing": lambda content: content[:-1],
    "garbage": lambda content: b"\x93garbage" * 40,
    "zeros": lambda content: bytes(len(content)),
    "text": lambda content: b"<html>404 Not Found</html>\n",
    "another object": lambda content: b"N.",  # a pickled None
}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module with a kernel, whose cache is in the folder of the test."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    path = tmp_path / "kernels.py"
    path.write_text(SOURCE)
    return path


def run(path: Path) -> Any:
    """The kernel after one call, as a new process would load it."""
    spec = importlib.util.spec_from_file_location("kernels", path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    assert loaded.doubled(21) == 42
    return loaded.doubled


def came_from_cache(kernel: Any) -> bool:
    """Whether the kernel was loaded instead of compiled."""
    hits, misses = kernel.stats.cache_hits, kernel.stats.cache_misses
    assert sum(hits.values()) + sum(misses.values()) == 1
    return bool(hits)


def cached(path: Path, suffix: str) -> Path:
    """The only file of the cache with that suffix."""
    (file,) = (path.parent / "__pycache__").glob(f"kernels.doubled-*{suffix}")
    return file


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_file_is_made_anew(module: Path, suffix: str, damage: Damage) -> None:
    assert not came_from_cache(run(module))
    assert came_from_cache(run(module))
    file = cached(module, suffix)
    file.write_bytes(damage(file.read_bytes()))
    assert not came_from_cache(run(module))
    assert came_from_cache(run(module))


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
def test_a_file_that_cannot_be_replaced_is_left_alone(module: Path, suffix: str) -> None:
    run(module)
    file = cached(module, suffix)
    file.unlink()
    file.mkdir()
    (file / "kept").touch()
    assert not came_from_cache(run(module))
    assert (file / "kept").exists()


def test_a_kernel_runs_where_its_folder_cannot_be_written(
    module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file stands where the folder of the cache would be: numba takes the user's cache folder."""
    (tmp_path / "__pycache__").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert not came_from_cache(run(module))
    kernel = run(module)
    assert came_from_cache(kernel)
    assert Path(kernel.stats.cache_path).is_relative_to(tmp_path / "user")


def test_a_kernel_runs_where_no_folder_can_be_written(
    module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "__pycache__").write_text("not a folder")
    (tmp_path / "user").write_text("not a folder either")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    for _ in range(2):
        assert run(module).signatures


def test_a_kernel_runs_where_the_disk_is_full(
    module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(caching.IndexDataCacheFile, "_save_data", full)
    assert not came_from_cache(run(module))
    assert not came_from_cache(run(module))  # the index names a file that is not there
