"""The sampler against a plain sampler in NumPy, float64 and sorts; rows one by one, in crowds.

The reference draws with the noise of `sampling._noise`, so that tokens must agree one by one;
`test_draws_follow_the_distribution` tests the noise itself.
"""

from dataclasses import dataclass, fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from pagedjax import sampling
from pagedjax.plan import NO_TARGET, RowUpdate, SamplingRows
from pagedjax.request import MAX_LOGPROBS

SLOTS = 8
F64 = NDArray[np.float64]

jitted_sample = jax.jit(sampling.sample, donate_argnums=2)
jitted_set_row = jax.jit(sampling.set_row, donate_argnums=0)
jitted_argmax = jax.jit(lambda logits: sampling._argmax(sampling._chunked(logits)))
jitted_noise = jax.jit(sampling._noise, static_argnums=1)


# ------------------------------------------------------------------------------- building rows


@dataclass(frozen=True)
class Row:
    """One row's parameters, neutral unless said otherwise."""

    slot: int = SLOTS
    counts: int = 0
    position: int = 0
    sample: int = 0
    target: int = NO_TARGET
    num_logprobs: int = -1
    top_k: int = 0
    seed: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


def device_rows(rows: list[Row]) -> sampling.DeviceRows:
    def column(name: str, dtype: type) -> jax.Array:
        return jnp.asarray(np.array([getattr(row, name) for row in rows], dtype))

    seeds = np.array([(row.seed >> 32, row.seed & 0xFFFFFFFF) for row in rows], np.uint32)
    whole = ("slot", "counts", "position", "sample", "target", "num_logprobs", "top_k")
    columns = {
        field.name: column(field.name, np.int32 if field.name in whole else np.float32)
        for field in fields(Row)
        if field.name != "seed"
    }
    index = jnp.arange(len(rows), dtype=jnp.int32)
    return sampling.DeviceRows(token_index=index, seed=jnp.asarray(seeds), **columns)


def update(slot: int = 0, **values: object) -> RowUpdate:
    neutral = RowUpdate(slot, {}, None, {}, frozenset())
    return replace(neutral, **values)  # pyright: ignore[reportArgumentType]


def state_with(vocab_size: int, *updates: RowUpdate) -> sampling.SamplerState:
    state = sampling.init_state(SLOTS, vocab_size)
    for each in updates:
        state = jitted_set_row(state, jnp.int32(each.slot), *sampling.densify(each, vocab_size))
    return state


def step(
    state: sampling.SamplerState, logits: np.ndarray, rows: list[Row]
) -> tuple[sampling.SamplerState, sampling.Sampled]:
    """One step of up to 8 rows, padded to 8 so that few programs are compiled; or of more."""
    padding = max(8 - len(rows), 0)
    padded = np.concatenate([logits, np.zeros((padding, logits.shape[1]), logits.dtype)])
    all_rows = device_rows(rows + [Row()] * padding)
    state, sampled = jitted_sample(jnp.asarray(padded), all_rows, state)
    return state, jax.tree.map(lambda array: np.asarray(array)[: len(rows)], sampled)


def run(logits: np.ndarray, rows: list[Row], *updates: RowUpdate) -> sampling.Sampled:
    return step(state_with(logits.shape[1], *updates), logits, rows)[1]


def tokens_of(logits: np.ndarray, rows: list[Row], *updates: RowUpdate) -> list[int]:
    return [int(token) for token in run(logits, rows, *updates).tokens]


def assert_same_row(a: sampling.Sampled, row: int, b: sampling.Sampled, other_row: int) -> None:
    """Equal to the bit."""
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[row], y[other_row]), a, b)


def random_logits(
    rng: np.random.Generator, num_rows: int, vocab_size: int, scale: float = 3.0
) -> NDArray[np.float32]:
    return (scale * rng.standard_normal((num_rows, vocab_size))).astype(np.float32)


# --------------------------------------------------------------------------------- the reference


def adjusted(logits: F64, row: Row, change: RowUpdate | None) -> F64:
    """Bias and bans, then repetition, frequency and presence penalty, token by token."""
    out = logits.copy()
    if row.slot == SLOTS or change is None:
        return out
    for token in range(len(out)):
        out[token] += change.bias.get(token, 0.0)
        if change.allowed is not None and token not in change.allowed:
            out[token] = -np.inf
        count = change.output_counts.get(token, 0)
        if count > 0 or token in change.prompt_tokens:
            repetition = row.repetition_penalty
            out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
        out[token] -= row.frequency_penalty * count
        out[token] -= row.presence_penalty * (count > 0)
    return out


