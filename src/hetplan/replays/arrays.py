"""Arrays of numbers."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
# One number, of one plan; or an array, of many strategies at once.
Numbers = float | NDArray[np.floating[Any]] | NDArray[np.integer[Any]]
