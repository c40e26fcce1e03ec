"""`flashgen verify`: compares kernels with the NumPy oracle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flashgen.cli.console import INTERRUPTED, note, print_json, progress
from flashgen.cli.edited import check_source
from flashgen.cli.options import (
    Deterministic,
    Emulate,
    Json,
    Passes,
    Seed,
    SpecOptions,
    Specs,
    Target,
    with_spec_options,
)
from flashgen.cli.pace import Pace, duration
from flashgen.cli.random_cases import Cases, Jobs, Minutes, Random, refuse_random
from flashgen.cli.specs import load_spec, load_variant
from flashgen.cli.verify_rows import Sweep

if TYPE_CHECKING:
    from flashgen.verify import Case, Result
    from flashgen.verify.sweeps import SweepSize

EXAMPLES = """[bold]Examples[/]

flashgen verify

flashgen verify --quick

flashgen verify "causal() & sliding_window(100)" variants.py:near --dtype bfloat16

flashgen verify tests/gym/suite.py:block_diffusion --emulate

flashgen verify "causal()" --emulate --sanitize thread --schedules 4

flashgen verify --pass backward --deterministic --schedules 100

flashgen verify "causal()" --source edited.cu --emulate
"""


@with_spec_options
def verify(
    options: SpecOptions,
    specs: Specs = None,
    target: Target = None,
    emulate: Emulate = False,
    sanitize: Annotated[
        Literal["address", "thread"] | None,
        typer.Option("--sanitize", help="Run on the emulator with ASan and UBSan (address), or with TSan (thread)."),
    ] = None,
    schedules: Annotated[
        int,
        typer.Option(
            "--schedules", min=1, help="Number of runs; on the emulator, each has another order of threads and copies."
        ),
    ] = 1,
    passes: Annotated[Passes, typer.Option("--pass", help="The pass to verify.")] = Passes.both,
    deterministic: Deterministic = False,
    every: Annotated[
        bool, typer.Option("--all", help="Run the full sweep, with large lengths; it takes minutes on a GPU.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Run a part of the sweep, which takes less than a minute on two cores.")
    ] = False,
    seed: Seed = 0,
    source: Annotated[
        Path | None,
        typer.Option(
            "--source", help="A .cu file or a folder of edited kernels of SPEC, to run instead of the generated ones."
        ),
    ] = None,
    random: Random = False,
    count: Cases = None,
    minutes: Minutes = None,
    jobs: Jobs = 1,
    json: Json = False,
) -> None:
    """Compare kernels with the NumPy oracle on random inputs. The exit status is 1 if an error exceeds its bound.

    Without SPEC, all named masks and score functions are run, at several head dims and lengths, in both dtypes; --quick
    runs a third of them at one length, and a SPEC at two lengths. Lines on stderr say how much is done and how long the
    rest takes. A kernel passes if its largest error is at most twice that of standard attention computed in the input
    dtype, plus 1e-5, and the error of its LSE is at most 1e-3, or 2^-20 of its magnitude. The same rule applies to dq,
    dk, dv and the gradients of captures; the table shows the worst of them. A gradient with few elements is judged
    together with those of the following seeds. With --deterministic each run must also give the same bits as the first.
    A name in your file may be a [cyan]flashgen.verify.Variant[/], which creates its own captures. Kernels run on this
    machine's GPU, or on the emulator if there is none. --source runs kernels that [cyan]flashgen show SPEC --output
    DIR/[/] wrote and you edited.
    """
    from flashgen.build.host import find_compiler
    from flashgen.cli.machine import engine_text, gpus
    from flashgen.verify import verify as verify_cases

    if random or count or minutes or jobs > 1:
        refuse_random(
            emulate=emulate or sanitize is not None or not gpus(),
            minutes=minutes,
            jobs=jobs,
            seed=seed,
            pass_=passes.value,
            target=target,
            sanitize=sanitize,
        )
    if not emulate and sanitize is None and not gpus():
        note("this machine has no GPU: the emulator runs the generated CUDA on this CPU")
        emulate = True
    emulate = emulate or sanitize is not None
    if emulate:
        find_compiler()  # raises once if there is no compiler, instead of a failure of each case
    where = ("emulator" if emulate else engine_text(emulate), target, sanitize)
    note(f"engine: {', '.join(part for part in where if part)}")
    cases = chosen_cases(specs, options, sweep_size(every, quick))
    if source is not None:
        engine = {"target": target, "emulate": emulate, "sanitize": sanitize, "deterministic": deterministic}
        check_source(source, specs, options, passes.chosen, **engine)
    running = verify_cases(
        cases,
        passes=passes.chosen,
        deterministic=deterministic,
        target=target,
        emulate=emulate,
        sanitize=sanitize,
        schedule_count=schedules,
        seed=seed,
        source=source,
    )
    sweep = Sweep(cases, schedules * len(passes.chosen), shown=not json)
    specs_text = f"{sweep.specs} spec{'s' if sweep.specs > 1 else ''}"
    note(f"{sweep.planned} runs of {specs_text}{expected_time(sweep.specs, sweep.planned, emulate, sanitize)}")
    interrupted = collect(sweep, running)
    if json:
        print_json(sweep.to_dict() | {"interrupted": interrupted})
    else:
        note(f"{'interrupted: ' if interrupted else ''}{sweep.summary}")
    if interrupted or sweep.failures:
        raise typer.Exit(INTERRUPTED if interrupted else 1)


def collect(sweep: Sweep, running: Iterator[Result]) -> bool:
    """Adds the results to the sweep while they are computed, and shows progress. Returns whether Ctrl-C ended it."""
    interrupted, pace = False, Pace(sweep.planned)
    with progress(sweep.running, sweep.planned) as bar:
        try:
            for result in running:
                sweep.add(result)
                bar.update(bar.task_ids[0], completed=len(sweep.results), description=sweep.running)
                pace.update(len(sweep.results))
        except KeyboardInterrupt:
            interrupted = True
        sweep.end()
    return interrupted


# Measured on the emulator: seconds to compile the kernels of a spec and of a run, and how much longer sanitizers take.
SECONDS_PER_SPEC, SECONDS_PER_RUN = 1.2, 0.23
SLOWDOWN = {None: 1.0, "address": 1.4, "thread": 2.0}


def expected_time(specs: int, runs: int, emulate: bool, sanitize: str | None) -> str:
    """Returns how long the runs take on the emulator, as text; "" on a GPU, whose speed is known after some runs."""
    seconds = (SECONDS_PER_SPEC * specs + SECONDS_PER_RUN * runs) * SLOWDOWN[sanitize]
    return f": about {duration(seconds)} on two idle cores" if emulate else ""


def sweep_size(every: bool, quick: bool) -> SweepSize:
    """Returns the size of the sweep that --all and --quick choose."""
    if every and quick:
        raise typer.BadParameter("--all and --quick exclude each other")
    return "full" if every else "quick" if quick else "small"


def chosen_cases(specs: list[str] | None, options: SpecOptions, size: SweepSize) -> tuple[Case, ...]:
    from flashgen.verify.sweeps import sweep_cases

    if specs:
        return tuple(case for text in specs for case in cases_of_spec(text, options, size))
    if options.given():
        raise typer.BadParameter('options of a spec need a SPEC, such as "full()"')
    return sweep_cases(size)


def cases_of_spec(text: str, options: SpecOptions, size: SweepSize) -> tuple[Case, ...]:
    """Returns the cases of SPEC at the lengths of a sweep, or those of a Variant at its own lengths and captures."""
    from flashgen.verify import cases_of
    from flashgen.verify.sweeps import QUICK_LENGTHS

    cases = cases_of(load_spec(text, options), large=size == "full", variant=load_variant(text))
    return cases[:QUICK_LENGTHS] if size == "quick" else cases
