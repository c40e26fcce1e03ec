"""The tables of docs/performance.md, from the JSON files that benchmarks wrote to docs/measured/.

`docs/refresh.py` renders docs/measured/performance.md.jinja between the marks of the page, and the table of the forward
between those of the README. A section whose files are missing is left out. On a machine with a GPU:

python docs/measured_tables.py                            # runs COMMANDS in order; each replaces its file
python docs/measured_tables.py forward decode             # runs these
python docs/measured_tables.py --folder DIR wide          # writes to another folder
python docs/measured_tables.py --list                     # prints the commands
python docs/refresh.py                                    # then renders the pages

A file has the rows of a command of `flashgen bench` or `python -m benchmarks`, and the environment of the run. Its
environment may have a `note` that the page states, and `converted`, which says that the file is not the output of the
command.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import jinja2

DOCS = Path(__file__).parent
MEASURED = DOCS / "measured"
BEGIN, END = "<!-- measured -->", "<!-- end of measured -->"
README_BEGIN, README_END = "<!-- measured forward -->", "<!-- end of measured forward -->"
_LATENT_SIZES = (
    "64x128:1x4096,16x128:1x32768,1x128:1x131072,64x64:1x8192,64x16:1x8192,32x128:1x8192x2,1x16:1x131072,16x8:1x8192"
)
_WIDE = "flashgen bench --head-dims 320,384,448,512 --lengths 4096,8192,16384 --batch 1 --heads 16 --peers FFPA"
_LATENT_TRAINING = 'flashgen bench "causal()" "full()" --head-dims 192 --value-dim 128 --heads 64 --lengths 4096,16384'
COMMANDS = {
    "forward": "flashgen bench --peers cuDNN,FA4",
    "backward": "flashgen bench --pass backward --deterministic --peers cuDNN,FA4",
    "variants": "flashgen bench --variants --no-mask-times --peers Flex",
    "variants-backward": "flashgen bench --variants --pass backward --peers Flex",
    "decode": "flashgen bench decode --pages 16,64,1",
    "latent": f"flashgen bench decode --latent --sizes {_LATENT_SIZES} --pages 64,16",
    "latent-records": f"flashgen bench decode --latent --sizes {_LATENT_SIZES} --kv-dtype fp8_ds_mla --peers ''",
    "prompts": "flashgen bench decode --prompts --peers ''",
    "biases": "flashgen bench biases",
    "biases-backward": "flashgen bench biases --pass backward",
    "wide": _WIDE,
    "wide-backward": f"{_WIDE} --pass backward",
    "latent-training": f"{_LATENT_TRAINING} --pass backward --peers cuDNN,FA4",
    "varlen": "flashgen bench ragged",
    "varlen-backward": "flashgen bench ragged --pass backward",
    "varlen-uneven": "flashgen bench ragged --pass backward --uneven --documents 64x65536",
    "host": "python -m benchmarks host --libraries torch",
    "host-registry": "python -m benchmarks host --sdpa-registry",
    "train": "python -m benchmarks train --modes compile",
    "train-long": "python -m benchmarks train --modes compile --long",
    "mma": "flashgen bench --target sm_90 --peers FA2,cuDNN",
    "mma-backward": "flashgen bench --target sm_90 --pass backward --deterministic --peers FA2,cuDNN",
}
"""The command that writes each file of docs/measured/, without its --output, in the order of a session on a GPU."""

_VERSIONS = {"flashgen": "flashgen", "nvrtc": "NVRTC", "torch": "torch", "cudnn": "cuDNN"}
_PEER_VERSIONS = {"FA4": "flash-attn-4", "FFPA": "ffpa-attn", "FlashInfer": "FlashInfer", "FlashMLA": "FlashMLA"}
_WITH_TILE_LISTS = ("16 documents", "neighbourhood 13x13")  # variants
_WIDTH = 120  # columns of a line of prose
_AHEAD = 0.995  # a peer is ahead where the speed relative to it is less
_OWN = ("flashgen", "deterministic", "two kernels")
_HOST_REGISTRY = {"torch's flash operator": "SDPA, torch's flash operator", "registry": "SDPA, flashgen in its place"}
_HOST_COLUMNS = {
    "`attention(...)`": "attention(...)",
    "`flashgen.torch.attention`": "flashgen.torch.attention",
    "SDPA": "torch's SDPA",
    "empty function": "an empty function",
    **_HOST_REGISTRY,
}
_HOST_CALLS = {
    "forward": ("forward", ""),
    "forward, with a graph": ("forward", ", with a graph"),
    "forward, packed": ("forward", ", packed"),
    "backward": ("backward", ""),
    "backward, in the caller's thread": ("backward", ", in the caller's thread"),
}

Row = Mapping[str, Any]
Cell = Callable[[Row], str]


def command(name: str, folder: str = "docs/measured") -> str:
    """Returns the complete command that writes a file."""
    return f"{COMMANDS[name]} --output {folder}/{name}.json --force"


# ---- tables


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown, without the columns that have no value."""
    body = [list(row) for row in rows]
    kept = [at for at in range(len(head)) if at == 0 or any(row[at] != "-" for row in body)]
    lines = [list(head), ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line[at] for at in kept)} |" for line in lines)


