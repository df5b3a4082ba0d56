"""How long a device would wait for the host: the real engine over a device that only takes time.

`bench_host.py` has this as its part "gap". Nothing of JAX is loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from pagedjax.config import SchedulerConfig
from pagedjax.engine import LLMEngine
from pagedjax.plan import MAX_LOGPROBS, StepPlan, StepResult
from pagedjax.request import SamplingParams
from pagedjax.scheduler import Scheduler
from pagedjax.tokenizer import Tokenizer


class SimulatedDevice:
    """Runs launched steps one after the other, each for the same time, and counts its waiting.

    Attributes:
      busy_seconds: in steps.
      idle_seconds: between the end of a step and the launch of the next one.
    """

    def __init__(self, step_seconds: float, clock: Callable[[], float]) -> None:
        """`clock`: the wall's seconds, which waiting takes; or others, which are counted on."""
        self._clock, self._waited, self._sleeps = clock, 0.0, clock is time.perf_counter
        self.busy_seconds = self.idle_seconds = 0.0
        self._step_seconds = step_seconds
        self._free_at = 0.0  # when the last launched step ends; 0: none was

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Starts when the step in front ends; what it returns sleeps until this one does."""
        now = self._now()
        if self._free_at:
            self.idle_seconds += max(0.0, now - self._free_at)
        end = self._free_at = max(now, self._free_at) + self._step_seconds
        self.busy_seconds += self._step_seconds
        width = len(plan.rows.slot)
        tokens = ((plan.rows.position * 7 + np.arange(width)) % 1_000).astype(np.int32)

        def read() -> StepResult:
            self._wait(end)
            return StepResult(
                tokens=tokens,
                logprobs=np.zeros(width, np.float32),
                ranks=np.ones(width, np.int32),
                top_ids=np.zeros((width, MAX_LOGPROBS), np.int32),
                top_logprobs=np.zeros((width, MAX_LOGPROBS), np.float32),
                corrupted=np.zeros(width, bool),
            )

        return read

    def _now(self) -> float:
        return self._clock() + self._waited

    def _wait(self, end: float) -> None:
        seconds = max(0.0, end - self._now())
        if self._sleeps:
            time.sleep(seconds)
        else:
            self._waited += seconds

    def recover(self) -> bool:
        """Never asked to."""
        return False

    def forget(self) -> None:
        """Counts from here on."""
        self.busy_seconds = self.idle_seconds = 0.0


class Words(Tokenizer):
    """A word for each id, so that the engine has text to put together and to search for stops.

    Bytewise and with its words at hand, like those of most models.
    """

    is_bytewise = True

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._words = [f" {i}".encode() for i in range(vocab_size)]

    @property
    def vocab_size(self) -> int:
        """As the model's."""
        return self._vocab_size

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """The ids that stand in the text."""
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The ids as words."""
        return b"".join(self._words[i] for i in ids).decode()

    def token_bytes(self, token_id: int) -> bytes:
        """Of one word."""
        return self._words[token_id]


@dataclass(frozen=True, slots=True)
class Gap:
    """What a device and its host did in the steps that were counted."""

    idle_share: float  # of the time, the device had nothing to run
    host_seconds: float  # the host's work a step, by `clock`; the wall's has waiting in it


def measure(
    config: SchedulerConfig,
    prompts: Sequence[Sequence[int]],
    *,
    steps: int,
    step_seconds: float,
    async_scheduling: bool,
    clock: Callable[[], float] = time.perf_counter,
) -> Gap:
    """How long the device has nothing to run while all prompts decode.

    Args:
      config: sizes; all prompts must fit at once.
      prompts: token ids of each sequence.
      steps: decode steps that are counted.
      step_seconds: what the device takes for each.
      async_scheduling: the engine's option.
      clock: what the host's work is measured with. With the processor's time it does not matter
        what else the machine does; the device's steps and the waiting for them are added to it.
    """
    device = SimulatedDevice(step_seconds, clock)
    tokenizer = Words(config.vocab_size)
    engine = LLMEngine(Scheduler(config), device, tokenizer, async_scheduling=async_scheduling)
    params = SamplingParams(max_tokens=None, stop=("no such text",))
    for at, prompt in enumerate(prompts):
        engine.add_request(f"request-{at}", tuple(prompt), params)
    lives = engine.scheduler.roster.live.values()
    while any(live.sequence.num_output_tokens == 0 for live in lives):
        engine.step()
    device.forget()
    started = clock()
    name = "gap, async" if async_scheduling else "gap, one by one"
    for _ in tqdm(range(steps), desc=name, unit="step", disable=None):
        engine.step()
    engine.check_integrity()
    host_seconds = (clock() - started) / steps
    idle, busy = device.idle_seconds, device.busy_seconds
    return Gap(idle / (idle + busy), host_seconds)
