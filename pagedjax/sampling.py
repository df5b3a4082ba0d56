"""From logits to token ids: one row of parameters for each row of logits, and what slots remember.

Owns the order of the sampling steps, the random keys, logprobs, and `SamplerState`: what each slot
bans, adds to logits and has generated. Pure functions; the runner jits them. Knows nothing of
requests, pages or steps.

Logits are looked at as `[R, C, LANES]`, the vocabulary padded to whole chunks of LANES with -inf:
token id = chunk * LANES + lane. Sums run over the chunk axis, so each lane is one vector lane and
adds few terms; the likeliest tokens are found chunk by chunk. No step sorts the vocabulary.

What no row asks for costs nothing: each part sits behind a `lax.cond`. Whether a branch runs never
changes a neutral row's result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from pagedjax.plan import RowUpdate
from pagedjax.request import MAX_LOGIT_BIAS, MAX_LOGPROBS

LANES = 128  # a power of two: TPU and AVX lanes; 512 noise values serve 49,152 tokens

# One u16 for each token of a slot (256 slots of 262,144 tokens: 128 MiB instead of 576 for three
# arrays): in the prompt, banned, and times generated, which stays at its maximum.
IN_PROMPT = 1 << 15
BANNED = 1 << 14
MAX_COUNT = BANNED - 1

MANY = 2.0**24  # more than any vocabulary; floats count exactly up to here

# exp(logit - largest) below this is taken as 0: noise spans 26 nats, so none is ever drawn, and
# thresholds stay clear of subnormal numbers, which some devices flush to 0.
LEAST_LIKELIHOOD = 2.0**-100


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class DeviceRows:
    """`plan.SamplingRows` on the device: the same fields, R rows each; padding rows are neutral."""

    token_index: jax.Array  # i32[R]
    slot: jax.Array  # i32[R], max_num_seqs: no slot
    counts: jax.Array  # i32[R], 1: the token is added to the slot's counts
    position: jax.Array  # i32[R]
    sample: jax.Array  # i32[R]
    target: jax.Array  # i32[R], >= 0: draw nothing, tell this token's logprob
    num_logprobs: jax.Array  # i32[R], -1: none
    top_k: jax.Array  # i32[R], 0: off
    seed: jax.Array  # u32[R, 2]
    temperature: jax.Array  # f32[R], 0: greedy
    top_p: jax.Array  # f32[R], 1: off
    min_p: jax.Array  # f32[R], 0: off
    repetition_penalty: jax.Array  # f32[R], 1: off
    presence_penalty: jax.Array  # f32[R], 0: off
    frequency_penalty: jax.Array  # f32[R], 0: off


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class SamplerState:
    """What each slot's sequence does to its logits. `set_row` writes a row, `sample` adds counts.

    A function that changes it takes it, DONATES it under the runner's jit, and returns the new one
    first.
    """

    bias_ids: jax.Array  # i32[max_num_seqs, MAX_LOGIT_BIAS], unused entries: C * LANES (dropped)
    bias_values: jax.Array  # f32[max_num_seqs, MAX_LOGIT_BIAS], added to those tokens' logits
    marks: jax.Array  # u16[max_num_seqs, C, LANES], IN_PROMPT | BANNED | times generated

    @property
    def max_num_seqs(self) -> int:
        """Slots; this number as a slot means none."""
        return self.marks.shape[0]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Sampled:
    """What `sample` found; the arrays of `plan.StepResult`. Not asked for: zeros."""

    tokens: jax.Array  # i32[R]
    logprobs: jax.Array  # f32[R]
    ranks: jax.Array  # i32[R]
    top_ids: jax.Array  # i32[R, MAX_LOGPROBS]
    top_logprobs: jax.Array  # f32[R, MAX_LOGPROBS]
    corrupted: jax.Array  # bool[R]


def init_state(max_num_seqs: int, vocab_size: int) -> SamplerState:
    """The state of `max_num_seqs` slots, none of which changes a logit."""
    num_chunks = _num_chunks(vocab_size)
    return SamplerState(
        bias_ids=jnp.full((max_num_seqs, MAX_LOGIT_BIAS), num_chunks * LANES, jnp.int32),
        bias_values=jnp.zeros((max_num_seqs, MAX_LOGIT_BIAS), jnp.float32),
        marks=jnp.zeros((max_num_seqs, num_chunks, LANES), jnp.uint16),
    )


def densify(
    update: RowUpdate, vocab_size: int
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.uint16]]:
    """`update` as what `set_row` takes after the slot: bias_ids i32[MAX_LOGIT_BIAS], bias
    f32[MAX_LOGIT_BIAS], marks u16[C, LANES]. NumPy, on the host.
    """
    num_chunks = _num_chunks(vocab_size)
    marks = np.zeros(num_chunks * LANES, np.uint16)
    for token, count in update.output_counts.items():
        marks[token] = min(count, MAX_COUNT)
    marks[list(update.prompt_tokens)] |= np.uint16(IN_PROMPT)
    if update.allowed is not None:
        banned = np.ones(marks.shape, bool)
        banned[list(update.allowed)] = False
        marks[banned] |= np.uint16(BANNED)
    marks[[token for token, value in update.bias.items() if value == -np.inf]] |= np.uint16(BANNED)
    added = {token: value for token, value in update.bias.items() if value != -np.inf}
    assert len(added) <= MAX_LOGIT_BIAS  # SamplingParams refuses more
    bias_ids = np.full(MAX_LOGIT_BIAS, num_chunks * LANES, np.int32)
    bias_values = np.zeros(MAX_LOGIT_BIAS, np.float32)
    bias_ids[: len(added)] = list(added)
    bias_values[: len(added)] = list(added.values())
    return bias_ids, bias_values, marks.reshape(num_chunks, LANES)


def set_row(
    state: SamplerState, slot: jax.Array, bias_ids: jax.Array, bias: jax.Array, marks: jax.Array
) -> SamplerState:
    """**DONATES** `state` under jit. Replaces all that `slot` holds.

    `slot` i32[]; max_num_seqs: dropped. The other three are what `densify` returns.
    """
    return SamplerState(
        bias_ids=state.bias_ids.at[slot].set(bias_ids, mode="drop"),
        bias_values=state.bias_values.at[slot].set(bias, mode="drop"),
        marks=state.marks.at[slot].set(marks, mode="drop"),
    )


def sample(
    logits: jax.Array, rows: DeviceRows, state: SamplerState
) -> tuple[SamplerState, Sampled]:
    """**DONATES** `state` under jit. Picks each row's token by that row's parameters.

    In this order: logprobs of the raw logits; the slot's bias and bans; repetition, frequency and
    presence penalty; then the likeliest token (ties: the lowest id) where temperature is 0, else
    temperature, min_p, top_k, top_p and a draw. Rows with a target give that token.

    A row whose logits hold NaN or +inf is corrupted: token 0, no logprobs. So is a row with no
    token left, every logit -inf or banned. Other rows never notice.

    Args:
      logits: [R, V], any float dtype, V the vocabulary that `state` was made for.
      state: of all slots; counts grow by one where `rows.counts` is 1 and the row is sound.
    """
    chunks = _chunked(logits)
    raw_best, likeliest = _argmax(chunks)
    draws = (rows.temperature > 0) & (rows.target < 0)
    best, tokens = lax.cond(
        jnp.any((rows.slot < state.max_num_seqs) | draws),
        lambda: _choose(chunks, raw_best, likeliest, rows, state),
        lambda: (raw_best, likeliest),
    )
    has_target = rows.target >= 0
    corrupted = _has_nan(chunks) | ~jnp.isfinite(raw_best) | (~jnp.isfinite(best) & ~has_target)
    tokens = jnp.where(corrupted, 0, jnp.where(has_target, rows.target, tokens))
    num_logprobs = jnp.where(corrupted, -1, rows.num_logprobs)
    logprobs, ranks, top_ids, top_logprobs = _if_any(
        num_logprobs >= 0, lambda: _report(chunks, raw_best, tokens, num_logprobs)
    )
    sampled = Sampled(tokens, logprobs, ranks, top_ids, top_logprobs, corrupted)
    return _counted(state, rows, sampled), sampled


def _choose(
    chunks: jax.Array, raw_best: jax.Array, token: jax.Array, rows: DeviceRows, state: SamplerState
) -> tuple[jax.Array, jax.Array]:
    """The largest adjusted logit f32[R] and the token i32[R] of every row, drawn or likeliest.

    `raw_best` and `token` are those of the raw logits. Corrupted rows run through with
    their NaN: nothing here mixes rows, and every loop is bounded.
    """
    draws = (rows.temperature > 0) & (rows.target < 0)
    temperature = jnp.where(draws, rows.temperature, 1.0)

    def adjusted() -> tuple[jax.Array, jax.Array, jax.Array]:
        logits = _adjusted(chunks.astype(jnp.float32), rows, state)
        best, token = _argmax(logits)
        return best, token, _likelihood(logits, best, temperature)

    def raw() -> tuple[jax.Array, jax.Array, jax.Array]:
        return raw_best, token, _likelihood(chunks, raw_best, temperature)

    best, tokens, likelihood = lax.cond(jnp.any(rows.slot < state.max_num_seqs), adjusted, raw)
    drawn = _if_any(draws, lambda: _draw(likelihood, rows, draws))
    return best, jnp.where(draws, drawn, tokens)


def _likelihood(logits: jax.Array, best: jax.Array, temperature: jax.Array) -> jax.Array:
    """f32[R, C, LANES] exp of logits over temperature, scaled to 1 for the likeliest token."""
    top = jnp.where(jnp.isfinite(best), best, 0.0)[:, None, None]
    likelihood = jnp.exp((logits.astype(jnp.float32) - top) / temperature[:, None, None])
    return jnp.where(likelihood >= LEAST_LIKELIHOOD, likelihood, 0.0)


def _adjusted(logits: jax.Array, rows: DeviceRows, state: SamplerState) -> jax.Array:
    """f32[R, C, LANES] with each slot's bias and bans and the rows' penalties applied."""
    num_rows, num_chunks, _ = logits.shape
    is_out = logits == -jnp.inf
    bias_ids = state.bias_ids.at[rows.slot].get(mode="fill", fill_value=num_chunks * LANES)
    bias = state.bias_values.at[rows.slot].get(mode="fill", fill_value=0)
    row = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    logits = logits.at[row, bias_ids // LANES, bias_ids % LANES].add(bias, mode="drop")

    marks = state.marks.at[rows.slot].get(mode="fill", fill_value=0).astype(jnp.int32)
    count = (marks & MAX_COUNT).astype(jnp.float32)
    was_generated = count > 0
    was_seen = was_generated | (marks >= IN_PROMPT)
    repetition = jnp.where(was_seen, rows.repetition_penalty[:, None, None], 1.0)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = logits - rows.frequency_penalty[:, None, None] * count
    logits = logits - jnp.where(was_generated, rows.presence_penalty[:, None, None], 0.0)
    # -inf stays -inf: a repetition penalty that rounds to 0 would make it NaN.
    return jnp.where(((marks & BANNED) != 0) | is_out, -jnp.inf, logits)


def _draw(likelihood: jax.Array, rows: DeviceRows, draws: jax.Array) -> jax.Array:
    """A token i32[R] of each row in `draws`, by likelihood, min_p, top_k, top_p and the row's key.

    Gumbel-max: the token whose log-likelihood plus noise is largest. Each token's noise depends on
    the key and the token id alone, so logits that differ by 1e-6 (another bucket, another page
    size) draw another token only where two sums lie that close. Inverse-CDF would shift every
    later boundary of the cumulative sum, and depends on how that sum was rounded.

    In two stages, the largest of the noisy tokens of a lane being distributed as one noisy token
    of the lane's whole mass: first a lane by its mass, then a token of that lane. It takes LANES +
    C random numbers a row instead of LANES * C, which on a CPU cost more than all the rest.
    """
    filters = draws & ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0))
    # No row filtered: everything >= 0 is kept, which zeros say too.
    threshold, ties_from = _if_any(filters, lambda: _limits(likelihood, rows, draws))
    num_chunks = likelihood.shape[1]
    rank = _rank_of_ids(num_chunks)
    kept = _kept(likelihood, rank, threshold[:, None, None], ties_from[:, None, None])
    lane_mass = jnp.sum(kept, axis=1)  # f32[R, LANES]

    noise = _noise(rows, max(LANES, num_chunks))
    lane = lax.argmax(jnp.log(lane_mass) + noise[:, :LANES, 0], 1, jnp.int32)
    of_lane = jnp.take_along_axis(likelihood, lane[:, None, None], axis=2)[:, :, 0]  # f32[R, C]
    rank_of_lane = rank[:, :, 0] - lane[:, None].astype(jnp.float32)
    of_lane = _kept(of_lane, rank_of_lane, threshold[:, None], ties_from[:, None])
    chunk = lax.argmax(jnp.log(of_lane) + noise[:, :num_chunks, 1], 1, jnp.int32)
    return chunk * LANES + lane


def _kept(
    likelihood: jax.Array, rank: jax.Array, threshold: jax.Array, ties_from: jax.Array
) -> jax.Array:
    """`likelihood`, 0 where `_limits` says that min_p, top_k or top_p drop the token."""
    keep = (likelihood > threshold) | ((likelihood == threshold) & (rank >= ties_from))
    return jnp.where(keep, likelihood, 0.0)


def _noise(rows: DeviceRows, num_values: int) -> jax.Array:
    """f32[R, num_values, 2] Gumbel noise, a function of (seed, sample, position) and the index.

    Threefry by name, and `fold_in` for every index: its value does not hang on JAX's settings nor
    on `num_values`, as that of `jax.random.bits` does.
    """
    index = jnp.arange(num_values, dtype=jnp.int32)

    def bits_of_row(seed: jax.Array, sample: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, sample), position)
        return jax.random.key_data(jax.vmap(lambda i: jax.random.fold_in(key, i))(index))

    bits = jax.vmap(bits_of_row)(rows.seed, rows.sample, rows.position)  # u32[R, num_values, 2]
    # Uniform in (0, 1), finest near 0, where the large noise values come from; never 1, or the
    # noise would be -inf.
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))


def _limits(
    likelihood: jax.Array, rows: DeviceRows, draws: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What a row keeps: likelihoods above f32[R] `threshold`, and of those equal to it the first.

    Tokens are ordered by likelihood, then id. min_p drops those below its fraction of the
    likeliest; top_k keeps the first k of the rest; top_p keeps the shortest run of those whose
    mass reaches its fraction of theirs. At least one token stays.

    Returns:
      threshold, and `ties_from` f32[R]: of tokens at the threshold, those with `_rank_of_ids` >=
      it stay.
    """
    threshold = jnp.maximum(rows.min_p, LEAST_LIKELIHOOD)  # f32[R]
    num_ties = jnp.full_like(threshold, MANY)  # how many at the threshold stay
    by_k, by_p = draws & (rows.top_k > 0), draws & (rows.top_p < 1)
    threshold, num_ties = lax.cond(
        jnp.any(by_k),
        lambda: _first_k(likelihood, threshold, rows.top_k, by_k),
        lambda: (threshold, num_ties),
    )
    threshold, num_ties = lax.cond(
        jnp.any(by_p),
        lambda: _first_mass(likelihood, threshold, num_ties, rows.top_p, by_p),
        lambda: (threshold, num_ties),
    )
    is_tied = likelihood == threshold[:, None, None]
    drops_ties = (num_ties < MANY) & (_count(is_tied) > num_ties)

    def last_kept() -> jax.Array:
        rank = jnp.where(is_tied, _rank_of_ids(likelihood.shape[1]), 0.0)
        found = _search(rank, num_ties, jnp.ones_like(num_ties), drops_ties, by_mass=False)
        return jnp.where(drops_ties, found, 0.0)

    return threshold, _if_any(drops_ties, last_kept)


