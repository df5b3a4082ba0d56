"""Ctrl-C waits for the end of a step, and is never lost."""

from __future__ import annotations

import gc
import signal
import threading
import warnings

import pytest

from pagedjax.interrupts import DeferredInterrupt, HeldInterrupt

pytestmark = pytest.mark.usefixtures("ctrl_c")


def press(times: int) -> None:
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_waits_for_the_check() -> None:
    with DeferredInterrupt() as interrupt:
        press(1)  # raises nothing
        with pytest.raises(KeyboardInterrupt):
            interrupt.check()
        interrupt.check()  # told once
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_that_was_kept_is_raised_when_they_are_raised_at_once() -> None:
    with DeferredInterrupt() as interrupt:
        press(1)
        with pytest.raises(KeyboardInterrupt):
            interrupt.expose()
        press(1)  # what unwinds is not cut off
        with pytest.raises(KeyboardInterrupt):
            press(1)
        interrupt.finish()


@pytest.mark.parametrize("defers", [True, False])
def test_what_unwinds_after_an_interrupt_is_not_cut_off_by_the_next_one(
    defers: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with DeferredInterrupt(signal.SIGINT, defers=defers, notice=b"stopping") as interrupt:
        with pytest.raises(KeyboardInterrupt):
            press(1 + defers)
        capfd.readouterr()
        press(1)  # raises nothing
        assert interrupt.is_pending
        assert capfd.readouterr().err == ""
        with pytest.raises(KeyboardInterrupt):
            press(1)
        interrupt.finish()


def test_an_interrupt_that_nobody_checked_is_raised_at_the_end() -> None:
    with pytest.raises(KeyboardInterrupt), DeferredInterrupt():
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("defers", [True, False])
@pytest.mark.parametrize("is_kept", [True, False])
def test_an_interrupt_of_work_that_is_done_changes_nothing_and_says_nothing(
    defers: bool, is_kept: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with DeferredInterrupt(signal.SIGINT, defers=defers, notice=b"stopping") as interrupt:
        if is_kept and defers:
            press(1)
            capfd.readouterr()
        interrupt.finish()
        press(1)
    assert capfd.readouterr().err == ""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_still_ends_what_is_being_closed() -> None:
    with DeferredInterrupt() as interrupt:
        interrupt.finish()
        with pytest.raises(KeyboardInterrupt):
            press(2)


def press_while_taking(lock: threading.Lock) -> None:
    try:
        press(2)
        lock.acquire()
    finally:
        lock.release()  # it was never taken


@pytest.mark.parametrize("defers", [True, False])
def test_an_error_of_what_an_interrupt_cut_off_is_the_interrupt(defers: bool) -> None:
    with DeferredInterrupt(signal.SIGINT, defers=defers) as interrupt:
        with pytest.raises(RuntimeError), interrupt.alone():
            raise RuntimeError  # nobody pressed anything
        with pytest.raises(KeyboardInterrupt) as raised, interrupt.alone():
            press_while_taking(threading.Lock())
        assert isinstance(raised.value.__cause__, RuntimeError)
        interrupt.finish()
        with pytest.raises(RuntimeError), interrupt.alone():
            raise RuntimeError


def test_a_second_interrupt_is_raised_at_once() -> None:
    with DeferredInterrupt() as interrupt:
        with pytest.raises(KeyboardInterrupt):
            press(2)
        with pytest.raises(KeyboardInterrupt):
            interrupt.check()  # the first one is still to be told


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_a_garbage_collection_swallowed_is_not_lost() -> None:
    """Whatever Python drops because nobody could catch it, as in a callback of JAX's."""

    def collected(phase: str, info: object) -> None:
        del phase, info  # what such a callback is called with
        gc.callbacks.remove(collected)
        press(1)

    with DeferredInterrupt(signal.SIGINT, defers=False) as interrupt:
        gc.callbacks.append(collected)
        gc.collect()  # raises nothing
        assert not interrupt.is_pending
        interrupt.defer()
        assert interrupt.is_pending
        interrupt.finish()
        interrupt.defer()
        assert not interrupt.is_pending, "it was answered"


@pytest.mark.parametrize("defers", [True, False])
def test_an_interrupt_within_jaxs_callback_of_the_collector_is_kept_and_prints_nothing(
    defers: bool,
) -> None:
    def _xla_gc_callback(phase: str, info: object) -> None:
        del phase, info  # what such a callback is called with
        gc.callbacks.remove(_xla_gc_callback)
        press(2)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of what could not be raised, too
        with DeferredInterrupt(signal.SIGINT, defers=defers) as interrupt:
            gc.callbacks.append(_xla_gc_callback)
            gc.collect()
            assert interrupt.is_pending
            with pytest.raises(KeyboardInterrupt):
                interrupt.check()


def test_a_program_with_its_own_handler_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        with DeferredInterrupt() as interrupt:
            signal.raise_signal(signal.SIGINT)
            interrupt.check()
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]


def test_other_threads_are_left_alone() -> None:
    def run() -> None:
        with DeferredInterrupt() as interrupt:
            interrupt.check()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_held_interrupt_goes_to_its_own_handler_at_the_end() -> None:
    held, is_whole = HeldInterrupt(), False
    with pytest.raises(KeyboardInterrupt):  # noqa: SIM117, PT012 (not one block)
        with held:
            press(2)
            is_whole = True
    assert is_whole
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with held:
        pass  # told once
    with DeferredInterrupt() as interrupt:
        with held:
            press(1)
            assert not interrupt.is_pending
        assert interrupt.is_pending
        interrupt.finish()
