"""The Llama family's decoder as a Flax NNX module: on pages, and dense, with the same weights.

`ModelConfig` says what differs between its members. Knows nothing of files (see `llama.py` for
the names that files use) and nothing of requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pagedjax.attention import Batch, attend
from pagedjax.errors import ModelFormatError
from pagedjax.kv_cache import KVCache
from pagedjax.models import rope as ropes
from pagedjax.models.layers import (
    Embedding,
    Linear,
    RMSNorm,
    dense_attention,
    gated,
    product,
)
from pagedjax.models.rope import RopeConfig

MAX_SIZE = 2**24  # of any dimension; larger numbers are a damaged file, not a model
MAX_LAYERS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of a decoder. Raises `ModelFormatError`.

    Attributes:
      vocab_size, embed_dim, ffw_dim, num_layers, num_q_heads, num_kv_heads, head_dim: sizes.
      max_positions: longest context that the model was trained for.
      norm_epsilon: added to the mean square in every norm.
      tied_embeddings: the output projection is the embedding.
      attention_bias: the q, k, v and output projections have biases.
      mlp_bias: the gate, up and down projections have biases.
      sliding_window: positions that a query sees, its own included; None: all before it.
      rope: rotary position embedding.
    """

    vocab_size: int
    embed_dim: int
    ffw_dim: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_epsilon: float = 1e-6
    tied_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    rope: RopeConfig = field(default_factory=RopeConfig)

    def __post_init__(self) -> None:
        """Checks sizes alone and together."""
        for name in ("vocab_size", "embed_dim", "ffw_dim", "head_dim", "num_q_heads"):
            _check_size(name, getattr(self, name), MAX_SIZE)
        _check_size("num_kv_heads", self.num_kv_heads, MAX_SIZE)
        _check_size("num_layers", self.num_layers, MAX_LAYERS)
        _check_size("max_positions", self.max_positions, 2**31 - 1)
        if self.sliding_window is not None:
            _check_size("sliding_window", self.sliding_window, 2**31 - 1)
        if self.num_q_heads % self.num_kv_heads:
            raise ModelFormatError(
                f"`num_q_heads` must be a multiple of `num_kv_heads` ({self.num_kv_heads}). "
                f"Got {self.num_q_heads}."
            )
        if self.head_dim % 2:
            raise ModelFormatError(
                f"`head_dim` must be even, for rotary embedding turns pairs. Got {self.head_dim}."
            )
        if not 0 < self.norm_epsilon < 1:
            raise ModelFormatError(
                f"`norm_epsilon` must be between 0 and 1. Got {self.norm_epsilon!r}."
            )
        ropes.inverse_frequencies(self.rope, self.head_dim)  # raises when they do not fit

    @property
    def q_dim(self) -> int:
        """Width of all query heads together."""
        return self.num_q_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_kv_heads * self.head_dim


class DecoderLayer(nnx.Module):
    """Attention and SwiGLU around a residual stream; the attention itself is the caller's.

    q, k and v are one product, and so are gate and up: fewer, larger products.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: jnp.dtype,
        weight_dtype: jnp.dtype | None,
        rngs: nnx.Rngs | None,
    ) -> None:
        def linear(in_features: int, out_features: int, use_bias: bool) -> Linear:
            return Linear(
                in_features,
                out_features,
                use_bias=use_bias,
                dtype=dtype,
                weight_dtype=weight_dtype,
                rngs=rngs,
            )

        def norm() -> RMSNorm:
            return RMSNorm(config.embed_dim, epsilon=config.norm_epsilon, dtype=dtype)

        qkv_dim = config.q_dim + 2 * config.kv_dim
        self.config = config
        self.attention_norm = norm()
        self.qkv = linear(config.embed_dim, qkv_dim, config.attention_bias)
        self.out = linear(config.q_dim, config.embed_dim, config.attention_bias)
        self.mlp_norm = norm()
        self.gate_up = linear(config.embed_dim, 2 * config.ffw_dim, config.mlp_bias)
        self.down = linear(config.ffw_dim, config.embed_dim, config.mlp_bias)

    def before_attention(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array, num_live: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [num_tokens, embed_dim] -> q, k (turned) and v, each [num_tokens, heads, head_dim].

        `num_live`: i32[], tokens from there on are padding; None: none is.
        """
        config = self.config
        qkv = self.qkv(self.attention_norm(x), num_live)
        heads = qkv.reshape(x.shape[0], -1, config.head_dim)
        qk, v = jnp.split(heads, [config.num_q_heads + config.num_kv_heads], axis=1)
        q, k = jnp.split(ropes.rotate(qk, cos, sin), [config.num_q_heads], axis=1)
        return q, k, v

    def after_attention(
        self, x: jax.Array, attended: jax.Array, num_live: jax.Array | None = None
    ) -> jax.Array:
        """The residual stream after attention's output and the feed-forward layer."""
        x = x + self.out(attended.reshape(x.shape[0], -1), num_live)
        return x + self.down(gated(self.gate_up, self.mlp_norm(x), num_live), num_live)


