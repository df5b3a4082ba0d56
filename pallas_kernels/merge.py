"""`merge_states`: one rule that joins attention over disjoint parts of a context.

Serves split contexts, cascades, sinks and context parallelism. Knows nothing of pages.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import arguments


def merge_states(outs: jax.Array, lses: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Joins partial attention results as if their positions had been attended at once.

    Args:
      outs: [parts, num_tokens, num_q_heads, head_dim], each part normalised by itself.
      lses: f32[parts, num_tokens, num_q_heads], natural logarithms; an empty part is -inf, and its
        row in `outs` is ignored.

    Returns:
      out in the dtype of `outs` (zeros where every part is empty) and lse f32.

    Raises:
      ValueError, TypeError: shapes or dtypes are wrong; at trace time.
    """
    outs, lses = arguments.as_array("outs", outs), arguments.as_array("lses", lses)
    if outs.ndim != 4 or outs.shape[0] == 0:
        raise ValueError(
            f"`outs` must have shape [parts, num_tokens, num_q_heads, head_dim] and a "
            f"part at least. Got {outs.shape}."
        )
    if lses.shape != outs.shape[:-1]:
        raise ValueError(f"`lses` must have shape {outs.shape[:-1]}, as `outs`. Got {lses.shape}.")
    if not jnp.issubdtype(outs.dtype, jnp.floating):
        raise TypeError(f"`outs` must be floating-point. Got {outs.dtype}.")
    if lses.dtype != jnp.float32:
        raise TypeError(f"`lses` must be float32. Got {lses.dtype}.")
    logs = lses
    peak = jnp.max(logs, axis=0)
    peak = jnp.where(jnp.isneginf(peak), 0.0, peak)
    weights = jnp.exp(logs - peak[None])  # f32[parts, num_tokens, num_q_heads]
    total = jnp.sum(weights, axis=0)
    # An empty part may hold anything: 0 * NaN is NaN, so it is replaced, not multiplied away.
    parts = jnp.where(weights[..., None] > 0, outs.astype(jnp.float32), 0.0)
    safe = jnp.where(total == 0, 1.0, total)
    out = jnp.sum(parts * weights[..., None], axis=0) / safe[..., None]
    return out.astype(outs.dtype), jnp.where(total == 0, -jnp.inf, peak + jnp.log(safe))


def add_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """An extra logit in the denominator; rows that saw nothing stay empty.

    Args:
      out: f32[num_tokens, num_q_heads, head_dim].
      lse: f32[num_tokens, num_q_heads].
      sinks: f32[num_q_heads].
    """
    with_sink = jnp.where(jnp.isneginf(lse), -jnp.inf, jnp.logaddexp(lse, sinks[None]))
    shrink = jnp.where(jnp.isneginf(lse), 0.0, jnp.exp(lse - with_sink))
    return out * shrink[..., None], with_sink
