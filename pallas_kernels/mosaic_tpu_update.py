"""Changes to a page pool on TPUs: new tokens, page copies, swap out and in. All in place.

Same contracts as `kv_update`, whose checks have passed. A tile of a page cannot be written in
part, so new tokens go in by reading, changing and writing back their page, once for each run of
tokens that follow each other in one page; a run that fills its page reads nothing. Scales likewise,
a page's slab of all heads at a time, with the tokens along the lanes.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tuning
from pallas_kernels.mosaic_tpu_ops import interpret_params

MAX_TOKENS = 2**15  # of one call of the kernel: each takes 12 bytes of the scalar memory's 2**20
RING_BYTES = 8 * 2**20  # of vector memory for pages in flight
MAX_PAGE_BYTES = 4 * 2**20  # of a page: two are in flight, each with its new tokens
VMEM_LIMIT = 48 * 2**20
SMALL_VMEM = 16 * 2**20  # all that a TPU v4 has
SPARE_VMEM = 2 * 2**20  # for what the compiler adds
TILE_BYTES = 32  # of a column of a tile, whatever the dtype: 8 rows of 32 bits
LANES = 128
SUBLANES = 8  # rows of a tile of 32-bit numbers
SCALE_BYTES = 2 * 2**20  # of vector memory for the new scales of one call of the kernel
COPIES = 8  # page copies in flight
RUN_WORDS = 5  # of a run in flight: the fields of `_Run` but the last
PAGE = 1  # its page
CURSOR, STORED, STATE_WORDS = range(3)  # where the next run begins; runs known to be written back


@dataclass(frozen=True)
class _Refs:
    """Memory of a writing kernel; what a page holds is the business of `copy_new` and `merge`."""

    count: Any  # SMEM i32[2]: runs, and where the first begins
    slots: Any  # SMEM i32[num_tokens]
    lengths: Any  # SMEM i32[num_tokens], of the run that begins here
    nexts: Any  # SMEM i32[num_tokens], where the run after it begins
    pages: Any  # HBM [num_pages, ...]
    page: Any  # VMEM [ring, ...]
    runs: Any  # SMEM i32[ring * RUN_WORDS]
    state: Any  # SMEM i32[STATE_WORDS]
    page_in: Any  # DMA semaphores [ring], likewise:
    page_out: Any
    page_size: int  # tokens of a page
    copy_new: Callable[["_Refs", "_Run", Any], None]  # starts, or waits for, what a run brings
    merge: Callable[["_Refs", "_Run"], None]  # puts it into the page in the ring

    @property
    def ring(self) -> int:
        """Runs in flight."""
        return self.page.shape[0]


@dataclass(frozen=True)
class _Run:
    """Scalars i32[] of a run of tokens that lie side by side in one page."""

    token: Any  # the first of them
    page: Any
    offset: Any  # of the first, in the page
    length: Any
    held: Any  # 1: the page is to be read once all earlier runs are written back
    place: Any  # in the ring

    @classmethod
    def read(cls, refs: _Refs, run: jax.Array) -> "_Run":
        """One in flight."""
        place = lax.rem(run, jnp.int32(refs.ring))
        token, page, offset, length, held = (
            refs.runs[place * RUN_WORDS + word] for word in range(RUN_WORDS)
        )
        return cls(token, page, offset, length, held, place)

    def fills_page(self, refs: _Refs) -> jax.Array:
        """Nothing of what the page held stays."""
        return self.length == refs.page_size


@dataclass(frozen=True)
class _Vectors:
    """Keys and values on their way into pages [2 * num_kv_heads, page_size, head_dim].

    A token is its keys, then its values: 2 * num_kv_heads rows.
    """

    new: Any  # HBM [num_tokens, 2 * num_kv_heads, head_dim]
    tokens: Any  # VMEM [ring, page_size, 2 * num_kv_heads, head_dim]
    arrived: Any  # DMA semaphores [ring]

    def window(self, run: _Run) -> jax.Array:
        """First of the page_size tokens that are copied for a run of several."""
        return jnp.minimum(run.token, self.new.shape[0] - self.tokens.shape[1])

    def copy(self, _: _Refs, run: _Run, do: Any) -> None:
        """Starts, or waits for, the copy of a run's tokens: one, or as many as a page has."""
        one = run.length == 1

        def copy(first: jax.Array, size: int) -> Any:
            source = self.new.at[pl.ds(first, size)]
            target = self.tokens.at[run.place, pl.ds(0, size)]
            return pltpu.make_async_copy(source, target, self.arrived.at[run.place])

        @pl.when(one)
        def _() -> None:
            do(copy(run.token, 1))

        @pl.when(~one)
        def _() -> None:
            do(copy(self.window(run), self.tokens.shape[1]))

    def merge(self, refs: _Refs, run: _Run) -> None:
        """Tokens [page_size, heads, head_dim] into the page [heads, page_size, head_dim]."""
        all_heads, page_size, head_dim = refs.page.shape[1:]
        some = TILE_BYTES // refs.page.dtype.itemsize  # rows of a tile
        place = run.place

        @pl.when(run.length == 1)
        def _() -> None:
            rows, start = page_size, 0
            if page_size % some == 0 and page_size > some:
                rows, start = some, lax.div(run.offset, jnp.int32(some)) * some
                start = pl.multiple_of(start, some)
            old, token = refs.page[place, :, pl.ds(start, rows)], self.tokens[place, 0]
            row = start + lax.broadcasted_iota(jnp.int32, old.shape, 1)
            new = jnp.where(row == run.offset, token[:, None, :], old)
            refs.page[place, :, pl.ds(start, rows)] = new

        def turn(heads: Any, columns: Any) -> None:
            # Turned in 32 bits, the only width whose rows move freely; exact for every pool dtype.
            tokens = self.tokens[place, :, heads, columns].astype(jnp.float32).swapaxes(0, 1)
            shift = run.offset - run.token + self.window(run)
            shift = lax.rem(shift + page_size, jnp.int32(page_size))
            tokens = pltpu.roll(tokens, shift, 1).astype(refs.page.dtype)
            row = lax.broadcasted_iota(jnp.int32, tokens.shape, 1)
            mine = (row >= run.offset) & (row < run.offset + run.length)
            old = refs.page[place, heads, :, columns]
            refs.page[place, heads, :, columns] = jnp.where(mine, tokens, old)

        @pl.when(run.length > 1)
        def _() -> None:
            heads = _turned_heads(all_heads, refs.page.dtype)
            width = LANES if head_dim % LANES == 0 else head_dim
            for column in range(0, head_dim, width):  # what is turned at once fills vector memory
                columns = pl.ds(column, width)
                lax.fori_loop(
                    0,
                    all_heads // heads,
                    lambda i, _, columns=columns: turn(pl.ds(i * heads, heads), columns),
                    None,
                )


