"""Random operations on allocator, page tables and prefix cache against the plain model."""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pagedjax.errors import IntegrityError
from tests.paging.simulation import Stream, World

TOKENS = st.lists(st.integers(0, 2), max_size=9)  # few tokens: equal prefixes are common
SALTS = st.sampled_from([None, None, "a", "b"])


class PagingMachine(RuleBasedStateMachine):
    """Small pools, so that allocation fails, eviction happens and pages are shared all the time."""

    world: World

    @initialize(num_pages=st.integers(2, 16), page_size=st.sampled_from([1, 2, 3, 4]))
    def begin(self, num_pages: int, page_size: int) -> None:
        self.world = World(num_pages, page_size)
        self.past: list[tuple[list[int], str | None]] = []  # what finished, to be asked again

    def has_streams(self) -> bool:
        return bool(self.world.streams)

    def pick(self, data: st.DataObject) -> Stream:
        return self.world.streams[data.draw(st.integers(0, len(self.world.streams) - 1))]

    @rule(tokens=TOKENS, salt=SALTS)
    def start(self, tokens: list[int], salt: str | None) -> None:
        self.world.start(tokens, salt)

    @precondition(has_streams)
    @rule(data=st.data())
    def repeat_a_prompt(self, data: st.DataObject) -> None:
        stream = self.pick(data)
        self.world.start(list(stream.tokens), stream.salt)

    @precondition(has_streams)
    @rule(data=st.data(), tokens=TOKENS, copy_last=st.booleans())
    def grow(self, data: st.DataObject, tokens: list[int], copy_last: bool) -> None:
        self.world.grow(self.pick(data), tokens, copy_last=copy_last)

    @precondition(has_streams)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.world.fork(self.pick(data))

    @precondition(has_streams)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def fork_and_grow_all_in_one_step(self, data: st.DataObject, tokens: list[int]) -> None:
        parent = self.pick(data)
        family = [parent, self.world.fork(parent), self.world.fork(parent)]
        self.world.grow_together(family, tokens)

    @precondition(has_streams)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        stream = self.pick(data)
        self.world.truncate(stream, data.draw(st.integers(0, len(stream.tokens))))

    @precondition(has_streams)
    @rule(data=st.data())
    def overwrite(self, data: st.DataObject) -> None:
        stream = self.pick(data)
        if stream.pages:
            self.world.overwrite(stream, data.draw(st.integers(0, len(stream.pages) - 1)))

    @precondition(has_streams)
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        stream = self.pick(data)
        self.world.register(stream, data.draw(st.integers(0, len(stream.tokens))))

    @precondition(has_streams)
    @rule(data=st.data())
    def register_all(self, data: st.DataObject) -> None:
        stream = self.pick(data)
        self.world.register(stream, len(stream.tokens))

    @rule(tokens=st.lists(st.integers(0, 2), min_size=4, max_size=9), salt=SALTS)
    def run_to_its_end(self, tokens: list[int], salt: str | None) -> None:
        stream = self.world.start(tokens, salt)
        if stream is not None:
            self.world.register(stream, len(tokens))
            self.world.release(stream)
            self.past.append((tokens, salt))

    @precondition(lambda self: self.past)
    @rule(data=st.data(), more=st.lists(st.integers(0, 2), max_size=3))
    def ask_again(self, data: st.DataObject, more: list[int]) -> None:
        tokens, salt = data.draw(st.sampled_from(self.past))
        self.world.start([*tokens, *more], salt)

    @precondition(has_streams)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def register_then_go_back_and_on(self, data: st.DataObject, tokens: list[int]) -> None:
        stream = self.pick(data)
        self.world.register(stream, len(stream.tokens))
        self.world.truncate(stream, data.draw(st.integers(0, len(stream.tokens))))
        self.world.grow(stream, tokens)

    @precondition(has_streams)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.world.release(self.pick(data))

    @rule()
    def reset(self) -> None:
        self.world.reset()

    @precondition(lambda self: self.world.plain.order)
    @rule(data=st.data())
    def misuse_changes_nothing(self, data: st.DataObject) -> None:
        unheld = data.draw(st.sampled_from(self.world.plain.order))
        held = [page for stream in self.world.streams for page in stream.pages]
        with pytest.raises(IntegrityError):
            self.world.allocator.free([*held, unheld])
        with pytest.raises(IntegrityError):
            self.world.allocator.free([*held, 0])
        if unheld not in self.world.plain.content:
            with pytest.raises(IntegrityError):
                self.world.allocator.share(unheld)

    @invariant()
    def everything_agrees(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


def test_paging_agrees_with_the_plain_model() -> None:
    run_state_machine_as_test(
        PagingMachine, settings=settings(max_examples=100, stateful_step_count=50)
    )


@pytest.mark.slow
def test_paging_agrees_with_the_plain_model_at_length() -> None:
    run_state_machine_as_test(
        PagingMachine, settings=settings(max_examples=10_000, stateful_step_count=50)
    )


def run_trace(num_operations: int, seed: int) -> None:
    """Random operations with exact accounting after each, and everything compared now and then."""
    draw = random.Random(seed)
    world = World(num_pages=65, page_size=4)
    hits = 0
    for step in range(num_operations):
        kind = draw.random()
        stream = draw.choice(world.streams) if world.streams else None
        if stream is None or (kind < 0.2 and len(world.streams) < 24):
            tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 40))]
            started = world.start(tokens, draw.choice([None, "a"]))
            hits += started is not None and started.chain.hashes != []
        elif kind < 0.55:
            world.grow(stream, [draw.randrange(2)], copy_last=draw.random() < 0.3)
        elif kind < 0.62 and len(world.streams) < 24:
            world.fork(stream)
        elif kind < 0.68:
            world.truncate(stream, draw.randint(0, len(stream.tokens)))
        elif kind < 0.72 and stream.pages:
            world.overwrite(stream, draw.randrange(len(stream.pages)))
        elif kind < 0.88:
            world.register(stream, len(stream.tokens))
        else:
            world.release(stream)
        world.check_counts()
        if step % 64 == 0:
            world.check()
    assert hits
    world.finish()


def test_random_trace_keeps_exact_accounts() -> None:
    run_trace(20_000, seed=1)


@pytest.mark.slow
def test_long_random_trace_keeps_exact_accounts() -> None:
    run_trace(200_000, seed=2)
