"""The files from which a workload was read: their paths, and digests that show a change."""

import contextlib
import hashlib
import os
import re
import stat
from typing import Annotated, Self

from pydantic import Field

from hetplan.files import MAX_BYTES
from hetplan.schema import PLAIN, Count, StrictModel

LONGEST_PATH = 4096
LARGEST = 100_000_000  # bytes of a file that is read to find out whether it has changed


class SourceFile(StrictModel):
    """A file as it was when it was read."""

    path: Annotated[str, Field(min_length=1, max_length=LONGEST_PATH, pattern=PLAIN)]
    """In a plan file relative to the folder of the plan file, else absolute."""
    size: Annotated[Count, Field(le=MAX_BYTES)]
    """Bytes."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of its content, in hexadecimal digits."""

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Self | None:
        """The file as it is now; None for a pipe or a device, for a file that is too large, and for
        a path that no JSON text can hold."""
        absolute = os.path.abspath(path)
        is_plain = re.fullmatch(PLAIN, absolute) and absolute.isprintable()
        content = regular_content(absolute)
        if content is None or not is_plain or len(absolute) > LONGEST_PATH:
            return None
        return cls(path=absolute, size=len(content), sha256=digest(content))

    def beside(self, folder: str) -> Self:
        """The same file with a path that is relative to `folder`."""
        return self.model_copy(update={"path": os.path.relpath(self.path, folder)})

    def found_from(self, folder: str) -> Self:
        """The same file with an absolute path. folder: the folder in which a relative path
        begins."""
        return self.model_copy(update={"path": os.path.abspath(os.path.join(folder, self.path))})

    def difference(self) -> str | None:
        """`has changed` or `is not there`; None where the file is as it was.

        The path may come from a file of somebody else, so that only a regular file of the same size
        is read. Nothing is said of what is no regular file and of files above 100 MB.
        """
        if not os.path.exists(self.path):
            return "is not there"
        size = regular_size(self.path)
        if size is None or max(size, self.size) > LARGEST:
            return None
        if size != self.size:
            return "has changed"
        content = regular_content(self.path)
        if content is None:
            return "is not there"
        return None if digest(content) == self.sha256 else "has changed"


def regular_size(path: str) -> int | None:
    """Bytes of a regular file; None for a path that is none, or whose status cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        status = os.stat(path)
        if stat.S_ISREG(status.st_mode):
            return status.st_size
    return None


def regular_content(path: str) -> bytes | None:
    """The bytes of a regular file that is not too large to be read; None for any other."""
    size = regular_size(path)
    if size is None or size > MAX_BYTES:
        return None
    with contextlib.suppress(OSError), open(path, "rb") as stream:
        return stream.read(MAX_BYTES + 1)  # bounded, because the file may have grown since
    return None


def digest(content: bytes) -> str:
    """SHA-256 in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()
