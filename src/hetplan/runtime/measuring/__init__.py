"""Measurements with torch on this machine's devices. Importing this package without torch raises
UnsupportedError."""

from hetplan.runtime.launch.devices import required_torch

required_torch("measuring")
