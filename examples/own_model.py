"""Your own Flax model on pages: define it, train it densely, serve it with the same parameters.

    python examples/own_model.py [--steps 1500]

A small NNX transformer learns to add from lines such as `27+5=32;` that this file makes. Training
uses plain dense attention. Serving calls `pagedjax.attend` in its place, nothing else changes; the
program then checks that both give the same answers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

from pagedjax import LLM, Batch, KVCache, SamplingParams, attend
from pagedjax.tokenizer import Tokenizer

ALPHABET = "0123456789+=; "
LINE = 12  # characters that a training line is padded to

type Attention = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]


class Layer(nnx.Module):
    """Pre-norm attention and feed-forward; which attention is the caller's choice."""

    def __init__(self, width: int, num_heads: int, rngs: nnx.Rngs) -> None:
        self.num_heads = num_heads
        self.norm1 = nnx.RMSNorm(width, rngs=rngs)
        self.norm2 = nnx.RMSNorm(width, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array, attention: Attention, layer: int) -> jax.Array:
        """x: [..., num_tokens, width]."""
        heads = (*x.shape[:-1], self.num_heads, x.shape[-1] // self.num_heads)
        q, k, v = (part.reshape(heads) for part in jnp.split(self.qkv(self.norm1(x)), 3, axis=-1))
        x = x + self.out(attention(layer, q, k, v).reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Adder(nnx.Module):
    """A character model with one body and two attentions: dense for training, paged to serve."""

    # What the engine asks of a model, beside `__call__` and `logits`.
    num_layers, num_kv_heads, head_dim = 2, 4, 16
    vocab_size = len(ALPHABET)
    max_model_len = 64

    def __init__(self, rngs: nnx.Rngs) -> None:
        width = self.num_kv_heads * self.head_dim
        self.embed = nnx.Embed(self.vocab_size, width, rngs=rngs)
        self.places = nnx.Embed(self.max_model_len, width, rngs=rngs)
        self.layers = nnx.List(
            [Layer(width, self.num_kv_heads, rngs) for _ in range(self.num_layers)]
        )
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, self.vocab_size, use_bias=False, rngs=rngs)

    def body(self, tokens: jax.Array, positions: jax.Array, attention: Attention) -> jax.Array:
        """Everything but the choice of attention and the last product."""
        x = self.embed(tokens) + self.places(positions)
        for i, layer in enumerate(self.layers):
            x = layer(x, attention, i)
        return self.norm(x)

    def dense(self, tokens: jax.Array) -> jax.Array:
        """Logits [batch, num_tokens, vocab_size] by plain causal attention: the training path."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)

        def attention(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            del layer  # the dense path keeps nothing between layers
            return jax.nn.dot_product_attention(q, k, v, is_causal=True)

        return self.logits(self.body(tokens, positions, attention))

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, kv_cache: KVCache, batch: Batch
    ) -> tuple[jax.Array, KVCache]:
        """The serving path: i32[num_tokens] of many sequences at once, keys and values in pages."""

        def attention(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            nonlocal kv_cache  # each call returns the new cache; the old one is donated
            out, kv_cache = attend(q, k, v, kv_cache, batch, layer=layer)
            return out

        hidden = self.body(tokens, positions, attention)
        return hidden, kv_cache

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [..., width] -> [..., vocab_size]."""
        return self.head(hidden)


class Characters(Tokenizer):
    """A character is a token; an answer ends with `;`."""

    eos_token_ids = frozenset({ALPHABET.index(";")})

    @property
    def vocab_size(self) -> int:
        """Number of characters."""
        return len(ALPHABET)

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Text to ids."""
        del special_tokens  # there are none
        return [ALPHABET.index(char) for char in text]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Ids to text."""
        del skip_special_tokens
        return "".join(ALPHABET[i] for i in ids)


def make_lines(rng: np.random.Generator, count: int) -> np.ndarray:
    """i32[count, LINE]: sums of two numbers below 50, padded with spaces."""
    pairs = rng.integers(0, 50, (count, 2))
    lines = [f"{a}+{b}={a + b};".ljust(LINE) for a, b in pairs]
    return np.array([[ALPHABET.index(char) for char in line] for line in lines], np.int32)


def train(model: Adder, steps: int) -> float:
    """Next-character training; returns the last loss."""
    optimizer = nnx.Optimizer(model, optax.adamw(2e-3), wrt=nnx.Param)
    rng = np.random.default_rng(0)

    @nnx.jit
    def step(model: Adder, optimizer: nnx.Optimizer[Adder], lines: jax.Array) -> jax.Array:
        def loss(model: Adder) -> jax.Array:
            logits = model.dense(lines[:, :-1])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, lines[:, 1:])
            return losses.mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    value = float("nan")
    with tqdm(range(steps), desc="training", unit="step", disable=None) as bar:
        for i in bar:
            value = step(model, optimizer, jnp.asarray(make_lines(rng, 256)))
            if i % 50 == 0:
                bar.set_postfix(loss=f"{float(value):.3f}")
    return float(value)


def dense_answer(model: Adder, tokens: list[int], num_new: int) -> list[int]:
    """Greedy answer by running the dense path over everything again for each character."""
    run = nnx.jit(lambda model, tokens: model.dense(tokens))
    answer: list[int] = []
    for _ in range(num_new):
        padded = np.zeros((1, model.max_model_len), np.int32)  # one shape, one compilation
        known = [*tokens, *answer]
        padded[0, : len(known)] = known
        answer.append(int(run(model, padded)[0, len(known) - 1].argmax()))
        if answer[-1] in Characters.eos_token_ids:
            break
    return answer


def main() -> None:
    """Trains, serves, compares."""
    parser = argparse.ArgumentParser(description="Trains a small model, serves it on pages.")
    parser.add_argument("--steps", type=int, default=1500, help="training steps (default 1500)")
    steps = parser.parse_args().steps
    model = Adder(nnx.Rngs(0))
    print(f"loss after {steps} steps: {train(model, steps):.3f}")

    llm = LLM(
        model,
        tokenizer=Characters(),
        page_size=4,
        num_pages=129,
        max_num_seqs=8,
        max_num_batched_tokens=64,
    )
    questions = ["1+1=", "27+5=", "33+44=", "8+49=", "12+30=", "49+49="]
    outputs = llm.generate(questions, SamplingParams(temperature=0, max_tokens=5))
    for question, output in zip(questions, outputs, strict=True):
        paged = output.outputs[0].token_ids
        dense = dense_answer(model, output.prompt_token_ids, 5)
        print(f"{question}{output.outputs[0].text:<4} paged {paged}  dense {dense}")
        if paged != dense:
            raise SystemExit("paged and dense answers differ")
    print("paged and dense answers are the same")


if __name__ == "__main__":
    main()
