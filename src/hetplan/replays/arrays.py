"""Types of the arrays that the formulas of this package take and return."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
# A number of one plan, or an array with one entry for each of many strategies.
Numbers = float | NDArray[np.floating[Any]] | NDArray[np.integer[Any]]
