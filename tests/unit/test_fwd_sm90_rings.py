"""The Hopper forward's rings of buffers, played through without a GPU: nobody waits for ever.

Who waits for whom is a network of processes that only wait for counts which only grow. So how far
all of them come does not depend on who is quick: one order tells for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

#: Query tiles handed out at a time (``item_stages`` in the kernel).
ITEM_STAGES = 3

Wait = Iterator[Callable[[], bool]]


@dataclass(frozen=True)
class Item:
    """A query tile: how many key tiles its block visits, and of each consumer, the first that it
    visits itself and the one after its last."""

    tiles: int
    own: tuple[tuple[int, int], ...]

    def unseen(self, consumer: int) -> tuple[int, int]:
        """Tiles that only others attend to, before and after (``OwnWork`` in the kernel)."""
        first, last = self.own[consumer]
        return (self.tiles, 0) if first == last else (first, self.tiles - last)


@dataclass
class Block:
    """A thread block of ``fwd_sm90``.

    Attributes:
        careful: a chain ends where a consumer would pass more tiles than the rings have.
        loaded: how many there were of each, so far.
        released: how many of each a reader has given back.
    """

    items: list[Item]
    consumers: int
    stages: int
    q_stages: int
    careful: bool = True
    loaded: Counter[str] = field(default_factory=Counter)
    released: Counter[tuple[str, int]] = field(default_factory=Counter)

    def load(self, what: str, stages: int, readers: list[int]) -> Wait:
        number = self.loaded[what]
        yield lambda: all(self.released[what, it] > number - stages for it in readers)
        self.loaded[what] = number + 1

    def await_next(self, what: str, reader: int) -> Wait:
        """Until the one is there that this reader has not given back yet."""
        number = self.released[what, reader]
        yield lambda: self.loaded[what] > number

    def release(self, what: str, reader: int) -> None:
        self.released[what, reader] += 1

    def schedule(self) -> Wait:
        readers = [*range(self.consumers), -1, -2, -3]
        for _ in range(len(self.items) + 1):  # after the last one, what tells the end
            yield from self.load("item", ITEM_STAGES, readers)

    def load_queries(self) -> Wait:
        for _ in self.items:
            yield from self.await_next("item", -1)
            self.release("item", -1)
            for consumer in range(self.consumers):
                yield from self.load(f"q{consumer}", self.q_stages, [consumer])

    def load_keys(self, what: str, loader: int) -> Wait:
        for item in self.items:
            yield from self.await_next("item", loader)
            self.release("item", loader)
            for _ in range(item.tiles):
                yield from self.load(what, self.stages, [*range(self.consumers)])

    def passes(self, what: str, consumer: int, tiles: int) -> Wait:
        for _ in range(tiles):
            yield from self.await_next(what, consumer)
            self.release(what, consumer)

    def passes_tiles(self, consumer: int, tiles: int) -> Wait:
        for _ in range(tiles):
            yield from self.passes("k", consumer, 1)
            yield from self.passes("v", consumer, 1)

    def step(self, consumer: int, is_last: bool) -> Wait:
        """Scores of a tile, and the output of the one before."""
        yield from self.await_next("k", consumer)
        yield from self.await_next("v", consumer)
        yield from self.scores(consumer, is_last)
        self.release("v", consumer)

    def scores(self, consumer: int, is_last: bool) -> Wait:
        yield from self.passes("k", consumer, 1)
        if is_last:
            self.release(f"q{consumer}", consumer)

    def await_told(self, number: int) -> Wait:
        yield lambda: self.loaded["item"] > number

    def attend(self, me: int) -> Wait:
        """What a consumer waits for and gives back, in the order of ``FwdSm90::attend``."""
        chained = False
        yield from self.await_told(0)
        for number, item in enumerate(self.items):
            first, last = item.own[me]
            before, after = item.unseen(me)
            if not chained:
                yield from self.await_next(f"q{me}", me)
                yield from self.passes_tiles(me, before)
                if first == last:
                    self.release(f"q{me}", me)
                else:
                    yield from self.scores(me, is_last=last - first == 1)
            for tile in range(first + 1, last):
                yield from self.step(me, is_last=tile == last - 1)
            yield from self.await_told(number + 1)
            chained = False
            if number + 1 < len(self.items) and first < last:
                following = self.items[number + 1]
                begin, end = following.own[me]
                unseen = after + following.unseen(me)[0]
                may = unseen < self.stages or not self.careful
                chained = self.q_stages > 1 and begin < end and may
            if chained:
                yield from self.await_next(f"q{me}", me)
                yield from self.passes("k", me, unseen)
                yield from self.step(me, is_last=end - begin == 1)
                yield from self.passes("v", me, unseen)
            else:
                if first < last:
                    yield from self.passes("v", me, 1)
                yield from self.passes_tiles(me, after)
            self.release("item", me)

    def ends(self) -> bool:
        """Whether all of its warps come to their ends."""
        running = [
            self.schedule(),
            self.load_queries(),
            self.load_keys("k", -2),
            self.load_keys("v", -3),
            *(self.attend(consumer) for consumer in range(self.consumers)),
        ]
        waits = [next(process, None) for process in running]
        while True:
            moved = False
            for place, process in enumerate(running):
                while (wait := waits[place]) is not None and wait():
                    waits[place] = next(process, None)
                    moved = True
            if not moved:
                return all(wait is None for wait in waits)


@st.composite
def items(draw: st.DrawFn, consumers: int) -> Item:
    """Any interval of a block's tiles for each consumer, or none."""
    tiles = draw(st.integers(1, 12))
    ends = st.tuples(st.integers(0, tiles), st.integers(0, tiles))
    return Item(
        tiles, tuple((min(own), max(own)) for own in (draw(ends) for _ in range(consumers)))
    )


@given(data=st.data(), consumers=st.integers(2, 4), stages=st.integers(2, 6), q=st.integers(1, 2))
def test_nobody_waits_for_ever(data: st.DataObject, consumers: int, stages: int, q: int) -> None:
    """All warps come to their ends, whatever key tiles each consumer visits."""
    drawn = data.draw(st.lists(items(consumers), max_size=6))
    assert Block(drawn, consumers, stages, q).ends()


def test_chains_must_end() -> None:
    """Were values held back while more tiles are passed than the rings have, all would wait."""
    both = [Item(8, ((0, 8), (7, 8))), Item(8, ((7, 8), (0, 8)))]
    assert Block(both, 2, 3, 2).ends()
    assert not Block(both, 2, 3, 2, careful=False).ends()
