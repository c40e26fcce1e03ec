"""`flashgen verify --random`: its options, and what it prints while it runs and at the end."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flashgen.cli.console import INTERRUPTED, note, print_json, progress, stdout

if TYPE_CHECKING:
    from flashgen.codegen.stages import Pass
    from flashgen.verify.random import Options, Summary

_SECONDS_BETWEEN_NOTES = 60.0

Random = Annotated[bool, typer.Option("--random", help="Random variants, captures, calls and targets.")]
Count = Annotated[int | None, typer.Option("--cases", min=1, help="With --random: how many cases.", show_default="100")]
Minutes = Annotated[float | None, typer.Option("--minutes", min=0.0, help="With --random: for how long.")]
Jobs = Annotated[int, typer.Option("--jobs", min=1, help="With --random: cases at a time, each in its own process.")]


def check_beside(random: bool, of_specs: Mapping[str, bool], of_random: Mapping[str, bool]) -> None:
    """Refuses options that mean nothing with --random, or nothing without it. The mappings say which were given."""
    wrong = [name for name, given in (of_specs if random else of_random).items() if given]
    if wrong and random:
        raise typer.BadParameter(f"--random draws its own: leave out {', '.join(wrong)}")
    if wrong:
        raise typer.BadParameter(f"{', '.join(wrong)} is of --random: add that, or leave it out")


def options_of(
    target: str | None, passes: tuple[Pass, ...], sanitize: Literal["address", "thread"] | None, emulate: bool
) -> Options:
    """The command's options as those that narrow random cases."""
    from flashgen.cli.machine import gpus
    from flashgen.codegen.targets import target_named
    from flashgen.verify.random import Options, targets_of_gpu

    if target is not None:
        targets: tuple[str, ...] = (target_named(target).name,)
    else:
        targets = () if emulate else targets_of_gpu(*gpus()[0].compute_capability)
    return Options(targets, passes, sanitize, emulate)


def _tell(summary: Summary, told: float, no_bar: bool) -> float:
    """Tells the progress now and then, where no bar shows it. `told` and the result: the time of the last telling."""
    now = time.monotonic()
    if not no_bar or now < told + _SECONDS_BETWEEN_NOTES:
        return told
    note(f"{summary.cases} cases, {len(summary.findings)} found")
    return now


def verify_random(seed: int, options: Options, cases: int | None, minutes: float | None, jobs: int, json: bool) -> None:
    """Runs random cases and prints a summary; exits with 1 where there are findings.

    Ctrl-C, or SIGTERM as `timeout` sends it, ends it with the results so far.
    """
    from flashgen.verify.random import Summary, finding_text, run

    cases = 100 if cases is None and minutes is None else cases
    summary = Summary(options)
    running = run(seed, options, cases=cases, seconds=None if minutes is None else minutes * 60, jobs=jobs)
    told = time.monotonic()
    before, interrupted = signal.signal(signal.SIGTERM, signal.default_int_handler), False
    with contextlib.closing(running), progress("random cases", cases) as bar:
        try:
            for result in running:
                summary.add(result)
                if result.outcome.status == "found":
                    bar.console.print(finding_text(result, options) + "\n", markup=False, highlight=False)
                told = _tell(summary, told, bar.disable)
                bar.update(bar.task_ids[0], advance=1, description=f"random cases, {len(summary.findings)} found")
        except KeyboardInterrupt:
            interrupted = True
    signal.signal(signal.SIGTERM, before)
    if json:
        print_json(summary.to_data())
    else:
        for line in summary.lines():
            stdout().print(line, markup=False)
    if interrupted or summary.cases == 0:
        note("interrupted" if interrupted else "no case ran: give it more --minutes")
    if interrupted or not summary.ok or not summary.cases:
        raise typer.Exit(INTERRUPTED if interrupted else 1)