class Decoder(nnx.Module):
    """A Llama-family language model.

    Serve it with `LLM(model)`; train or check it with `dense`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        weight_dtype: DTypeLike | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        """Random weights, or zeros to be filled from a file if `rngs` is None.

        Args:
          config: sizes and switches.
          dtype: of parameters and activations.
          weight_dtype: int8 or float8_e4m3fn for the matrices of the layers, with a scale for each
            output; embedding and output head, whose errors go straight into the logits, stay in
            `dtype`. None: all are in `dtype`. An 8-bit model is served, not trained.
          rngs: where random weights come from.
        """
        dtype = jnp.dtype(dtype)
        narrow = None if weight_dtype is None else jnp.dtype(weight_dtype)
        self.config = config
        self.num_layers = config.num_layers
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.vocab_size = config.vocab_size
        self.max_model_len = config.max_positions
        self.embedding = Embedding(config.vocab_size, config.embed_dim, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [
                DecoderLayer(config, dtype=dtype, weight_dtype=narrow, rngs=rngs)
                for _ in range(config.num_layers)
            ]
        )
        self.norm = RMSNorm(config.embed_dim, epsilon=config.norm_epsilon, dtype=dtype)
        self.head = (
            None
            if config.tied_embeddings
            else Linear(config.embed_dim, config.vocab_size, dtype=dtype, rngs=rngs)
        )

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        kv_cache: KVCache,
        batch: Batch,
    ) -> tuple[jax.Array, KVCache]:
        """Runs the step's tokens, keys and values in pages. **DONATES** `kv_cache` under jit.

        Args:
          tokens: i32[num_tokens], packed; padding tokens may be any id.
          positions: i32[num_tokens], of each in its sequence.
          kv_cache: the page pools.
          batch: where the tokens belong.

        Returns:
          hidden [num_tokens, embed_dim] after the last norm, and the cache.
        """
        # Behind a barrier, or XLA computes sines and cosines anew in every layer.
        cos, sin = jax.lax.optimization_barrier(
            ropes.rotation(self.config.rope, self.head_dim, positions)
        )
        num_live = batch.cu_q_lens[batch.num_seqs]
        x = self.embedding(tokens)
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{index}"):
                q, k, v = layer.before_attention(x, cos, sin, num_live)
                attended, kv_cache = attend(
                    q,
                    k,
                    v,
                    kv_cache,
                    batch,
                    layer=index,
                    sliding_window=self.config.sliding_window,
                )
                x = layer.after_attention(x, attended, num_live)
        return self.norm(x), kv_cache

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [num_rows, embed_dim] -> f32[num_rows, vocab_size]."""
        output = self.embedding if self.head is None else self.head
        return product(hidden, output.weight[...])

    def dense(self, tokens: jax.Array) -> jax.Array:
        """Plain causal attention without pages, over whole sequences from position 0.

        Args:
          tokens: i32[length], or i32[batch, length] with padding, if any, at the end.

        Returns:
          f32[length, vocab_size], or f32[batch, length, vocab_size].
        """
        batch, length = (1, *tokens.shape)[-2:]
        positions = jnp.tile(jnp.arange(length, dtype=jnp.int32), batch)
        cos, sin = ropes.rotation(self.config.rope, self.head_dim, positions)
        x = self.embedding(tokens.reshape(-1))
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{index}"):
                q, k, v = (
                    array.reshape(batch, length, -1, self.head_dim)
                    for array in layer.before_attention(x, cos, sin)
                )
                attended = dense_attention(q, k, v, sliding_window=self.config.sliding_window)
                x = layer.after_attention(x, attended)
        return self.logits(self.norm(x)).reshape(*tokens.shape, self.vocab_size)


def _check_size(name: str, value: object, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ModelFormatError(f"`{name}` must be an integer in [1, {most}]. Got {value!r}.")
