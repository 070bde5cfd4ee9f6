"""Replays of plans: the seconds that an iteration takes, and the bytes that each device holds."""
