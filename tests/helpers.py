"""Shared fakes: a tiny language model on pages with its dense twin, and a tokenizer of bytes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pagedjax.attention import Batch, attend
from pagedjax.kv_cache import KVCache
from pagedjax.tokenizer import Tokenizer

VOCAB = 32
MAX_LEN = 256


class TinyLM(nnx.Module):
    """Two layers, four query heads on two KV heads; peaked random weights, so that greedy
    answers wander through the vocabulary instead of repeating one token."""

    num_layers = 2
    num_kv_heads = 2
    num_q_heads = 4
    head_dim = 8
    vocab_size = VOCAB
    max_model_len = MAX_LEN

    def __init__(self, seed: int = 0, dtype: Any = jnp.float32) -> None:
        rng = np.random.default_rng(seed)
        width = self.num_q_heads * self.head_dim

        def param(*shape: int, scale: float) -> nnx.Param[jax.Array]:
            return nnx.Param(jnp.asarray(rng.normal(0, scale, shape), dtype))

        self.embed = param(VOCAB, width, scale=1.0)
        self.where = param(MAX_LEN, width, scale=1.0)
        self.head = param(width, VOCAB, scale=1.0)
        kv_width = self.num_kv_heads * self.head_dim
        self.wq = nnx.List([param(width, width, scale=0.4) for _ in range(self.num_layers)])
        self.wkv = nnx.List([param(width, 2 * kv_width, scale=0.4) for _ in range(self.num_layers)])
        self.wo = nnx.List([param(width, width, scale=0.3) for _ in range(self.num_layers)])

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, kv_cache: KVCache, batch: Batch
    ) -> tuple[jax.Array, KVCache]:
        x = self.embed[...][tokens] + self.where[...][positions]
        for layer in range(self.num_layers):
            q, k, v = self.project(layer, x)
            out, kv_cache = attend(q, k, v, kv_cache, batch, layer=layer)
            x = self.mix(layer, x, out)
        return x, kv_cache

    def dense(self, tokens: jax.Array) -> jax.Array:
        """Logits [num_tokens, VOCAB] of one whole sequence, plain causal attention."""
        count = tokens.shape[0]
        x = self.embed[...][tokens] + self.where[...][:count]
        mask = jnp.tril(jnp.ones((count, count), bool))[None]
        group = self.num_q_heads // self.num_kv_heads
        for layer in range(self.num_layers):
            q, k, v = self.project(layer, x)
            k, v = (jnp.repeat(array, group, axis=1) for array in (k, v))
            scores = jnp.einsum("tnh,snh->nts", q, k) * jnp.float32(self.head_dim**-0.5)
            weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
            x = self.mix(layer, x, jnp.einsum("nts,snh->tnh", weights, v))
        return self.logits(x)

    def logits(self, hidden: jax.Array) -> jax.Array:
        return hidden @ self.head[...]

    def project(self, layer: int, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        q = (x @ self.wq[layer][...]).reshape(-1, self.num_q_heads, self.head_dim)
        kv = (x @ self.wkv[layer][...]).reshape(-1, 2, self.num_kv_heads, self.head_dim)
        return q, kv[:, 0], kv[:, 1]

    def mix(self, layer: int, x: jax.Array, out: jax.Array) -> jax.Array:
        y = x + out.reshape(x.shape) @ self.wo[layer][...]
        return y / jnp.sqrt(jnp.mean(y * y, axis=-1, keepdims=True))


class ByteTokenizer(Tokenizer):
    """Token i is the character of code 96 + i; enough for a vocabulary of 32."""

    eos_token_ids = frozenset({0})
    special_tokens = MappingProxyType({"`": 0})

    @property
    def vocab_size(self) -> int:
        return VOCAB

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        del special_tokens  # the tests never type one where it would be a forgery
        return [(ord(char) - 96) % VOCAB for char in text]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        kept = [i for i in ids if not (skip_special_tokens and i in self.special_ids)]
        return "".join(chr(96 + i) for i in kept)


@functools.cache
def dense_logits_fn(seed: int = 0) -> Any:
    """Jitted dense logits of `TinyLM(seed)` over MAX_LEN padded tokens: one compilation."""
    model = TinyLM(seed)
    return jax.jit(lambda tokens: model.dense(tokens))


def dense_greedy(prompt: Sequence[int], num_new: int, seed: int = 0) -> list[int]:
    """The oracle: greedy tokens by recomputing the whole sequence densely for each one."""
    tokens = list(prompt)
    for _ in range(num_new):
        padded = np.zeros(MAX_LEN, np.int32)
        padded[: len(tokens)] = tokens
        logits = np.asarray(dense_logits_fn(seed)(padded))[len(tokens) - 1]
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def dense_logprobs(tokens: Sequence[int], seed: int = 0) -> np.ndarray:
    """f64[len(tokens), VOCAB]: log-probabilities of what follows each position, densely."""
    padded = np.zeros(MAX_LEN, np.int32)
    padded[: len(tokens)] = tokens
    logits = np.asarray(dense_logits_fn(seed)(padded), np.float64)[: len(tokens)]
    top = logits.max(axis=-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))
