"""The one formula for memory: bytes of a page, pages of a length, pool size, concurrency.

Start-up, the report and the refusal of a request all count with these functions, so that what is
promised is what the allocator does. Knows no device: bytes come in as numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagedjax.errors import CapacityError

GIB = 2**30
CPU_POOL_BYTES = 2 * GIB  # a CPU's default pool is at most this ...
CPU_POOL_SHARE = 0.25  # ... and at most this share of the RAM that is available
ACCELERATOR_UTILIZATION = 0.9  # default share of a device's memory for weights, pool and step
SHORTEST_DEFAULT_LEN = 1024  # a chosen max_model_len is not shrunk below this to fit the pool


@dataclass(frozen=True, slots=True)
class PageLayout:
    """What decides a page's bytes."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    itemsize: int  # bytes of one element of the pages
    scale_bytes: int = 0  # of each vector in a quantised page

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers: K and V of `page_size` positions."""
        per_vector = self.head_dim * self.itemsize + self.scale_bytes
        per_position = 2 * self.num_kv_heads * per_vector
        return self.num_layers * self.page_size * per_position

    def pages_for(self, num_tokens: int) -> int:
        """Pages that a sequence of so many positions holds."""
        return -(-num_tokens // self.page_size)

    def pages_in(self, num_bytes: int) -> int:
        """Whole pages in so many bytes."""
        return max(0, num_bytes // self.page_bytes)


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The decision: pages of the pool, and the longest request it was made for."""

    num_pages: int  # the null page included
    max_model_len: int

    def concurrency(self, layout: PageLayout, length: int | None = None) -> float:
        """Requests of `length` tokens (None: of `max_model_len`) that fit at once."""
        return (self.num_pages - 1) / layout.pages_for(length or self.max_model_len)


def pool_budget(
    *, on_cpu: bool, free_bytes: int, total_bytes: int, utilization: float | None
) -> int:
    """Bytes for the page pool.

    Args:
      on_cpu: the device is the host; its memory is shared with everything else that runs.
      free_bytes: memory not in use once weights and the step's temporaries are accounted for.
      total_bytes: the device's whole memory.
      utilization: the share asked for; None: the default of the device. On a CPU it is a share
        of the available RAM, elsewhere of the whole memory, of which what is in use is taken off.
    """
    if on_cpu and utilization is None:
        return min(CPU_POOL_BYTES, int(free_bytes * CPU_POOL_SHARE))
    if on_cpu:
        return int(free_bytes * (utilization or 1.0))
    share = ACCELERATOR_UTILIZATION if utilization is None else utilization
    return max(0, free_bytes - int(total_bytes * (1.0 - share)))


def size_pool(
    layout: PageLayout,
    *,
    budget: int,
    model_len: int,
    asked_len: int | None,
    asked_pages: int | None,
    max_num_seqs: int,
    free_bytes: int | None = None,
) -> PoolSize:
    """Chooses the number of pages and `max_model_len`.

    A `max_model_len` that was asked for is met or refused; one that was not is the model's own,
    made shorter when the pool holds less. No more pages are taken than `max_num_seqs` requests
    of that length can fill. `free_bytes` bounds the pages that were asked for.

    Raises:
      CapacityError: one request does not fit; the message says what would.
    """
    if asked_pages is not None and free_bytes is not None:
        _check_memory(layout, asked_pages, free_bytes)
    available = layout.pages_in(budget) if asked_pages is None else asked_pages
    usable = available - 1
    longest = usable * layout.page_size
    floor = asked_len or min(model_len, SHORTEST_DEFAULT_LEN)
    if longest < floor:
        raise CapacityError(_too_small(layout, floor, budget, asked_pages))
    max_model_len = asked_len or min(model_len, longest)
    if asked_pages is None:
        most = layout.pages_for(max_model_len) * max_num_seqs
        usable = min(usable, most)
    return PoolSize(usable + 1, max_model_len)


def host_pages_in(layout: PageLayout, swap_space: float, free_bytes: int) -> int:
    """Pages of the host pool.

    Args:
      swap_space: GiB asked for.
      free_bytes: of the host's memory, once all else has taken its part.

    Raises:
      CapacityError: `free_bytes` are fewer.
    """
    asked = int(swap_space * GIB)
    if asked > free_bytes:
        raise CapacityError(
            f"`swap_space` must fit into the host's free memory, {max(free_bytes, 0) / GIB:.3f} "
            f"GiB. Got {swap_space:g} GiB: lower it, or free memory on the host."
        )
    return layout.pages_in(asked)


def _check_memory(layout: PageLayout, asked_pages: int, free_bytes: int) -> None:
    needed = asked_pages * layout.page_bytes
    if needed > free_bytes:
        raise CapacityError(
            f"`num_pages` {asked_pages} needs {needed / GIB:.3f} GiB of pages; "
            f"{free_bytes / GIB:.3f} GiB are free. Set `num_pages` to at most "
            f"{layout.pages_in(free_bytes)}, or choose a smaller `dtype`."
        )


def _too_small(layout: PageLayout, length: int, budget: int, asked_pages: int | None) -> str:
    needed = layout.pages_for(length) + 1
    if asked_pages is not None:
        fits = max(0, asked_pages - 1) * layout.page_size
        return (
            f"`num_pages` must be at least {needed} for one request of `max_model_len` {length} "
            f"at `page_size` {layout.page_size} (one page is the null page). Got {asked_pages}, "
            f"which holds {fits} tokens: set `num_pages` to {needed} or more, or "
            f"`max_model_len` to at most {fits}."
        )
    fits = max(0, layout.pages_in(budget) - 1) * layout.page_size
    return (
        f"one request of `max_model_len` {length} needs {needed * layout.page_bytes / GIB:.3f} GiB "
        f"of pages; {budget / GIB:.3f} GiB are available, which hold {fits} tokens. Set "
        f"`max_model_len` to at most {fits}, raise `memory_utilization`, choose a smaller `dtype`, "
        f"or free memory on the device."
    )
