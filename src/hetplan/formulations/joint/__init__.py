"""The sixth problem: of all plans that the plan file can express, the one whose replayed iteration
is shortest."""
