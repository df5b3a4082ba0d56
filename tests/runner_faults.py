"""Makes a real runner fail at each place where it can: one call, or every step with some request.

`before` fails without a trace; `after` does the work first, so that what was donated is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import pytest

from pagedjax.host_pool import MovePrograms
from pagedjax.plan import StepPlan, StepResult
from pagedjax.runner import ModelRunner

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes."

STEP_SITES = (
    "copy before", "copy after", "row before", "row after", "forward before", "forward after",
    "sampler before", "sampler after", "readback",
)  # fmt: skip
SWAP_SITES = (
    "gather", "to host", "arrival", "checksum", "device_put", "scatter before", "scatter after",
)  # fmt: skip


class Injected(RuntimeError):
    """What a device raises when a test says so."""


class BrokenArray:
    """What a failed asynchronous call returns: it raises when somebody looks."""

    def copy_to_host_async(self) -> None:
        pass

    def is_ready(self) -> bool:
        return True

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise Injected(OUT_OF_MEMORY)


class FaultyRunner:
    """Runs plans on `runner`, in which one site fails when `fails(plan, nth call)` says so.

    Attributes:
      num_calls: of the site, in steps.
      num_failures: how often it failed.
    """

    def __init__(
        self,
        runner: ModelRunner,
        site: str,
        fails: Callable[[StepPlan, int], bool],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        self.runner = runner
        self.num_calls = self.num_failures = 0
        self._fails = fails
        self._plan: StepPlan | None = None
        self._patch(site, monkeypatch)

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        self._plan = plan
        try:
            return self.runner.launch(plan)
        finally:
            self._plan = None

    def recover(self) -> bool:
        return self.runner.recover()

    def _now(self) -> bool:
        """Counts a call; True when it is to fail. A rehearsal outside a step never is."""
        if self._plan is None:
            return False
        self.num_calls += 1
        fails = self._fails(self._plan, self.num_calls)
        self.num_failures += fails
        return fails

    def _patch(self, site: str, monkeypatch: pytest.MonkeyPatch) -> None:
        runner, host = self.runner, self.runner.host_pool
        name, _, when = site.partition(" ")
        if name in ("copy", "row"):
            attribute = {"copy": "_copy", "row": "_set_row"}[name]
            monkeypatch.setattr(runner, attribute, self._failing(getattr(runner, attribute), when))
        elif name in ("forward", "sampler"):
            attribute = f"_{name}s"
            programs = getattr(runner, attribute)
            failing = {key: self._failing(call, when) for key, call in programs.items()}
            monkeypatch.setattr(runner, attribute, failing)
        elif name == "readback":
            failing = {key: self._breaking(call, 1) for key, call in runner._samplers.items()}
            monkeypatch.setattr(runner, "_samplers", failing)
        elif name == "device_put":
            monkeypatch.setattr(jax, "device_put", self._failing(jax.device_put, "before"))
        elif name == "checksum":
            monkeypatch.setattr(host, "verify", self._flipping(host.verify))
        else:
            programs = {w: self._moves(each, name, when) for w, each in host.programs.items()}
            monkeypatch.setattr(host, "programs", programs)

    def _moves(self, each: MovePrograms, name: str, when: str) -> MovePrograms:
        if name == "scatter":
            return MovePrograms(each.gather, self._failing(each.scatter, when))
        if name == "arrival":
            return MovePrograms(self._breaking(each.gather, 0), each.scatter)
        if name == "to":

            def gather(*arguments: Any) -> Any:
                arrays = each.gather(*arguments)
                return tuple(_NoRoom() for _ in arrays) if self._now() else arrays

            return MovePrograms(gather, each.scatter)
        return MovePrograms(self._failing(each.gather, "before"), each.scatter)

    def _failing(self, call: Callable[..., Any], when: str) -> Callable[..., Any]:
        def wrapper(*arguments: Any) -> Any:
            fails = self._now()
            if fails and when == "before":
                raise Injected(OUT_OF_MEMORY)
            result = call(*arguments)
            if fails:
                raise Injected(OUT_OF_MEMORY)
            return result

        return wrapper

    def _breaking(self, call: Callable[..., Any], first: int) -> Callable[..., Any]:
        """Returns broken arrays from place `first` on."""

        def wrapper(*arguments: Any) -> Any:
            arrays = call(*arguments)
            if not self._now():
                return arrays
            return (*arrays[:first], *(BrokenArray() for _ in arrays[first:]))

        return wrapper

    def _flipping(self, verify: Callable[[Iterable[int]], None]) -> Callable[..., None]:
        """Flips a bit of the first page that is about to be checked."""

        def wrapper(host_pages: Iterable[int]) -> None:
            pages = list(host_pages)
            if pages and self._now():
                self.runner.host_pool.drain(wait=True)
                self.runner.host_pool._bytes[pages[0], -1] ^= 64
            verify(pages)

        return wrapper


class _NoRoom(BrokenArray):
    def copy_to_host_async(self) -> None:
        raise Injected(OUT_OF_MEMORY)
