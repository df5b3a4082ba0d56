"""The host pool: what was swapped out comes back to the bit, or an error names what is lost."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import host_pool as host_pools
from pagedjax.errors import CapacityError, TransferError
from pagedjax.host_pool import HostPool, MovePrograms, move_programs
from pagedjax.kv_cache import KVCache, init_kv_cache
from pagedjax.plan import PageMove
from pagedjax.programs import ProgramSet

SIZES: dict[str, Any] = {
    "num_layers": 2, "num_pages": 90, "num_kv_heads": 3, "page_size": 4, "head_dim": 8,
}  # fmt: skip
NUM_HOST_PAGES = 100
DTYPES = [jnp.float32, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn]


def filled(dtype: Any, seed: int = 0) -> KVCache:
    """Every page and scale other bits, NaN among them, but page 0."""
    rng = np.random.default_rng(seed)

    def bits(array: jax.Array) -> jax.Array:
        data = rng.integers(0, 256, array.nbytes, dtype=np.uint8)
        data[: array.nbytes // SIZES["num_pages"]] = 0
        return jnp.array(data.view(array.dtype).reshape(array.shape))

    return jax.tree.map(bits, init_kv_cache(**SIZES, dtype=dtype))


@functools.cache
def programs(dtype: Any) -> dict[int, MovePrograms]:
    widths = (8, 64)
    cache = init_kv_cache(**SIZES, dtype=dtype)
    compiled = ProgramSet().compile(move_programs(widths, cache, "xla"))
    return {w: MovePrograms(compiled["gather", w], compiled["scatter", w]) for w in widths}


def new_pool(cache: KVCache, dtype: Any) -> HostPool:
    pool = HostPool(NUM_HOST_PAGES, cache)
    pool.programs = programs(dtype)
    return pool


def bytes_of(cache: KVCache, page: int) -> list[bytes]:
    return [np.asarray(array)[page].tobytes() for array in jax.tree.leaves(cache)]


def moves(pages: Iterable[int], host_pages: Iterable[int]) -> list[PageMove]:
    return [PageMove(*pair) for pair in zip(pages, host_pages, strict=True)]


def swap(pool: HostPool, cache: KVCache, out: list[PageMove], back: list[PageMove]) -> KVCache:
    return [cache, *pool.swap(cache, out, back)][-1]


class Broken:
    """An array that the device could not make."""

    def __init__(self, fails_in: str) -> None:
        self.fails_in = fails_in

    def copy_to_host_async(self) -> None:
        if self.fails_in == "copy":
            raise RuntimeError("RESOURCE_EXHAUSTED: no pinned memory")

    def is_ready(self) -> bool:
        return True

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise RuntimeError("INTERNAL: the copy failed")


class Slow:
    """An array that is still being computed."""

    def __init__(self, array: jax.Array) -> None:
        self.array = array

    def copy_to_host_async(self) -> None:
        pass

    def is_ready(self) -> bool:
        return False

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        return np.asarray(self.array)


def with_gather(pool: HostPool, change: Any) -> None:
    """Puts `change` around what each gather returns."""

    def changed(gather: Any) -> Any:
        return lambda *arguments: tuple(change(array) for array in gather(*arguments))

    pool.programs = {
        width: MovePrograms(changed(each.gather), each.scatter)
        for width, each in pool.programs.items()
    }


# ------------------------------------------------------------------------------- there and back


@pytest.mark.parametrize("count", [1, 8, 9, 80])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_come_back_to_the_bit_and_nothing_else_changes(dtype: Any, count: int) -> None:
    cache = filled(dtype)
    pool = new_pool(cache, dtype)
    pages, host_pages = range(5, 5 + count), range(NUM_HOST_PAGES, NUM_HOST_PAGES - count, -1)
    stored = [bytes_of(cache, page) for page in pages]
    cache = swap(pool, cache, moves(pages, host_pages), [])
    other = filled(dtype, seed=1)
    expected = [bytes_of(other, page) for page in range(SIZES["num_pages"])]
    for page, content in zip(reversed(pages), stored, strict=True):
        expected[page] = content
    other = swap(pool, other, [], moves(reversed(pages), host_pages))
    assert [bytes_of(other, page) for page in range(SIZES["num_pages"])] == expected
    assert pool.take_lost() == frozenset()


def test_a_page_is_read_before_the_same_step_writes_it() -> None:
    cache = filled(jnp.float32)
    pool = new_pool(cache, jnp.float32)
    first, second = bytes_of(cache, 3), bytes_of(cache, 4)
    cache = swap(pool, cache, moves([4], [1]), [])
    cache = swap(pool, cache, moves([3], [2]), moves([3], [1]))  # 3 goes out, 4's content in
    assert bytes_of(cache, 3) == second
    cache = swap(pool, cache, [], moves([5], [2]))
    assert bytes_of(cache, 5) == first


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_the_pools_are_written_in_place(dtype: Any) -> None:
    cache = filled(dtype)
    pool = new_pool(cache, dtype)
    cache = swap(pool, cache, moves([1], [1]), [])
    before = [array.unsafe_buffer_pointer() for array in jax.tree.leaves(cache)]
    after = swap(pool, cache, [], moves([7], [1]))
    assert all(array.is_deleted() for array in jax.tree.leaves(cache))
    assert [array.unsafe_buffer_pointer() for array in jax.tree.leaves(after)] == before
    for width, each in programs(dtype).items():
        memory = each.scatter.compiled.memory_analysis()  # pyright: ignore[reportFunctionMemberAccess]
        assert memory.alias_size_in_bytes >= after.nbytes
        assert memory.temp_size_in_bytes <= 1.1 * width * pool.page_bytes + 4096  # of what it moves


def test_moves_are_bounded_whatever_a_page_weighs() -> None:
    assert host_pools.widths(1000) == (8, 64)
    assert host_pools.widths(2 * 2**20) == (8, 32)
    assert host_pools.widths(2**30) == (8, 8)
    assert host_pools.temp_bytes(2 * 2**20) == 6 * 32 * 2 * 2**20


def test_batches_in_flight_are_bounded() -> None:
    cache = filled(jnp.float32)
    pool = new_pool(cache, jnp.float32)
    with_gather(pool, Slow)
    for start in range(0, 80, 8):
        pool.store(cache, moves(range(1 + start, 9 + start), range(1 + start, 9 + start)))
        assert pool.num_in_flight == min(start // 8 + 1, host_pools.MAX_IN_FLIGHT)
    pool.drain()
    assert pool.num_in_flight == host_pools.MAX_IN_FLIGHT  # none is ready: nobody waits
    pool.drain(wait=True)
    assert pool.num_in_flight == 0
    pool.verify(range(1, 81))


# ---------------------------------------------------------------------------------------- epochs


def test_a_load_waits_for_the_store_in_flight() -> None:
    cache = filled(jnp.float32)
    pool = new_pool(cache, jnp.float32)
    with_gather(pool, Slow)
    pool.store(cache, moves([6], [9]))
    expected = bytes_of(cache, 6)
    cache = swap(pool, cache, [], moves([2], [9]))
    assert bytes_of(cache, 2) == expected
    assert pool.num_in_flight == 0


def test_an_older_store_that_arrives_late_is_dropped() -> None:
    """Bug 19: a page of the host that is used again must not get what was meant for its past."""
    cache = filled(jnp.float32)
    pool = new_pool(cache, jnp.float32)
    with_gather(pool, Slow)
    pool.store(cache, moves([6, 7], [9, 10]))
    pool.store(cache, moves([8], [9]))  # the scheduler freed host page 9 and uses it again
    newer, kept = bytes_of(cache, 8), bytes_of(cache, 7)
    pool.verify([9])  # the newer one arrives first
    pool.drain(wait=True)
    cache = swap(pool, cache, [], moves([2, 3], [9, 10]))
    assert (bytes_of(cache, 2), bytes_of(cache, 3)) == (newer, kept)


def test_a_failure_of_an_older_store_does_not_touch_the_newer_one() -> None:
    cache = filled(jnp.float32)
    pool = new_pool(cache, jnp.float32)
    good = pool.programs
    with_gather(pool, lambda _: Broken("arrival"))
    pool.store(cache, moves([6, 7], [9, 10]))
    pool.programs = good
    pool.store(cache, moves([8], [9]))
    pool.drain(wait=True)
    assert pool.take_lost() == {10}
    pool.verify([9])


# ---------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize("fails_in", ["copy", "arrival"])
def test_a_store_that_fails_is_told_once_and_harms_no_other(fails_in: str) -> None:
    cache = filled(jnp.float32)
    pool = new_pool(cache, jnp.float32)
    pool.store(cache, moves([1], [1]))
    good = pool.programs
    with_gather(pool, lambda _: Broken(fails_in))
    pool.store(cache, moves([2, 3], [2, 3]))
    pool.programs = good
    pool.drain(wait=True)
    assert pool.take_lost() == {2, 3}
    assert pool.take_lost() == frozenset()
    with pytest.raises(TransferError, match="2 host pages do not hold") as caught:
        pool.verify([1, 2, 3])
    assert caught.value.host_pages == {2, 3}
    pool.verify([1])


def test_a_page_that_is_filled_again_is_not_lost() -> None:
    cache = filled(jnp.float32)
    pool = new_pool(cache, jnp.float32)
    good = pool.programs
    with_gather(pool, lambda _: Broken("copy"))
    pool.store(cache, moves([2], [2]))
    pool.programs = good
    pool.store(cache, moves([3], [2]))
    assert pool.take_lost() == frozenset()
    pool.verify([2])


def test_what_a_host_page_held_before_is_not_given_for_what_failed_to_arrive() -> None:
    cache = filled(jnp.float32)
    pool = new_pool(cache, jnp.float32)
    pool.store(cache, moves([1], [2]))
    pool.drain(wait=True)
    with_gather(pool, lambda _: Broken("copy"))
    pool.store(cache, moves([3], [2]))
    with pytest.raises(TransferError):
        pool.verify([2])  # whole, but another page's content


def test_a_loss_that_an_error_told_is_not_told_again() -> None:
    cache = filled(jnp.float32)
    pool = new_pool(cache, jnp.float32)
    with_gather(pool, lambda _: Broken("arrival"))
    pool.store(cache, moves([1, 2], [1, 2]))
    with pytest.raises(TransferError):
        pool.verify([1])
    assert pool.take_lost() == {2}


@pytest.mark.parametrize("at", [0, 100, -1])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
def test_a_flipped_bit_is_found_and_named(dtype: Any, at: int) -> None:
    cache = filled(dtype)
    pool = new_pool(cache, dtype)
    pool.store(cache, moves([1, 2], [1, 2]))
    pool.drain(wait=True)
    pool._bytes[2, at] ^= 1
    before = [bytes_of(cache, page) for page in range(SIZES["num_pages"])]
    with pytest.raises(TransferError) as caught:
        swap(pool, cache, moves([5], [5]), moves([3, 4], [1, 2]))
    assert caught.value.host_pages == {2}
    assert [bytes_of(cache, page) for page in range(SIZES["num_pages"])] == before
    with pytest.raises(TransferError):
        pool.verify([5])  # raised before anything else of the step was done


def test_a_page_that_was_never_stored_is_no_page() -> None:
    cache = filled(jnp.float32)
    pool = new_pool(cache, jnp.float32)
    with pytest.raises(TransferError) as caught:
        pool.verify([4])
    assert caught.value.host_pages == {4}


def test_a_device_that_takes_no_pages_is_a_transfer_error(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled(jnp.float32)
    pool = new_pool(cache, jnp.float32)
    cache = swap(pool, cache, moves(range(1, 71), range(1, 71)), [])
    put, left = jax.device_put, iter(range(1))

    def failing(*arguments: Any) -> Any:
        if next(left, None) is None:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return put(*arguments)

    monkeypatch.setattr(jax, "device_put", failing)
    stored = bytes_of(cache, 1)
    alive: list[KVCache] = []
    with pytest.raises(TransferError, match=r"6 pages could not be moved .*RESOURCE") as caught:
        alive.extend(pool.swap(cache, [], moves(range(20, 90), range(1, 71))))
    assert caught.value.host_pages == frozenset(range(65, 71))
    assert bytes_of(alive[-1], 20) == stored  # what was moved before is there


def test_a_pool_that_the_host_cannot_hold_is_refused() -> None:
    with pytest.raises(CapacityError, match="`swap_space` must fit into the host's memory"):
        HostPool(2**52, init_kv_cache(**SIZES, dtype=jnp.dtype(jnp.float32)))


# --------------------------------------------------------------------------------------- measured


def test_a_rehearsal_measures_and_leaves_nothing_behind() -> None:
    cache = filled(jnp.float32)
    pool = new_pool(cache, jnp.float32)
    assert (pool.seconds_out.value, pool.seconds_in.value) == (None, None)
    before = [bytes_of(cache, page) for page in range(SIZES["num_pages"])]
    cache = pool.rehearse(cache)
    assert [bytes_of(cache, page) for page in range(SIZES["num_pages"])] == before
    assert pool.seconds_out.value is not None
    assert pool.seconds_out.value > 0
    assert pool.seconds_in.value is not None
    assert pool.seconds_in.value > 0
    with pytest.raises(TransferError):
        pool.verify([1])
