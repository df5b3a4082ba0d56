"""The mma.sync kernel, interpreted in its TMA form, against float64; unused values are poison."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mosaic_gpu_mma, mosaic_gpu_target, reference
from pallas_kernels.mosaic_gpu_mma import attend_mma
from pallas_kernels.mosaic_gpu_target import GpuTarget, target
from pallas_kernels.paged_attention_mosaic import row_slopes
from pallas_kernels.quantize import LARGEST
from pallas_kernels.score_rule import ScoreRule
from pallas_kernels.tuning import KernelConfig
from pallas_kernels.work_plan import (
    TileShape,
    WorkList,
    pack_queries,
    plan_tiles,
    plan_work,
)
from tests.pallas_kernels import cases, races
from tests.pallas_kernels.joining import join_items, to_tokens

races.interpret_mma()

SPLIT_P = 1e-5  # P in two 16-bit parts
PLAIN_P = 3e-3  # P in one bfloat16
PLAIN_P_F16 = 3e-4  # P in one float16
OUT_F16 = 6e-4  # out rounded to float16


def attend(
    shape: cases.Shape,
    batch: cases.Batch,
    *,
    rows: int = 16,
    kv_tile: int = 64,
    stages: int = 2,
    workers: int = 3,
    split: bool = True,
    split_p: bool = True,
    out_dtype: Any = jnp.float32,
    alibi_slopes: np.ndarray | None = None,
    kv_scales: np.ndarray | None = None,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """out [num_tokens, num_q_heads, head_dim] and lse [num_tokens, num_q_heads] of the kernel."""
    q, pool, table, kv_lens, cu_q_lens, num_seqs = (jnp.asarray(a) for a in batch.arrays)
    tile_shape = TileShape.fit(shape.group, rows=rows, multiple=rows, kv_tile=kv_tile)
    tiles = plan_tiles(
        kv_lens,
        cu_q_lens,
        num_seqs,
        shape=tile_shape,
        num_tokens=shape.num_tokens,
        sliding_window=options.get("sliding_window"),
    )
    heads = shape.num_kv_heads * tile_shape.passes
    work = plan_work(tiles, heads=heads, workers=workers, split=split, min_tiles=1)
    with races.no_gpu_race():
        o, lse = attend_mma(
            pack_queries(q, tiles, shape.num_kv_heads, shape.head_dim),
            pool,
            table,
            work,
            shape=tile_shape,
            rule=ScoreRule(options.pop("scale", shape.head_dim**-0.5), **options),
            config=KernelConfig("mma", rows, kv_tile, stages, workers, split, split_p),
            slopes=None
            if alibi_slopes is None
            else row_slopes(jnp.asarray(alibi_slopes), tile_shape, shape.num_kv_heads),
            kv_scales=None if kv_scales is None else jnp.asarray(kv_scales),
            out_dtype=out_dtype,
            interpret=True,
        )
        assert o.dtype == out_dtype
        o, lse = np.asarray(o.astype(jnp.float32)), np.asarray(lse)
    return to_tokens(*join_items(o, lse, work), tiles, shape.num_q_heads)


def check(shape: cases.Shape, batch: cases.Batch, bound: float, **options: Any) -> None:
    """Out within `bound` of float64, the lse within `SPLIT_P`."""
    told = ("scale", "sliding_window", "soft_cap", "alibi_slopes", "kv_scales")
    out, lse = attend(shape, batch, **options)
    rule = {name: options[name] for name in told if name in options}
    expected, expected_lse = reference.paged_attention(*batch.arrays, **rule, return_lse=True)
    errors = cases.error(out, expected), cases.error(lse, expected_lse)
    print(f"out {errors[0]:.1e}, lse {errors[1]:.1e}")
    assert errors[0] <= bound
    assert errors[1] <= SPLIT_P


def quantised(batch: cases.Batch, dtype: Any) -> tuple[cases.Batch, np.ndarray]:
    """The batch with 8-bit pages and their scales; those of unused positions are NaN."""
    pool = batch.kv_pages.astype(np.float32)
    scales = np.abs(pool).max(axis=-1) / np.float32(LARGEST[jnp.dtype(dtype)])
    scales[0] = 1
    values = pool / scales[..., None]
    if dtype == jnp.int8:
        values = np.where(np.isnan(values), 99, np.round(values))
    values = np.asarray(jnp.asarray(values, jnp.float32).astype(dtype))
    return dataclasses.replace(batch, kv_pages=values), scales


def rng() -> np.random.Generator:
    return np.random.default_rng(3)


# --------------------------------------------------------------------------------- interpretation


def test_decode_of_lengths_around_page_and_tile_edges() -> None:
    shape = cases.Shape(16, 2, 4, 128, 10, 10, 200)
    kv_lens = [1, 15, 16, 17, 63, 64, 65, 128, 200]
    batch = cases.make_batch(shape, rng(), kv_lens, [1] * 9, jnp.bfloat16)
    check(shape, batch, SPLIT_P, stages=3, workers=5)


def test_several_tokens_a_tile_and_plain_p_on_large_pages() -> None:
    shape = cases.Shape(128, 1, 3, 64, 4, 20, 300)  # 5 tokens and a padding row a tile
    batch = cases.make_batch(shape, rng(), [300, 9, 129], [7, 9, 2], jnp.bfloat16)
    check(shape, batch, PLAIN_P, split_p=False, workers=2)


def test_prefill_with_a_window_writes_its_final_dtype() -> None:
    shape = cases.Shape(32, 1, 7, 64, 3, 60, 150)  # 9 tokens and a padding row a tile
    batch = cases.make_batch(shape, rng(), [150, 20], [35, 20], jnp.float16)
    options = {"rows": 64, "split": False, "out_dtype": jnp.float16, "sliding_window": 40}
    check(shape, batch, OUT_F16, **options)


def test_soft_cap_and_slopes_with_a_group_in_two_passes() -> None:
    shape = cases.Shape(8, 1, 32, 64, 2, 4, 100)
    batch = cases.make_batch(shape, rng(), [100, 66], [1, 2], jnp.bfloat16)
    slopes = np.geomspace(0.5, 0.01, 32, dtype=np.float32)
    check(shape, batch, SPLIT_P, alibi_slopes=slopes, soft_cap=3.0, scale=0.3, kv_tile=32)


@pytest.mark.parametrize(
    ("dtype", "page_size", "split_p", "bound"),
    [(jnp.int8, 16, True, SPLIT_P), (jnp.float8_e4m3fn, 128, False, PLAIN_P_F16)],
)
def test_quantised_pages(dtype: Any, page_size: int, split_p: bool, bound: float) -> None:
    shape = cases.Shape(page_size, 2, 4, 64, 4, 8, 200)
    batch = cases.make_batch(shape, rng(), [200, 65, 64, 1], [1, 3, 0, 1], jnp.bfloat16)
    batch, scales = quantised(batch, dtype)
    check(shape, batch, bound, kv_scales=scales, split_p=split_p)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page_size", "head_dim", "group", "rows"),
    [
        *itertools.product((8, 16, 64, 128), (64, 128, 256), (1, 8), (16,)),
        *itertools.product((16, 64), (64, 128), (1, 4, 12), (32, 64)),
    ],
)
def test_random_batches(page_size: int, head_dim: int, group: int, rows: int) -> None:
    seed = page_size + head_dim + 7 * group + rows
    generator = np.random.default_rng(seed)
    shape = cases.Shape(page_size, 2, group, head_dim, 5, 60, 300)
    batch = cases.random_batch(shape, generator, jnp.bfloat16)
    kv_tile = int(generator.choice([32, 64, 128]))
    window = None if seed % 3 else int(generator.integers(1, 200))
    options = {"rows": rows, "kv_tile": kv_tile, "sliding_window": window, "workers": 4}
    check(shape, batch, SPLIT_P, stages=int(generator.integers(2, 5)), **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "page_size", "head_dim", "rows"),
    [
        *itertools.product((jnp.int8, jnp.float8_e4m3fn), (8, 32, 64), (64, 128), (16,)),
        (jnp.int8, 64, 128, 64),
        (jnp.float8_e4m3fn, 128, 256, 32),
    ],
)
def test_random_quantised_batches(dtype: Any, page_size: int, head_dim: int, rows: int) -> None:
    shape = cases.Shape(page_size, 2, 4, head_dim, 5, 60, 300)
    batch = cases.random_batch(shape, np.random.default_rng(page_size + head_dim), jnp.bfloat16)
    batch, scales = quantised(batch, dtype)
    check(shape, batch, SPLIT_P, kv_scales=scales, rows=rows, stages=3, soft_cap=20.0)


# ------------------------------------------------------------------------------------- refusals

REFUSALS = {
    "stages": ("`config.stages` must be at least 2. Got 1", {"stages": 1}),
    "kv_tile": ("`config.kv_tile` must be 32, 64 or 128.* Got 16", {"kv_tile": 16}),
    "rows": ("`shape.rows` must be a multiple of 16.* Got 24", {"rows": 24}),
    "head_dim": ("head_dim that is a multiple of 64.* Got 80", {"head_dim": 80}),
    "page_size": ("page_size of 8, 16, 32, 64 or 128.* Got 4", {"page_size": 4}),
    "dtype": ("`kv_pages` must be bfloat16 or float16 .* Got float32", {"dtype": jnp.float32}),
    "q_dtype": ("`q_tiles` must have the dtype of `kv_pages`", {"q_dtype": jnp.float16}),
    "scales": ("`kv_pages` must be int8 or float8_e4m3fn with", {"scales": True}),
}


def trace(chip: GpuTarget, monkeypatch: pytest.MonkeyPatch, **change: Any) -> None:
    """Traces, and does not lower, a call for `chip`."""
    given: dict[str, Any] = {
        "stages": 2, "kv_tile": 64, "rows": 16, "head_dim": 128, "page_size": 16,
        "dtype": jnp.bfloat16, "q_dtype": None, "scales": False, "interpret": False,
    } | change  # fmt: skip
    monkeypatch.setattr(mosaic_gpu_mma, "target", lambda: chip)
    rows, width, page_size = given["rows"], given["head_dim"], given["page_size"]
    struct = jax.ShapeDtypeStruct
    integers = (struct((n,), jnp.int32) for n in (3, 9))
    scales = struct((5, 2, 2, page_size), jnp.float32) if given["scales"] else None
    jax.eval_shape(
        lambda q, pool, table, items, workers, row_items, scales: attend_mma(
            q,
            pool,
            table,
            WorkList(items, workers, row_items, False),
            shape=TileShape(4, 1, 4, rows, given["kv_tile"]),
            rule=ScoreRule(0.1),
            config=KernelConfig("mma", rows, given["kv_tile"], given["stages"], 2),
            kv_scales=scales,
            interpret=given["interpret"],
        ),
        struct((2, 4, rows, width), given["q_dtype"] or jnp.bfloat16),
        struct((5, 2, 2, page_size, width), given["dtype"]),
        struct((3, 4), jnp.int32),
        struct((8, 8), jnp.int32),
        *integers,
        scales,
    )


H200 = GpuTarget("NVIDIA H200", (9, 0), 132, 227 * 1024)
A100 = GpuTarget("NVIDIA A100", (8, 0), 108, 163 * 1024)
L4 = GpuTarget("NVIDIA L4", (8, 9), 58, 99 * 1024)


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses_what_it_cannot_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    message, change = REFUSALS[name]
    with pytest.raises(NotImplementedError, match=message):
        trace(H200, monkeypatch, **change)


def test_refuses_what_the_chip_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    e4m3 = {"dtype": jnp.float8_e4m3fn, "scales": True}
    with pytest.raises(NotImplementedError, match="must be int8 on chips before compute cap"):
        trace(A100, monkeypatch, **e4m3)
    trace(L4, monkeypatch, **e4m3)
    trace(A100, monkeypatch, stages=3)
    with pytest.raises(NotImplementedError, match=r"at most the 101376 bytes .* of NVIDIA L4"):
        trace(L4, monkeypatch, stages=3)
    tiny = {"dtype": jnp.int8, "scales": True, "head_dim": 64, "page_size": 8}
    with pytest.raises(NotImplementedError, match=r"at least 1024 bytes .* Got 8 rows of 64 bytes"):
        trace(L4, monkeypatch, **tiny)
    trace(H200, monkeypatch, **tiny)


# ------------------------------------------------------------------------------------- the target


class FakeDevice:
    """What `target` reads of a device."""

    def __init__(self, capability: str, cores: int | None = 100) -> None:
        self.platform, self.device_kind = "gpu", f"fake {capability}"
        self.compute_capability, self.core_count = capability, cores


@pytest.mark.parametrize(
    ("capability", "kib", "has_tma", "has_wgmma"),
    [
        ("8.0", 163, False, False),
        ("8.6", 99, False, False),
        ("8.9", 99, False, False),
        ("9.0", 227, True, True),
        ("10.0", 227, True, False),
        ("12.0", 99, True, False),
    ],
)
def test_target_of_a_device(
    capability: str, kib: int, has_tma: bool, has_wgmma: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [FakeDevice(capability)])
    got = target()
    assert (got.kind, got.num_sms) == (f"fake {capability}", 100)
    assert (got.smem_bytes, got.has_tma, got.has_wgmma) == (kib * 1024, has_tma, has_wgmma)


def test_target_of_an_abstract_mesh_comes_before_the_device() -> None:
    class Described(jax.sharding.AbstractDevice):
        compute_capability = "8.0"

    def inside(cls: type, platform: str) -> GpuTarget:
        device = cls("a chip", 108, platform)
        mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
        with jax.sharding.use_abstract_mesh(mesh):
            return target()

    assert inside(Described, "gpu") == GpuTarget("a chip", (8, 0), 108, 163 * 1024)
    with pytest.raises(ValueError, match="must have an attribute `compute_capability`"):
        inside(jax.sharding.AbstractDevice, "gpu")
    assert inside(jax.sharding.AbstractDevice, "cpu") == mosaic_gpu_target._INTERPRETED


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a chip")
def test_target_where_there_is_no_chip_is_a_hopper() -> None:
    assert target().has_wgmma
