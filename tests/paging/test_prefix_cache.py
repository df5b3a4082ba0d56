"""What hits, what must not, and what the cache forgets."""

import random
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from pagedjax.errors import IntegrityError
from pagedjax.paging import PageAllocator, PageTable, PrefixCache, PrefixChain
from pagedjax.paging.prefix_cache import encode_extra_keys

ROOT = bytes(range(32))
PAGE_SIZE = 4


def new_cache(
    num_pages: int = 20, page_size: int = PAGE_SIZE, digest: Callable[[bytes], bytes] | None = None
) -> tuple[PageAllocator, PrefixCache]:
    allocator = PageAllocator(num_pages)
    return allocator, PrefixCache(allocator, page_size, root=ROOT, _digest=digest)


def computed(
    allocator: PageAllocator,
    cache: PrefixCache,
    tokens: list[int],
    extra_keys: Mapping[str, str | bytes | int | None] | None = None,
) -> tuple[PageTable, PrefixChain]:
    """A sequence that ran: found what it could, computed and registered the rest."""
    chain = cache.chain(tokens, extra_keys)
    hits = cache.match(tokens, chain)
    table = PageTable(allocator, cache.page_size)
    table.adopt(hits, len(hits) * cache.page_size)
    table.append(len(tokens) - table.num_tokens)
    cache.insert_computed(chain, tokens, table, len(tokens))
    return table, chain


def hits(cache: PrefixCache, tokens: list[int], **extra: str | bytes | int | None) -> list[int]:
    return cache.match(tokens, cache.chain(extra_keys=extra))


def test_17_equal_tokens_at_page_size_16_hit_16() -> None:
    allocator, cache = new_cache(page_size=16)
    table, _ = computed(allocator, cache, [7] * 17)
    assert hits(cache, [7] * 17) == table.pages[:1]


def test_a_full_hit_leaves_a_token_to_run() -> None:
    """Seen elsewhere: a prompt of exactly k pages hit k, and no token was left to run."""
    allocator, cache = new_cache()
    table, _ = computed(allocator, cache, list(range(12)))
    assert hits(cache, list(range(12))) == table.pages[:2]
    assert hits(cache, list(range(13))) == table.pages[:3]
    assert hits(cache, [0]) == hits(cache, []) == []


def test_a_hit_is_the_longest_run_from_the_start() -> None:
    allocator, cache = new_cache()
    table, _ = computed(allocator, cache, list(range(16)))
    assert hits(cache, [*range(8), 99, *range(9, 20)]) == table.pages[:2]
    assert hits(cache, [99, *range(1, 20)]) == []
    allocator.unmark(table.pages[1])
    assert hits(cache, list(range(17))) == table.pages[:1]


def test_the_same_page_after_another_prefix_is_no_hit() -> None:
    allocator, cache = new_cache()
    computed(allocator, cache, [1, 1, 1, 1, 5, 5, 5, 5])
    assert hits(cache, [2, 2, 2, 2, 5, 5, 5, 5, 0]) == []
    assert hits(cache, [5, 5, 5, 5, 0]) == []


def test_match_changes_nothing() -> None:
    allocator, cache = new_cache()
    table, _ = computed(allocator, cache, list(range(16)))
    table.release()
    before = (allocator.eviction_order(), allocator.num_evictable, cache.stats)
    assert len(hits(cache, list(range(16)))) == 3
    assert (allocator.eviction_order(), allocator.num_evictable, cache.stats) == before


def test_only_full_pages_are_registered() -> None:
    allocator, cache = new_cache()
    table, chain = computed(allocator, cache, list(range(7)))
    assert cache.num_cached == 1
    with pytest.raises(IntegrityError, match=r"`page_index` must be in \[0, 1\).* Got 1"):
        cache.insert(chain, 1, table.pages[1])


