"""The page pool: allocation, sharing of common prefixes, release. Works on the host only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class Pool:
    """The pages of a cache, by number, with reference counts.

    A page full of prompt tokens may be published, so that prompts with the same prefix share it. The key of a published
    page consists of the page before it and its own tokens, so pages with equal keys hold the same keys and values. A
    sequence that holds a page holds all pages before it.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._free = list(range(pages))[::-1]
        self._holders = [0] * pages
        self._published: dict[tuple[int, tuple[int, ...]], int] = {}
        self._keys: dict[int, tuple[int, tuple[int, ...]]] = {}

    @property
    def free(self) -> int:
        """The number of free pages."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Allocates free pages."""
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def shared(self, tokens: Sequence[int]) -> list[int]:
        """Returns the published pages of a prompt's prefix, which excludes its last token: that must be computed."""
        found: list[int] = []
        for key in self._page_keys(tokens, len(tokens) - 1, found):
            if key not in self._published:
                break
            found.append(self._published[key])
        return found

    def share(self, pages: Sequence[int]) -> None:
        """Adds a reference to allocated pages."""
        for page in pages:
            self._holders[page] += 1

    def publish(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Publishes the pages that a prompt fills, after its keys have been written."""
        before: list[int] = []
        for page, key in zip(pages, self._page_keys(tokens, len(tokens), before), strict=False):
            if self._published.setdefault(key, page) != page:
                break  # another page holds these keys: the next key would refer to a page that is not held
            self._keys[page] = key
            before.append(page)

    def release(self, pages: Sequence[int]) -> None:
        """Removes a reference; pages without references are free and no longer published."""
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)
                if page in self._keys:
                    del self._published[self._keys.pop(page)]

    def _page_keys(self, tokens: Sequence[int], end: int, before: list[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yields the key of each full page of tokens[:end]; the caller appends each page that it finds to `before`."""
        for number in range(end // self.page_size):
            own = tuple(tokens[number * self.page_size : (number + 1) * self.page_size])
            yield (before[-1] if before else -1, own)
