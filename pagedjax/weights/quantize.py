"""Rows of a weight in eight bits, as they are read: on the host, so that no float copy is made.

The rule is that of `pallas_kernels.quantize`, in NumPy.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

from pallas_kernels.quantize import LARGEST, SMALLEST_SCALE, check_dtype


def quantize_rows(rows: np.ndarray, dtype: DTypeLike) -> tuple[np.ndarray, np.ndarray]:
    """Each row as 8-bit values and a scale; values * scale is about the row.

    int8 values are within scale / 2 of the row's numbers, scale being max |row| / 127;
    float8_e4m3fn values within a 16th of each number, or scale / 1024 where that is more, scale
    being max |row| / 448.

    Args:
      rows: [num_rows, in], floating point.
      dtype: int8 or float8_e4m3fn.

    Returns:
      values [num_rows, in] in `dtype`, and scales f32[num_rows]. A row of zeros has scale 1; one
      that holds a NaN or an infinity has scale NaN and zeros.

    Raises:
      TypeError: `dtype` is another.
    """
    narrow = check_dtype(dtype)
    largest = np.float32(LARGEST[narrow])
    wide = rows.astype(np.float32)
    amax = np.abs(wide).max(axis=-1)
    finite = amax < np.inf  # not of a NaN
    scales = np.where(finite, amax * np.float32(1 / LARGEST[narrow]), np.float32(1))
    scales = np.where(scales < SMALLEST_SCALE, np.float32(1), scales)
    wide[~finite] = 0
    wide *= (np.float32(1) / scales)[:, None]
    np.clip(wide, -largest, largest, out=wide)
    if narrow == np.int8:
        np.rint(wide, out=wide)
    return wide.astype(narrow), np.where(finite, scales, np.float32(np.nan))