def number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def three_digits(value: float | None) -> str:
    """Formats a value with three digits or more."""
    return number(value, max(2 - math.floor(math.log10(value)), 0) if value else 0)


def milliseconds(value: float | None) -> str:
    """Formats a time with three digits or more, but at most three after the point."""
    return number(value, 3) if value and value < 1 else three_digits(value)


def label(spec: str) -> str:
    """Returns the columns and the mask of a spec's name: "bf16-d192v128-causal-0123abcd" -> "192, 128 causal"."""
    found = re.fullmatch(r"\w+-d(\d+)(?:v(\d+))?-(.+)-[0-9a-f]{8}", spec)
    assert found, f"{spec} is not the name of a plain spec"
    return f"{found[1]}{f', {found[2]}' if found[2] else ''} {found[3]}"


def best_peer(row: Row) -> tuple[str, float] | None:
    """Returns the fastest peer of a row and the speed of flashgen relative to it; None without peers."""
    if "ratios" in row:
        ratios = row["ratios"]
    else:
        spent = row["milliseconds"]
        ratios = {name: time / spent["flashgen"] for name, time in spent.items() if name not in _OWN}
    return min(ratios.items(), key=lambda each: each[1], default=None)


def best_ratio(row: Row) -> float | None:
    """Returns the speed of flashgen relative to the fastest peer; None without peers."""
    found = best_peer(row)
    return found[1] if found else None


def by_spec(rows: Sequence[Row]) -> dict[str, dict[int, Row]]:
    """Returns the rows by the label of their spec and by length."""
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        found.setdefault(label(row["spec"]), {})[row["length"]] = row
    return found


def joined(rows: Mapping[int, Row], lengths: Sequence[int], cell: Cell) -> str:
    """Returns the cells of several lengths, divided by slashes."""
    cells = [cell(rows[length]) if length in rows else "-" for length in lengths]
    return "-" if set(cells) == {"-"} else " / ".join(cells)


def tflops(name: str) -> Cell:
    return lambda row: number(row["tflops"].get(name))


def times(name: str) -> Cell:
    return lambda row: number(row["ratios"].get(name), 2)


def lengths_in(rows: Iterable[Row]) -> list[int]:
    return sorted({row["length"] for row in rows})


def speed_table(rows: Sequence[Row]) -> str:
    """Returns TFLOP/s beside cuDNN and FlashAttention-4, with a row for each head dim and mask."""
    columns: dict[str, Cell] = {name: tflops(name) for name in ("flashgen", "cuDNN", "FA4")}
    columns |= {"times cuDNN": times("cuDNN"), "times the best peer": lambda row: number(best_ratio(row), 2)}
    lengths = lengths_in(rows)
    lines = (
        [name, *(joined(mine, lengths, each) for each in columns.values())] for name, mine in by_spec(rows).items()
    )
    return table(["head dim", *columns], lines)


