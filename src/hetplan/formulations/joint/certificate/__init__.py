"""Certificates of the bound of `joint`: `check` verifies what `write` makes."""
