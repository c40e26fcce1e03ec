"""`flashgen report`: reports on the kernels of a spec, as one page of HTML or as JSON."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashgen.cli.arrays import load_arrays
from flashgen.cli.console import note, print_json
from flashgen.cli.options import Deterministic, Json, Passes, SpecOptions, Target, with_spec_options
from flashgen.cli.show import target_here
from flashgen.cli.specs import load_spec, load_variant
from flashgen.cli.writing import Force, check_output, write_output
from flashgen.errors import ArgumentError

if TYPE_CHECKING:
    from flashgen.report.facts import ReportRequest

EXAMPLES = """[bold]Examples[/]

flashgen report "causal() & sliding_window(1024)" --head-dim 128 --target sm_90a --output report.html

flashgen report "causal()" --target sm_80 --json

flashgen report --compare "causal()" "causal() & sliding_window(512)" --target sm_80 --output both.html

flashgen report --compare "causal()" "causal()" --target sm_80 --other-target sm_90a --output targets.html

flashgen report --compare "causal()" "causal()" --target sm_80 --other-plan tile_k=32,stages=1 --output plans.html
"""


@with_spec_options
def report(
    specs: Annotated[list[str], typer.Argument(metavar="SPEC", help="One spec, as for `show`; two with --compare.")],
    options: SpecOptions,
    target: Target = None,
    pass_: Annotated[Passes, typer.Option("--pass", help="The pass whose kernels are reported.")] = Passes.both,
    compare: Annotated[bool, typer.Option("--compare", help="Show two specs, targets or plans side by side.")] = False,
    other_target: Annotated[
        str | None,
        typer.Option("--other-target", metavar="ARCH", help="With --compare: the target of the second report."),
    ] = None,
    plan: Annotated[
        str,
        typer.Option("--plan", metavar="NAME=N,...", help="Parameters of the forward plan to set, such as tile_k=64."),
    ] = "",
    other_plan: Annotated[
        str,
        typer.Option(
            "--other-plan", metavar="NAME=N,...", help="With --compare: plan parameters of the second report."
        ),
    ] = "",
    deterministic: Deterministic = False,
    len_q: Annotated[int, typer.Option("--len-q", min=1, help="Number of queries of a sequence.")] = 4096,
    len_k: Annotated[
        int | None, typer.Option("--len-k", min=1, help="Number of keys of a sequence. Default: that of queries.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Number of sequences.")] = 1,
    heads: Annotated[int, typer.Option("--heads", min=1, help="Number of query heads.")] = 16,
    heads_kv: Annotated[
        int | None, typer.Option("--heads-kv", min=1, help="Number of key heads. Default: that of query heads.")
    ] = None,
    captures: Annotated[
        Path | None, typer.Option("--captures", "-i", help="A file with the mask's captures by name, for the tile map.")
    ] = None,
    run: Annotated[
        bool, typer.Option("--run/--no-run", help="Run the kernels once on the emulator, for timelines and errors.")
    ] = True,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Time calls if this machine has a GPU that runs the target.")
    ] = True,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the page to this .html file.")] = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Write a page about a spec's kernels: tile maps, plans, resources, HBM bytes, timelines, sources and errors.

    The page is self-contained and loads nothing from the network. No GPU is needed: the compiler reports the resources
    of each kernel, and the emulator runs it once, to record its timeline and to compare its results with the oracle.
    """
    from flashgen.report.facts import report_of
    from flashgen.report.page import comparison, page

    if len(specs) != (2 if compare else 1):
        raise ArgumentError(f"{len(specs)} specs were given: {'--compare takes two' if compare else 'give one'}")
    for option, given in (("--other-target", other_target), ("--other-plan", other_plan)):
        if given and not compare:
            raise ArgumentError(f"{option} {given}: only --compare takes this")
    if (output is None) is not json:
        raise ArgumentError("give --output FILE.html for a page, or --json for its data")
    if output is not None:
        if output.suffix != ".html":
            raise ArgumentError(f"--output {output} must end in .html")
        check_output(output, force)
    sizes = (len_q, len_k or len_q, batch, heads, heads_kv or heads)
    architectures = [target or target_here()]
    architectures.append(other_target or architectures[0])
    plans = [plan_numbers(plan), plan_numbers(other_plan or plan)]
    reports = [
        report_of(_request(text, options, architecture, pass_, deterministic, sizes, captures, (run, measure), numbers))
        for text, architecture, numbers in zip(specs, architectures, plans, strict=False)
    ]
    if output is None:
        print_json([each.data for each in reports] if compare else reports[0].data)
        return
    command = shlex.join(["flashgen", *sys.argv[1:]])
    html = comparison(reports[0], reports[1], command) if compare else page(reports[0], command)
    write_output(output, html)
    note(f"{' | '.join(each.request.spec.name for each in reports)} -> {output}, {len(html.encode()) / 1e6:.1f} MB")


def plan_numbers(text: str) -> dict[str, int]:
    """Parses plan parameters: "tile_k=64, stages=3" -> {"tile_k": 64, "stages": 3}."""
    found: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = (word.strip() for word in part.partition("="))
        if not name.isidentifier() or not number.isdecimal():
            raise ArgumentError(f"the plan parameter {part!r} must be NAME=NUMBER, such as tile_k=64")
        found[name] = int(number)
    return found


def _request(
    text: str,
    options: SpecOptions,
    target: str,
    pass_: Passes,
    deterministic: bool,
    sizes: tuple[int, ...],
    captures: Path | None,
    executed: tuple[bool, bool],
    plan: dict[str, int],
) -> ReportRequest:
    """Returns the parameters of a report. executed: whether to run the kernels on the emulator, and to time calls."""
    from flashgen.report.facts import ReportRequest, check_request
    from flashgen.report.sizes import CallSizes

    spec, variant = load_spec(text, options), load_variant(text)
    given: dict[str, Any] = dict(load_arrays(captures, "--captures")) if captures else {}
    known = {capture.name for capture in spec.captures}
    request = ReportRequest(
        spec,
        target,
        CallSizes(*sizes),
        pass_.chosen,
        deterministic,
        {name: array for name, array in given.items() if name in known},
        variant.captures if variant else None,
        *executed,
        plan,
    )
    check_request(request)
    return request
