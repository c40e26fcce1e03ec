"""A report as one page of HTML that needs nothing beside itself."""

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
    """The page. command: what made it, to be shown."""
    return rendered(
        "page.html.jinja",
        title=report.asked.spec.name,
        report=_shown(report, "a"),
        command=command,
        data=_embedded(report.data),
    )


def comparison(left: Report, right: Report, command: str) -> str:
    """Two reports side by side, and what differs between their numbers."""
    return rendered(
        "compare.html.jinja",
        title=f"{left.asked.spec.name} | {right.asked.spec.name}",
        sides=[_shown(left, "a"), _shown(right, "b")],
        rows=differences(left.data, right.data),
        command=command,
        data=_embedded([left.data, right.data]),
    )


def rendered(template: str, **context: Any) -> str:
    """A template of templates/report/, with the colours that all pages have."""
    styles = {"code_styles": source.styles(), "colours": _COLOURS}
    return str(_environment().get_template(template).render(**context, **styles))


def _embedded(data: Any) -> str:
    """JSON that may stand in a script element."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def thousands(value: int) -> str:
    """A number in groups of three digits, at whose gaps no line ends: 4 096."""
    return f"{value:,}".replace(",", "\N{NO-BREAK SPACE}")


def si(value: float) -> str:
    """A number with three digits and a prefix: 70.9 G."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 1000 or prefix == "T":
            return f"{value:.3g} {prefix}".rstrip()
        value /= 1000
    raise AssertionError


def _shown(report: Report, side: str) -> dict[str, Any]:
    """What the template says of a report; `side` begins the ids of its elements."""
    kernels = []
    for place, facts in enumerate(report.kernels):
        identity = f"{side}{place}"
        drawn = ""
        if facts.timeline:
            title = f"{facts.kernel.role} on {facts.kernel.target.name}, first block"
            drawn = timeline.to_svg(facts.timeline, title, link=f"#{identity}-L")
        kernels.append(
            facts.data | {"id": identity, "sections": source.sections(facts.kernel.source), "drawn_timeline": drawn}
        )
    spec = report.asked.spec
    return {
        "id": side,
        **report.data,
        "kernels": kernels,
        "sentences": sentences(spec),
        "formulas": formulas(spec),
        "drawn_maps": [_map(map_, f"{side}-{map_.of}", spec) for map_ in report.maps],
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
                "label": _place(map_, batch, head),
                "svg": tile_maps.to_bare_svg(tiles, batch, head),
                "summary": tile_maps.summary(tiles, batch, head),
                "classes": _runs(tiles.of(batch, head)),
                "elements": json.dumps(asdict(mixed_elements(mask, tiles, batch, head, map_.arrays))),
            }
            for batch, head in map_.places
        ],
        "left_out": tiles.classes.shape[0] * tiles.classes.shape[1] - len(map_.places),
    }


def _place(map_: Map, batch: int, head: int) -> str:
    of_batch, of_heads = map_.tiles.classes.shape[:2]
    words = [f"sequence {batch}"] if of_batch > 1 else []
    words += [f"head {head}"] if of_heads > 1 else []
    return ", ".join(words) or "every sequence and head"


def _runs(classes: Any) -> str:
    """The classes of tiles, row by row, as stretches: "2*31,1*1;..."."""
    rows = []
    for line in classes.tolist():
        stretches: list[list[int]] = []
        for kind in line:
            if stretches and stretches[-1][0] == kind:
                stretches[-1][1] += 1
            else:
                stretches.append([kind, 1])
        rows.append(",".join(f"{kind}*{count}" for kind, count in stretches))
    return ";".join(rows)


