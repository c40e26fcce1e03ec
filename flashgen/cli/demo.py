"""`flashgen demo`: generates, runs and checks kernels on the inputs of a trained layer."""

from __future__ import annotations

import json as json_module
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from flashgen.cli.arrays import Arrays, load_arrays
from flashgen.cli.console import note, print_json, progress, stdout
from flashgen.cli.machine import engine_text, gpus
from flashgen.cli.options import Emulate, Json, Target
from flashgen.cli.writing import Force, check_folder, check_unedited, write_output, writing
from flashgen.errors import FlashgenError
from flashgen.remedies import install

if TYPE_CHECKING:
    from flashgen.analysis.tile_classes import TileMap
    from flashgen.attention import Attention
    from flashgen.language import AttentionSpec
    from flashgen.reference import Verdict

EXAMPLES = """[bold]Examples[/]

flashgen demo

flashgen demo --emulate --output /tmp/demo
"""

EXAMPLE = "minilm_qkv.npz"
SUMMARY, PAGE = "summary.json", "index.html"
VARIANT_FILES = ("kernel.cu", "tile_lists.cu", "spec.json", "tiles.svg")
SEED = 7
COPIES, HEADS = 6, 4  # the paragraph is repeated, so that kernels skip tiles; of its 12 heads, the variants use these
BLOCK = 64  # queries and keys of a cell of a drawn mask
LEGEND = (
    f"Masks in blocks of {BLOCK} × {BLOCK} scores: · masked, ▒ partly kept, █ kept.",
    "The colour of a block is that of the kernel's tile around it:",
)
PICTURE = 440  # width in pixels of a picture on the index page
TOKEN = "rabbit"  # the token whose attention weights are shown


@dataclass(frozen=True)
class Traffic:
    """Bytes read from and written to HBM, counted, if keys and values are loaded again for each tile that uses them.

    kernel: of the kernel. without_skipping: of the kernel if it visited all tiles. standard: of standard attention,
    which stores the matrices of scores and weights.
    """

    kernel: int
    without_skipping: int
    standard: int

    @property
    def saved(self) -> float:
        """The share of the bytes that skipping tiles saves."""
        return 1 - self.kernel / self.without_skipping


@dataclass(frozen=True)
class Outcome:
    """The results and files of a variant that was run.

    ready: seconds until the kernel was compiled. ran: seconds of a call. visited: the tile map of the kernel. blocks:
    the map of the mask in blocks of BLOCK × BLOCK. elements: the map of the mask in single elements. traffic: the bytes
    that the kernel moves.
    """

    attention: Attention
    verdict: Verdict
    folder: Path
    ready: float
    ran: float
    visited: TileMap
    blocks: TileMap
    elements: TileMap
    traffic: Traffic

    def to_dict(self) -> dict[str, Any]:
        """Returns the results for JSON."""
        return {
            "spec": self.attention.spec.name,
            "target": self.attention.target.name,
            "folder": str(self.folder),
            "ok": self.verdict.ok,
            "error": self.verdict.error,
            "bound": self.verdict.bound,
            "lse_error": self.verdict.lse_error,
            "seconds_until_ready": self.ready,
            "seconds_of_a_run": self.ran,
            "tokens": self.visited.len_q,
            "tile": list(self.visited.tile),
            "share_of_tiles_visited": self.visited.share,
            "share_of_scores_kept": self.elements.share,
            "bytes": self.traffic.kernel,
            "bytes_without_skipping": self.traffic.without_skipping,
            "bytes_of_standard_attention": self.traffic.standard,
        }


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")] = Path("flashgen-demo"),
    target: Target = None,
    emulate: Emulate = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Generate, compile, run and check several attention variants on q, k and v of a trained layer.

    The inputs are those of one layer of all-MiniLM-L6-v2 for the first sentences of "Alice's Adventures in Wonderland",
    repeated so that they fill many tiles. Each variant is compared with NumPy in float64, and its CUDA source, spec and
    tile map are saved. The kernels run on this machine's GPU. Without a GPU they run on the emulator, which runs the
    same CUDA on the CPU.
    """
    emulate = emulate or not gpus()
    check_folder(output)
    example = load_arrays(example_path())
    specs = variants(example)
    check_unedited((output / name for name in file_names(specs)), force)
    note(f"engine: {engine_text(emulate)}")
    inputs = repeated(example)
    note(
        f"input:  {inputs['q'].shape[2]} tokens ({COPIES} times the same {len(example['tokens'])}), {HEADS} heads of "
        f"{example['q'].shape[3]}, float16"
    )
    if not json:
        print_legend()
    outcomes = []
    with progress("first kernel", len(specs)) as bar:
        for number, spec in enumerate(specs, start=1):
            bar.update(bar.task_ids[0], description=spec.mask.name)
            outcome = run_variant(spec, inputs, output, target, emulate)
            outcomes.append(outcome)
            bar.advance(bar.task_ids[0])
            if not json:
                print_outcome(number, outcome)
    weight_lines = list(read_attention(example, target, emulate))
    failures = sum(not outcome.verdict.ok for outcome in outcomes)
    summary = {"engine": engine_text(emulate), "variants": [outcome.to_dict() for outcome in outcomes]}
    write_output(output / SUMMARY, json_module.dumps(summary, indent=2) + "\n")
    write_output(output / PAGE, index_page(outcomes, engine_text(emulate), weight_lines, output))
    if json:
        print_json(summary)
    else:
        for line in weight_lines:
            stdout().print(line, markup=False)
        note(f"{len(outcomes) - failures} of {len(outcomes)} variants agree with NumPy; open {output}/index.html")
    if failures:
        raise typer.Exit(1)


def example_path() -> Path:
    """Returns the path of the example's data, inside the installed package or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    candidates = (package / "examples" / EXAMPLE, package.parent / "examples" / EXAMPLE)
    for path in candidates:
        if path.is_file():
            return path
    raise FlashgenError(
        f"the example's data is missing: neither {candidates[0]} nor {candidates[1]} exists; "
        f"install flashgen again: {install()} --force-reinstall"
    )