def kept(logits: F64, row: Row) -> tuple[list[int], F64]:
    """Ids that survive min_p, top_k, top_p in that order, likeliest first; all probabilities."""
    weights = np.exp((logits - logits.max()) / row.temperature)
    probabilities = weights / weights.sum()
    order = sorted(range(len(logits)), key=lambda token: (-probabilities[token], token))
    largest = probabilities[order[0]]
    order = [t for t in order if probabilities[t] >= row.min_p * largest and probabilities[t] > 0]
    if row.top_k > 0:
        order = order[: row.top_k]
    if row.top_p < 1:
        masses = np.cumsum(probabilities[order])
        order = order[: int(np.argmax(masses >= row.top_p * masses[-1])) + 1]
    return order, probabilities


def noise_of(row: Row, vocab_size: int) -> F64:
    num_values = max(sampling.LANES, -(-vocab_size // sampling.LANES))
    return np.asarray(jitted_noise(device_rows([row]), num_values))[0].astype(np.float64)


def drawn(logits: F64, row: Row) -> int:
    """Gumbel-max over lanes (token id modulo LANES), then over the tokens of that lane."""
    order, probabilities = kept(logits, row)
    mass = np.zeros(sampling.LANES)
    for token in order:
        mass[token % sampling.LANES] += probabilities[token]
    noise = noise_of(row, len(logits))
    with np.errstate(divide="ignore"):
        lane = int(np.argmax(np.log(mass) + noise[: sampling.LANES, 0]))
    of_lane = [token for token in order if token % sampling.LANES == lane]
    return max(of_lane, key=lambda t: np.log(probabilities[t]) + noise[t // sampling.LANES, 1])


def expected_token(logits: F64, row: Row, change: RowUpdate | None = None) -> int:
    if row.target >= 0:
        return row.target
    final = adjusted(logits, row, change)
    return int(np.argmax(final)) if row.temperature == 0 else drawn(final, row)


def expected_report(
    logits: F64, token: int, num_logprobs: int
) -> tuple[float, int, list[int], F64]:
    logprobs = logits - logits.max()
    logprobs = logprobs - np.log(np.exp(logprobs).sum())
    order = sorted(range(len(logits)), key=lambda t: (-logits[t], t))
    top = order[:num_logprobs]
    return logprobs[token], order.index(token) + 1, top, logprobs[top]


# ---------------------------------------------------------------------------------- each parameter

PINNED = [888, 128, 641, 150, 543, 235]  # tokens of `test_draws_are_pinned`

ALONE = [
    Row(),
    Row(temperature=1.0),
    Row(temperature=0.3),
    Row(temperature=0.01),
    Row(temperature=50.0),
    Row(temperature=1.0, top_k=1),
    Row(temperature=1.5, top_k=5),
    Row(temperature=1.0, top_k=1000000),
    Row(temperature=1.0, top_p=0.9),
    Row(temperature=2.0, top_p=0.5),
    Row(temperature=1.0, top_p=1e-6),
    Row(temperature=1.0, min_p=0.1),
    Row(temperature=1.0, min_p=1.0),
    Row(temperature=3.0, top_k=20, top_p=0.8, min_p=0.05),
    Row(slot=0, repetition_penalty=1.7),
    Row(slot=0, repetition_penalty=0.5, temperature=1.0),
    Row(slot=0, frequency_penalty=1.3),
    Row(slot=0, presence_penalty=-2.0, temperature=0.7),
    Row(slot=0, repetition_penalty=1.2, frequency_penalty=-0.4, presence_penalty=1.0),
]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(97, jnp.float32), (97, jnp.bfloat16), (1000, jnp.float32)]
)
def test_each_parameter_alone_equals_the_reference(
    rng: np.random.Generator, vocab_size: int, dtype: jnp.dtype
) -> None:
    change = update(
        bias={3: 4.0, 17: -3.5, 40: -np.inf},
        output_counts={3: 1, 5: 4, 80: 9},
        prompt_tokens=frozenset({5, 6, 7, 41}),
    )
    for start in range(0, len(ALONE), 8):
        rows = [
            replace(row, seed=2**63 + start + i, position=7 * i)
            for i, row in enumerate([*ALONE, *ALONE][start : start + 8])
        ]
        logits = np.asarray(jnp.asarray(random_logits(rng, 8, vocab_size), dtype))
        wide = logits.astype(np.float64)
        want = [expected_token(wide[i], row, change) for i, row in enumerate(rows)]
        assert tokens_of(logits, rows, change) == want


def random_row(rng: np.random.Generator, slot: int, vocab_size: int) -> Row:
    def maybe[T](value: T, neutral: T, chance: float = 0.4) -> T:
        return value if rng.random() < chance else neutral

    greedy = rng.random() < 0.25
    return Row(
        slot=maybe(slot, SLOTS, 0.6),
        position=int(rng.integers(0, 10000)),
        sample=int(rng.integers(0, 128)),
        target=maybe(int(rng.integers(vocab_size)), NO_TARGET, 0.1),
        num_logprobs=maybe(int(rng.integers(0, MAX_LOGPROBS + 1)), -1),
        top_k=maybe(int(rng.integers(1, vocab_size + 20)), 0),
        seed=int(rng.integers(0, 2**63)) * 2 + 1,
        temperature=0.0 if greedy else float(np.float32(rng.uniform(0.05, 3))),
        top_p=maybe(float(np.float32(rng.uniform(0.01, 1))), 1.0),
        min_p=maybe(float(np.float32(rng.uniform(0, 0.5))), 0.0, 0.3),
        repetition_penalty=maybe(float(np.float32(rng.uniform(0.5, 2))), 1.0),
        presence_penalty=maybe(float(np.float32(rng.uniform(-2, 2))), 0.0),
        frequency_penalty=maybe(float(np.float32(rng.uniform(-2, 2))), 0.0),
    )


def random_update(rng: np.random.Generator, slot: int, vocab_size: int) -> RowUpdate:
    def ids(most: int) -> list[int]:
        return [int(t) for t in rng.choice(vocab_size, int(rng.integers(0, most)), replace=False)]

    bias = {t: float(np.float32(rng.uniform(-100, 100))) for t in ids(6)}
    bias |= dict.fromkeys(ids(20), -np.inf)
    allowed = frozenset([*range(5), *ids(60)]) if rng.random() < 0.3 else None
    counts = {t: int(rng.integers(1, 6)) for t in ids(40)}
    return RowUpdate(slot, bias, allowed, counts, frozenset(ids(40)))


@pytest.mark.parametrize(("vocab_size", "num_batches"), [(97, 20), (1000, 5)])
def test_random_mixtures_equal_the_reference(vocab_size: int, num_batches: int) -> None:
    rng = np.random.default_rng(vocab_size)
    for _ in range(num_batches):
        updates = [random_update(rng, slot, vocab_size) for slot in range(SLOTS)]
        rows = [random_row(rng, slot, vocab_size) for slot in range(SLOTS)]
        logits = random_logits(rng, SLOTS, vocab_size)
        wide = logits.astype(np.float64)
        sampled = run(logits, rows, *updates)
        assert not sampled.corrupted.any()
        for i, row in enumerate(rows):
            assert sampled.tokens[i] == expected_token(wide[i], row, updates[i]), row
            check_report(sampled, i, wide[i], row)


def check_report(sampled: sampling.Sampled, i: int, logits: F64, row: Row) -> None:
    n = max(row.num_logprobs, 0)
    assert not sampled.top_ids[i, n:].any()
    assert not sampled.top_logprobs[i, n:].any()
    if row.num_logprobs < 0:
        assert (sampled.logprobs[i], sampled.ranks[i]) == (0, 0)
        return
    logprob, rank, top, top_logprobs = expected_report(logits, int(sampled.tokens[i]), n)
    np.testing.assert_allclose(sampled.logprobs[i], logprob, atol=1e-5, rtol=1e-6)
    assert sampled.ranks[i] == rank
    assert sampled.top_ids[i, :n].tolist() == top
    np.testing.assert_allclose(sampled.top_logprobs[i, :n], top_logprobs, atol=1e-5, rtol=1e-6)


def test_every_adjusted_logit_equals_the_reference() -> None:
    rng = np.random.default_rng(11)
    apply = jax.jit(lambda x, r, s: sampling._adjusted(sampling._chunked(x), r, s))
    for _ in range(10):
        updates = [random_update(rng, slot, 300) for slot in range(SLOTS)]
        rows = [random_row(rng, slot, 300) for slot in range(SLOTS)]
        logits = random_logits(rng, SLOTS, 300)
        logits[:, 7] = -np.inf
        got = apply(jnp.asarray(logits), device_rows(rows), state_with(300, *updates))
        got = np.asarray(got).reshape(SLOTS, -1)
        for i, row in enumerate(rows):
            want = adjusted(logits[i].astype(np.float64), row, updates[i])
            np.testing.assert_allclose(got[i, :300], want, rtol=1e-5, atol=1e-5)
        assert (got[:, 300:] == -np.inf).all()


# ------------------------------------------------------------------------------- filters and ties


@jax.jit
def filtered(logits: jax.Array, rows: sampling.DeviceRows) -> jax.Array:
    chunks = sampling._chunked(logits)
    best, _ = sampling._argmax(chunks)
    weights = sampling._likelihood(chunks, best, rows.temperature)
    limits = sampling._limits(weights, rows, rows.temperature > 0)
    rank = sampling._rank_of_ids(chunks.shape[1])
    return sampling._kept(weights, rank, *(limit[:, None, None] for limit in limits))


def kept_set(logits: np.ndarray, row: Row) -> list[int]:
    """Ids that the sampler's filters keep, by the parts that `sample` runs."""
    padded = np.full((1, 5000), -np.inf, np.float32)
    padded[0, : len(logits)] = logits
    out = filtered(jnp.asarray(padded), device_rows([row]))
    return np.flatnonzero(np.asarray(out).reshape(-1)).tolist()


def test_ties_at_the_edge_of_top_k_and_top_p_go_to_the_lowest_ids() -> None:
    logits = np.zeros(300, np.float32)
    logits[[250, 7, 130]] = 1.0
    by = Row(temperature=1.0)
    assert kept_set(logits, replace(by, top_k=2)) == [7, 130]
    assert kept_set(logits, replace(by, top_k=3)) == [7, 130, 250]
    assert kept_set(logits, replace(by, top_k=5)) == [0, 1, 7, 130, 250]
    uniform = np.zeros(256, np.float32)
    assert kept_set(uniform, replace(by, top_p=0.5)) == list(range(128))
    assert kept_set(uniform, replace(by, top_k=64, top_p=0.5)) == list(range(32))
    assert kept_set(uniform, replace(by, top_k=64, top_p=0.501)) == list(range(33))
    assert kept_set(uniform, replace(by, min_p=1.0)) == list(range(256))


@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0, 30.0])
def test_top_p_keeps_the_shortest_prefix_that_reaches_its_mass(
    rng: np.random.Generator, scale: float
) -> None:
    logits = random_logits(rng, 1, 5000, scale)[0]
    wide = logits.astype(np.float64)
    for top_p in (0.001, 0.3, 0.9, 0.999):
        order, probabilities = kept(wide, Row(temperature=1.0))
        keep = kept_set(logits, Row(temperature=1.0, top_p=top_p))
        assert sorted(order[: len(keep)]) == keep
        mass = probabilities[keep].sum()
        assert mass >= top_p - 1e-6
        assert mass - probabilities[keep].min() < top_p + 1e-6


