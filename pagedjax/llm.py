"""`LLM`: the front door of the library. Loads a model, starts the engine, answers lists of prompts.

A facade by composition: `llm.engine` is the engine, `llm.report` what start-up decided.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from pagedjax import device
from pagedjax.chat_template import ChatTemplate, encode_chat
from pagedjax.config import EngineConfig
from pagedjax.errors import ConfigError, RequestError
from pagedjax.intake import prompt_fields
from pagedjax.interrupts import DeferredInterrupt
from pagedjax.programs import CompiledProgram, Countdown
from pagedjax.request import RequestOutput, SamplingParams
from pagedjax.startup import ModelFacts, start_engine
from pagedjax.tokenizer import TextTokenizer, Tokenizer
from pagedjax.weights import LoadedModel, load_model, resolve_model

type Messages = Sequence[Mapping[str, Any]]

# What is read of a tokenizer; one that is no subclass of `Tokenizer` must bring all of it.
_TOKENIZER_NAMES = (
    "encode",
    "decode",
    "vocab_size",
    "eos_token_ids",
    "bos_token_id",
    "add_bos",
    "special_ids",
    "token_text",
)


class LLM:
    """Answers prompts with a model on paged memory.

    >>> llm = LLM("smollm2-135m-instruct")  # doctest: +SKIP
    >>> llm.generate("The sea is", SamplingParams(max_tokens=8))[0].outputs[0].text
    """

    def __init__(
        self,
        model: Any = "smollm2-135m-instruct",
        *,
        tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
        chat_template: str | None = None,
        progress: bool | Callable[[str], None] | None = None,
        **options: Any,
    ) -> None:
        """Loads, sizes the pool and compiles; afterwards nothing compiles any more.

        Args:
          model: a directory in Hugging Face's layout, a `.gguf` file, a hub id (with a network),
            `"smollm2-135m-instruct"`; or a model of your own (see `pagedjax.models.contract`).
          tokenizer: what `encode`s and `decode`s, or a directory with a tokenizer.json; None: the
            model's own. Without one, prompts are token ids and answers have no text.
          chat_template: Jinja source for `chat`; None: the model's own.
          progress: show a bar while compiling, and a line for each program that was compiled;
            None: on a terminal. Or a function that gets the lines.
          **options: of the engine, see `pagedjax.config.EngineConfig`.

        Raises:
          ConfigError, ModelFormatError, CapacityError: with what to change.
        """
        config = EngineConfig.from_options(options)
        loaded: LoadedModel | None = None
        started = time.monotonic()
        if isinstance(model, str | os.PathLike):
            loaded = load_model(
                resolve_model(os.fspath(model)),
                dtype=config.dtype,
                quantization=config.quantization,
                default_dtype=jnp.dtype(device.defaults().dtype),
            )
        elif config.quantization != "none":
            raise ConfigError(
                "`quantization` must be used with a model that is loaded from files: weights are "
                f"quantised as they are read. Got {config.quantization!r} and a model of your own, "
                f"a {type(model).__name__}: leave the option out, or give its files."
            )
        self.tokenizer = _tokenizer(tokenizer, loaded)
        self.model_name = type(model).__name__ if loaded is None else loaded.name
        self.default_params: dict[str, Any] = (
            {} if loaded is None else dict(loaded.sampling_defaults)
        )
        self._template = _template(chat_template, loaded, self.tokenizer)
        facts = _facts(model, loaded, self.tokenizer, time.monotonic() - started)
        self._terminal = sys.stderr is not None and sys.stderr.isatty()  # pyright: ignore[reportUnnecessaryComparison]
        with _CompileBar(self._terminal if progress is None else progress) as bar:
            self.engine, self.report = start_engine(
                model if loaded is None else loaded.model, self.tokenizer, config, facts, bar
            )
        self._ids = itertools.count()
        self._turn = threading.Lock()  # held by who drives the engine

    def generate(
        self,
        prompts: Any,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        priority: int | Sequence[int] = 0,
        timeout: float | None = None,
    ) -> list[RequestOutput]:
        """Answers one prompt or a list of them; outputs are in input order.

        Args:
          prompts: text, a list of token ids, a mapping with `prompt` or `prompt_token_ids` and
            `cache_salt`, or a list of any of these.
          params: for all, or a list with one for each; None: the model's defaults.
          use_tqdm: show a progress bar; None: on a terminal.
          priority: for all, or a list with one for each; smaller values run earlier. 0 unless the
            engine runs with `scheduling_policy="priority"`.
          timeout: seconds that each may take, in the queue and running; a prompt that takes longer
            gets what came so far and an error of code "timeout".

        A prompt that cannot be served gets an output whose `error` says why; the others run. Calls
        from several threads take turns; prompts that shall run together belong in one call.
        """
        items = _as_list(prompts)
        return self._run(self._asks(items, params, priority, timeout), use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        priority: int | Sequence[int] = 0,
        timeout: float | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them with the model's chat template.

        Args:
          messages: a list of `{"role": ..., "content": ...}`, or a list of such lists.
          params, use_tqdm, priority, timeout: as for `generate`.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise RequestError(
                "`messages` must be a list of messages, or a list of such lists. "
                f"Got {type(messages).__name__}.",
                param="messages",
            )
        first = messages[0] if messages else None
        items: list[Any] = [messages] if isinstance(first, Mapping) else list(messages)
        prompts: list[Any] = []
        for item in items:
            try:
                prompts.append(self.encode_chat(item))
            except RequestError as error:
                prompts.append(error)
        return self._run(self._asks(prompts, params, priority, timeout), use_tqdm)

    def pin_prefix(self, prompt: Any, *, cache_salt: str | None = None) -> int:
        """Keeps a prompt's full pages in the prefix cache; see `LLMEngine.pin_prefix`.

        Args:
          prompt: one prompt in a form that `generate` takes; of a chat, what `encode_chat` gives.
          cache_salt: of the requests that begin with it, unless the prompt has one.

        Returns:
          how many tokens are pinned.
        """
        prompt, salt = prompt_fields(prompt)
        with self._turn:
            return self.engine.pin_prefix(prompt, cache_salt=cache_salt if salt is None else salt)

    def unpin_prefix(self, prompt: Any, *, cache_salt: str | None = None) -> int:
        """Takes back `pin_prefix` of the same prompt; returns how many tokens that were, or 0."""
        prompt, salt = prompt_fields(prompt)
        with self._turn:
            return self.engine.unpin_prefix(prompt, cache_salt=cache_salt if salt is None else salt)

    def encode_chat(self, messages: Messages) -> list[int]:
        """Token ids of a conversation, with the prompt for the answer.

        Raises:
          RequestError: there is no template, or the messages do not fit it.
        """
        if self.tokenizer is None:
            raise RequestError(
                "`messages` must not be used with this engine: it has no tokenizer. "
                "Use a prompt of token ids.",
                param="messages",
            )
        return encode_chat(self.tokenizer, self._template, messages)

    def _params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None:
            return [SamplingParams.from_dict(self.default_params)] * count
        if isinstance(params, SamplingParams):
            return [params] * count
        each: list[Any] = list(params) if isinstance(params, list | tuple) else [params]
        wrong = [type(item).__name__ for item in each if not isinstance(item, SamplingParams)]
        if wrong or len(each) != count:
            got = f"a {wrong[0]}" if wrong else len(each)
            raise RequestError(
                f"`params` must be one SamplingParams or a list of as many as prompts ({count}). "
                f"Got {got}.",
                param="params",
            )
        return each

    def _asks(
        self,
        items: list[Any],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int],
        timeout: float | None,
    ) -> list[_Ask]:
        each = zip(
            items, self._params(params, len(items)), _priorities(priority, len(items)), strict=True
        )
        return [_Ask(f"request-{next(self._ids)}", *values, timeout) for values in each]

    def _run(self, asks: list[_Ask], use_tqdm: bool | None) -> list[RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        show = self._terminal if use_tqdm is None else use_tqdm
        with self._turn, DeferredInterrupt() as interrupt:
            try:
                with tqdm(total=len(asks), disable=not show, unit="prompt") as bar:
                    self._drain(asks, outputs, bar, interrupt)
            except BaseException:  # Ctrl-C too: what was asked here must not run on later
                for ask in asks:
                    self.engine.abort(ask.request_id)
                raise
        return [outputs[ask.request_id] for ask in asks]

    def _feed(
        self,
        waiting: deque[_Ask],
        outputs: dict[str, RequestOutput],
        interrupt: DeferredInterrupt,
    ) -> None:
        """Adds what the queue has room for; the answers of what can never run go to `outputs`."""
        while waiting and self.engine.has_queue_room:
            interrupt.check()
            ask = waiting.popleft()
            try:
                self._add(ask)
            except RequestError as error:
                outputs[ask.request_id] = _failed(ask.request_id, ask.item, error)

    def _add(self, ask: _Ask) -> None:
        if isinstance(ask.item, RequestError):
            raise ask.item
        prompt, salt = prompt_fields(ask.item)
        self.engine.add_request(
            ask.request_id,
            prompt,
            ask.params,
            cache_salt=salt,
            priority=ask.priority,
            timeout=ask.timeout,
        )

    def _drain(
        self,
        asks: list[_Ask],
        outputs: dict[str, RequestOutput],
        bar: Any,
        interrupt: DeferredInterrupt,
    ) -> None:
        asked, waiting = {ask.request_id for ask in asks}, deque(asks)
        started, generated = time.monotonic(), 0
        while waiting or self.engine.has_unfinished:
            self._feed(waiting, outputs, interrupt)
            interrupt.check()
            for output in self.engine.step():
                if output.request_id not in asked:  # aborted when an earlier call was interrupted
                    continue
                outputs[output.request_id] = output
                generated += sum(len(sample.token_ids) for sample in output.outputs)
                seconds = max(time.monotonic() - started, 1e-9)
                bar.set_postfix_str(f"{generated / seconds:.1f} tok/s", refresh=False)
            bar.update(len(outputs) - bar.n)


@dataclass(frozen=True, slots=True)
class _Ask:
    """One prompt on its way to the engine."""

    request_id: str
    item: Any  # a prompt in any of its forms, or the error that it gave already
    params: SamplingParams
    priority: int
    timeout: float | None


class _CompileBar:
    """A progress bar over an engine's programs, made when the first one is ready."""

    def __init__(self, show: bool | Callable[[str], None]) -> None:
        self._tell = show if callable(show) else functools.partial(tqdm.write, file=sys.stderr)
        self._bar = tqdm(desc="compiling", unit="program", disable=show is not True, leave=False)
        self._countdown, self._shows = Countdown(), bool(show)

    def __call__(self, program: CompiledProgram, done: int, total: int) -> None:
        line = self._countdown.line(program, done, total)
        if line is not None and self._shows:
            self._tell(line)
        self._bar.total = total
        self._bar.set_postfix_str(program.name, refresh=False)
        self._bar.update(done - self._bar.n)

    def __enter__(self) -> _CompileBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def _as_list(prompts: Any) -> list[Any]:
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        return [prompts]
    items = prompts.tolist() if isinstance(prompts, np.ndarray) else list(prompts)
    is_ids = bool(items) and all(isinstance(item, int) for item in items)
    return [items] if is_ids else items


