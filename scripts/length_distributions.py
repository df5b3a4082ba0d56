"""Requests for the paging experiments: lengths, arrival times, and trace files.

Owns the log-normal fits, Poisson arrivals and the reading of traces. Knows nothing of memory.

Of the paper's two data sets only the means are published (`ShareGPT` 161.31 tokens in and 337.99
out, `Alpaca` 19.31 and 58.45). A log-normal needs a spread too; it is taken from the paper's own
memory figures, by what a running request is on average. Long answers run longer, so with X the
answer's length a running request has E[X^2] / (2 E[X]) of its tokens still to come:

- ShareGPT: with 2,048 positions reserved, 7 requests always run, and 13.3 % of 15,728 positions
  are "reserved", that is 299 tokens to come for each: sigma 0.80. (The 20.4 % that hold tokens are
  458 a request: 159 of prompt beside the 299, the plain mean, so that prompt and answer are taken
  to be independent.)
- Alpaca: with an oracle 72.75 requests run. Were their buddy blocks to fill the pool as far as
  ShareGPT's do, a request would have about 135 tokens in the end, 116 of them answer: sigma 0.83.

Prompts enter by their mean only, so their spread is an assumption: 1.0 (ShareGPT: from a line to a
pasted page), 0.5 (Alpaca: an instruction). The location is solved for so that the mean *after*
clipping is the published one. These fits make Max's figures come out by construction; those of the
other allocators are then predictions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_MODEL_LEN = 2048


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One ask: the lengths decide everything, the tokens only what a prefix cache may share."""

    arrival: float  # seconds
    prompt_tokens: int
    output_tokens: int  # of each of its samples; eos is not modelled
    num_sequences: int = 1  # samples, or the width of its beam
    is_beam: bool = False
    shared_prefix: int = 0  # of the prompt's tokens, the same in every request

    @property
    def total_tokens(self) -> int:
        """Prompt and answer of one sequence."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class LogNormal:
    """min(max(1, round(exp(mu + sigma Z))), longest), with mu such that the mean is `mean`."""

    mean: float
    sigma: float
    longest: int

    @property
    def mu(self) -> float:
        """The location, found by bisection on the clipped mean, which grows with it."""
        low, high = math.log(self.mean) - self.sigma**2 - 2.0, math.log(self.longest)
        for _ in range(60):
            middle = (low + high) / 2
            if self._clipped_mean(middle) < self.mean:
                low = middle
            else:
                high = middle
        return low

    def draw(self, rng: np.random.Generator, n: int) -> NDArray[np.int64]:
        """i64[n], each in [1, longest]."""
        values = np.exp(self.mu + self.sigma * rng.standard_normal(n))
        return np.clip(np.rint(values), 1, self.longest).astype(np.int64)

    def _clipped_mean(self, mu: float) -> float:
        """E[min(exp(mu + sigma Z), longest)]; the bound of 1 below does not matter here."""
        z = (math.log(self.longest) - mu) / self.sigma
        whole = math.exp(mu + self.sigma**2 / 2)
        return whole * _normal_cdf(z - self.sigma) + self.longest * (1 - _normal_cdf(z))


@dataclass(frozen=True, slots=True)
class Lengths:
    """A data set: prompt and answer, independent of each other; the sum is clipped to the model."""

    name: str
    prompt: LogNormal
    output: LogNormal

    def draw(self, rng: np.random.Generator, n: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(prompt tokens, output tokens), i64[n] each; every answer has room for a token."""
        prompts, outputs = self.prompt.draw(rng, n), self.output.draw(rng, n)
        return prompts, np.minimum(outputs, MAX_MODEL_LEN - prompts)


SHAREGPT = Lengths(
    "ShareGPT-like", LogNormal(161.31, 1.0, MAX_MODEL_LEN - 1), LogNormal(337.99, 0.80, 2047)
)
ALPACA = Lengths(
    "Alpaca-like", LogNormal(19.31, 0.5, MAX_MODEL_LEN - 1), LogNormal(58.45, 0.83, 2047)
)
# A sentence of news and its translation. Of WMT16 the paper publishes no lengths; German and
# English news sentences have some 25 words, about 35 tokens, with a spread of half of it.
TRANSLATION = Lengths("WMT16-like", LogNormal(35.0, 0.5, 256), LogNormal(35.0, 0.5, 256))
CHAT_LIMIT = 1024  # the paper's chat: the last 1,024 tokens of the history, at most 1,024 out