def test_top_k_is_exact_whatever_the_scale(rng: np.random.Generator) -> None:
    for scale in (1e-3, 1.0, 20.0):
        logits = random_logits(rng, 1, 5000, scale)[0]
        order = np.lexsort((np.arange(5000), -logits))
        for k in (1, 2, 50, 1234):
            weight = np.exp(logits.astype(np.float64) - logits.max())
            expected = [t for t in order[:k] if weight[t] >= sampling.LEAST_LIKELIHOOD]
            assert kept_set(logits, Row(temperature=1.0, top_k=k)) == sorted(expected)


def test_every_filter_leaves_the_likeliest_token() -> None:
    logits = np.full((1, 97), -1e4, np.float32)
    logits[0, 61] = 3e4
    tight = Row(temperature=0.01, top_k=1, top_p=1e-30, min_p=1.0)
    assert tokens_of(np.repeat(logits, 8, 0), [tight] * 8) == [61] * 8


# ----------------------------------------------------------------------------------------- greedy


@pytest.mark.parametrize("vocab_size", [1, 127, 128, 129, 1000])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_greedy_takes_the_lowest_id_of_equal_logits(vocab_size: int, dtype: jnp.dtype) -> None:
    logits = np.full((4, vocab_size), -2.0, np.float32)
    logits[1] = -np.arange(vocab_size) % 7  # many equal maxima
    logits[2] = np.where(np.arange(vocab_size) % 2, 0.0, -0.0)  # zeros of both signs are equal
    logits[3, -1] = 5.0
    best, tokens = jitted_argmax(jnp.asarray(logits, dtype))
    np.testing.assert_array_equal(tokens, np.argmax(logits, axis=1))
    np.testing.assert_array_equal(best, np.max(logits, axis=1))
    if vocab_size == 1000:
        assert tokens_of(logits, [Row()] * 4) == tokens.tolist()


