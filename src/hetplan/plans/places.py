"""Where a rank of a plan stands."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """A rank's replica, stage, row group and tensor rank, and its device."""

    rank: int
    replica: int
    stage: int
    group: int
    tensor: int
    device: int

    @property
    def unit(self) -> tuple[int, int, int]:
        """(replica, stage, group) of the ranks that compute a set of rows together: they contribute
        once to each gradient."""
        return self.replica, self.stage, self.group