def test_nothing_is_found_before_it_was_committed() -> None:
    """Seen elsewhere: a hit on a page that is not written yet."""
    allocator, cache = new_cache()
    tokens = list(range(12))
    table, chain = PageTable(allocator, PAGE_SIZE), cache.chain(tokens)
    table.append(12)
    assert hits(cache, tokens) == []
    assert cache.insert_computed(chain, tokens, table, 7) == 1  # the first chunk ran
    assert hits(cache, tokens) == table.pages[:1]
    assert cache.insert_computed(chain, tokens, table, 12) == 2
    assert hits(cache, [*tokens, 0]) == table.pages


def test_placeholders_after_the_computed_tokens_are_not_hashed() -> None:
    allocator, cache = new_cache()
    table, chain = PageTable(allocator, PAGE_SIZE), cache.chain()
    table.append(8)
    cache.insert_computed(chain, [1, 2, 3, 4, 5, 6, -1, -1], table, 6)
    cache.insert_computed(chain, [1, 2, 3, 4, 5, 6, 7, 8], table, 8)
    assert hits(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == table.pages


def test_generated_tokens_are_cached_too() -> None:
    allocator, cache = new_cache()
    tokens = [1, 2, 3, 4, 5]
    table, chain = computed(allocator, cache, tokens)
    for token in (6, 7, 8):
        tokens.append(token)
        table.extend(1)
        cache.insert_computed(chain, tokens, table, len(tokens))
    assert hits(cache, [*tokens, 0]) == table.pages


def test_registration_goes_on_from_the_hit() -> None:
    """Seen elsewhere: pages that were hits registered a second time, as if counted from 0."""
    allocator, cache = new_cache()
    first, _ = computed(allocator, cache, list(range(9)))
    second, chain = PageTable(allocator, PAGE_SIZE), cache.chain()
    tokens = list(range(13))
    second.adopt(cache.match(tokens, chain), 8)
    second.append(5)
    assert cache.insert_computed(chain, tokens, second, 13) == 1
    assert cache.insert_computed(chain, tokens, second, 13) == 0
    assert cache.insert(chain, 0, first.pages[0]) is False
    assert cache.num_cached == 3
    cache.check_integrity()


def test_a_preempted_sequence_finds_its_pages_again_or_registers_new_ones() -> None:
    """Seen elsewhere: a stale count of cached pages after preemption. Here nothing is counted."""
    allocator, cache = new_cache(num_pages=6)
    tokens = list(range(10))
    table, chain = computed(allocator, cache, tokens)
    table.release()
    assert cache.match(tokens, chain) == [1, 2]
    blocker = allocator.allocate(5)  # its pages are reused, so its content is gone
    assert cache.match(tokens, chain) == []
    allocator.free(blocker)
    table.append(10)
    assert cache.insert_computed(chain, tokens, table, 10) == 2
    assert cache.match(tokens, chain) == table.pages[:2]


def test_a_reused_page_carries_no_hash_over() -> None:
    """Seen elsewhere: a stale hash on a reused page served another prompt's keys and values."""
    allocator, cache = new_cache(num_pages=3)
    table, _ = computed(allocator, cache, [1, 2, 3, 4, 5, 6, 7, 8])
    table.release()
    other, _ = computed(allocator, cache, [9] * 8)
    assert sorted(other.pages) == [1, 2]
    assert hits(cache, [1, 2, 3, 4, 5, 6, 7, 8, 0]) == []
    assert hits(cache, [9] * 9) == other.pages
    cache.check_integrity()


def test_two_held_pages_with_the_same_content_are_both_kept() -> None:
    """Seen elsewhere: an inverted condition lost or leaked one of them on eviction."""
    allocator, cache = new_cache(num_pages=9)
    tokens = [1, 2, 3, 4, 5]
    tables = [PageTable(allocator, PAGE_SIZE) for _ in range(3)]
    for table in tables:  # three sequences run in the same step, none sees the others' pages
        table.append(5)
    for table in tables:
        assert cache.insert_computed(cache.chain(), tokens, table, 5) == 1
    first, second, third = (table.pages[0] for table in tables)
    assert cache.num_cached == 3
    assert hits(cache, tokens) == [first]

    tables[0].release()
    assert hits(cache, tokens) == [second]  # held: sharing it takes no free page
    tables[1].release()
    tables[2].release()
    assert hits(cache, tokens) == [first]
    for lost, left in ((first, [second]), (second, [third]), (third, [])):
        while allocator.eviction_order()[0] != lost:
            allocator.allocate()
        allocator.allocate()
        assert hits(cache, tokens) == left
        cache.check_integrity()


def test_a_newer_copy_replaces_one_that_nobody_holds() -> None:
    """A prompt of exactly k pages recomputes its last page each time; it must not pile up."""
    allocator, cache = new_cache()
    tokens = list(range(8))
    for _ in range(10):
        table, _ = computed(allocator, cache, tokens)
        table.release()
        assert cache.num_cached == allocator.num_evictable == 2
        cache.check_integrity()


def test_a_page_hit_again_is_the_last_to_be_evicted() -> None:
    allocator, cache = new_cache(num_pages=5)
    old, _ = computed(allocator, cache, [1] * 5)
    old.release()
    young, _ = computed(allocator, cache, [2] * 5)
    young.release()
    again, _ = computed(allocator, cache, [1] * 5)
    again.release()
    assert allocator.count_evictable(hits(cache, [1] * 5)) == 1
    allocator.allocate(3)
    assert hits(cache, [2] * 5) == []
    assert len(hits(cache, [1] * 5)) == 1


EXTRA_KEYS: list[dict[str, str | bytes | int | None]] = [
    {},
    {"cache_salt": "x"},
    {"adapter": "x"},  # an adapter with the name of a salt
    {"adapter": "x", "cache_salt": "x"},
    {"adapter": "xcache_saltsx"},  # the same bytes as the one before, were sizes left out
    {"adapter": "", "cache_salt": "x"},
    {"cache_salt": b"x"},
    {"cache_salt": "\ud800"},  # a lone surrogate, which JSON can hold
    {"adapter": 12},
    {"adapter": "12"},
    {"adapter": "x", "adapter_revision": "1"},
    {"adapter": "x", "adapter_revision": "2"},  # content replaced under the same name
    {"model_revision": "x"},
    {"adapterx": ""},
]


def test_extra_keys_never_pass_for_one_another() -> None:
    """Seen elsewhere: all identity is in the chain, tagged, with its revision."""
    allocator, cache = new_cache(num_pages=100)
    tokens = list(range(9))
    for keys in EXTRA_KEYS:
        assert hits(cache, tokens, **keys) == []
        computed(allocator, cache, tokens, keys)
        assert len(hits(cache, tokens, **keys)) == 2
    assert len({encode_extra_keys(keys) for keys in EXTRA_KEYS}) == len(EXTRA_KEYS)


def test_extra_keys_are_inherited_by_the_whole_chain() -> None:
    """Seen elsewhere: only the first page carried the key, so that its children collided."""
    _, cache = new_cache()
    plain = cache.chain(list(range(12)))
    salted = cache.chain(list(range(12)), {"cache_salt": "x"})
    assert len(set(plain.hashes) | set(salted.hashes)) == 6


def test_extra_keys_have_one_canonical_form() -> None:
    assert encode_extra_keys({"b": "1", "a": 2}) == encode_extra_keys({"a": 2, "b": "1"})
    assert encode_extra_keys({"a": None}) == encode_extra_keys({}) == b""


def test_the_root_is_secret_and_drawn_for_each_cache() -> None:
    """Seen elsewhere: predictable hashes let a client craft a collision."""
    roots = [PrefixCache(PageAllocator(3), PAGE_SIZE).chain([1, 2, 3, 4]).hashes for _ in range(2)]
    assert roots[0] != roots[1]
    known = [new_cache()[1].chain([1, 2, 3, 4]).hashes for _ in range(2)]
    assert known[0] == known[1]
    assert [len(digest) for digest in known[0]] == [32]
    with pytest.raises(IntegrityError, match=r"`root` must be 32 bytes. Got 3"):
        PrefixCache(PageAllocator(3), PAGE_SIZE, root=b"abc")


def same_hash_for_all(data: bytes) -> bytes:
    del data
    return bytes(32)


def one_byte_hash(data: bytes) -> bytes:
    return bytes([sum(data) % 3])


@pytest.mark.parametrize("digest", [same_hash_for_all, one_byte_hash])
def test_a_collision_costs_a_miss_and_never_gives_a_wrong_page(
    digest: Callable[[bytes], bytes],
) -> None:
    """With hash functions that collide all the time: each hit is what its tokens say."""
    draw = random.Random(5)
    allocator, cache = new_cache(num_pages=40, page_size=2, digest=digest)
    content: dict[int, tuple[str | None, tuple[int, ...]]] = {}  # page -> what was computed into it
    num_hits = 0
    tables: list[PageTable] = []
    for _ in range(2_000):
        tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 9))]
        salt = draw.choice([None, "x"])
        chain = cache.chain(extra_keys={"cache_salt": salt})
        pages = cache.match(tokens, chain)
        for i, page in enumerate(pages):
            assert content[page] == (salt, tuple(tokens[: 2 * (i + 1)]))
        num_hits += len(pages)
        table = PageTable(allocator, 2)
        table.adopt(pages, 2 * len(pages))
        table.append(len(tokens) - table.num_tokens)
        for i, page in enumerate(table.pages[len(pages) :], len(pages)):
            content[page] = (salt, tuple(tokens[: 2 * (i + 1)]))
        cache.insert_computed(chain, tokens, table, len(tokens))
        tables.append(table)
        if len(tables) > 6:
            tables.pop(draw.randrange(len(tables))).release()
        cache.check_integrity()
    assert num_hits > 100  # the cache still works, for the content that came first


