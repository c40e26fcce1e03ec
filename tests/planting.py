"""How a fault is planted in the text of a kernel."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Fault:
    """`pattern`, a regular expression that stands once in the text of the subject's kernel, becomes `replacement`."""

    name: str
    subject: str
    pattern: str
    replacement: str = ""

    def planted(self, source: str) -> str:
        return replaced_once(self.name, self.pattern, self.replacement, source)


def named(faults: Sequence[Fault]) -> Any:
    """A test for each of these faults."""
    return pytest.mark.parametrize("fault", faults, ids=lambda fault: fault.name)


def replaced_once(name: str, pattern: str, replacement: str, source: str) -> str:
    """The source with the one place that the pattern, a regular expression, finds replaced. `name`: of the fault."""
    text, count = re.subn(pattern, replacement, source, flags=re.DOTALL)
    assert count == 1, f"{name}: {pattern!r} stands {count} times in the source; the fault fits no more"
    assert text != source, f"{name}: {replacement!r} changes nothing"
    return text
