"""`quire bench`: what users measure with. What a benchmark finds is a plain dict, as of --json."""

from typing import Any

import numpy as np
import numpy.typing as npt

Json = dict[str, Any]
"""An object of a request, or of a line of a file."""
Result = dict[str, Any]
"""What a benchmark found."""
TokenArray = npt.NDArray[np.int32]
