"""How a fault is planted in the text of a kernel."""

from __future__ import annotations

import re


def replaced_once(name: str, pattern: str, replacement: str, source: str) -> str:
    """The source with the one place that the pattern, a regular expression, finds replaced. `name`: of the fault."""
    text, count = re.subn(pattern, replacement, source, flags=re.DOTALL)
    assert count == 1, f"{name}: {pattern!r} stands {count} times in the source; the fault fits no more"
    assert text != source, f"{name}: {replacement!r} changes nothing"
    return text