def test_target_rows_give_their_target_and_draw_nothing(rng: np.random.Generator) -> None:
    logits = random_logits(rng, 2, 97)
    rows = [Row(target=11, num_logprobs=2), Row(target=0, temperature=1.0)]
    sampled = run(logits, rows)
    assert sampled.tokens.tolist() == [11, 0]
    check_report(sampled, 0, logits[0].astype(np.float64), rows[0])


# ----------------------------------------------------------------------------- draws and their keys


def test_draws_follow_the_distribution() -> None:
    vocab_size, num_rows, num_steps = 1000, 512, 40
    logits = np.full(vocab_size, -np.inf, np.float32)
    likely = [0, 1, 127, 128, 129, 256, 299]  # two chunks share lanes 0 and 1
    logits[likely] = np.log([0.3, 0.05, 0.15, 0.2, 0.1, 0.12, 0.08]).astype(np.float32)
    state = state_with(vocab_size)
    batch = jnp.asarray(np.repeat(logits[None], num_rows, 0))
    seen = np.zeros(vocab_size)
    for n in range(num_steps):
        rows = [Row(temperature=1.0, seed=9, position=n * num_rows + i) for i in range(num_rows)]
        state, sampled = jitted_sample(batch, device_rows(rows), state)
        seen += np.bincount(np.asarray(sampled.tokens), minlength=vocab_size)
    expected = np.exp(logits.astype(np.float64)) * num_rows * num_steps
    assert seen[expected == 0].sum() == 0
    chi_square = ((seen - expected)[likely] ** 2 / expected[likely]).sum()
    assert chi_square < 22.5  # 6 degrees of freedom: 1 in 1000; the draws are fixed