def test_a_chain_of_other_tokens_costs_a_miss_and_never_gives_a_wrong_page() -> None:
    allocator, cache = new_cache()
    table, chain = computed(allocator, cache, [1] * 12)
    assert cache.match([1, 1, 1, 1, 2, 2, 2, 2, 0], chain) == table.pages[:1]
    assert cache.match([2] * 12, chain) == []
    other = PageTable(allocator, PAGE_SIZE)
    other.append(12)
    with pytest.raises(IntegrityError, match=r"other tokens in pages 0 to 2.* truncates its chain"):
        cache.insert_computed(chain, [1] * 8 + [2] * 4, other, 12)
    assert cache.num_cached == 3


def test_a_truncated_and_forked_chain_hashes_what_follows_anew() -> None:
    allocator, cache = new_cache()
    table, chain = computed(allocator, cache, [1] * 12)
    child = chain.fork()
    chain.truncate(7)
    chain.extend([1] * 4 + [2] * 8)
    assert chain.hashes[0] == child.hashes[0]
    assert child.hashes == cache.chain([1] * 12).hashes
    assert chain.hashes == cache.chain([1] * 4 + [2] * 8).hashes
    assert cache.match([1] * 13, child) == table.pages


def test_each_page_is_hashed_once_in_a_sequences_life() -> None:
    calls: list[bytes] = []

    def counted(data: bytes) -> bytes:
        calls.append(data)
        return len(calls).to_bytes(32, "little")

    allocator, cache = new_cache(digest=counted)
    tokens = list(range(11))
    table, chain = computed(allocator, cache, tokens)
    for token in range(11, 30):
        tokens.append(token)
        table.extend(1)
        cache.insert_computed(chain, tokens, table, len(tokens))
        cache.match(tokens, chain)
    pages_hashed = [data for data in calls if data.startswith(b"page")]
    assert len(pages_hashed) == len(set(pages_hashed)) == 30 // PAGE_SIZE


