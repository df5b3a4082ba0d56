"""What the engine asks of a model: each breach has an error that says how to mend it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pagedjax import LLM, Batch, ConfigError, KVCache, SamplingParams, attend
from pagedjax.models import contract
from tests.helpers import VOCAB, TinyLM, dense_greedy

F32 = jnp.dtype(jnp.float32)


def complaint(model: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        contract.check(contract.flatten(model), F32)
    return str(caught.value)


def test_a_good_model_passes_and_is_measured() -> None:
    model = TinyLM()
    flat = contract.flatten(model)
    contract.check(flat, F32)
    assert (flat.num_layers, flat.num_kv_heads, flat.head_dim, flat.vocab_size) == (2, 2, 8, VOCAB)
    assert flat.dtype == jnp.float32
    assert flat.num_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    rebuilt = flat.merge(flat.leaves)
    tokens = jnp.arange(5, dtype=jnp.int32)
    np.testing.assert_array_equal(rebuilt.dense(tokens), model.dense(tokens))


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "vocab_size"])
@pytest.mark.parametrize("value", [None, 0, True, 2.0, "2"])
def test_a_missing_or_odd_size_is_named(name: str, value: Any) -> None:
    model = TinyLM()
    setattr(model, name, value)
    text = complaint(model)
    assert text.startswith(f"`model.{name}` must be a positive integer")
    assert f"Got {value!r} on TinyLM." in text


class WithoutLogits(nnx.Module):
    num_layers, num_kv_heads, head_dim, vocab_size = 1, 2, 8, VOCAB

    def __init__(self) -> None:
        self.weight = nnx.Param(jnp.zeros((2,)))

    def __call__(self, tokens: Any, positions: Any, kv_cache: Any, batch: Any) -> Any:
        raise AssertionError("is never called")


class WithoutCall(nnx.Module):
    num_layers, num_kv_heads, head_dim, vocab_size = 1, 2, 8, VOCAB

    def __init__(self) -> None:
        self.weight = nnx.Param(jnp.zeros((2,)))


@pytest.mark.parametrize(
    ("model", "method"), [(WithoutLogits, "logits"), (WithoutCall, "__call__")]
)
def test_a_missing_method_is_named_with_the_signature(model: Any, method: str) -> None:
    text = complaint(model())
    assert f"must have a method `{method}`" in text
    assert "(tokens, positions, kv_cache, batch) -> (hidden, kv_cache)" in text


class Broken(TinyLM):
    """A model whose result is bent by a function."""

    def __init__(self, bend: Any) -> None:
        super().__init__()
        self.bend = bend

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, kv_cache: KVCache, batch: Batch
    ) -> Any:
        hidden, new_cache = super().__call__(tokens, positions, kv_cache, batch)
        return self.bend(hidden, kv_cache, new_cache)


def half(cache: KVCache) -> KVCache:
    return KVCache(tuple(pool.astype(jnp.bfloat16) for pool in cache.kv_pages))


@pytest.mark.parametrize(
    ("bend", "messages"),
    [
        (lambda h, old, new: h, ("must return (hidden, kv_cache)", "Got DynamicJaxprTracer")),
        (lambda h, old, new: (h,), ("must return (hidden, kv_cache)", "Got (DynamicJaxprTracer)")),
        (lambda h, old, new: (new, h), ("Got (KVCache, DynamicJaxprTracer)",)),
        (lambda h, old, new: (h, None), ("Got (DynamicJaxprTracer, NoneType)",)),
        (lambda h, old, new: (h[None], new), ("`hidden`", "[6, embed_dim]", "Got [1, 6, 32]")),
        (lambda h, old, new: (h[:, 0], new), ("`hidden`", "[6, embed_dim]", "Got [6]")),
        (lambda h, old, new: (h[:3], new), ("`hidden`", "6 tokens", "Got [3, 32]")),
        (lambda h, old, new: (h, old), ("for each of its `num_layers` = 2", "Layers [0, 1]")),
        (
            lambda h, old, new: (h, KVCache((new.kv_pages[0], old.kv_pages[1]))),
            ("Layers [1] were not written", "is a returned cache dropped"),
        ),
        (lambda h, old, new: (h, half(new)), ("the shapes and dtypes it came with", "bfloat16")),
        (lambda h, old, new: (h, KVCache(new.kv_pages[:1])), ("2 layers", "Got 1 layers")),
    ],
)
def test_a_wrong_result_is_shown_beside_the_right_one(bend: Any, messages: tuple[str]) -> None:
    text = complaint(Broken(bend))
    for message in messages:
        assert message in text


def test_logits_of_another_width_are_refused() -> None:
    model = TinyLM()
    model.vocab_size = VOCAB - 1
    assert "`logits(hidden)` of the model must have shape [4, 31]" in complaint(model)
    assert "Got [4, 32]" in complaint(model)


def test_too_many_layers_are_told_by_number() -> None:
    model = TinyLM()
    model.num_layers = 4
    model.wq, model.wkv, model.wo = (
        nnx.List([*part, *part]) for part in (model.wq, model.wkv, model.wo)
    )
    contract.check(contract.flatten(model), F32)  # four layers of weights: nothing to say

    class Claims(TinyLM):
        def __call__(
            self, tokens: jax.Array, positions: jax.Array, kv_cache: KVCache, batch: Batch
        ) -> tuple[jax.Array, KVCache]:
            x = self.embed[...][tokens]
            q, k, v = self.project(0, x)
            out, kv_cache = attend(q, k, v, kv_cache, batch, layer=0)
            return self.mix(0, x, out), kv_cache

    assert "Layers [1] were not written: " in complaint(Claims())
    assert "or `num_layers` too large?" in complaint(Claims())


def test_too_few_layers_are_told_by_attend() -> None:
    class Claims(TinyLM):
        def __call__(
            self, tokens: jax.Array, positions: jax.Array, kv_cache: KVCache, batch: Batch
        ) -> tuple[jax.Array, KVCache]:
            q, k, v = self.project(0, self.embed[...][tokens])
            attend(q, k, v, kv_cache, batch, layer=2)
            raise AssertionError("attend refuses")

    text = complaint(Claims())
    assert "Tracing it raised ValueError" in text
    assert "`layer` must be in [0, 2)" in text


def test_a_cache_of_another_dtype_is_told_before_anything_is_allocated() -> None:
    with pytest.raises(ConfigError, match=r"a cache of dtype bfloat16\. Tracing it raised"):
        contract.check(contract.flatten(TinyLM()), jnp.dtype(jnp.bfloat16))


@jax.tree_util.register_dataclass
@dataclass
class Plain:
    """A registered pytree of arrays with the two methods, and no module library at all."""

    embed: Any
    where: Any
    head: Any
    wq: Any
    wkv: Any
    wo: Any
    num_layers: int = field(default=2, metadata={"static": True})
    num_kv_heads: int = field(default=2, metadata={"static": True})
    head_dim: int = field(default=8, metadata={"static": True})
    vocab_size: int = field(default=VOCAB, metadata={"static": True})
    max_model_len: int = field(default=32, metadata={"static": True})

    @classmethod
    def of(cls, model: TinyLM) -> Plain:
        parts = (model.embed, model.where, model.head)
        lists = (model.wq, model.wkv, model.wo)
        embed, where, head = (part[...] for part in parts)
        wq, wkv, wo = ([layer[...] for layer in part] for part in lists)
        return cls(embed, where, head, wq, wkv, wo)

    def __call__(self, tokens: Any, positions: Any, kv_cache: KVCache, batch: Batch) -> Any:
        x = self.embed[tokens] + self.where[positions]
        for layer in range(self.num_layers):
            q = (x @ self.wq[layer]).reshape(-1, 4, 8)
            kv = (x @ self.wkv[layer]).reshape(-1, 2, 2, 8)
            out, kv_cache = attend(q, kv[:, 0], kv[:, 1], kv_cache, batch, layer=layer)
            y = x + out.reshape(x.shape) @ self.wo[layer]
            x = y / jnp.sqrt(jnp.mean(y * y, axis=-1, keepdims=True))
        return x, kv_cache

    def logits(self, hidden: Any) -> Any:
        return hidden @ self.head


@pytest.mark.parametrize("leaf", [None, 3, 2.5, "text", np.zeros((4, 4), np.float32)])
def test_leaves_that_are_no_jax_arrays_are_named(leaf: Any) -> None:
    model = Plain.of(TinyLM())
    model.head = leaf
    text = complaint(model)
    if leaf is None:  # an empty subtree: the model itself must say what it misses
        assert "Tracing it raised" in text
    else:
        assert "whose leaves are all JAX arrays" in text
        assert type(leaf).__name__ in text


def test_an_object_that_is_no_pytree_is_named() -> None:
    class Opaque:
        num_layers, num_kv_heads, head_dim, vocab_size = 1, 1, 8, VOCAB

    assert "Got Opaque with ['Opaque']." in complaint(Opaque())


def test_the_main_dtype_is_that_of_most_bytes() -> None:
    model = Plain.of(TinyLM())
    model.embed = model.embed.astype(jnp.bfloat16)
    assert contract.flatten(model).dtype == jnp.float32
    everything = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), Plain.of(TinyLM()))
    everything.head = everything.head.astype(jnp.float32)
    assert contract.flatten(everything).dtype == jnp.bfloat16


def test_an_unknown_implementation_of_attention_is_refused() -> None:
    flat = contract.flatten(TinyLM())
    contract.check_implementation(flat, F32, "xla")
    with pytest.raises(ConfigError, match=r"`attention_implementation` must be .*Got 'magic': "):
        contract.check_implementation(flat, F32, "magic")
    with pytest.raises(ConfigError, match="Got 'mosaic_tpu': "):
        contract.check_implementation(flat, F32, "mosaic_tpu")
    with pytest.raises(ConfigError, match="Got 'reference': "):  # it reads values: no jit
        contract.check_implementation(flat, F32, "reference")


# ------------------------------------------------------------------------ other models are served


class LinenLM(nn.Module):
    """One layer; the cache goes through `__call__` as any other argument."""

    @nn.compact
    def __call__(self, tokens: Any, positions: Any, kv_cache: Any, batch: Any) -> Any:
        x = nn.Embed(VOCAB, 16, name="embed")(tokens) + nn.Embed(32, 16, name="where")(positions)
        q, k, v = (nn.Dense(16, name=name)(x).reshape(-1, 2, 8) for name in "qkv")
        out, kv_cache = attend(q, k, v, kv_cache, batch, layer=0)
        return x + nn.Dense(16, name="out")(out.reshape(-1, 16)), kv_cache

    def dense(self, params: Any, tokens: list[int]) -> np.ndarray:
        """f64 logits after the last token, by NumPy."""
        p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

        def linear(name: str, x: np.ndarray) -> np.ndarray:
            return x @ p[name]["kernel"] + p[name]["bias"]

        x = p["embed"]["embedding"][tokens] + p["where"]["embedding"][: len(tokens)]
        q, k, v = (linear(name, x).reshape(-1, 2, 8) for name in "qkv")
        scores = np.einsum("nh,snh->ns", q[-1], k) / np.sqrt(8)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        hidden = x[-1] + linear("out", np.einsum("ns,snh->nh", weights, v).reshape(16))
        return hidden @ p["embed"]["embedding"].T


@jax.tree_util.register_dataclass
@dataclass
class LinenOnPages:
    """A Linen module and its parameters, as the engine wants them."""

    params: Any
    num_layers: int = field(default=1, metadata={"static": True})
    num_kv_heads: int = field(default=2, metadata={"static": True})
    head_dim: int = field(default=8, metadata={"static": True})
    vocab_size: int = field(default=VOCAB, metadata={"static": True})

    def __call__(self, tokens: Any, positions: Any, kv_cache: Any, batch: Any) -> Any:
        return LinenLM().apply({"params": self.params}, tokens, positions, kv_cache, batch)

    def logits(self, hidden: Any) -> Any:
        return hidden @ self.params["embed"]["embedding"].T


def served(model: Any, prompt: list[int]) -> list[int]:
    llm = LLM(
        model,
        page_size=4,
        num_pages=17,
        max_model_len=32,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        enable_prefix_caching=False,
    )
    output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=10))[0]
    assert output.error is None
    assert output.outputs[0].text == ""  # no tokenizer, no text
    return output.outputs[0].token_ids


def test_a_plain_pytree_is_served_and_equals_its_dense_path() -> None:
    prompt = [3, 9, 27, 1, 14, 5, 30]
    assert served(Plain.of(TinyLM()), prompt) == dense_greedy(prompt, 10)


def test_a_linen_module_is_served_and_equals_its_dense_path() -> None:
    def scaled(path: Any, shape: Any) -> Any:
        seed = sum(map(ord, jax.tree_util.keystr(path)))
        scale = 1.0 if "embedding" in jax.tree_util.keystr(path) else 0.4
        values = np.random.default_rng(seed).normal(0, scale, shape.shape)
        return jnp.asarray(values, jnp.float32)

    flat = LinenOnPages(None)
    cache = KVCache((jnp.zeros((3, 2, 2, 4, 8)),))
    batch = Batch(
        page_table=jnp.zeros((1, 1), jnp.int32),
        kv_lens=jnp.ones((1,), jnp.int32),
        cu_q_lens=jnp.array([0, 1], jnp.int32),
        num_seqs=jnp.int32(1),
        slot_mapping=jnp.array([4], jnp.int32),
    )
    one = jnp.zeros((1,), jnp.int32)
    shapes = jax.eval_shape(LinenLM().init, jax.random.key(0), one, one, cache, batch)["params"]
    flat.params = jax.tree_util.tree_map_with_path(scaled, shapes)
    prompt = [3, 9, 27, 1, 14, 5, 30]
    expected = list(prompt)
    for _ in range(10):
        expected.append(int(LinenLM().dense(flat.params, expected).argmax()))
    assert served(flat, prompt) == expected[len(prompt) :]
    assert len(set(expected[len(prompt) :])) > 1