@pytest.mark.parametrize("change", ["seed", "sample", "position"])
def test_draws_of_other_seeds_samples_and_positions_are_unrelated(change: str) -> None:
    logits = np.zeros((512, 1000), np.float32)
    scale = 2**33 if change == "seed" else 1  # the high word of a seed counts too
    base = Row(temperature=1.0)
    rows = [replace(base, **{change: i * scale}) for i in range(512)]  # pyright: ignore[reportArgumentType]
    assert 360 < len(set(tokens_of(logits, rows))) < 440  # 401 expected, deviation 10


def test_a_draw_depends_on_seed_sample_position_and_logits_alone(
    rng: np.random.Generator,
) -> None:
    logits = random_logits(rng, 1, 1000)[0]
    row = Row(temperature=1.0, seed=77, sample=3, position=12, top_p=0.95, num_logprobs=4)
    alone = run(logits[None], [row])
    for num_rows in (8, 33):
        for place in (0, num_rows - 1):
            crowd = random_logits(rng, num_rows, 1000)
            crowd[place] = logits
            rows = [random_row(rng, i % SLOTS, 1000) for i in range(num_rows)]
            rows[place] = row
            updates = [random_update(rng, slot, 1000) for slot in range(SLOTS)]
            sampled = run(crowd, rows, *updates)
            assert_same_row(sampled, place, alone, 0)


def test_noise_does_not_hang_on_the_settings_of_jax() -> None:
    rows = device_rows([Row(seed=2**40 + i, sample=i) for i in range(3)])
    expected = jitted_noise(rows, 130)
    with jax.threefry_partitionable(False), jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(jitted_noise(rows, 130), expected)
    np.testing.assert_array_equal(jitted_noise(rows, 200)[:, :130], expected)


def test_draws_are_pinned() -> None:
    # A change here changes every seeded answer: say so in BUILD_NOTES.md.
    logits = np.zeros((6, 1000), np.float32)
    rows = [Row(temperature=1.0, seed=2**40 + i, sample=i, position=i) for i in range(6)]
    assert tokens_of(logits, rows) == PINNED