def test_token_ids_never_wrap_into_one_another() -> None:
    _, cache = new_cache(page_size=1)
    tokens = [0, 1, 2**31, 2**32, 2**32 + 1, 256, 65536]
    assert len({cache.chain([token]).hashes[0] for token in tokens}) == len(tokens)
    assert cache.chain(np.array([5], np.int32)).hashes == cache.chain([5]).hashes


def test_reset_succeeds_only_when_no_page_is_held() -> None:
    allocator, cache = new_cache()
    table, chain = computed(allocator, cache, list(range(9)))
    gone, _ = computed(allocator, cache, [9] * 8)
    gone.release()
    before = (allocator.eviction_order(), cache.num_cached)
    assert cache.reset() is False
    assert (allocator.eviction_order(), cache.num_cached) == before
    table.release()
    assert cache.reset() is True
    assert cache.num_cached == allocator.num_evictable == 0
    assert cache.match(list(range(9)), chain) == []
    assert allocator.num_free == allocator.usable
    cache.check_integrity()
    allocator.check_integrity([])


def test_a_disabled_cache_finds_and_keeps_nothing() -> None:
    allocator = PageAllocator(10)
    cache = PrefixCache(allocator, PAGE_SIZE, enabled=False)
    table, chain = computed(allocator, cache, list(range(9)))
    assert cache.insert(chain, 0, table.pages[0]) is False
    assert cache.match(list(range(9)), chain) == []
    table.release()
    assert allocator.num_evictable == cache.num_cached == 0
    assert cache.reset() is True