def passes_table(head: str, passes: Mapping[str, Sequence[Row]], columns: Mapping[str, Cell]) -> str:
    """Returns columns of the forward and of the backward, with a row for each head dim and mask of either."""
    found = {name: by_spec(rows) for name, rows in passes.items()}
    lengths = lengths_in(row for rows in passes.values() for row in rows)
    names = dict.fromkeys(name for mine in found.values() for name in mine)
    heads = [f"{name}: {column}" for name in passes for column in columns]
    lines = (
        [name, *(joined(mine.get(name, {}), lengths, each) for mine in found.values() for each in columns.values())]
        for name in names
    )
    return table([head, *heads], lines)


def wide_table(forward: Sequence[Row], backward: Sequence[Row]) -> str:
    columns = {name: tflops(name) for name in ("flashgen", "FFPA", "cuDNN", "FA4")}
    return passes_table("columns", {"forward": forward, "backward": backward}, columns)


def mma_table(forward: Sequence[Row], backward: Sequence[Row]) -> str:
    columns = {"flashgen": tflops("flashgen"), "times FA2": times("FA2")}
    return passes_table("head dim", {"forward": forward, "backward": backward}, columns)


def variants_table(forward: Sequence[Row], backward: Sequence[Row]) -> str:
    columns: dict[str, Cell] = {
        "ms": lambda row: milliseconds(row["milliseconds"]),
        "Flex": lambda row: milliseconds(row["flex_ms"]),
        "times Flex": lambda row: three_digits(row["ratio"]),
        "deterministic": lambda row: milliseconds(row["deterministic_ms"]),
    }
    return _by_name("variant", {"forward": forward, "backward": backward}, columns)


def biases_table(forward: Sequence[Row], backward: Sequence[Row]) -> str:
    def time(name: str) -> Cell:
        return lambda row: number(row["milliseconds"].get(name), 3)

    columns = {name: time(name) for name in ("flashgen", "cuDNN", "EFFICIENT", "Flex")}
    return _by_name("array", {"forward": forward, "backward": backward}, columns)


def varlen_table(forward: Sequence[Row], backward: Sequence[Row], uneven: Sequence[Row]) -> str:
    def time(name: str) -> Cell:
        return lambda row: milliseconds(row["milliseconds"].get(name))

    marked = [{**row, "name": f"{row['name']}, of random lengths"} for row in uneven]
    columns = {name: time(name) for name in ("flashgen", "FA4", "torch")}
    return _by_name("documents in tokens", {"forward": forward, "backward": [*backward, *marked]}, columns)


def _by_name(head: str, passes: Mapping[str, Sequence[Row]], columns: Mapping[str, Cell]) -> str:
    """Returns columns of the forward and of the backward, with a row for each name."""
    found = {each: {row["name"]: row for row in rows} for each, rows in passes.items()}
    names = dict.fromkeys(name for mine in found.values() for name in mine)
    heads = [f"{each}: {column}" for each in passes for column in columns]
    lines = (
        [name, *(cell(mine[name]) if name in mine else "-" for mine in found.values() for cell in columns.values())]
        for name in names
    )
    return table([head, *heads], lines)


def decode_table(rows: Sequence[Row]) -> str:
    names = ("flashgen", "pages of 64", "pages of 16", "cuDNN", "FlashInfer", "FA2", "Flex")
    lines = (
        [
            row["size"],
            *(number(row["terabytes"].get(name), 2) for name in names),
            number(row["microseconds"]["flashgen"], 1),
            number(row["ratio"], 2),
        ]
        for row in rows
    )
    return table(["batch, heads, keys", *names, "flashgen µs", "times the best peer"], lines)


