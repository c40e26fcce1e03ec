"""Renders a report as one self-contained page of HTML."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict
from typing import Any

from flashgen.analysis.drawing import palette, tile_maps
from flashgen.language.spec import AttentionSpec
from flashgen.report import roofline, source, timeline
from flashgen.report.elements import mixed_elements
from flashgen.report.facts import Map, Report
from flashgen.report.mathml import block, call, conjuncts, expression, name, number, power, row, sign, sub
from flashgen.templates_path import template_root

_COLOURS = {
    "full": palette.FULL,
    "partial": palette.PARTIAL,
    "copy": palette.COPY,
    "store": palette.STORE,
}


@functools.cache
def _environment() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_root() / "report"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )
    environment.filters |= {"thousands": thousands, "si": si}
    return environment


def page(report: Report, command: str) -> str:
    """Returns the page. command: the command line that created it, which the page shows."""
    return render_template(
        "page.html.jinja",
        title=report.request.spec.name,
        report=_context(report, "a"),
        command=command,
        data=_embedded(report.data),
    )


def comparison(left: Report, right: Report, command: str) -> str:
    """Returns a page with two reports side by side, and a table of the differences between their numbers."""
    return render_template(
        "compare.html.jinja",
        title=f"{left.request.spec.name} | {right.request.spec.name}",
        sides=[_context(left, "a"), _context(right, "b")],
        rows=differences(left.data, right.data),
        comparable_cycles=comparable_cycles(left.data, right.data),
        command=command,
        data=_embedded([left.data, right.data]),
    )


def render_template(template: str, **context: Any) -> str:
    """Renders a template of templates/report/ with the colours that all pages share."""
    styles = {"code_styles": source.styles(), "colours": _COLOURS}
    return str(_environment().get_template(template).render(**context, **styles))


def _embedded(data: Any) -> str:
    """Returns JSON that is safe inside a script element."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def thousands(value: int) -> str:
    """Formats a number in groups of three digits with no-break spaces between them: 4 096."""
    return f"{value:,}".replace(",", "\N{NO-BREAK SPACE}")


def si(value: float) -> str:
    """Formats a number with three significant digits and an SI prefix: 70.9 G."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 1000 or prefix == "T":
            return f"{value:.3g} {prefix}".rstrip()
        value /= 1000
    raise AssertionError


def _context(report: Report, side: str) -> dict[str, Any]:
    """Returns the template context of a report; `side` is the prefix of the ids of its HTML elements."""
    kernels = []
    for index, facts in enumerate(report.kernels):
        identity = f"{side}{index}"
        drawn = ""
        if facts.timeline:
            title = f"{facts.kernel.role} on {facts.kernel.target.name}, first block"
            drawn = timeline.to_svg(facts.timeline, title, link=f"#{identity}-L")
        kernels.append(
            facts.data | {"id": identity, "sections": source.sections(facts.kernel.source), "drawn_timeline": drawn}
        )
    spec = report.request.spec
    return {
        "id": side,
        **report.data,
        "kernels": kernels,
        "sentences": sentences(spec),
        "formulas": formulas(spec),
        "drawn_maps": [_map(map_, f"{side}-{map_.pass_}", spec) for map_ in report.maps],
        "drawn_roof": roofline.to_svg(report.card, report.points) if report.card and report.points else "",
    }


def _map(map_: Map, identity: str, spec: AttentionSpec) -> dict[str, Any]:
    tiles, mask = map_.tiles, spec.mask.expression
    return {
        **map_.to_dict(),
        "id": identity,
        "len_q": tiles.len_q,
        "len_k": tiles.len_k,
        "places": [
            {
                "label": _position_label(map_, batch, head),
                "svg": tile_maps.to_bare_svg(tiles, batch, head),
                "summary": tile_maps.summary(tiles, batch, head),
                "classes": _run_lengths(tiles.of(batch, head)),
                "elements": json.dumps(asdict(mixed_elements(mask, tiles, batch, head, map_.arrays))),
            }
            for batch, head in map_.positions
        ],
        "left_out": tiles.classes.shape[0] * tiles.classes.shape[1] - len(map_.positions),
    }


def _position_label(map_: Map, batch: int, head: int) -> str:
    batches, heads = map_.tiles.classes.shape[:2]
    words = [f"sequence {batch}"] if batches > 1 else []
    words += [f"head {head}"] if heads > 1 else []
    return ", ".join(words) or "every sequence and head"


def _run_lengths(classes: Any) -> str:
    """Returns the classes of tiles, row by row, in run-length encoding: "2*31,1*1;..."."""
    rows = []
    for line in classes.tolist():
        lengths: list[list[int]] = []
        for kind in line:
            if lengths and lengths[-1][0] == kind:
                lengths[-1][1] += 1
            else:
                lengths.append([kind, 1])
        rows.append(",".join(f"{kind}*{count}" for kind, count in lengths))
    return ";".join(rows)


def sentences(spec: AttentionSpec) -> list[str]:
    """Describes the spec in sentences."""
    dims = f"{spec.head_dim}" if spec.head_dim == spec.value_dim else f"{spec.head_dim}, values of {spec.value_dim}"
    lines = [
        f"Queries and keys have {dims} elements of {spec.dtype}; sums are float32.",
        f"A score is q·k times {spec.scale:.6g}" + (f", then {spec.score.name}." if spec.score else "."),
        f"A query attends to the keys that {spec.mask.name} keeps; a row with none is 0."
        if spec.mask.name != "full()"
        else "Every query attends to every key.",
    ]
    if spec.dropout:
        lines.append(
            f"A weight is kept where its random byte is below {spec.keep_threshold}, and is then multiplied by "
            f"256/{spec.keep_threshold}: dropout {spec.dropout:g}."
        )
    for capture in spec.captures:
        kind = f"an array of {capture.ndim} dimension(s)" if capture.ndim else "a number"
        learned = ", with a gradient" if capture.grad else ""
        lines.append(f"{capture.name} is {kind} of {capture.dtype}, given at the call{learned}.")
    return lines


def formulas(spec: AttentionSpec) -> list[str]:
    """Returns the formulas of the spec as MathML, with the indices b, h, q and k of batch, head, query and key."""
    indices = row(name("q"), name("k"))
    score, weight = sub(name("s"), indices), sub(name("P"), indices)
    product = row(sub(name("Q"), name("q")), sign("·"), sub(name("K"), name("k")))
    shown = [block(score, sign("="), number(f"{spec.scale:.6g}"), sign("·"), product)]
    if spec.score:
        shown.append(block(power(name("s"), sign("′")), sign("="), expression(spec.score.expression)))
    if spec.mask.name != "full()":
        first, *others = conjuncts(spec.mask.expression)
        where = row(call("M", name("b"), name("h"), name("q"), name("k")), sign("="))
        shown.append(block(where, first))
        shown += [block(sign("∧"), each) for each in others]
    total = row(f"<munder>{sign('∑')}{name('k')}</munder>", weight, sub(name("V"), name("k")))
    shown.append(block(weight, sign("="), sub(call("softmax", name("S")), indices)))
    shown.append(block(sub(name("O"), name("q")), sign("="), total))
    return shown


def comparable_cycles(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Returns whether the ratio of the cycles of two timelines is one of times in the model.

    It is not for two targets, whose clocks and latencies differ, and the model knows neither; nor for two lengths.
    """
    return bool(left["target"] == right["target"] and left["checked"]["run"] == right["checked"]["run"])