def _priorities(priority: Any, count: int) -> list[Any]:
    """One for each prompt; the engine checks the values."""
    if not isinstance(priority, list | tuple):
        return [priority] * count
    each: list[Any] = list(priority)
    if len(each) != count:
        raise RequestError(
            f"`priority` must be an integer or a list of as many as prompts ({count}). "
            f"Got {len(each)}.",
            param="priority",
        )
    return each


def _failed(request_id: str, item: Any, error: RequestError) -> RequestOutput:
    return RequestOutput(
        request_id=request_id,
        prompt=item if isinstance(item, str) else None,
        prompt_token_ids=[],
        outputs=[],
        finished=True,
        error=error,
    )


def _tokenizer(given: Any, loaded: LoadedModel | None) -> Tokenizer | None:
    if isinstance(given, str | os.PathLike):
        return TextTokenizer.from_directory(Path(given))
    if given is not None:
        missing = [name for name in _TOKENIZER_NAMES if not hasattr(given, name)]
        if missing:
            raise ConfigError(
                "`tokenizer` must be a subclass of pagedjax.tokenizer.Tokenizer with `encode`, "
                f"`decode` and `vocab_size`, or have what it has. Got {type(given).__name__} "
                f"without {', '.join(missing)}."
            )
        return given
    if loaded is None:
        return None
    if loaded.gguf_metadata is not None:
        return TextTokenizer.from_gguf(loaded.gguf_metadata)
    return None if loaded.directory is None else TextTokenizer.from_directory(loaded.directory)


def _template(
    source: str | None, loaded: LoadedModel | None, tokenizer: Tokenizer | None
) -> ChatTemplate | None:
    if source is None and loaded is not None:
        source = loaded.chat_template_source
    if source is None and tokenizer is not None:
        source = getattr(tokenizer, "chat_template", None)
    if source is None:
        return None
    return ChatTemplate(
        source,
        bos_token=getattr(tokenizer, "bos_token", None),
        eos_token=getattr(tokenizer, "eos_token", None),
    )


def _facts(
    model: Any, loaded: LoadedModel | None, tokenizer: Tokenizer | None, seconds: float
) -> ModelFacts:
    eos = frozenset[int]() if tokenizer is None else frozenset(tokenizer.eos_token_ids)
    if loaded is None:
        longest = getattr(model, "max_model_len", None)
        return ModelFacts(name=type(model).__name__, max_model_len=longest, eos_token_ids=eos)
    return ModelFacts(
        name=loaded.name,
        max_model_len=loaded.config.max_positions,
        eos_token_ids=eos | frozenset(loaded.eos_token_ids),
        load_seconds=seconds,
        identity=loaded.identity,
    )