def latent_table(rows: Sequence[Row], records: Sequence[Row]) -> str:
    """Returns microseconds over 16-bit keys and over records, which are measured beside 16-bit keys in another run."""
    names = ("flashgen", "pages of 64", "pages of 16", "FlashMLA", "FlashInfer")
    found = {row["size"]: row["microseconds"] for row in rows}
    others = {row["size"]: row["microseconds"] for row in records}
    lines = (
        [
            size,
            *(number(found.get(size, {}).get(name)) for name in names),
            *(number(others.get(size, {}).get(name)) for name in ("flashgen", "16 bits")),
        ]
        for size in dict.fromkeys([*found, *others])
    )
    return table(["batch, heads, keys", "contiguous", *names[1:], "records", "16 bits beside them"], lines)


def prompts_table(rows: Sequence[Row]) -> str:
    names = ("flashgen", "16 bits", "pages of 64", "pages of 64, 16 bits")
    lines = (
        [row["size"], *(number(row["microseconds"].get(name), 1) for name in names), number(row["tflops"]["flashgen"])]
        for row in rows
    )
    return table(["batch, heads, keys", "8 bits", *names[1:], "TFLOP/s of 8 bits"], lines)


def host_table(rows: Sequence[Row], registry: Sequence[Row]) -> str:
    """Returns microseconds of a call of one tile by function; several rows of a function are rounds of one run."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in (*rows, *registry):
        if row["library"] == "torch":
            found.setdefault((row["timed"], row["name"]), []).append(row["median"])

    def cell(timed: str, name: str) -> str:
        return number(median(found[timed, name]) if (timed, name) in found else None, 1)

    def names(column: str, timed: str, case: str) -> str:
        if column == "attention(...)" and timed == "backward":  # it has no graph: its plain call is the caller's
            return column + {"": ", in autograd's thread", ", in the caller's thread": ""}[case]
        return column + case

    lines = (
        [call, *(cell(timed, names(column, timed, case)) for column in _HOST_COLUMNS.values())]
        for call, (timed, case) in _HOST_CALLS.items()
    )
    return table(["call", *_HOST_COLUMNS], (line for line in lines if any(cell != "-" for cell in line[1:])))


def train_table(rows: Sequence[Row], long: Sequence[Row]) -> str:
    """Returns milliseconds per step and gigabytes of memory by attention, with a row for each shape."""
    shapes: dict[str, dict[str, str]] = {}
    for row in (*rows, *long):
        shape = f"{row['batch']} × {row['length']}" + (", window 1024 in 16 documents" if row in long else "")
        failed = "out of memory" if "memory" in row["problem"] else "-"
        cell = f"{row['ms']:.1f}, {row['peak_bytes'] / 1e9:.1f}" if row["ms"] else failed
        shapes.setdefault(shape, {})[row["name"]] = cell
    names = ("flashgen", "cuDNN", "FA2", "Flex", "standard")
    return table(
        ["batch × tokens", *names], ([shape, *(mine.get(n, "-") for n in names)] for shape, mine in shapes.items())
    )


# ---- figures in sentences


@dataclass(frozen=True)
class Files:
    """The files of a folder that exist, by name, in the order of COMMANDS."""

    saved: Mapping[str, Mapping[str, Any]]

    @classmethod
    def read(cls, folder: Path = MEASURED) -> Files:
        paths = {name: folder / f"{name}.json" for name in COMMANDS}
        return cls({name: json.loads(path.read_text("utf-8")) for name, path in paths.items() if path.exists()})

    def rows(self, name: str) -> list[Row]:
        """Returns the rows of a file; none if it does not exist."""
        return list(self.saved[name]["rows"]) if name in self.saved else []

    def has(self, *names: str) -> bool:
        """Returns whether any of the files exists."""
        return any(name in self.saved for name in names)

    def mean(self, name: str, peer: str = "") -> str:
        """Returns the geometric mean of the speed relative to a peer, or to the best one."""
        ratios = (row["ratios"].get(peer) if peer else best_ratio(row) for row in self.rows(name))
        return f"{geometric_mean([ratio for ratio in ratios if ratio]):.2f}"

    def speed(self, name: str) -> str:
        """Returns the geometric mean of TFLOP/s."""
        return f"{geometric_mean([row['tflops']['flashgen'] for row in self.rows(name)]):.0f}"

    def span(self, name: str, ratio: Callable[[Row], float | None]) -> str:
        """Returns the smallest and the largest ratio of a file's rows."""
        return _span(map(ratio, self.rows(name)))

    def ahead(self, *names: str) -> str:
        """Returns a sentence that lists the cells in which a peer is ahead, with the speed relative to it."""
        cells = []
        for name in names:
            for row in self.rows(name):
                peer, ratio = best_peer(row) or ("", 1.0)
                where = row["name"] if "name" in row else f"{label(row['spec'])} at {row['length']} tokens"
                if ratio < _AHEAD:
                    cells.append(f"{row['timed']} of {where} ({ratio:.2f} times {peer})")
        return f"A peer is ahead here: {', '.join(cells)}." if cells else "No peer is ahead in any cell."

    def deterministic(self) -> dict[str, str]:
        """Returns the time of the deterministic backward relative to the default, by kernels and masks."""
        variants = {
            row["name"]: row["deterministic_ms"] / row["milliseconds"] for row in self.rows("variants-backward")
        }
        speeds = {
            name: [row["milliseconds"]["deterministic"] / row["milliseconds"]["flashgen"] for row in self.rows(name)]
            for name in ("backward", "mma-backward")
        }
        lists = [ratio for name, ratio in variants.items() if name in _WITH_TILE_LISTS]
        closed = [ratio for name, ratio in variants.items() if name not in _WITH_TILE_LISTS]
        found = {"closed": [*speeds["backward"], *closed], "lists": lists, "mma": speeds["mma-backward"]}
        return {name: _span(ratios) for name, ratios in found.items() if ratios}

    # ---- where it was measured

    def environment(self) -> dict[str, str]:
        """Returns the environment of the first file, with the peers of the files that were measured in the same."""
        first = dict(next(iter(self.saved.values()))["environment"])
        for saved in self.saved.values():
            if not _differences(first, saved["environment"]):
                peers = {name: saved["environment"][name] for name in _PEER_VERSIONS if name in saved["environment"]}
                first = peers | first
        return first

    def where(self) -> str:
        """Returns the card and the versions of the page's run."""
        return _where(self.environment(), [*_VERSIONS, *_PEER_VERSIONS])

    def source(self, *names: str) -> str:
        """Returns how files were measured that differ from the page's run, as a paragraph; "" if none does."""
        common, sentences = self.environment(), {}
        for name in names:
            mine = self.saved.get(name, {}).get("environment", {})
            if mine and _differences(common, mine):
                sentences[f"Measured on another card or with other versions: {_where(mine, _VERSIONS)}."] = None
            if "note" in mine:
                sentences[mine["note"]] = None
        return f"{' '.join(sentences)}\n" if sentences else ""


