"""The options that several commands share, among them those of an AttentionSpec."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from flashgen.codegen.stages import Pass

SPEC_HELP = (
    'An expression such as "causal() & sliding_window(1024)", a name in a file such as variants.py:near, or JSON.'
)


def known_targets() -> list[str]:
    """Returns the names of the targets, for the shell completion of --target."""
    from flashgen.codegen.targets import TARGETS

    return list(TARGETS)


def one_of(*words: str) -> Callable[[], list[str]]:
    """Returns a function that returns these words, for the shell completion of an option."""
    return lambda: list(words)


_NO_DEFAULTS: Mapping[str, str] = {}
Spec = Annotated[str, typer.Argument(metavar="SPEC", help=SPEC_HELP)]
Specs = Annotated[list[str] | None, typer.Argument(metavar="SPEC", help=SPEC_HELP)]
Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="ARCH",
        help="The target architecture, such as sm_80. Default: that of this machine's GPU.",
        autocompletion=known_targets,
    ),
]


class Passes(StrEnum):
    """The values of --pass."""

    forward = "forward"
    backward = "backward"
    both = "both"

    @property
    def chosen(self) -> tuple[Pass, ...]:
        """The passes in the order in which they run."""
        if self is Passes.both:
            return ("forward", "backward")
        return ("forward",) if self is Passes.forward else ("backward",)


Emulate = Annotated[bool, typer.Option("--emulate", help="Run the generated CUDA on this CPU, with the emulator.")]
Json = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="Use the backward that computes bitwise equal gradients in every run.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="The seed of dropout and of random inputs.")]


@dataclass(frozen=True)
class SpecOptions:
    """The options of a spec. None means that an option was not given, so the default of AttentionSpec applies."""

    score: Annotated[
        str | None,
        typer.Option("--score", metavar="EXPR", help='A score function, such as "softcap(30)" or file.py:name.'),
    ] = None
    dropout: Annotated[
        float | None, typer.Option("--dropout", help="Probability of dropping an attention weight, 0 <= p < 1.")
    ] = None
    head_dim: Annotated[
        int | None,
        typer.Option("--head-dim", help="Head dim of queries and keys: 8, 16, ... 576.", show_default="64"),
    ] = None
    value_dim: Annotated[
        int | None, typer.Option("--value-dim", help="Head dim of values.", show_default="the head dim")
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            help="The dtype of q, k and v: float16 or bfloat16.",
            show_default="float16",
            autocompletion=one_of("float16", "bfloat16"),
        ),
    ] = None
    scale: Annotated[
        float | None, typer.Option("--scale", help="The factor of q·k.", show_default="1/sqrt(head dim)")
    ] = None
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout",
            help="The order of the axes of q, k and v: bhsd or bshd; thd for varlen batches.",
            show_default="bhsd",
            autocompletion=one_of("bhsd", "bshd", "thd"),
        ),
    ] = None

    sink: Annotated[
        str | None,
        typer.Option(
            "--sink",
            metavar="NAME",
            help="The name of a float32 array of learned attention sinks, one for each query head.",
        ),
    ] = None

    page_size: Annotated[
        int | None,
        typer.Option("--page-size", help="Keys of a page, for a paged KV cache: a power of 2 up to 256."),
    ] = None

    kv_dtype: Annotated[
        str | None,
        typer.Option(
            "--kv-dtype",
            help="The dtype of k and v: float8_e4m3fn, int8, or fp8_ds_mla for records of latent attention.",
            show_default="the dtype",
            autocompletion=one_of("float8_e4m3fn", "int8", "fp8_ds_mla"),
        ),
    ] = None

    out_dtype: Annotated[
        str | None,
        typer.Option(
            "--out-dtype",
            help="The dtype of the output: the dtype, or float32.",
            show_default="the dtype",
            autocompletion=one_of("float16", "bfloat16", "float32"),
        ),
    ] = None

    grad_dtype: Annotated[
        str | None,
        typer.Option(
            "--grad-dtype",
            help="The dtype of dq, dk and dv: the dtype, or float32.",
            show_default="the dtype",
            autocompletion=one_of("float16", "bfloat16", "float32"),
        ),
    ] = None

    sharded: Annotated[
        bool | None,
        typer.Option("--sharded", help="The kernels for shards of q and k, which context parallelism runs."),
    ] = None

    shared_kv: Annotated[
        bool | None,
        typer.Option("--shared-kv", help="V is the first columns of K, as in latent attention: calls take q and kv."),
    ] = None

    def given(self) -> dict[str, Any]:
        """Returns the options that were given, by field name."""
        fields = dataclasses.asdict(self)
        return {name: value for name, value in fields.items() if value is not None}

    def with_defaults(self, **defaults: Any) -> SpecOptions:
        """Returns these options, with other values for those that were not given."""
        return SpecOptions(**(defaults | self.given()))


def with_spec_options_of(**defaults: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns `with_spec_options` for a command whose help shows other defaults, given by field name."""
    return functools.partial(with_spec_options, defaults=defaults)


def with_spec_options(command: Callable[..., Any], defaults: Mapping[str, str] = _NO_DEFAULTS) -> Callable[..., Any]:
    """Adds the options of SpecOptions to a command, which receives them as one keyword argument, `options`."""
    signature = inspect.signature(command, eval_str=True)
    hints = typing.get_type_hints(SpecOptions, include_extras=True)
    hints |= {name: _with_default(hints[name], default) for name, default in defaults.items()}
    added = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in dataclasses.fields(SpecOptions)
    ]
    own = [parameter for parameter in signature.parameters.values() if parameter.name != "options"]

    @functools.wraps(command)
    def wrapper(**arguments: Any) -> Any:
        options = SpecOptions(**{parameter.name: arguments.pop(parameter.name) for parameter in added})
        return command(**arguments, options=options)

    keyword_only = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    parameters = [*keyword_only, *added]
    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def _with_default(hint: Any, default: str) -> Any:
    """Returns the type hint of an option with another default in its help."""
    kind, option = typing.get_args(hint)
    option = copy.copy(option)
    option.show_default = default
    return Annotated[kind, option]
