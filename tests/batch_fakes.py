"""A model that answers without computing: what the tests of the batch program need, and no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagedjax.errors import RequestError
from pagedjax.request import (
    CompletionOutput,
    Logprob,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from pagedjax.tokenizer import Tokenizer

MAX_MODEL_LEN = 64
EOS = 0


class CharTokenizer(Tokenizer):
    """Token i is the character i; 0 is the special token `<eos>`."""

    eos_token_ids = frozenset({EOS})
    special_tokens: Mapping[str, int] = {"<eos>": EOS}

    @property
    def vocab_size(self) -> int:
        return 0x110000

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        del special_tokens  # no character is one
        return [ord(char) for char in text]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(i) if i != EOS else "" if skip_special_tokens else "<eos>" for i in ids)


def entry(token: int, count: int) -> TokenLogprobs:
    """The chosen token is the second likeliest; the others follow it in the alphabet."""
    likeliest = [token + 1, token, *range(token + 2, token + 21)][:count]
    ranks = {key: rank for rank, key in enumerate(likeliest, 1)}
    ranks = {token: 2, **{key: rank for key, rank in ranks.items() if key != token}}
    return {key: Logprob(-0.5 * rank, rank, chr(key)) for key, rank in ranks.items()}


@dataclass
class FakeEngine:
    """Repeats the prompt with its case swapped; each request takes as many steps as it has tokens.

    Prompts that ask for trouble: "boom" raises when added, "break" fails in the engine, "vanish"
    is aborted by it, "linger" runs out of time, "crash" stops the engine itself.
    """

    running: dict[str, list[Any]] = field(default_factory=dict)  # id -> [steps left, output, n]
    added: dict[str, tuple[Any, SamplingParams, str | None]] = field(default_factory=dict)
    asked: dict[str, tuple[int, float | None]] = field(default_factory=dict)  # priority, timeout
    labels: dict[str, str | None] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    max_queue: int = 10**6
    most_sequences: int = 0
    num_steps: int = 0

    @property
    def scheduler(self) -> FakeScheduler:
        return FakeScheduler(self)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running)

    @property
    def has_queue_room(self) -> bool:
        return len(self.running) < self.max_queue

    def add_request(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        label: str | None = None,
    ) -> None:
        assert self.has_queue_room
        self.labels[request_id] = label
        assert request_id not in self.added, "an id is used once"
        if prompt == "boom":
            raise KeyError("a bug")
        ids = [ord(char) for char in prompt] if isinstance(prompt, str) else prompt
        if len(ids) + 1 > MAX_MODEL_LEN:
            raise RequestError(
                f"`prompt` must have at most {MAX_MODEL_LEN - 1} tokens. Got {len(ids)}.",
                param="prompt",
                code="context_length_exceeded",
            )
        self.asked[request_id] = (priority, timeout)
        self.added[request_id] = (prompt, params, cache_salt)
        output = self._output(request_id, prompt, ids, params)
        self.running[request_id] = [len(output.outputs[0].token_ids), output, params.n]
        sequences = sum(n for _, _, n in self.running.values())
        self.most_sequences = max(self.most_sequences, sequences)

    def step(self) -> list[RequestOutput]:
        self.num_steps += 1
        ended = []
        for request_id, state in list(self.running.items()):
            output = state[1]
            if output.prompt == "crash":
                raise RuntimeError("the device is gone")
            state[0] -= 1
            if state[0] <= 0:
                del self.running[request_id]
                ended.append(output)
        return ended

    def abort(self, request_id: str) -> bool:
        self.aborted.append(request_id)
        return self.running.pop(request_id, None) is not None

    def _output(
        self, request_id: str, prompt: str | list[int], ids: list[int], params: SamplingParams
    ) -> RequestOutput:
        text = "".join(chr(i) for i in ids).swapcase()[: params.max_tokens]
        output = RequestOutput(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=list(ids),
            outputs=[_sample(index, text, params) for index in range(params.n)],
            finished=True,
            num_cached_tokens=1,
        )
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [None, *(entry(i, params.prompt_logprobs) for i in ids[1:])]
        if prompt == "break":
            output.error = RequestError("internal error", code="engine_error")
        if prompt == "linger":
            output.outputs[0].finish_reason = "timeout"
            output.error = RequestError("its time is over", param="timeout", code="timeout")
        if prompt == "vanish":
            output.outputs[0].finish_reason = "abort"
        return output


def _sample(index: int, text: str, params: SamplingParams) -> CompletionOutput:
    ids = [ord(char) for char in text]
    count = params.logprobs
    return CompletionOutput(
        index=index,
        text=text,
        token_ids=ids,
        logprobs=None if count is None else [entry(i, count) for i in ids],
        finish_reason="length" if len(ids) == params.max_tokens else "stop",
        stop_reason=None if len(ids) == params.max_tokens else EOS,
    )


@dataclass
class FakeStats:
    """Counters of an engine; the prefix cache found a quarter."""

    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 3
    num_cow_copies: int = 0
    kv_usage: float = 0.5
    prefix_hit_rate: float = 0.25


@dataclass
class FakeScheduler:
    """What progress reads."""

    engine: FakeEngine
    num_waiting: int = 1

    @property
    def num_running(self) -> int:
        return len(self.engine.running)

    @property
    def stats(self) -> FakeStats:
        return FakeStats(10 * self.engine.num_steps, 4 * self.engine.num_steps)


@dataclass
class FakeReport:
    """The one figure of the start-up report that the program reads."""

    max_num_seqs: int = 2


@dataclass
class FakeLLM:
    """What a batch job sees of an `LLM`."""

    engine: FakeEngine = field(default_factory=FakeEngine)
    tokenizer: CharTokenizer | None = field(default_factory=CharTokenizer)
    model_name: str = "fake"
    default_params: dict[str, Any] = field(default_factory=dict)
    report: FakeReport = field(default_factory=FakeReport)

    def encode_chat(self, messages: Any) -> list[int]:
        if not isinstance(messages, list) or not messages:
            raise RequestError("`messages` must be a list.", param="messages")
        return [ord(char) for message in messages for char in message["content"]]