def test_stats_count_tokens_once_for_each_record() -> None:
    """Only the first admission is recorded; a match alone counts nothing."""
    allocator, cache = new_cache()
    computed(allocator, cache, list(range(9)))
    assert (cache.stats.num_requests, cache.stats.hit_rate) == (0, 0.0)
    cache.stats.record(9, 0)
    cache.stats.record(11, 8)
    assert cache.stats.num_requests == 2
    assert (cache.stats.num_query_tokens, cache.stats.num_hit_tokens) == (20, 8)
    assert cache.stats.hit_rate == 0.4


def test_insert_refuses_a_page_that_holds_something_else_or_is_not_held() -> None:
    allocator, cache = new_cache()
    table, chain = computed(allocator, cache, list(range(8)))
    with pytest.raises(IntegrityError, match=rf"other cached content. Got page {table.pages[1]}"):
        cache.insert(chain, 0, table.pages[1])
    with pytest.raises(IntegrityError, match=r"must be held and not yet cached"):
        cache.insert(chain, 0, 9)
    with pytest.raises(IntegrityError, match=r"in \[1, 20\)\. Got the null page"):
        cache.insert(chain, 0, 0)
    with pytest.raises(IntegrityError, match=r"`page` must be registered. Got page 9"):
        cache.evict(9)
    cache.check_integrity()


def test_an_allocator_serves_one_cache() -> None:
    allocator, _ = new_cache()
    with pytest.raises(IntegrityError, match="must not serve another prefix cache"):
        PrefixCache(allocator, PAGE_SIZE)


def test_no_hash_outlives_its_pages_and_sequences() -> None:
    allocator, cache = new_cache()
    table, chain = computed(allocator, cache, list(range(16)))
    other = chain.fork()
    table.release()
    assert cache.reset()
    assert len(cache._nodes) == 4  # the chains still know the tokens
    del chain, other
    assert len(cache._nodes) == 0


def _forget_a_flag(cache: PrefixCache) -> None:
    cache._allocator._cached[1] = False


def _lose_an_entry(cache: PrefixCache) -> None:
    cache._node_of[1] = None


def _repeat_a_page(cache: PrefixCache) -> None:
    node = cache._node_of[1]
    assert node is not None
    node.pages.append(1)


def _name_a_stranger(cache: PrefixCache) -> None:
    node = cache._node_of[1]
    assert node is not None
    node.pages.append(2)


def _lose_the_hash(cache: PrefixCache) -> None:
    node = cache._node_of[1]
    assert node is not None
    del cache._nodes[node.hash]


@pytest.mark.parametrize(
    "damage",
    [_forget_a_flag, _lose_an_entry, _repeat_a_page, _name_a_stranger, _lose_the_hash],
)
def test_check_integrity_finds(damage: Callable[[PrefixCache], None]) -> None:
    allocator, cache = new_cache()
    table, chain = computed(allocator, cache, list(range(9)))
    cache.check_integrity()
    damage(cache)
    with pytest.raises(IntegrityError):
        cache.check_integrity()
    del table, chain