def variants(example: Arrays) -> tuple[AttentionSpec, ...]:
    """Returns the specs of the demo. They capture `sentence` and `slopes`, which are arrays of the example's file."""
    import flashgen as fg

    dims = {"head_dim": example["q"].shape[3], "value_dim": example["v"].shape[3]}
    return (
        fg.AttentionSpec(**dims),
        fg.AttentionSpec(**dims, mask=fg.causal()),
        fg.AttentionSpec(**dims, mask=fg.causal() & fg.sliding_window(100)),
        fg.AttentionSpec(**dims, mask=fg.causal(), score=fg.softcap(20)(fg.alibi("slopes"))),
        fg.AttentionSpec(**dims, mask=fg.document("sentence")),
        fg.AttentionSpec(**dims, mask=fg.causal() & near_or_first, dropout=0.1),
    )


def near_or_first(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Keeps the 20 tokens before each query and the first token, as an example of a user's mask function."""
    return (q - k <= 20) | (k == 0)


def repeated(example: Arrays) -> Arrays:
    """Returns the inputs of the variants: HEADS heads of COPIES copies of the paragraph, with distinct sentences."""
    q, k, v = (np.tile(example[name][:, :HEADS], (1, 1, COPIES, 1)) for name in ("q", "k", "v"))
    sentence = example["sentence"]
    sentences = np.concatenate([sentence + copy * (sentence.max() + 1) for copy in range(COPIES)]).astype(np.int32)
    return {"q": q, "k": k, "v": v, "sentence": sentences, "slopes": example["slopes"][:HEADS]}


def run_variant(spec: AttentionSpec, inputs: Arrays, output: Path, target: str | None, emulate: bool) -> Outcome:
    from flashgen import attention as engine
    from flashgen.analysis.tile_classes import tile_map
    from flashgen.verify import judged

    begin = time.perf_counter()
    attention = engine.compile(spec, target=target, emulate=emulate)
    ready = time.perf_counter() - begin
    captures: dict[str, Any] = {capture.name: inputs[capture.name] for capture in spec.captures}
    options: dict[str, Any] = {"seed": SEED} if spec.dropout else {}
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    out, lse = attention(q, k, v, return_lse=True, **captures, **options)
    ran = seconds_of_a_run(attention, (q, k, v), captures | options, emulate)
    verdict = judged(spec, q, k, v, out, lse, captures, **options)
    length, mask_arrays = q.shape[2], {capture.name: captures[capture.name] for capture in spec.mask.captures}
    tiles = attention.tiles(length, **mask_arrays)
    blocks, elements = (
        tile_map(spec.mask.expression, (size, size), length, length, captures=mask_arrays) for size in (BLOCK, 1)
    )
    folder = output / spec.name
    keep_files(folder, attention, tiles)
    traffic = traffic_of(attention, tiles, q)
    return Outcome(attention, verdict, folder, ready, ran, tiles, blocks, elements, traffic)


def traffic_of(attention: Attention, tiles: TileMap, q: Any) -> Traffic:
    from flashgen.analysis.tile_classes import tile_map
    from flashgen.language import full
    from flashgen.report.sizes import CallSizes
    from flashgen.report.traffic import forward_traffic

    batch, heads, length, _ = q.shape
    sizes = CallSizes(length, length, batch, heads, heads)
    every = tile_map(full().expression, tiles.tile, length, length)
    standard, *_, kernel, _ = forward_traffic(attention.spec, attention.target, tiles, sizes)
    *_, without_skipping, _ = forward_traffic(attention.spec, attention.target, every, sizes)
    return Traffic(kernel.bytes, without_skipping.bytes, standard.bytes)


def seconds_of_a_run(attention: Attention, inputs: tuple[Any, ...], options: dict[str, Any], emulate: bool) -> float:
    """Returns the median time of several calls on a GPU with the arrays there, or the time of one emulated call."""
    if not emulate:
        import cupy

        from flashgen.runtime.timing import median_ms

        moved = [cupy.asarray(array) for array in inputs]
        arguments = {name: cupy.asarray(v) if isinstance(v, np.ndarray) else v for name, v in options.items()}
        return median_ms(lambda: attention(*moved, **arguments)) / 1e3
    begin = time.perf_counter()
    attention(*inputs, **options)
    return time.perf_counter() - begin


def keep_files(folder: Path, attention: Attention, tiles: TileMap) -> None:
    """Writes the CUDA source of the kernel and of its tile-list kernel, if any, the spec and the tile map."""
    from flashgen.analysis.drawing.tile_maps import to_svg

    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    kernel_file, lists_file, spec_file, map_file = VARIANT_FILES
    for kernel in attention.kernels:
        write_output(folder / (kernel_file if kernel.source == attention.source else lists_file), kernel.source)
    write_output(folder / spec_file, attention.spec.to_json() + "\n")
    write_output(folder / map_file, to_svg(tiles, title=attention.spec.mask.name))


def file_names(specs: Sequence[AttentionSpec]) -> Iterator[str]:
    """Yields the names of all files that the demo writes, relative to its folder."""
    yield from (SUMMARY, PAGE, *(f"{spec.name}/{name}" for spec in specs for name in VARIANT_FILES))


def print_legend() -> None:
    from rich.text import Text

    from flashgen.analysis.drawing import palette

    colours = (
        ("blue: all kept, no mask code", palette.FULL),
        ("orange: masked by element", palette.PARTIAL),
        ("grey: skipped", palette.RULE),
    )
    for line in LEGEND:
        stdout().print(line, markup=False)
    stdout().print(Text("  ") + Text(", ").join(Text(name, style=colour) for name, colour in colours))


def print_outcome(number: int, outcome: Outcome) -> None:
    console = stdout()
    console.print()
    console.print(f"{number}. {variant_text(outcome.attention.spec)}", style="bold", markup=False)
    for line in drawn_lines(outcome):
        console.print(line)
    for name, text in result_lines(outcome):
        style = None if name != "NumPy" else "green" if outcome.verdict.ok else "bold red"
        console.print(f"   {name:7} {text}", style=style, markup=False)


def drawn_lines(outcome: Outcome) -> Iterator[Any]:
    """Yields the lines of the mask drawn in blocks, in the colours of the tiles, with query and key numbers."""
    from rich.text import Text

    from flashgen.analysis.drawing.tile_maps import to_text

    length, classes = outcome.blocks.len_q, outcome.visited.of()
    rows, columns = outcome.visited.tile
    drawn = to_text(outcome.blocks, legend=False).splitlines()
    yield Text(" query ↓")
    for block, line in enumerate(drawn):
        text = Text(f"{block * BLOCK if block % 4 == 0 else '':>6} ")
        for index, glyph in enumerate(line):
            middle = (block * BLOCK + BLOCK // 2, index // 2 * BLOCK + BLOCK // 2)
            kind = classes[min(middle[0], length - 1) // rows, min(middle[1], length - 1) // columns]
            text.append(glyph, style=tile_colours()[int(kind)])
        yield text
    numbers = "".join(f"{block * BLOCK:<8}" for block in range(0, len(drawn), 4))
    yield Text(f"       {numbers.rstrip()}  key →")


def tile_colours() -> tuple[str, str, str]:
    """Returns the colours of the tile classes EMPTY, PARTIAL and FULL."""
    from flashgen.analysis.drawing import palette

    return palette.RULE, palette.PARTIAL, palette.FULL


def result_lines(outcome: Outcome) -> tuple[tuple[str, str], ...]:
    """Returns the (label, text) of each line about a variant."""
    tiles, traffic, source = outcome.visited, outcome.traffic, outcome.attention.source
    return (
        ("mask", f"keeps {outcome.elements.share:.1%} of the scores"),
        (
            "tiles",
            f"{tiles.share:.1%} visited: {tiles.len_q} × {tiles.len_k} scores in tiles of "
            f"{tiles.tile[0]} × {tiles.tile[1]}",
        ),
        (
            "traffic",
            f"{traffic.kernel / 1e6:.1f} MB; skipping saves {traffic.saved:.0%} of "
            f"{traffic.without_skipping / 1e6:.1f} MB; standard attention {traffic.standard / 1e6:.1f} MB",
        ),
        ("kernel", f"{outcome.folder / 'kernel.cu'}, {len(source.splitlines())} lines"),
        ("time", f"ready in {outcome.ready:.2f} s, then {outcome.ran * 1e3:.2f} ms a run"),
        ("NumPy", str(outcome.verdict)),
    )


def index_page(outcomes: list[Outcome], engine: str, weight_lines: list[str], output: Path) -> str:
    """Returns the page that shows all variants, with links to their files."""
    from flashgen.analysis.drawing.tile_maps import to_mask_svg, to_svg
    from flashgen.report.demo_page import VariantEntry, demo_page

    entries = [
        VariantEntry(
            variant_text(outcome.attention.spec),
            outcome.verdict.ok,
            to_mask_svg(outcome.elements, "What the mask keeps", PICTURE),
            to_svg(outcome.visited, "Which tiles the kernel visits", PICTURE),
            result_lines(outcome),
            [(path.name, str(path.relative_to(output))) for path in sorted(outcome.folder.iterdir())],
        )
        for outcome in outcomes
    ]
    return demo_page(engine, outcomes[0].visited.len_q, COPIES, entries, [line.strip() for line in weight_lines])


def variant_text(spec: AttentionSpec) -> str:
    parts = [
        spec.mask.name,
        f"score {spec.score.name}" if spec.score else "",
        f"dropout {spec.dropout:g}" if spec.dropout else "",
    ]
    return ", ".join(part for part in parts if part)


def read_attention(example: Arrays, target: str | None, emulate: bool) -> Iterator[str]:
    """Yields lines about the attention weights of TOKEN.

    With the identity matrix as V, the output of a kernel is the matrix of attention weights: O = P·I = P.
    """
    import flashgen as fg
    from flashgen import attention as engine

    tokens = [str(token) for token in example["tokens"]]
    q, k = example["q"], example["k"]
    spec = fg.AttentionSpec(head_dim=q.shape[3], value_dim=len(tokens), mask=fg.document("sentence"))
    identity = np.broadcast_to(np.eye(len(tokens), dtype=np.float16), (*q.shape[:2], len(tokens), len(tokens)))
    weights = engine.compile(spec, target=target, emulate=emulate)(
        q, k, np.ascontiguousarray(identity), sentence=example["sentence"]
    )
    query = tokens.index(TOKEN)
    yield f'\nAttention weights of "{TOKEN}" within its sentence, the output for V = identity:'
    rows = weights[0, :, query].astype(np.float32)
    others = np.where(np.arange(len(tokens)) == query, 0, rows)
    for head in sorted(np.argsort(-others.max(axis=1))[:3]):
        best = np.argsort(-rows[head])[:4]
        found = ", ".join(f"{tokens[key]} {rows[head, key]:.2f}" for key in best)
        yield f"   head {head:2}: {found}"
