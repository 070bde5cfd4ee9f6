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
        """What computes a set of rows together: one contribution to each gradient."""
        return self.replica, self.stage, self.group
