"""Settings for all tests."""

from __future__ import annotations

from hypothesis import settings

# The first example of a property may compile a kernel, which takes seconds: no per-example deadline.
settings.register_profile("hetplan", deadline=None)
settings.load_profile("hetplan")
