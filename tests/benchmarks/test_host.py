"""The benchmark of host time: its arithmetic with a mock clock, and the parts of a call."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import flashgen
from benchmarks import host, host_export, host_sdpa, host_torch, start, tables
from benchmarks.host import (
    ONE_TILE,
    PARTS,
    REST,
    HostCase,
    Meter,
    cost_of,
    costs_in_turns,
    host_rows,
    owner_of,
    run_of,
)
from flashgen.cli import bench_tables

SMALL = (2, 2, 64)


class Clock:
    """A clock that is advanced explicitly, and by `look` nanoseconds at each reading."""

    def __init__(self, look: int = 0) -> None:
        self.now, self.look = 0, look

    def __call__(self) -> int:
        self.now += self.look
        return self.now

    def working(self, nanoseconds: int, *inner: Callable[[], Any]) -> Callable[[], None]:
        """Returns a function that takes a given time, not counting its callees."""

        def work() -> None:
            self.now += nanoseconds
            for function in inner:
                function()

        return work


def test_the_time_of_a_part_excludes_its_callees() -> None:
    clock = Clock()
    meter = Meter(clock)
    inner = meter.of("launch", clock.working(5_000))
    outer = meter.of("lists", clock.working(700, inner, clock.working(10), inner))
    outer()
    inner()
    assert meter.nanoseconds() == {"launch": 15_000, "lists": 710} and meter.calls == {"launch": 3, "lists": 1}
    meter.clear()
    assert meter.nanoseconds() == {} == meter.calls


def test_the_time_to_read_the_clock_is_subtracted() -> None:
    clock = Clock(look=40)
    meter = Meter(clock)
    inner = meter.of("launch", clock.working(5_000))
    outer = meter.of("lists", clock.working(700, *[inner] * 100))
    outer()
    found = meter.nanoseconds()
    assert found["launch"] == pytest.approx(100 * 5_000, rel=1e-3)
    assert found["lists"] == pytest.approx(700, abs=0.2 * 100)  # of 40 for each of 100 calls


def test_errors_of_a_call_are_passed_on() -> None:
    meter = Meter()

    def fails() -> None:
        raise ValueError("of the call")

    for _ in range(2):
        with pytest.raises(ValueError, match="of the call"):
            meter.of("outer", meter.of("inner", fails))()
    assert meter.calls == {"outer": 2, "inner": 2} and not meter._inner


def test_groups_report_medians_and_minima_after_warmup() -> None:
    """Calls become slower within a group and from group to group; the first groups, which warm up, are the slowest."""
    clock, waited = Clock(), []
    durations = [
        *[9_000_000] * 5 * host.WARM_GROUPS,
        *[1000 * (10 * group + call) for group in range(3) for call in range(5)],
    ]
    left = iter([*durations, *durations])
    cost = cost_of(lambda: clock.working(next(left))(), lambda: waited.append(clock.now), 3, 5, clock)
    assert (cost.median, cost.minimum) == (12.0, 2.0)
    assert cost.parts[REST] == pytest.approx(12.0) and len(waited) == 2 * (host.WARM_GROUPS + 3)
    assert {part: cost.parts[part] for part in PARTS} == dict.fromkeys(PARTS, 0.0)


def test_kinds_of_calls_alternate() -> None:
    """A host that becomes slower does so for all: groups of each kind alternate."""
    clock, seen = Clock(), []

    def call(name: str, nanoseconds: int) -> None:
        seen.append(name)
        clock.working(nanoseconds)()

    runs = [partial(call, "a", 1000), partial(call, "b", 3000)]
    one, other = costs_in_turns(runs, lambda: None, 2, [3, 2], clock)
    assert (one.median, other.median) == (1.0, 3.0)
    assert "".join(seen) == "aaabb" * 2 * (host.WARM_GROUPS + 2)
    assert one.parts[REST] == pytest.approx(1.0) and other.parts[REST] == pytest.approx(3.0)


def functions() -> dict[str, Any]:
    """Returns the current functions at the positions of PARTS."""
    owners = {place: owner_of(place) for places in PARTS.values() for place in places}
    return {place: getattr(owner, name, None) for place, (owner, name) in owners.items()}


def test_every_part_exists_and_is_restored() -> None:
    before, meter = functions(), Meter()
    with meter.installed() as found:
        assert found == tuple(PARTS), "a part of PARTS has moved: update benchmarks/host.py"
        assert functions() != before
    assert functions() == before


def test_a_checkout_without_a_part_is_measured_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"checks": ("flashgen.nowhere:Pass.f", "flashgen.attention.call_pass:Pass.nothing", "json:Nothing.loads")}
    monkeypatch.setattr(host, "PARTS", places | {"numbers": ("json:loads",)})
    meter = Meter()
    with meter.installed() as found:
        assert found == ("numbers",) and json.loads("[1]") == [1]
    assert meter.calls == {"numbers": 1}


def test_groups_of_calls_are_served_on_request() -> None:
    """Answers name the cells first; each request then runs the calls of one group of one cell."""
    ran: list[str] = []
    case = HostCase("causal", {}, ONE_TILE)
    cells = [
        host.HostCell(
            case, "sm_90a", library, "forward", lambda name=library: ran.append(name), lambda: ran.append("|")
        )
        for library in ("cupy", "torch")
    ]
    names, *medians = host.serve_groups(cells, iter(["1", "0\n"]), calls=2)
    assert json.loads(names) == ["cupy causal forward [1, 1, 64]", "torch causal forward [1, 1, 64]"]
    assert ran == ["torch", "torch", "|", "cupy", "cupy", "|"] and all(float(each) > 0 for each in medians)


CASES = {case.name: case for case in host.host_cases()}


@pytest.mark.parametrize("name", ["causal, out given", "causal, dropout", "lists of each call"])
def test_which_parts_a_call_has(name: str) -> None:
    """On the emulator, where no address is looked up."""
    case = replace(CASES[name], sizes=SMALL)
    attention = flashgen.compile(flashgen.AttentionSpec(64, **case.options), target="sm_90a", emulate=True)
    listed = name == "lists of each call"
    for timed, launches in (("forward", 1), ("backward", 2)):
        run, meter = run_of(attention, case, timed, "numpy"), Meter()  # type: ignore[arg-type]
        with meter.installed():
            run()
        assert meter.calls["checks"] == 1 and meter.calls.get("numbers", 0) == ("dropout" in name)
        assert meter.calls["launch"] == launches + listed and meter.calls.get("lists", 0) == listed
        assert "counter" in meter.calls  # Hopper's kernels count their tiles
        assert ("allocation" in meter.calls) is not (case.given and timed == "forward")


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "pages" in name])
def test_decode_calls_over_pages(name: str) -> None:
    """They launch one kernel and have no backward."""
    case = replace(CASES[name], sizes=(2, 16, 32))
    attention = flashgen.compile(flashgen.AttentionSpec(64, **case.options), target="sm_90a", emulate=True)
    run, meter = run_of(attention, case, "forward", "numpy"), Meter()
    with meter.installed():
        out = run()
    assert case.passes == ("forward",) and meter.calls["launch"] == 1 and meter.calls["checks"] >= 1
    assert out.shape[0] == 2 and abs(out.astype("float32")).max() > 0


def test_rows_of_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "host_cases", lambda: [HostCase("causal", {"mask": flashgen.causal()}, ONE_TILE)])
    rows = list(host_rows(["numpy"], target="sm_90a", groups=1, calls=1, emulate=True))
    assert [(row.name, row.library, row.timed, row.target) for row in rows] == [
        ("causal", "numpy", "forward", "sm_90a"),
        ("causal", "numpy", "backward", "sm_90a"),
    ]
    for row in rows:
        assert row.median >= row.minimum > 0 and set(row.parts) == {*PARTS, REST} and row.to_dict()["sizes"] == ONE_TILE
    columns = tables.host([*PARTS, REST])
    heading, cells = tuple(columns), [bench_tables.cells(columns, row) for row in rows]
    assert heading[:5] == ("call", "target", "arrays", "pass", "batch x heads x length")
    assert heading[5:] == ("us", "least us", *PARTS, REST) and cells[0][4] == "1x1x64"


def test_a_start_is_measured_in_new_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    imported, ready, name = start._start(str(tmp_path), 0.1, "sm_80")
    assert imported > 0 and ready > 0 and name == "sm_80"
    assert sum(folder.name.startswith("fwd-") for folder in tmp_path.iterdir()) == 2
    started: list[tuple[str, float]] = []

    def process(cache: str, scale: float, target: str | None, checkout: Path | None) -> tuple[float, float, str]:
        assert checkout == tmp_path
        known = (cache, scale) in started
        started.append((cache, scale))
        return 0.25, 0.01 if known else 1.0, "sm_80"

    monkeypatch.setattr(start, "_start", process)
    rows = list(start.start_rows(repeats=3, checkout=tmp_path))
    assert [(row.name.split(", ")[1], row.median) for row in rows] == [
        ("beyond NumPy and SymPy", 250_000),
        ("from nothing", 1_000_000),
        ("from disk", 10_000),
    ]
    assert len(rows) == start.STARTS and len(set(started)) == 3


def test_the_file_runs_with_another_checkout() -> None:
    """It uses only flashgen's public names, and nothing from its own folder."""
    path = Path(host.__file__)
    program = f"import runpy, sys; runpy.run_path({str(path)!r}); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert "benchmarks" not in done.stdout and "flashgen.bench" not in done.stdout and "'flashgen'" in done.stdout