def ahead_over_pages(rows: Sequence[Row]) -> str:
    """Returns a sentence about the sizes at which a peer of latent decode is ahead over pages; "" without peers."""
    times = [row["microseconds"] for row in rows]
    best = [min((each[name] for name in ("FlashMLA", "FlashInfer") if name in each), default=None) for each in times]
    ratios = [peer / each["pages of 64"] for each, peer in zip(times, best, strict=True) if peer]
    count = sum(ratio < _AHEAD for ratio in ratios)
    stated = f"Over pages of 64 a peer is ahead in {count} of {len(ratios)} rows ({_span(ratios)} times its speed)."
    return stated if ratios else ""


def _span(ratios: Iterable[float | None]) -> str:
    known = [f"{ratio:.2f}" for ratio in sorted(ratio for ratio in ratios if ratio is not None)] or ["-"]
    return known[0] if known[0] == known[-1] else f"{known[0]} to {known[-1]}"


def _differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return [name for name in ("gpu", *_VERSIONS) if name in one and name in other and one[name] != other[name]]


def _where(environment: Mapping[str, str], names: Iterable[str]) -> str:
    titles = _VERSIONS | _PEER_VERSIONS
    versions = [f"{titles[name]} {_version(name, environment[name])}" for name in names if name in environment]
    return f"one {environment['gpu']} ({', '.join(versions)})"