def write_kv_tpu(
    kv_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    *,
    interpret: Any = False,
) -> jax.Array:
    """**DONATES** under a donating jit. `kv_update.write_kv`, in place.

    Args:
      kv_pages: [num_pages, 2, num_kv_heads, page_size, head_dim].
      k, v: [num_tokens, num_kv_heads, head_dim] in the pool's dtype.
      slot_mapping: i32[num_tokens]; outside the pool: dropped. Live entries must differ.
      interpret: False, True (strict), or interpret parameters.

    Returns:
      The pool, with the tokens in it.

    Raises:
      NotImplementedError: a page is too large for the vector memory, or holds float16.
    """
    _, _, num_kv_heads, page_size, head_dim = kv_pages.shape
    if kv_pages.dtype == jnp.float16:
        raise NotImplementedError(
            "`kv_pages` must not be float16 for 'mosaic_tpu': TPUs do not compute in it. Use "
            "bfloat16, or 'xla'."
        )
    page_bytes = 2 * num_kv_heads * page_size * head_dim * kv_pages.dtype.itemsize
    most = min(MAX_PAGE_BYTES, _ring_bytes(2 * num_kv_heads, page_size, kv_pages.dtype) // 4)
    if page_bytes > most:
        raise NotImplementedError(
            f"`kv_pages` must have pages of at most {most} bytes for 'mosaic_tpu'. Got "
            f"{page_bytes}. Use smaller pages, or 'xla'."
        )
    new = jnp.concatenate([k, v], axis=1)
    pages = kv_pages.reshape(-1, 2 * num_kv_heads, page_size, head_dim)
    for start in range(0, new.shape[0], MAX_TOKENS):
        part = slice(start, start + MAX_TOKENS)
        pages = _write_vectors(pages, new[part], slot_mapping[part], interpret)
    return pages.reshape(kv_pages.shape)


def _vmem() -> int:
    """Bytes that a kernel may take on the chip that the trace is for."""
    return SMALL_VMEM if tuning.current_chip("mosaic_tpu").kind == "TPU v4" else VMEM_LIMIT


def _turned_heads(all_heads: int, dtype: Any) -> int:
    """Heads (of K and of V) of a run that are turned into a page together: whole tiles."""
    rows = TILE_BYTES // dtype.itemsize
    return rows if all_heads % rows == 0 else all_heads


def _ring_bytes(all_heads: int, page_size: int, dtype: Any) -> int:
    """Vector memory that is left for pages in flight and their tokens."""
    turned = 4 * _turned_heads(all_heads, dtype) * page_size * LANES * 4  # four float32 copies
    return _vmem() - SPARE_VMEM - turned


def _write_vectors(
    pages: jax.Array,  # [num_pages, 2 * num_kv_heads, page_size, head_dim]
    new: jax.Array,  # [num_tokens, 2 * num_kv_heads, head_dim]
    slots: jax.Array,
    interpret: Any,
) -> jax.Array:
    _, per_token, page_size, head_dim = pages.shape
    # A copy takes a whole page of tokens, wherever the run begins.
    missing = max(0, page_size - new.shape[0])
    new = jnp.pad(new, ((0, missing), (0, 0), (0, 0)))
    page_bytes = per_token * page_size * head_dim * pages.dtype.itemsize
    ring_bytes = min(RING_BYTES, _ring_bytes(per_token, page_size, pages.dtype))
    ring = max(2, min(16, ring_bytes // (2 * page_bytes)))

    def handle(new: Any, tokens: Any, arrived: Any) -> Any:
        vectors = _Vectors(new, tokens, arrived)
        return {"copy_new": vectors.copy, "merge": vectors.merge}

    return _call(
        handle,
        pages,
        new,
        slots,
        name=f"write_kv_{page_size}",
        page_size=page_size,
        ring=ring,
        new_in=pltpu.HBM,
        scratch=[
            pltpu.VMEM((ring, page_size, per_token, head_dim), pages.dtype),
            pltpu.SemaphoreType.DMA((ring,)),
        ],
        interpret=interpret,
    )


def write_scales_tpu(
    kv_scales: jax.Array,
    k_scales: jax.Array,
    v_scales: jax.Array,
    slot_mapping: jax.Array,
    *,
    interpret: Any = False,
) -> jax.Array:
    """**DONATES** under a donating jit. The scales of new tokens, in place.

    Args:
      kv_scales: f32[num_pages, 2, num_kv_heads, page_size].
      k_scales, v_scales: f32[num_tokens, num_kv_heads].
      slot_mapping: i32[num_tokens]; outside the pool: dropped. Live entries must differ.
      interpret: False, True (strict), or interpret parameters.

    Returns:
      The scales of the pool, with those of the tokens in them.

    Raises:
      NotImplementedError: the page size is not 128.
    """
    num_kv_heads, page_size = kv_scales.shape[2:]
    check_scales(page_size)
    # In memory the compiler for TPUs puts K and V inside the heads for these counts, which saves it
    # padding. A kernel takes axes in their order only: so turned, nothing is copied.
    turned = num_kv_heads not in (1, 2, 4) and num_kv_heads % SUBLANES != 0
    outer, inner = (num_kv_heads, 2) if turned else (2, num_kv_heads)
    per_token = outer * -(-inner // SUBLANES) * SUBLANES  # numbers that a token takes up
    most = min(MAX_TOKENS, SCALE_BYTES // (4 * per_token) // LANES * LANES)
    new = jnp.stack([k_scales, v_scales], axis=2 if turned else 1)
    pages = kv_scales.swapaxes(1, 2) if turned else kv_scales
    for start in range(0, new.shape[0], most):
        part = slice(start, start + most)
        pages = _write_scales(pages, new[part], slot_mapping[part], interpret)
    return pages.swapaxes(1, 2) if turned else pages


def check_scales(page_size: int) -> None:
    """Raises `NotImplementedError` for the page sizes whose scales the kernels cannot take."""
    if page_size != LANES:
        raise NotImplementedError(
            f"`kv_scales` must be of pages of {LANES} tokens for 'mosaic_tpu': the compiler keeps "
            f"the scales of smaller pages in an order that would have them all copied in every "
            f"call. Got page_size {page_size}. Use page_size {LANES}, or 'xla'."
        )


def _write_scales(
    scales: jax.Array,  # f32[num_pages, outer, inner, LANES]
    new: jax.Array,  # f32[num_tokens, outer, inner]
    slots: jax.Array,
    interpret: Any,
) -> jax.Array:
    new = jnp.pad(new, ((0, -new.shape[0] % LANES), (0, 0), (0, 0)))
    blocks = new.reshape(-1, LANES, *new.shape[1:])
    blocks = jnp.moveaxis(blocks, 1, 3)  # along the lanes, as in a page

    return _call(
        lambda new: {"copy_new": lambda *_: None, "merge": functools.partial(_merge_scales, new)},
        scales,
        blocks,
        slots,
        name="write_scales",
        page_size=LANES,
        ring=16,
        new_in=pltpu.VMEM,
        scratch=[],
        interpret=interpret,
    )


def _merge_scales(new: Any, refs: _Refs, run: "_Run") -> None:
    """Columns of a page: new VMEM f32[blocks, outer, inner, LANES] has a run in two blocks."""
    block, first = lax.div(run.token, jnp.int32(LANES)), lax.rem(run.token, jnp.int32(LANES))
    shift = lax.rem(run.offset - first + LANES, jnp.int32(LANES))
    after = jnp.minimum(block + 1, new.shape[0] - 1)
    column = lax.broadcasted_iota(jnp.int32, new.shape[2:], 1)
    mine = (column >= run.offset) & (column < run.offset + run.length)
    for i in range(new.shape[1]):
        begins, ends = (pltpu.roll(new[b, i], shift, 1) for b in (block, after))
        tokens = jnp.where(first + column - run.offset < LANES, begins, ends)
        refs.page[run.place, i] = jnp.where(mine, tokens, refs.page[run.place, i])


def _call(
    handle: Callable[..., Any],  # (new, *scratch) -> {"copy_new": .., "merge": ..}, see `_Refs`
    pages: jax.Array,
    new: jax.Array,
    slots: jax.Array,
    *,
    name: str,
    page_size: int,
    ring: int,
    new_in: Any,  # the memory space of `new`
    scratch: list[Any],
    interpret: Any,
) -> jax.Array:
    """The kernel: pages with what is new in them."""
    # Not ANY: a small array, as scales are, would be copied into the vector memory and back.
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)

    def kernel(*refs: Any) -> None:
        count, slots, lengths, nexts, new, _, pages, *scratch = refs  # the pool is the output
        page, runs, state, page_in, page_out, *others = scratch
        _write_runs(
            _Refs(
                count=count,
                slots=slots,
                lengths=lengths,
                nexts=nexts,
                pages=pages,
                page=page,
                runs=runs,
                state=state,
                page_in=page_in,
                page_out=page_out,
                page_size=page_size,
                **handle(new, *others),
            )
        )

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=new_in), hbm],
            out_specs=hbm,
            scratch_shapes=[
                pltpu.VMEM((ring, *pages.shape[1:]), pages.dtype),
                pltpu.SMEM((ring * RUN_WORDS,), jnp.int32),
                pltpu.SMEM((STATE_WORDS,), jnp.int32),
                *[pltpu.SemaphoreType.DMA((ring,))] * 2,
                *scratch,
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        input_output_aliases={5: 0},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_vmem()),
        interpret=interpret_params(interpret),
        name=name,
    )(*_find_runs(slots, pages.shape[0], page_size), new, pages)


def _find_runs(slots: jax.Array, num_pages: int, page_size: int) -> tuple[jax.Array, ...]:
    """The scalar arguments of the kernel: see `_Refs`."""
    num_tokens = slots.shape[0]
    live = (slots >= 0) & (slots < num_pages * page_size)
    slots = jnp.where(live, slots, -2)  # follows and precedes nothing
    before = jnp.concatenate([jnp.full((1,), -2, jnp.int32), slots[:-1]])
    follows = live & (slots == before + 1) & (slots % page_size != 0)
    begins, ends = live & ~follows, live & ~jnp.append(follows[1:], False)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    begin = lax.cummin(jnp.where(begins, token, num_tokens), reverse=True)  # at or after each
    end = lax.cummin(jnp.where(ends, token, num_tokens), reverse=True)
    nexts = jnp.append(begin[1:], jnp.int32(num_tokens))
    count = jnp.stack([jnp.sum(begins, dtype=jnp.int32), begin[0]])
    return count, slots, end - token + 1, nexts


def _write_runs(refs: _Refs) -> None:
    """Runs in order: half of those in flight are being read, half written back."""
    ahead = refs.ring // 2
    count = refs.count[0]
    refs.state[STORED] = 0
    refs.state[CURSOR] = refs.count[1]

    def step(i: jax.Array, _: None) -> None:
        @pl.when(i < count)
        def _() -> None:
            _begin(refs, i)

        @pl.when(i >= ahead)
        def _() -> None:
            _complete(refs, i - ahead)

    lax.fori_loop(0, jnp.where(count > 0, count + ahead, 0), step, None)
    _wait_for_stores(refs, count)


def _begin(refs: _Refs, number: jax.Array) -> None:
    """Starts to read a run's page and tokens."""
    _wait_for_stores(refs, number - refs.ring + 1)  # that frees its place
    token = refs.state[CURSOR]
    refs.state[CURSOR] = refs.nexts[token]
    slot, page_size = refs.slots[token], jnp.int32(refs.page_size)
    page = lax.div(slot, page_size)

    def same(earlier: jax.Array, found: jax.Array) -> jax.Array:
        place = lax.rem(earlier, jnp.int32(refs.ring))
        return found | (refs.runs[place * RUN_WORDS + PAGE] == page).astype(jnp.int32)

    held = lax.fori_loop(refs.state[STORED], number, same, jnp.int32(0))
    place = lax.rem(number, jnp.int32(refs.ring))
    run = _Run(token, page, lax.rem(slot, page_size), refs.lengths[token], held, place)
    for word, value in enumerate((run.token, run.page, run.offset, run.length, run.held)):
        refs.runs[place * RUN_WORDS + word] = value
    refs.copy_new(refs, run, lambda copy: copy.start())

    @pl.when((held == 0) & ~run.fills_page(refs))
    def _() -> None:
        _load(refs, run).start()


def _complete(refs: _Refs, number: jax.Array) -> None:
    """Puts a run's tokens into its page, and starts to write it back."""
    run = _Run.read(refs, number)

    @pl.when(run.held == 1)
    def _() -> None:
        _wait_for_stores(refs, number)

        @pl.when(~run.fills_page(refs))
        def _() -> None:
            _load(refs, run).start()

    @pl.when(~run.fills_page(refs))
    def _() -> None:
        _load(refs, run).wait()

    refs.copy_new(refs, run, lambda copy: copy.wait())
    refs.merge(refs, run)
    _store(refs, run.page, run.place).start()


def _wait_for_stores(refs: _Refs, end: jax.Array) -> None:
    """Until the pages of the runs before `end` are written back."""
    stored = refs.state[STORED]

    def wait(number: jax.Array, _: None) -> None:
        # A wait is for a size: which page it was does not matter.
        _store(refs, jnp.int32(0), lax.rem(number, jnp.int32(refs.ring))).wait()

    @pl.when(end > stored)
    def _() -> None:
        lax.fori_loop(stored, end, wait, None)
        refs.state[STORED] = end


def _load(refs: _Refs, run: _Run) -> Any:
    place = run.place
    return pltpu.make_async_copy(
        refs.pages.at[run.page], refs.page.at[place], refs.page_in.at[place]
    )


def _store(refs: _Refs, page: jax.Array, place: jax.Array) -> Any:
    return pltpu.make_async_copy(refs.page.at[place], refs.pages.at[page], refs.page_out.at[place])


# -------------------------------------------------------------------------------- whole pages


def copy_pages_tpu(
    kv_pages: jax.Array, src: jax.Array, dst: jax.Array, *, interpret: Any = False
) -> jax.Array:
    """**DONATES** under a donating jit. `kv_update.copy_pages`, in place, copies in any order.

    Args:
      kv_pages: [num_pages, 2, num_kv_heads, page_size, head_dim].
      src: i32[n], clamped to the pool.
      dst: i32[n]; outside the pool: dropped. No page may be in `dst` twice, nor in both.
      interpret: False, True (strict), or interpret parameters.

    Returns:
      The pool, with the copies in it.
    """
    return _move_pages(None, kv_pages, src, dst, interpret)


def gather_pages_tpu(
    kv_pages: jax.Array, page_ids: jax.Array, *, interpret: Any = False
) -> jax.Array:
    """`kv_update.gather_pages`: [n, 2, num_kv_heads, page_size, head_dim]; ids are clamped."""
    place = jnp.arange(page_ids.shape[0], dtype=jnp.int32)
    out = jax.ShapeDtypeStruct((page_ids.shape[0], *kv_pages.shape[1:]), kv_pages.dtype)
    return _move_pages(kv_pages, out, page_ids, place, interpret)


def scatter_pages_tpu(
    kv_pages: jax.Array, page_ids: jax.Array, pages: jax.Array, *, interpret: Any = False
) -> jax.Array:
    """**DONATES** under a donating jit. `kv_update.scatter_pages`, in place.

    Args:
      kv_pages: [num_pages, 2, num_kv_heads, page_size, head_dim].
      page_ids: i32[n]; outside the pool: dropped. Live entries must differ.
      pages: [n, 2, num_kv_heads, page_size, head_dim] in the pool's dtype.
      interpret: False, True (strict), or interpret parameters.

    Returns:
      The pool, with the pages in it.
    """
    place = jnp.arange(page_ids.shape[0], dtype=jnp.int32)
    return _move_pages(pages, kv_pages, place, page_ids, interpret)


def _move_pages(
    source: jax.Array | None,  # pages; None: the target itself
    target: jax.Array | jax.ShapeDtypeStruct,  # pages; an array is changed in place
    src: jax.Array,  # i32[n]
    dst: jax.Array,  # i32[n]
    interpret: Any,
) -> jax.Array:
    """`target` with pages src of `source` at dst, by copies that no core touches."""
    operands = [x for x in (source, target) if isinstance(x, jax.Array)]
    in_place = isinstance(target, jax.Array)
    n = src.shape[0]

    def body(src: Any, dst: Any, *refs: Any) -> None:
        *inputs, to, arrived = refs
        origin = to if source is None else inputs[0]

        def each(i: jax.Array, do: Any) -> None:
            place = dst[i]

            @pl.when((place >= 0) & (place < to.shape[0]))
            def _() -> None:
                page = jnp.clip(src[i], 0, origin.shape[0] - 1)
                slot = lax.rem(i, jnp.int32(COPIES))
                do(pltpu.make_async_copy(origin.at[page], to.at[place], arrived.at[slot]))

        def step(i: jax.Array, _: None) -> None:
            @pl.when(i >= COPIES)
            def _() -> None:
                each(i - COPIES, lambda copy: copy.wait())

            @pl.when(i < n)
            def _() -> None:
                each(i, lambda copy: copy.start())

        lax.fori_loop(0, n + COPIES, step, None)

    hbm = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(1,),
            in_specs=[hbm] * len(operands),
            out_specs=hbm,
            scratch_shapes=[pltpu.SemaphoreType.DMA((COPIES,))],
        ),
        out_shape=jax.ShapeDtypeStruct(target.shape, target.dtype),
        input_output_aliases={1 + len(operands): 0} if in_place else {},
        interpret=interpret_params(interpret),
        name="move_pages",
    )(src, dst, *operands)
