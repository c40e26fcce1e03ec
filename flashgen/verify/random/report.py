"""What a run of random cases came to, in words and as JSON."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from flashgen.verify.random.draw import Options
from flashgen.verify.random.outcome import KINDS
from flashgen.verify.random.runner import Result

# A refusal's kind: its numbers and names are left out, as they are the case's.
_OWN = re.compile(r"-?\d[\w.+]*|'[^']*'|\([\w.]+:\d+\)")


@dataclass
class Summary:
    """Counts over results; `refused` by message, without the case's own names and numbers."""

    options: Options
    cases: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    checked: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    findings: list[Result] = field(default_factory=list)

    def add(self, result: Result) -> None:
        outcome = result.outcome
        self.cases += 1
        self.outcomes[outcome.kind or outcome.status] += 1
        self.checked.update(outcome.counts)
        if outcome.status == "refused":
            self.refused[_OWN.sub("…", outcome.message.splitlines()[0])] += 1
        if outcome.status == "found":
            self.findings.append(result)

    @property
    def ok(self) -> bool:
        return not self.findings

    def to_data(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "cases": self.cases,
            "outcomes": dict(self.outcomes),
            "checked": dict(self.checked),
            "refused": dict(self.refused),
            "findings": [finding_to_data(result, self.options) for result in self.findings],
        }

    def lines(self) -> list[str]:
        """A few lines: how many cases ran, what was refused how often, and a table of what was checked."""
        kinds = ", ".join(f"{self.outcomes.get(kind, 0)} {kind}" for kind in ("passed", "refused", *KINDS))
        refused = [f"refused {count} times: {message}" for message, count in self.refused.most_common()]
        checked = [f"{count:>8} {what}" for what, count in sorted(self.checked.items())]
        return [f"{self.cases} cases: {kinds}", *refused, "checked:" if checked else "checked: nothing", *checked]


def command(seed: int, options: Options) -> str:
    """The command that runs one case."""
    parts = [f"flashgen verify --random --seed {seed} --cases 1"]
    parts += ["--emulate"] if options.emulate and not options.sanitize else []
    parts += [f"--target {options.targets[0]}"] if len(options.targets) == 1 else []
    parts += [f"--pass {options.passes[0]}"] if len(options.passes) == 1 else []
    parts += [f"--sanitize {options.sanitize}"] if options.sanitize else []
    return " ".join(parts)


def finding_to_data(result: Result, options: Options) -> dict[str, Any]:
    return {
        "seed": result.seed,
        "command": command(result.seed, options),
        "kind": result.outcome.kind,
        "message": result.outcome.message,
        "spec": str(result.recipe),
        "recipe": result.recipe.to_json(),
    }


def finding_text(result: Result, options: Options) -> str:
    """A finding for a person: what was seen, the smallest case, and how to run it again."""
    return "\n".join(
        [
            f"FOUND {result.outcome.kind}: {KINDS[result.outcome.kind]} (seed {result.seed})",
            *(f"  {line}" for line in result.outcome.message.strip().splitlines()),
            "the smallest case that fails alike:",
            *(f"  {line}" for line in str(result.recipe).splitlines()),
            f"  {_where(result)}",
            f"again: {command(result.seed, options)}",
            "in a test, by flashgen.verify.random: assert check(Recipe.from_json(TEXT)).status == 'passed', TEXT being",
            f"  {result.recipe.to_json()}",
        ]
    )


def _where(result: Result) -> str:
    recipe = result.recipe
    if not recipe.passes:
        return "predicates alone, no kernel"
    words = [str(recipe.target), " and ".join(recipe.passes), "emulated" if recipe.emulate else "on the GPU"]
    words += [f"plan {recipe.plan}"] if recipe.plan else []
    words += ["deterministic"] if recipe.deterministic else []
    words += [f"under {recipe.sanitize}"] if recipe.sanitize else []
    words += [f"schedule {recipe.schedule}"] if recipe.schedule else []
    return ", ".join(words)
