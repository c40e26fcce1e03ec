"""What became of a case."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

Status = Literal["passed", "refused", "found"]
KINDS = {
    "wrong": "a kernel's results are wrong",
    "tiles": "a tile map, range or list says what is not so",
    "oracle": "the oracle and the reference of random cases differ",
    "compile": "the emitted text does not compile",
    "sanitizer": "a sanitizer reports",
    "emulator": "the launch fails, or the emulator reports",
    "refused call": "arguments that the documentation allows are refused",
    "not deterministic": "gradients differ from one run to the next",
    "raised": "another exception",
    "crash": "the process died",
    "hang": "the case takes longer than its time",
}


@dataclass(frozen=True)
class Outcome:
    """One case's outcome. kind: one of KINDS for a finding. counts: how much was checked, by name."""

    status: Status
    kind: str = ""
    message: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(replace(self, counts=dict(self.counts))))

    @staticmethod
    def from_json(text: str) -> Outcome:
        return Outcome(**json.loads(text))


class Found(Exception):
    """A finding: its kind, and what was seen."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        assert kind in KINDS, kind
        self.kind = kind


Counts = Counter[str]