def test_rows_of_torchs_operator() -> None:
    """Compared with the attention itself, torch's own, and autograd around a function that computes nothing."""
    pytest.importorskip("torch", reason="the operator is torch's")
    rows = list(host_torch.operator_rows(groups=1, calls=1, chain=2, emulate=True, target="sm_90a"))
    assert [row.name for row in rows] == host_torch.operator_names()
    assert [row.timed for row in rows] == ["forward"] * 7 + ["backward"] * 10
    assert all(row.library == "torch" and row.target == "sm_90a" for row in rows)
    by_name = {(row.name, row.timed): row.parts for row in rows}
    for (name, _), parts in by_name.items():
        assert (parts["launch"] > 0) == (name.startswith(("attention", "flashgen"))), (
            "peers launch no kernel of flashgen"
        )


def test_the_backward_of_the_operator_is_a_fraction_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="the operator is torch's")
    fixed = host.Cost(60.0, 30.0, {"launch": 12.0})
    monkeypatch.setattr("benchmarks.host_torch.costs_in_turns", lambda runs, *given: [fixed] * len(runs))
    one, *rest = host_torch.operator_rows(["backward"], chain=3, emulate=True, target="sm_90a")
    assert (one.median, one.minimum) == (60.0, 30.0)
    assert all((row.median, row.minimum, row.parts["launch"]) == (20.0, 10.0, 4.0) for row in rest)


