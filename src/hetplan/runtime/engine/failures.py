"""The failure of a rank, told to the others: the rank that has the cause says it, and the others
name that rank."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import distributed as dist

from hetplan.errors import HetplanError, kind_and_text, one_line

# Words in errors of torch.distributed that another rank is gone. Errors of gloo have the paths of
# its source files.
PEER_GONE = (
    "connection closed", "connection reset", "broken pipe", "connection refused", "timed out",
    "socket closed", "peer closed", "read error", "aborted", "gloo",
)  # fmt: skip


KEY = "hetplan failure"  # in the store by which the ranks met


class LostPeer(HetplanError):
    """A rank could not go on because another rank was gone."""


def is_lost(error: BaseException) -> bool:
    """Whether a rank's error says that another rank is gone."""
    if isinstance(error, LostPeer):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return False
    text = str(error).lower()
    return any(word in text for word in PEER_GONE)


def error_text(error: BaseException) -> str:
    """An error as one line."""
    if isinstance(error, HetplanError):
        return str(error)
    text = one_line(str(error))
    # torch's allocator on the CPU raises a plain RuntimeError
    of_cpu_allocator = isinstance(error, RuntimeError) and "allocate memory" in text
    if of_cpu_allocator or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return f"out of memory: {text[:300]}"
    return kind_and_text(error)


@contextmanager
def told_to_peers(place: str) -> Iterator[None]:
    """A context for what the ranks do together. An exception in it is told to the other ranks. The
    error of a rank that has lost another one is a single line with what that one has told.

    place: this rank and its place in the plan, for errors.
    """
    try:
        yield
    except Exception as error:
        if is_lost(error):
            raise LostPeer(f"{place}: lost a peer: {told() or 'its own error says why'}") from None
        tell(f"{place}: {error_text(error)}")
        error.add_note(f"hetplan: on {place}")
        raise


def store() -> Any:
    """The store by which the ranks met. torch has no public function for it."""
    return dist.distributed_c10d._get_default_store()


def tell(text: str) -> None:
    """Leave the text of this rank's failure in the store, where no rank has left one."""
    with suppress(Exception):  # the store may be gone with the rank that had it
        if not store().check([KEY]):
            store().set(KEY, text)


def told() -> str | None:
    """The text of the first rank that failed; None where the store has none."""
    with suppress(Exception):
        if store().check([KEY]):
            return str(store().get(KEY).decode())
    return None