def test_a_tiny_change_of_logits_hardly_ever_changes_a_draw(rng: np.random.Generator) -> None:
    logits = random_logits(rng, 512, 1000)
    shifted = logits + (1e-6 * rng.standard_normal(logits.shape)).astype(np.float32)
    rows = [Row(temperature=1.0, seed=i) for i in range(512)]
    differ = np.array(tokens_of(logits, rows)) != np.array(tokens_of(shifted, rows))
    assert differ.sum() <= 1


# ------------------------------------------------------------------------------ rows and neighbours

ODD = {
    "temperature": Row(temperature=2.5),
    "filters": Row(temperature=1.0, top_k=3, top_p=0.5, min_p=0.2),
    "penalties": Row(slot=1, repetition_penalty=3.0, frequency_penalty=2.0, counts=1),
    "logprobs": Row(num_logprobs=20),
    "target": Row(target=5, num_logprobs=0),
}


@pytest.mark.parametrize("odd", [*ODD, "nan", "inf", "banned"])
def test_one_odd_row_changes_nothing_in_the_others(rng: np.random.Generator, odd: str) -> None:
    logits = random_logits(rng, 8, 97)
    rows = [
        Row(),
        Row(temperature=1.0),
        Row(temperature=1.0, top_k=9, seed=4),
        Row(slot=2, temperature=0.5, presence_penalty=1.0),
        Row(num_logprobs=3),
        Row(temperature=0.9, top_p=0.8, min_p=0.01, num_logprobs=0),
        Row(),
        Row(),
    ]
    updates = [update(1, output_counts={1: 3}), update(2, output_counts={4: 2}), update(3)]
    before = run(logits, rows, *updates)
    rows[6] = ODD.get(odd, Row(temperature=1.0, top_p=0.9, top_k=5, num_logprobs=5))
    if odd == "banned":
        rows[6] = replace(rows[6], slot=3)
        updates[2] = update(3, bias=dict.fromkeys(range(97), -np.inf))
    elif odd not in ODD:
        logits[6, 50] = np.nan if odd == "nan" else np.inf
    after = run(logits, rows, *updates)
    for other in (0, 1, 2, 3, 4, 5, 7):
        assert_same_row(after, other, before, other)
    assert after.corrupted[6] == (odd not in ODD)


# ------------------------------------------------------------------------------- broken and banned


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("row", [Row(), Row(temperature=1.0, top_p=0.9), Row(slot=0, counts=1)])
def test_nan_and_infinity_corrupt_their_row_alone(
    rng: np.random.Generator, row: Row, dtype: jnp.dtype
) -> None:
    logits = random_logits(rng, 8, 97)
    logits[:, 9] = -np.inf  # not corrupt by itself
    logits[1, 20] = np.nan
    logits[2, 96] = -np.float32(np.nan)  # the sign that x86 gives to 0 * inf
    logits[3, 0] = np.inf
    logits[4] = np.nan
    logits[5, 3], logits[5, 4] = np.inf, np.nan
    logits[6] = -np.inf
    broken = [False, True, True, True, True, True, True, False]
    rows = [replace(row, num_logprobs=2, seed=i) for i in range(8)]
    bad = np.asarray(jnp.asarray(logits, dtype))
    sampled = run(bad, rows, update())
    assert sampled.corrupted.tolist() == broken
    for i in np.flatnonzero(broken):
        assert sampled.tokens[i] == 0
        assert not sampled.logprobs[i]
        assert not sampled.top_logprobs[i].any()
    sound = np.where(np.array(broken)[:, None], np.zeros_like(bad), bad)
    clean = run(sound, rows, update())
    for i in np.flatnonzero(~np.array(broken)):
        assert_same_row(sampled, int(i), clean, int(i))
    assert np.isfinite(sampled.logprobs).all()
    assert np.isfinite(sampled.top_logprobs[:, :2]).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_nan_is_seen_in_large_vocabularies_too(dtype: jnp.dtype) -> None:
    # Where XLA takes its fast reductions, a maximum over float32 skips NaN.
    logits = np.zeros((8, 49152), np.float32)
    logits[1, 777] = np.nan
    logits[2, 49151] = -np.float32(np.nan)
    logits[3] = -np.inf
    logits[4, 5] = 3e37  # large, but a number
    has_nan = jax.jit(lambda x: sampling._has_nan(sampling._chunked(x)))
    flags = has_nan(jnp.asarray(logits, dtype))
    assert flags.tolist() == [False, True, True, *[False] * 5]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_every_token_banned_is_corrupted(
    rng: np.random.Generator, temperature: float
) -> None:
    logits = random_logits(rng, 2, 97)
    bans = [
        update(0, bias=dict.fromkeys(range(97), -np.inf)),
        update(1, allowed=frozenset({5}), bias={5: -np.inf}),
    ]
    rows = [Row(slot=i, temperature=temperature, top_k=3, top_p=0.5) for i in range(2)]
    sampled = run(logits, rows, *bans)
    assert sampled.corrupted.tolist() == [True, True]
    assert sampled.tokens.tolist() == [0, 0]