def test_the_summary_compares_within_a_thread() -> None:
    operator, function = "flashgen.torch.attention", "an empty function"
    autograds, callers = ", in autograd's thread", ", in the caller's thread"

    def rows(timed: host.Timed, medians: dict[str, float]) -> list[host.HostRow]:
        return [host.HostRow(name, "sm_90a", "torch", timed, (1, 1, 64), us, us, {}) for name, us in medians.items()]

    graph = {"attention(...)": 17, operator: 20, f"{operator}, with a graph": 26.5, f"{function}, with a graph": 8}
    (line,) = host_torch.operator_summary(rows("forward", graph))
    assert line.startswith("forward, with gradients:") and "takes +9.5 us" in line and line.endswith("takes 8.0")
    both = {"attention(...)": 35, f"attention(...){autograds}": 50, operator: 58, f"{operator}{callers}": 41}
    both |= {function: 14, f"{function}{callers}": 7.25}
    own, called = host_torch.operator_summary(rows("backward", both))
    assert f"gradients{autograds}: " in own and "takes +8.0 us" in own and own.endswith("takes 14.0")
    assert f"gradients{callers}: " in called and "takes +6.0 us" in called and called.endswith("takes 7.2")
    del both[f"attention(...){autograds}"]
    assert len(host_torch.operator_summary(rows("backward", both))) == 1, "threads are not compared with each other"
    assert not host_torch.operator_summary(rows("forward", graph)[:3])


def test_the_flash_operators_of_torch_are_compared_by_the_medians_of_their_rounds() -> None:
    pytest.importorskip("torch", reason="flashgen.torch needs torch: pip install 'flashgen[torch]'")
    names = host_sdpa.registry_names()
    rows = [
        host.HostRow(name, "-", "torch", "backward" if "thread" in name else "forward", ONE_TILE, 10.0 + at, 9.0, {})
        for at, name in enumerate(names)
    ]
    lines = host_sdpa.registry_summary(rows)
    assert len(names) == 40 and len(lines) == 4
    assert lines[0].startswith("forward: ") and "takes 30.0 us, +4.0 beside" in lines[0]
    assert host_sdpa.registry_summary(rows[:4]) == []


def test_an_exported_package_is_compared_with_torch() -> None:
    names = host_export.export_names()
    timed = {name: "backward" if "caller" in name else "forward" for name in names}
    rows = [host.HostRow(name, "-", "torch", timed[name], ONE_TILE, 10.0 + at, 9, {}) for at, name in enumerate(names)]
    lines = host_export.export_summary(rows)
    assert len(names) == 8 and len(lines) == 4
    assert lines[0] == "forward: an exported package takes 14.0 us, 1.40 times torch's SDPA"
    assert host_export.export_summary(rows[:4]) == []
