"""The place of a rank in a plan: what it computes, and on which device."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """The place of one rank. `Plan.places` lists the places of all ranks."""

    rank: int  # number of the process
    replica: int
    stage: int  # within the replica
    group: int  # row group within the stage
    tensor: int  # tensor rank within the row group
    device: int  # number in the plan's `devices`

    @property
    def unit(self) -> tuple[int, int, int]:
        """(replica, stage, row group). The ranks of one unit compute the same rows together, so
        that they contribute once to each gradient."""
        return self.replica, self.stage, self.group