def differences(left: dict[str, Any], right: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the numbers of two reports in rows, with their ratio where both reports have the number.

    Cycles of the timeline's model are left out unless they are comparable (`comparable_cycles`).
    """
    rows: list[dict[str, Any]] = []

    def add(what: str, a: Any, b: Any) -> None:
        both = isinstance(a, int | float) and isinstance(b, int | float) and a
        rows.append({"what": what, "left": a, "right": b, "ratio": b / a if both else None, "same": a == b})

    for key in ("head_dim", "value_dim", "dtype", "dropout"):
        add(key.replace("_", " "), left["spec"][key], right["spec"][key])
    add("mask", left["spec"]["mask"]["name"], right["spec"]["mask"]["name"])
    add("score", *((side["spec"]["score"] or {"name": "none"})["name"] for side in (left, right)))
    add("target", left["target"]["name"], right["target"]["name"])
    for pass_ in ("forward", "backward"):
        maps = [next((map_ for map_ in side["maps"] if map_["pass"] == pass_), None) for side in (left, right)]
        if all(maps):
            add(f"{pass_}: share of tiles visited", *(map_["share"] for map_ in maps if map_))
            add(f"{pass_}: tiles masked by element", *(map_["partial"] for map_ in maps if map_))
    comparable = comparable_cycles(left, right)
    numbers = {what: value for what, value in _KERNEL_NUMBERS.items() if comparable or what != _CYCLES}
    for role in dict.fromkeys(kernel["role"] for side in (left, right) for kernel in side["kernels"]):
        found = [next((each for each in side["kernels"] if each["role"] == role), None) for side in (left, right)]
        for what, value in numbers.items():
            add(f"{role}: {what}", *(value(each) if each else None for each in found))
    return rows


_CYCLES = "cycles of the model"
_KERNEL_NUMBERS: dict[str, Any] = {
    "plan": lambda each: ", ".join(f"{key} {value}" for key, value in (each["plan"] or {}).items()),
    "registers": lambda each: each["resources"] and each["resources"]["registers"],
    "bytes of shared memory": lambda each: each["shared_bytes"],
    "blocks on a multiprocessor": lambda each: each["occupancy"] and each["occupancy"]["blocks"],
    "FLOPs": lambda each: each["flops"],
    "bytes of HBM": lambda each: each["hbm_bytes"],
    "instructions": lambda each: each["instructions"] and each["instructions"]["total"],
    _CYCLES: lambda each: each["timeline"] and round(each["timeline"]["cycles"]),
    "lines": lambda each: each["lines"],
}
