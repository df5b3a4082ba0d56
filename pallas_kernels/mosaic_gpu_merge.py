"""Joins the items of each row that a work plan has cut: the GPU form of `merge_states`.

Owns the merge kernel; knows nothing of how the items were computed. Runs on every NVIDIA GPU that
Mosaic GPU has: it moves registers only, no TMA and no tensor cores.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_gpu_ops as ops

MOST = 4096  # elements that a CTA holds: 32 registers of a thread for the sum, 32 for an item


def merge_items(
    o: jax.Array,
    lse: jax.Array,
    row_items: jax.Array,
    *,
    transposed: bool,
    out_dtype: Any = jnp.float32,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """The attention of each row of a work list from that of its items, in the items' order.

    Args:
      o: [num_items, head_dim, rows] if `transposed`, else [num_items, rows, head_dim]; float32,
        bfloat16 or float16, each item normalised by itself. Where lse is -inf it may be anything,
        NaN included. head_dim is a multiple of 64; rows a multiple of 8, or of 16 if natural.
      lse: f32[num_items, rows], natural logarithm; -inf: saw nothing.
      row_items: i32[num_rows + 1]; row r has the items from row_items[r] up to row_items[r + 1].
      transposed: the form of `o`, and of the result.
      out_dtype: of the merged o; the sums are float32.
      interpret: run on the CPU; True is with race detection.

    Returns:
      o out_dtype[num_rows, head_dim, rows] or [num_rows, rows, head_dim], 0 where nothing was seen,
      and lse f32[num_rows, rows], -inf there.
    """
    matrix, rows = o.shape[1:], lse.shape[1]
    axis = 1 if transposed else 0  # of `matrix` along which the rows lie
    part = _part(matrix, axis)
    layout = _layout(part, transposed)
    each = layout.reduce(1 - axis)
    num_rows = row_items.shape[0] - 1

    def wide(value: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(value, part, [axis])

    def body(o_g: Any, lse_g: Any, bounds: Any, out_g: Any, out_lse_g: Any) -> None:
        row = lax.axis_index("row")
        at = [pl.ds(lax.axis_index(f"part{i}") * part[i], part[i]) for i in range(2)]

        def step(item: jax.Array, state: Any) -> Any:
            acc, peak, total = state
            new = plgpu.load(o_g.at[item, at[0], at[1]], layout=layout, optimized=False)
            new_lse = plgpu.load(lse_g.at[item, at[axis]], layout=each, optimized=False)
            new_peak = jnp.maximum(peak, new_lse)
            safe = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)  # -inf - -inf is NaN
            keep, weight = jnp.exp(peak - safe), jnp.exp(new_lse - safe)
            # Selected, not multiplied by a weight of 0: what an item did not see may be NaN.
            weighted = new.astype(jnp.float32) * wide(weight)
            weighted = jnp.where(wide(new_lse) == -jnp.inf, 0.0, weighted)
            return acc * wide(keep) + weighted, new_peak, total * keep + weight

        start = (
            plgpu.layout_cast(jnp.full(part, 0.0, jnp.float32), layout),
            plgpu.layout_cast(jnp.full(part[axis : axis + 1], -jnp.inf, jnp.float32), each),
            plgpu.layout_cast(jnp.full(part[axis : axis + 1], 0.0, jnp.float32), each),
        )
        acc, peak, total = lax.fori_loop(bounds[row], bounds[row + 1], step, start)
        acc = acc * wide(1 / jnp.where(total == 0, 1.0, total))
        ops.store_small(out_g.at[row, at[0], at[1]], acc.astype(out_dtype))

        @pl.when(lax.axis_index(f"part{1 - axis}") == 0)
        def _() -> None:  # nothing seen: -inf + -inf
            ops.store_small(out_lse_g.at[row, at[axis]], peak + jnp.log(total))

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((num_rows, *matrix), out_dtype),
            jax.ShapeDtypeStruct((num_rows, rows), jnp.float32),
        ),
        grid=(num_rows, matrix[0] // part[0], matrix[1] // part[1]),
        grid_names=("row", "part0", "part1"),
        interpret=ops.interpret_params(interpret),
        kernel_name=f"merge_items_{matrix[0]}x{matrix[1]}",
    )(o, lse, row_items)


def _part(matrix: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """The piece of `matrix` that a CTA merges; head_dim is cut first, then the rows (`axis`)."""
    part = list(matrix)
    for cut in (1 - axis, axis):
        if part[0] * part[1] > MOST and part[cut] % 64 == 0:
            part[cut] = 64
    return tuple(part)


def _layout(matrix: tuple[int, ...], transposed: bool) -> Any:
    """A register layout that fits `matrix`; refuses what none fits."""
    if matrix[0] % 64 == 0 and matrix[1] % 8 == 0:
        return plgpu.Layout.WGMMA
    if not transposed and matrix[0] % 16 == 0 and matrix[1] % 32 == 0:
        return plgpu.Layout.MMA_ACC(jnp.bfloat16, m_warps=1)  # 16 rows, columns over four warps
    form = "head_dim (of 64) and rows (of 8)" if transposed else "rows (of 16) and head_dim (of 64)"
    raise NotImplementedError(
        f"`o` must have multiples as {form} in the merge kernel. Got {matrix}."
    )
