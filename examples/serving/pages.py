"""Which pages are whose: taken, shared by sequences that begin alike, given back. Nothing here touches a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class Pool:
    """The pages of a cache, by number.

    A page that is full of a prompt's tokens may be published: a prompt that begins alike then shares it. A page is
    known by the page before it and its own tokens, so that two that are alike hold the same keys; who holds a page
    holds all before it.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._free = list(range(pages))[::-1]
        self._holders = [0] * pages
        self._published: dict[tuple[int, tuple[int, ...]], int] = {}
        self._names: dict[int, tuple[int, tuple[int, ...]]] = {}

    @property
    def free(self) -> int:
        """How many pages nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Pages that nobody holds, to hold."""
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def shared(self, tokens: Sequence[int]) -> list[int]:
        """The published pages that a prompt begins with; its last token is never of them, as it must be computed."""
        found: list[int] = []
        for name in self._names_of(tokens, len(tokens) - 1, found):
            if name not in self._published:
                break
            found.append(self._published[name])
        return found

    def share(self, pages: Sequence[int]) -> None:
        """Holds pages that others hold."""
        for page in pages:
            self._holders[page] += 1

    def publish(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Lets others share the pages that a prompt fills: its keys are written."""
        before: list[int] = []
        for page, name in zip(pages, self._names_of(tokens, len(tokens), before), strict=False):
            if self._published.setdefault(name, page) != page:
                break  # another page has these keys: what is behind would be named by one that is not held
            self._names[page] = name
            before.append(page)

    def release(self, pages: Sequence[int]) -> None:
        """Gives pages up; what nobody holds any more is free, and published no longer."""
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)
                if page in self._names:
                    del self._published[self._names.pop(page)]

    def _names_of(self, tokens: Sequence[int], end: int, before: list[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """The name of each full page of tokens[:end]; `before` are the pages that were found for those before it."""
        for number in range(end // self.page_size):
            own = tuple(tokens[number * self.page_size : (number + 1) * self.page_size])
            yield (before[-1] if before else -1, own)