def test_bans_hold_for_greedy_and_drawn_tokens(rng: np.random.Generator) -> None:
    logits = random_logits(rng, 8, 97)
    allowed = frozenset({3, 50, 96})
    bans = [update(0, allowed=allowed, bias={50: -np.inf}), update(1, bias={96: 100.0})]
    for temperature in (0.0, 5.0):
        rows = [Row(slot=i % 2, temperature=temperature, seed=i) for i in range(8)]
        tokens = tokens_of(logits, rows, *bans)
        assert set(tokens[0::2]) <= {3, 96}
        assert set(tokens[1::2]) == {96}


def test_a_penalty_that_overflows_corrupts_no_other_row(rng: np.random.Generator) -> None:
    logits = np.abs(random_logits(rng, 2, 97)) + 1
    logits[:, 4] = -np.inf
    seen = update(0, prompt_tokens=frozenset(range(97)))
    rows = [Row(slot=0, repetition_penalty=1e-45, temperature=1.0), Row(temperature=1.0)]
    sampled = run(logits, rows, seen)
    assert sampled.corrupted.tolist() == [True, False]
    assert sampled.tokens[1] == drawn(logits[1].astype(np.float64), rows[1])


# ---------------------------------------------------------------------------------------- logprobs


def test_logprobs_are_of_the_raw_logits(rng: np.random.Generator) -> None:
    logits = random_logits(rng, 1, 97)
    row = Row(slot=0, temperature=0.1, top_k=1, num_logprobs=5, repetition_penalty=2.0)
    sampled = run(logits, [row], update(bias={8: 100.0}, prompt_tokens=frozenset(range(90))))
    assert sampled.tokens[0] == 8
    check_report(sampled, 0, logits[0].astype(np.float64), row)


def test_equal_logits_rank_by_id() -> None:
    logits = np.zeros((2, 1000), np.float32)
    logits[:, 600:620] = 2.0
    logits[:, 10] = 3.0
    logits[:, 1::2] *= -1.0  # -0 beside 0: equal
    logits[:, 601:620:2] = 2.0
    rows = [Row(target=615, num_logprobs=20), Row(target=40, num_logprobs=1)]
    sampled = run(logits, rows)
    assert sampled.ranks.tolist() == [17, 21 + 40]
    assert sampled.top_ids[0].tolist() == [10, *range(600, 619)]
    assert sampled.top_ids[1, 0] == 10
    tail = np.zeros((1, 1000), np.float32)
    tail[:, ::3] = -0.0
    assert run(tail, [Row(num_logprobs=20)]).top_ids[0].tolist() == list(range(20))


def test_the_likeliest_are_found_in_one_chunk_or_in_twenty() -> None:
    likeliest = jax.jit(lambda logits: sampling._likeliest(sampling._chunked(logits)))
    for spread in (1, 128, 131):
        logits = np.full((1, 3000), -1.0, np.float32)
        found = [5 + spread * i for i in range(20)]
        logits[0, found] = np.arange(20, dtype=np.float32) // 2  # in pairs
        ids, values = likeliest(jnp.asarray(logits))
        assert ids[0].tolist() == sorted(found, key=lambda t: (-logits[0, t], t))
        np.testing.assert_array_equal(values[0], logits[0, np.asarray(ids[0])])
    crossed = np.full((1, 3000), -1.0, np.float32)
    crossed[0, [0, 1, 130, 131]] = [3.0, 2.0, 5.0, 2.0]  # the later chunk has the larger maximum
    ids, _ = likeliest(jnp.asarray(crossed))
    assert ids[0, :4].tolist() == [130, 0, 1, 131]


