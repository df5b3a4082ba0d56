"""Engine options: what is refused and in which words, and the shapes that they resolve to."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedjax import ConfigError
from pagedjax.config import EngineConfig, SchedulerConfig, growing


def scheduler_config(**sizes: int) -> SchedulerConfig:
    values: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "max_model_len": 100,
        "page_size": 16,
        "num_pages": 8,
        "vocab_size": 32,
    }
    return SchedulerConfig(**{**values, **sizes})


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("dtype", "fp16", "auto, float32, bfloat16 or float16. Got 'fp16'"),
        ("seed", 1.5, r"Got 1\.5"),
        ("seed", 2**64, "must be an integer in"),
        ("seed", 10**400, "Got an integer of 1329 bits"),
        ("max_model_len", 0, r"integer in \[1, 2147483647\]. Got 0"),
        ("max_num_seqs", True, "Got True"),
        ("max_num_batched_tokens", "512", "Got '512'"),
        ("num_pages", 1, r"integer in \[2, 2147483647\]. Got 1"),
        ("page_size", 512, r"integer in \[1, 256\]. Got 512"),
        ("page_size", 24, "power of two, 1 to 256. Got 24"),
        ("page_size", 0, "Got 0"),
        ("memory_utilization", 0.0, r"number in \(0, 1\]. Got 0\.0"),
        ("memory_utilization", 1.1, r"Got 1\.1"),
        ("memory_utilization", float("nan"), "Got nan"),
        ("memory_utilization", "0.9", "Got '0.9'"),
        ("enable_prefix_caching", 1, "true or false. Got 1"),
        ("attention_implementation", 3, "a name or None. Got 3"),
        ("attention_implementation", ["xla"], r"a name or None. Got \['xla'\]"),
        ("dtype", ["float32"], r"or float16. Got \['float32'\]"),
        ("dtype", None, "or float16. Got None"),
        ("kv_cache_dtype", ["int8"], r"one of auto, float8_e4m3fn, .*Got \['int8'\]"),
        ("kv_cache_dtype", {}, "Got {}"),
        ("kv_cache_dtype", "float16", "one of auto, .*Got 'float16'"),
        ("quantization", "int4", "one of none, int8, float8, fp8. Got 'int4'"),
        ("quantization", None, "Got None"),
        ("quantization", ["int8"], r"Got \['int8'\]"),
        ("num_pages", [8], r"Got \[8\]"),
        ("memory_utilization", [0.5], r"Got \[0\.5\]"),
        ("cascade_attention", "no", "true or false. Got 'no'"),
        ("batch_invariant", 1, "true or false. Got 1"),
        ("swap_space", -1, r"finite number of GiB, 0 \(none\) or more\. Got -1"),
        ("swap_space", float("inf"), "Got inf"),
        ("swap_space", float("nan"), "Got nan"),
        ("swap_space", True, "Got True"),
        ("swap_space", "4", "Got '4'"),
        ("preemption_mode", "drop", r"auto, swap or recompute\. Got 'drop'"),
        ("victim_policy", None, r"latest or least_cost\. Got None"),
    ],
)
def test_a_bad_option_is_refused_by_name(option: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        EngineConfig.from_options({option: value})
    assert str(caught.value).startswith(f"`{option}` must")


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"`max_num_seq` is not an engine option\. Did you mean"):
        EngineConfig.from_options({"max_num_seq": 8})
    with pytest.raises(ConfigError, match=r"`zzz` is not an engine option. Known: dtype, seed, "):
        EngineConfig.from_options({"zzz": 8})
    with pytest.raises(ConfigError, match="`8` is not an engine option"):
        EngineConfig.from_options({8: "zzz"})  # pyright: ignore[reportArgumentType]


def test_aliases_of_vllm_are_accepted_once() -> None:
    config = EngineConfig.from_options({"gpu_memory_utilization": 0.5, "block_size": 8})
    assert (config.memory_utilization, config.page_size) == (0.5, 8)
    with pytest.raises(ConfigError, match=r"`page_size` must be given once\. Got it twice, as"):
        EngineConfig.from_options({"page_size": 8, "block_size": 8})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_host_pages", -1, r"`num_host_pages` must be an integer in \[0, .*Got -1"),
        ("preemption_mode", "", "`preemption_mode` must be auto, swap or recompute"),
        ("victim_policy", "oldest", "`victim_policy` must be latest or least_cost"),
    ],
)
def test_a_bad_resolved_option_is_refused_too(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scheduler_config(**{name: value})


def test_the_step_must_have_a_token_for_each_sequence() -> None:
    message = r"`max_num_batched_tokens` must be at least `max_num_seqs` \(8\).*Got 7\."
    with pytest.raises(ConfigError, match=message):
        scheduler_config(max_num_batched_tokens=7)


def test_one_request_must_fit_the_pool_or_the_message_says_what_would() -> None:
    assert scheduler_config(num_pages=8).pages_per_seq == 7
    with pytest.raises(ConfigError) as caught:
        scheduler_config(num_pages=6)
    assert str(caught.value) == (
        "`num_pages` must be at least 8 for one request of `max_model_len` 100 at `page_size` 16 "
        "(one page is the null page). Got 6: raise it, or lower `max_model_len` to 80."
    )


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "decode", "mixed"),
    [
        (1, 1, (1,), (2,)),
        (1, 512, (1,), (64, 128, 256, 512)),
        (6, 40, (1, 6), (40,)),
        (8, 32, (1, 8), (32,)),
        (16, 16, (1, 8, 16), (32,)),
        (32, 512, (1, 8, 32), (64, 128, 256, 512)),
    ],
)
def test_buckets_grow_by_powers_up_to_the_ends(
    max_num_seqs: int, max_num_batched_tokens: int, decode: tuple[int], mixed: tuple[int]
) -> None:
    config = scheduler_config(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
    )
    assert config.decode_buckets == decode
    assert config.mixed_buckets == mixed
    assert config.buckets == decode + mixed
    assert [b for b in config.buckets if config.is_decode_bucket(b)] == list(decode)


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "decode", "mixed"),
    [
        (1, 1, (1,), (2,)),
        (3, 100, (1, 3), (64, 82, 100)),
        (8, 512, (1, 4, 8), (64, 96, 128, 192, 256, 384, 512)),
        (32, 128, (1, 4, 8, 12, 16, 24, 32), (64, 96, 128)),
    ],
)
def test_fine_buckets_lie_halfway_between_too(
    max_num_seqs: int, max_num_batched_tokens: int, decode: tuple[int], mixed: tuple[int]
) -> None:
    config = scheduler_config(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        fine_buckets=True,
    )
    assert config.decode_buckets == decode
    assert config.mixed_buckets == mixed


@given(st.integers(1, 70), st.integers(0, 300), st.booleans(), st.data())
def test_every_step_has_a_bucket_with_room(
    seqs: int, more: int, fine: bool, data: st.DataObject
) -> None:
    config = scheduler_config(
        max_num_seqs=seqs, max_num_batched_tokens=seqs + more, fine_buckets=fine
    )
    assert list(config.buckets) == sorted(set(config.buckets))
    num_rows = data.draw(st.integers(0, seqs))
    for decode_only in (True, False):
        most = seqs if decode_only else seqs + more
        num_tokens = data.draw(st.integers(1, most))
        bucket = config.bucket_for(num_tokens, num_rows, decode_only=decode_only)
        assert bucket >= max(num_tokens, num_rows)
        assert config.rows_in(bucket) >= min(num_rows, seqs)
        assert config.is_decode_bucket(bucket) == decode_only
        smaller = config.decode_buckets if decode_only else config.mixed_buckets
        assert not any(max(num_tokens, num_rows) <= b < bucket for b in smaller)


def test_growing_ends_at_the_limit() -> None:
    assert growing(2, 2, factor=2) == (2,)
    assert growing(2, 12, factor=2) == (2, 4, 8, 12)
    assert growing(2, 12, factor=4) == (2, 8, 12)
    assert growing(16, 3, factor=2) == (16,)