def _first_k(
    likelihood: jax.Array, floor: jax.Array, top_k: jax.Array, active: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Threshold and ties at it, f32[R] each, that keep the first k of the tokens >= `floor`."""
    k = top_k.astype(jnp.float32)
    threshold = _search(likelihood, k, floor, active, by_mass=False)
    above = _count(likelihood > threshold[:, None, None])
    return threshold, jnp.where(active, jnp.maximum(k - above, 1), MANY)


def _first_mass(
    likelihood: jax.Array, floor: jax.Array, ties: jax.Array, top_p: jax.Array, active: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Threshold and ties at it, f32[R] each, that keep the fraction `top_p` of what was kept."""
    limit = floor[:, None, None]
    above = _sum(jnp.where(likelihood > limit, likelihood, 0.0))
    mass = top_p * (above + floor * jnp.minimum(_count(likelihood == limit), ties))
    threshold = _search(likelihood, mass, floor, active, by_mass=True)
    limit = threshold[:, None, None]
    above = _sum(jnp.where(likelihood > limit, likelihood, 0.0))
    num_ties = jnp.maximum(jnp.ceil((mass - above) / threshold), 1)
    most = jnp.where(threshold > floor, MANY, ties)
    return threshold, jnp.where(active, jnp.minimum(num_ties, most), ties)


def _search(
    values: jax.Array, target: jax.Array, floor: jax.Array, active: jax.Array, *, by_mass: bool
) -> jax.Array:
    """f32[R]: the largest t >= floor such that the values >= t number, or sum to, `target`.

    Bisects on the bits of t: those of positive floats are ordered as the floats are, so 31 halvings
    end at one float whatever the scale. A row ends early when its values >= t already are the
    fewest that reach the target; t then need not be one of them.

    Args:
      values: f32[R, C, LANES], >= 0.
      target: f32[R], > 0; out of reach of the values >= floor: the answer is the floor.
      floor: f32[R], > 0.
      active: bool[R], False: the answer is the floor.
    """

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        t = lax.bitcast_convert_type(middle, jnp.float32)
        weights = values if by_mass else jnp.ones_like(values)
        total = _sum(jnp.where(values >= t[:, None, None], weights, 0.0))
        reached = total >= target
        is_fewest = reached & (total - (t if by_mass else jnp.ones_like(t)) < target)
        low, high = jnp.where(reached, middle, low), jnp.where(reached, high, middle)
        return low, jnp.where(is_fewest & (middle + 1 < high), middle + 1, high)

    low = lax.bitcast_convert_type(floor, jnp.int32)
    past_all = lax.bitcast_convert_type(jnp.max(values, axis=(1, 2)), jnp.int32) + 1
    high = jnp.where(active, jnp.maximum(past_all, low + 1), low + 1)
    low, _ = lax.while_loop(lambda b: jnp.any(b[1] - b[0] > 1), halve, (low, high))
    return lax.bitcast_convert_type(low, jnp.float32)


def _report(
    chunks: jax.Array, raw_best: jax.Array, tokens: jax.Array, num_logprobs: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Logprob f32[R] and rank i32[R] of `tokens`, and the likeliest: ids, logprobs [R, 20]."""
    asked = num_logprobs >= 0
    logits = chunks.astype(jnp.float32)
    log_total = raw_best + jnp.log(_sum(jnp.exp(logits - raw_best[:, None, None])))
    num_chunks = logits.shape[1]
    chosen = logits[jnp.arange(tokens.shape[0]), tokens // LANES, tokens % LANES]
    limit = chosen[:, None, None]
    rank_of_token = (num_chunks * LANES - tokens).astype(jnp.float32)[:, None, None]
    is_lower_id = _rank_of_ids(num_chunks) > rank_of_token
    is_likelier = (logits > limit) | ((logits == limit) & is_lower_id)
    rank = 1 + _count(is_likelier).astype(jnp.int32)

    top_ids, top_logits = _if_any(num_logprobs > 0, lambda: _likeliest(chunks))
    column = jnp.arange(MAX_LOGPROBS, dtype=jnp.int32)[None, :]
    wanted = column < num_logprobs[:, None]
    return (
        jnp.where(asked, chosen - log_total, 0.0),
        jnp.where(asked, rank, 0),
        jnp.where(wanted, top_ids, 0),
        jnp.where(wanted, top_logits - log_total[:, None], 0.0),
    )


def _likeliest(chunks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The MAX_LOGPROBS likeliest: ids i32, logits f32 [R, MAX_LOGPROBS]; ties by id.

    Exact: a token outside the n chunks of largest maxima has n tokens before it, those maxima.
    """
    num_rows, num_chunks, _ = chunks.shape
    n = min(MAX_LOGPROBS, num_chunks)
    _, best_chunks = lax.top_k(_plain_zero(jnp.max(chunks, axis=2)), n)
    best_chunks = jnp.sort(best_chunks, axis=1)  # by id again, so that ties keep their order
    candidates = jnp.take_along_axis(chunks, best_chunks[:, :, None], axis=1)
    candidates = _plain_zero(candidates.reshape(num_rows, n * LANES))
    logits, index = lax.top_k(candidates, MAX_LOGPROBS)
    ids = jnp.take_along_axis(best_chunks, index // LANES, axis=1) * LANES + index % LANES
    return ids, logits


def _counted(state: SamplerState, rows: DeviceRows, sampled: Sampled) -> SamplerState:
    """The state with each row's token counted where the row says so."""
    counts = (rows.counts > 0) & ~sampled.corrupted
    slot = jnp.where(counts, rows.slot, state.max_num_seqs)
    where = (slot, sampled.tokens // LANES, sampled.tokens % LANES)
    # A gather and a set: slots are distinct, and the count must stop at its maximum.
    marks = state.marks.at[where].get(mode="fill", fill_value=0)
    grown = marks + ((marks & MAX_COUNT) < MAX_COUNT).astype(marks.dtype)
    return replace(state, marks=state.marks.at[where].set(grown, mode="drop"))


def _chunked(logits: jax.Array) -> jax.Array:
    """[R, C, LANES] in the logits' dtype, padded with -inf."""
    num_rows, vocab_size = logits.shape
    num_chunks = _num_chunks(vocab_size)
    padding = num_chunks * LANES - vocab_size
    padded = jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    return padded.reshape(num_rows, num_chunks, LANES)


def _argmax(chunks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Largest value f32[R] and its lowest id i32[R]; of a row that holds NaN, anything.

    Two plain maxima and a look into one chunk: XLA's own argmax takes four times as long on a CPU.
    """
    of_chunk = jnp.max(chunks, axis=2)  # [R, C]
    best = jnp.max(of_chunk, axis=1)
    chunk = lax.argmax(of_chunk == best[:, None], 1, jnp.int32)  # the first that has it
    values = jnp.take_along_axis(chunks, chunk[:, None, None], axis=1)[:, 0]  # [R, LANES]
    lane = lax.argmax(values == best[:, None], 1, jnp.int32)
    return best.astype(jnp.float32), chunk * LANES + lane


def _has_nan(chunks: jax.Array) -> jax.Array:
    """bool[R]: a logit is NaN (or +inf beside -inf). By a sum: a maximum may skip over NaN."""
    return jnp.isnan(jnp.sum(chunks, axis=(1, 2), dtype=jnp.float32))


def _sum(values: jax.Array) -> jax.Array:
    """f32[R] of f32[R, C, LANES], lane by lane; the barrier keeps XLA from one long serial sum."""
    return jnp.sum(lax.optimization_barrier(jnp.sum(values, axis=1)), axis=1)


def _count(flags: jax.Array) -> jax.Array:
    """f32[R] how many of bool[R, C, LANES] are True."""
    return _sum(flags.astype(jnp.float32))


def _plain_zero(values: jax.Array) -> jax.Array:
    """float32 without -0: `top_k` puts it below 0, where equal logits go by id."""
    values = values.astype(jnp.float32)
    return jnp.where(values == 0, 0.0, values)


def _rank_of_ids(num_chunks: int) -> jax.Array:
    """f32[1, C, LANES], C * LANES for id 0 down to 1: low ids first, exact up to 2^24."""
    ranks = jnp.arange(num_chunks * LANES, 0, -1, dtype=jnp.float32)
    return ranks.reshape(1, num_chunks, LANES)


def _num_chunks(vocab_size: int) -> int:
    return -(-vocab_size // LANES)


def _if_any[T](asked: jax.Array, compute: Callable[[], T]) -> T:
    """`compute()` when any element is True, else zeros of its shapes, at no cost."""
    shapes = jax.eval_shape(compute)
    return lax.cond(
        jnp.any(asked),
        compute,
        lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes),
    )