def poisson_requests(
    lengths: Lengths, *, rate: float, seconds: float, seed: int, **shape: Any
) -> list[SimulatedRequest]:
    """Requests of so many seconds at `rate` a second.

    The same seed gives the same lengths at every rate, and the same arrivals but for their scale:
    rates are compared on one trace that is played faster or slower. `shape` goes to every request.
    """
    arrivals = poisson_arrivals(rate=rate, seconds=seconds, seed=seed)
    prompts, outputs = lengths.draw(np.random.default_rng([seed, 1]), len(arrivals))
    prefix = int(shape.get("shared_prefix", 0))
    return [
        SimulatedRequest(arrival, prefix + prompt, output, **shape)
        for arrival, prompt, output in zip(
            arrivals, prompts.tolist(), outputs.tolist(), strict=True
        )
    ]


def chat_requests(*, rate: float, seconds: float, seed: int) -> list[SimulatedRequest]:
    """Turns of chats: the history so far and a new question, cut to its last 1,024 tokens.

    A turn stands at any place of its chat. The number of turns before it is geometric with a mean
    of three, an assumption: a ShareGPT conversation has a handful of turns.
    """
    arrivals = poisson_arrivals(rate=rate, seconds=seconds, seed=seed)
    rng = np.random.default_rng([seed, 2])
    turns_before = rng.geometric(1 / 4, len(arrivals)) - 1
    questions, answers = SHAREGPT.draw(rng, len(arrivals))
    requests: list[SimulatedRequest] = []
    for arrival, turns, question, answer in zip(
        arrivals, turns_before, questions.tolist(), answers.tolist(), strict=True
    ):
        earlier = sum(int(part.sum()) for part in SHAREGPT.draw(rng, int(turns)))
        prompt = min(question + earlier, CHAT_LIMIT)
        requests.append(SimulatedRequest(arrival, prompt, min(answer, CHAT_LIMIT)))
    return requests


def poisson_arrivals(*, rate: float, seconds: float, seed: int) -> list[float]:
    """Arrival times in [0, seconds) of a Poisson process."""
    rng = np.random.default_rng([seed, 0])
    times: list[float] = []
    now = rng.standard_exponential()
    while now < rate * seconds:
        times.append(now / rate)
        now += rng.standard_exponential()
    return times


def read_trace(path: Path) -> list[SimulatedRequest]:
    """Requests of a trace file, by arrival.

    Either JSON lines of `{"arrival": seconds, "prompt_tokens": n, "output_tokens": n}`, or a
    workload file of `bench_engine.py` whose requests have `arrival_s` (all of its timed workloads).

    Raises:
      ValueError: a line cannot be used; the message names it.
    """
    text = path.read_text("utf-8")
    try:
        whole = json.loads(text)
    except json.JSONDecodeError:
        whole = None
    if isinstance(whole, dict) and "workloads" in whole:
        entries = [r for w in whole["workloads"].values() for r in w["requests"]]
        entries = [
            {
                "arrival": entry["arrival_s"],
                "prompt_tokens": len(entry["prompt_ids"]),
                "output_tokens": entry["max_new"],
            }
            for entry in entries
            if entry.get("arrival_s") is not None
        ]
        return _checked(enumerate(entries, 1), dict)
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    return _checked(lines, json.loads)


def _checked(entries: Any, parse: Callable[[Any], Any]) -> list[SimulatedRequest]:
    requests: list[SimulatedRequest] = []
    for number, entry in entries:
        try:
            values = parse(entry)
            request = SimulatedRequest(
                float(values["arrival"]), int(values["prompt_tokens"]), int(values["output_tokens"])
            )
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"line {number} must have numbers `arrival` (seconds), `prompt_tokens` and "
                f"`output_tokens`. Got {entry!r:.80} ({type(error).__name__}: {error})."
            ) from error
        fits = request.prompt_tokens >= 1 and request.output_tokens >= 1 and request.arrival >= 0
        if not fits or request.total_tokens > MAX_MODEL_LEN:
            raise ValueError(
                f"line {number} must have at least one token in and one out, at most "
                f"{MAX_MODEL_LEN} together, and no negative time. Got {entry!r:.80}."
            )
        requests.append(request)
    if not requests:
        raise ValueError("a trace must hold at least one request with an arrival time. Got none.")
    return sorted(requests, key=lambda request: request.arrival)


def _normal_cdf(z: float) -> float:
    return (1 + math.erf(z / math.sqrt(2))) / 2