# ------------------------------------------------------------------------------------ slots' memory


def test_counts_grow_over_steps_as_in_the_reference() -> None:
    rng = np.random.default_rng(5)
    vocab_size = 97
    rows = [
        Row(slot=3, counts=1, frequency_penalty=0.9, presence_penalty=0.4),
        Row(slot=7, counts=1, repetition_penalty=1.6, temperature=0.8, seed=5),
        Row(slot=0, counts=0, frequency_penalty=2.0),  # looks, does not count
        Row(slot=SLOTS, counts=1, frequency_penalty=2.0),  # no slot: nothing to count in
    ]
    counts = {slot: {2: 1} for slot in (0, 3, 7)}
    prompt = frozenset({4})
    updates = [update(s, output_counts=counts[s], prompt_tokens=prompt) for s in counts]
    state = state_with(vocab_size, *updates)
    logits = random_logits(rng, len(rows), vocab_size, 2.0)
    wide = logits.astype(np.float64)
    for position in range(40):
        now = [replace(row, position=position) for row in rows]
        state, sampled = step(state, logits, now)
        for i, row in enumerate(now):
            known = counts.get(row.slot, {})
            change = update(output_counts=known, prompt_tokens=prompt)
            token = int(sampled.tokens[i])
            assert token == expected_token(wide[i], row, change if row.slot < SLOTS else None)
            if row.counts and row.slot in counts:
                known[token] = known.get(token, 0) + 1
    marks = np.asarray(state.marks).reshape(SLOTS, -1) & sampling.MAX_COUNT
    for slot in range(SLOTS):
        seen = {int(token): int(marks[slot, token]) for token in np.flatnonzero(marks[slot])}
        assert seen == counts.get(slot, {})


def test_set_row_replaces_all_that_the_slot_held(rng: np.random.Generator) -> None:
    logits = random_logits(rng, 1, 97)
    one, two = frozenset({1}), frozenset({2})
    old = update(0, bias={1: 50.0}, allowed=one, output_counts={1: 3}, prompt_tokens=two)
    row = Row(slot=0, repetition_penalty=2.0, frequency_penalty=1.0)
    assert tokens_of(logits, [row], old) == [1]
    assert tokens_of(logits, [row], old, update(0)) == tokens_of(logits, [Row()])
    state = state_with(97, old, update(0), update(SLOTS, bias={1: 50.0}))  # no such slot: dropped
    fresh = sampling.init_state(SLOTS, 97)
    jax.tree.map(np.testing.assert_array_equal, state, fresh)


def test_counts_stop_at_their_maximum() -> None:
    most = sampling.MAX_COUNT
    state = state_with(97, update(0, output_counts={5: most + 7, 6: most - 1}))
    logits = np.zeros((1, 97), np.float32)
    for token in (5, 6, 6):
        row = Row(slot=0, counts=1, target=token)
        state, _ = step(state, logits, [row])
    marks = np.asarray(state.marks)[0].reshape(-1)
    assert marks[[5, 6]].tolist() == [most, most]


def test_corrupted_rows_count_nothing() -> None:
    state = state_with(97, update(0))
    logits = np.full((1, 97), np.nan, np.float32)
    state, sampled = step(state, logits, [Row(slot=0, counts=1)])
    assert sampled.corrupted.tolist() == [True]
    assert not np.asarray(state.marks).any()


def test_the_state_is_changed_in_place(rng: np.random.Generator) -> None:
    state = state_with(1000, update(0))
    where = [array.unsafe_buffer_pointer() for array in jax.tree.leaves(state)]
    rows = [Row(slot=0, counts=1, temperature=1.0, frequency_penalty=1.0)]
    for _ in range(3):
        old = state
        state, _ = step(state, random_logits(rng, 1, 1000), rows)
        assert all(array.is_deleted() for array in jax.tree.leaves(old))
        state = jitted_set_row(state, jnp.int32(1), *sampling.densify(update(1), 1000))
        assert [array.unsafe_buffer_pointer() for array in jax.tree.leaves(state)] == where


def test_device_rows_have_the_fields_of_the_plan() -> None:
    names = [field.name for field in fields(sampling.DeviceRows)]
    # The runner keeps for each slot what was drawn last; the sampler knows nothing of it.
    assert names == [f.name for f in fields(SamplingRows) if f.name != "token_slot"]
