"""Changes to a page pool: new tokens, page copies, swap out and in. All in place when donated.

Owns how bytes move; which page belongs to whom is the host's business.

Every change is one XLA scatter along the leading axes, which the compiler does in place. Bits are
moved, never converted: the dtypes must agree.
"""

import jax
import jax.numpy as jnp


def write_kv(kv_pages: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> jax.Array:
    """**DONATES** under a donating jit. Puts each token's keys and values where the mapping says.

    Args:
      kv_pages: [num_pages, 2, num_kv_heads, page_size, head_dim].
      k, v: [num_tokens, num_kv_heads, head_dim] in the pool's dtype.
      slot_mapping: i32[num_tokens], page * page_size + page offset; an entry outside
        [0, num_pages * page_size) is dropped. Live entries must differ.

    Returns:
      The pool, with the tokens in it.

    Raises:
      ValueError, TypeError: shapes or dtypes disagree; at trace time.
    """
    num_pages, _, num_kv_heads, page_size, head_dim = _check_pool(kv_pages)
    _check_ids("slot_mapping", slot_mapping)
    expected = (slot_mapping.shape[0], num_kv_heads, head_dim)
    _check_like("k", k, expected, kv_pages)
    _check_like("v", v, expected, kv_pages)
    slots = _past_the_end(slot_mapping, num_pages * page_size)
    pages, offsets = slots // page_size, slots % page_size
    new = jnp.stack([k, v], axis=1)  # [num_tokens, 2, num_kv_heads, head_dim]
    return kv_pages.at[pages, :, :, offsets].set(new, mode="drop")


def copy_pages(kv_pages: jax.Array, src: jax.Array, dst: jax.Array) -> jax.Array:
    """**DONATES** under a donating jit. Copies whole pages; all reads come before all writes.

    Args:
      kv_pages: [num_pages, 2, num_kv_heads, page_size, head_dim].
      src: i32[n] page ids to copy from; clamped to the pool.
      dst: i32[n] page ids to copy to; an entry outside [0, num_pages) is dropped.

    Returns:
      The pool, with the copies in it.

    Raises:
      ValueError, TypeError: shapes or dtypes disagree; at trace time.
    """
    if src.shape != dst.shape:
        raise ValueError(f"`dst` must have the shape of `src`, {src.shape}. Got {dst.shape}.")
    return scatter_pages(kv_pages, dst, gather_pages(kv_pages, src))


def gather_pages(kv_pages: jax.Array, page_ids: jax.Array) -> jax.Array:
    """Copies pages out of the pool, for swapping out.

    Args:
      kv_pages: [num_pages, 2, num_kv_heads, page_size, head_dim].
      page_ids: i32[n]; clamped to the pool.

    Returns:
      [n, 2, num_kv_heads, page_size, head_dim].

    Raises:
      ValueError, TypeError: shapes or dtypes disagree; at trace time.
    """
    num_pages = _check_pool(kv_pages)[0]
    _check_ids("page_ids", page_ids)
    return kv_pages.at[jnp.clip(page_ids, 0, num_pages - 1)].get(mode="promise_in_bounds")


def scatter_pages(kv_pages: jax.Array, page_ids: jax.Array, pages: jax.Array) -> jax.Array:
    """**DONATES** under a donating jit. Puts whole pages into the pool, for swapping in.

    Args:
      kv_pages: [num_pages, 2, num_kv_heads, page_size, head_dim].
      page_ids: i32[n]; an entry outside [0, num_pages) is dropped. Live entries must differ.
      pages: [n, 2, num_kv_heads, page_size, head_dim] in the pool's dtype.

    Returns:
      The pool, with the pages in it.

    Raises:
      ValueError, TypeError: shapes or dtypes disagree; at trace time.
    """
    num_pages = _check_pool(kv_pages)[0]
    _check_ids("page_ids", page_ids)
    _check_like("pages", pages, (page_ids.shape[0], *kv_pages.shape[1:]), kv_pages)
    return kv_pages.at[_past_the_end(page_ids, num_pages)].set(pages, mode="drop")


def _past_the_end(indices: jax.Array, size: int) -> jax.Array:
    """Indices with the negative ones, which JAX would wrap, made too large: a write drops them."""
    return jnp.where(indices < 0, size, indices)


def _check_pool(kv_pages: jax.Array) -> tuple[int, ...]:
    if kv_pages.ndim != 5 or kv_pages.shape[1] != 2:
        raise ValueError(
            "`kv_pages` must have shape [num_pages, 2, num_kv_heads, page_size, head_dim]. "
            f"Got {kv_pages.shape}."
        )
    return kv_pages.shape


def _check_ids(name: str, ids: jax.Array) -> None:
    if ids.ndim != 1:
        raise ValueError(f"`{name}` must have one dimension. Got shape {ids.shape}.")
    if ids.dtype != jnp.int32:
        raise TypeError(f"`{name}` must be int32. Got {ids.dtype}.")


def _check_like(name: str, array: jax.Array, shape: tuple[int, ...], pool: jax.Array) -> None:
    if array.shape != shape:
        raise ValueError(f"`{name}` must have shape {shape}. Got {array.shape}.")
    if array.dtype != pool.dtype:
        raise TypeError(
            f"`{name}` must have the dtype of `kv_pages`, {pool.dtype}. Got {array.dtype}."
        )