def _version(name: str, text: str) -> str:
    """Returns a version without its local part; cuDNN states its version as a number."""
    return f"{int(text) // 10000}.{int(text) // 100 % 100}" if name == "cudnn" else text.partition("+")[0]


# ---- pages


def page(folder: Path = MEASURED) -> str:
    """Returns what stands between the marks of docs/performance.md."""
    files = Files.read(folder)
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    source = (MEASURED / "performance.md.jinja").read_text(encoding="utf-8")
    tables = {name: value for name, value in globals().items() if name.endswith("_table")}
    commands = "\n".join(map(command, COMMANDS))
    functions = {"ratio": lambda row: row["ratio"], "ahead_over_pages": ahead_over_pages}
    text = environment.from_string(source).render(files=files, commands=commands, **functions, **tables)
    return "\n\n".join(filled(paragraph) for paragraph in re.split(r"\n{2,}", text.strip()))


def filled(paragraph: str) -> str:
    """Returns a paragraph in lines of equal width that break no link or code; headings, tables and blocks stay."""
    if paragraph.startswith(("#", "|", "```")):
        return paragraph
    whole = re.sub(r"`[^`]*`|\[[^\]]*\]\([^)]*\)", lambda match: re.sub(r"\s", "\0", match[0]), paragraph)
    return textwrap.fill(whole, _WIDTH, break_long_words=False, break_on_hyphens=False).replace("\0", " ")


def readme(folder: Path = MEASURED) -> str:
    """Returns what stands between the marks of the README: the table of the forward, and where it was measured."""
    saved = Files.read(folder).saved["forward"]
    intro = (
        "TFLOP/s of the forward at 1024 / 4096 / 16384 tokens per sequence, 16384 tokens in total, bfloat16, heads × "
        "dim = 2048, cold L2, medians of `flashgen bench` "
        f"on one {saved['environment']['gpu']}; FA4 is FlashAttention-4:"
    )
    return f"{filled(intro)}\n\n{speed_table(saved['rows'])}"


def with_tables(text: str) -> str:
    """Returns a page with current tables between its marks, if it has any."""
    for begin, end, content in ((BEGIN, END, page), (README_BEGIN, README_END, readme)):
        if begin in text:
            before, _, rest = text.partition(begin)
            text = f"{before}{begin}\n{content()}\n{end}{rest.partition(end)[2]}"
    return text


def run(names: Sequence[str], folder: Path) -> list[str]:
    """Runs the commands of files one after another. Returns the names of those that failed."""
    programs = {"flashgen": [sys.executable, "-m", "flashgen"], "python": [sys.executable]}
    start = partial(subprocess.run, cwd=DOCS.parent, check=False)
    failed = []
    for name in names:
        program, *words = shlex.split(command(name, str(folder)))
        print(f"== {name}", flush=True)
        if start([*programs[program], *words]).returncode:
            failed.append(name)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the benchmarks that write docs/measured/.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"the files to write: {', '.join(COMMANDS)}")
    parser.add_argument("--folder", type=Path, default=MEASURED, help="the folder to write to; default: docs/measured")
    parser.add_argument("--list", action="store_true", help="print the commands instead")
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in COMMANDS]
    if unknown:
        parser.error(f"there is no file {unknown[0]!r}")
    if given.list:
        print("\n".join(command(name, str(given.folder.resolve())) for name in given.names or COMMANDS))
    elif failed := run(given.names or [*COMMANDS], given.folder.resolve()):
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