def sentences(spec: AttentionSpec) -> list[str]:
    """The spec in words."""
    dims = f"{spec.head_dim}" if spec.head_dim == spec.value_dim else f"{spec.head_dim}, values of {spec.value_dim}"
    said = [
        f"Queries and keys have {dims} elements of {spec.dtype}; sums are float32.",
        f"A score is q·k times {spec.scale:.6g}" + (f", then {spec.score.name}." if spec.score else "."),
        f"A query attends to the keys that {spec.mask.name} keeps; a row with none is 0."
        if spec.mask.name != "full()"
        else "Every query attends to every key.",
    ]
    if spec.dropout:
        said.append(
            f"A weight is kept where its random byte is below {spec.keep_threshold}, and is then multiplied by "
            f"256/{spec.keep_threshold}: dropout {spec.dropout:g}."
        )
    for capture in spec.captures:
        kind = f"an array of {capture.ndim} dimension(s)" if capture.ndim else "a number"
        learned = ", with a gradient" if capture.grad else ""
        said.append(f"{capture.name} is {kind} of {capture.dtype}, given at the call{learned}.")
    return said


def formulas(spec: AttentionSpec) -> list[str]:
    """The spec as MathML, by the indices of a batch, a head, a query and a key."""
    indices = row(name("q"), name("k"))
    score, weight = sub(name("s"), indices), sub(name("P"), indices)
    product = row(sub(name("Q"), name("q")), sign("·"), sub(name("K"), name("k")))
    shown = [block(score, sign("="), number(f"{spec.scale:.6g}"), sign("·"), product)]
    if spec.score:
        shown.append(block(power(name("s"), sign("′")), sign("="), expression(spec.score.expression)))
    if spec.mask.name != "full()":
        first, *others = conjuncts(spec.mask.expression)
        where = row(call("M", name("b"), name("h"), name("q"), name("k")), sign("="))
        shown.append(block(where, expression(first)))
        shown += [block(sign("∧"), expression(each)) for each in others]
    total = row(f"<munder>{sign('∑')}{name('k')}</munder>", weight, sub(name("V"), name("k")))
    shown.append(block(weight, sign("="), sub(call("softmax", name("S")), indices)))
    shown.append(block(sub(name("O"), name("q")), sign("="), total))
    return shown


def differences(left: dict[str, Any], right: dict[str, Any]) -> list[dict[str, Any]]:
    """Numbers of two reports beside each other, and their ratio, where both have the kernel."""
    rows: list[dict[str, Any]] = []

    def add(what: str, a: Any, b: Any) -> None:
        both = isinstance(a, int | float) and isinstance(b, int | float) and a
        rows.append({"what": what, "left": a, "right": b, "ratio": b / a if both else None, "same": a == b})

    for key in ("head_dim", "value_dim", "dtype", "dropout"):
        add(key.replace("_", " "), left["spec"][key], right["spec"][key])
    add("mask", left["spec"]["mask"]["name"], right["spec"]["mask"]["name"])
    add("score", *((side["spec"]["score"] or {"name": "none"})["name"] for side in (left, right)))
    add("target", left["target"]["name"], right["target"]["name"])
    for of in ("forward", "backward"):
        maps = [next((map_ for map_ in side["maps"] if map_["pass"] == of), None) for side in (left, right)]
        if all(maps):
            add(f"{of}: share of tiles visited", *(map_["share"] for map_ in maps if map_))
            add(f"{of}: tiles masked by element", *(map_["partial"] for map_ in maps if map_))
    for role in dict.fromkeys(kernel["role"] for side in (left, right) for kernel in side["kernels"]):
        found = [next((each for each in side["kernels"] if each["role"] == role), None) for side in (left, right)]
        for what, value in _KERNEL_NUMBERS.items():
            add(f"{role}: {what}", *(value(each) if each else None for each in found))
    return rows


_KERNEL_NUMBERS: dict[str, Any] = {
    "plan": lambda each: ", ".join(f"{key} {value}" for key, value in (each["plan"] or {}).items()),
    "registers": lambda each: each["resources"] and each["resources"]["registers"],
    "bytes of shared memory": lambda each: each["shared_bytes"],
    "blocks on a multiprocessor": lambda each: each["occupancy"] and each["occupancy"]["blocks"],
    "FLOPs": lambda each: each["flops"],
    "bytes of HBM": lambda each: each["hbm_bytes"],
    "instructions": lambda each: each["instructions"] and each["instructions"]["total"],
    "cycles of the model": lambda each: each["timeline"] and round(each["timeline"]["cycles"]),
    "lines": lambda each: each["lines"],
}
