"""`Attention`: a compiled spec, to be called, and to be asked what it is and does."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from flashgen.attention.engines import Engine, build
from flashgen.attention.forward import ForwardPass
from flashgen.attention.lists import TileLister, TileLists
from flashgen.build.resources import Resources
from flashgen.codegen.forward import render_forward
from flashgen.codegen.kernel import RenderedKernel
from flashgen.codegen.plans import ForwardPlan
from flashgen.codegen.targets import Target
from flashgen.errors import ArgumentError
from flashgen.language.spec import AttentionSpec

if TYPE_CHECKING:
    from flashgen.analysis.tiles import TileMap


class Attention:
    """A spec compiled for a target: call it with q, k and v.

    Attributes: `spec`, `target`, `engine` (where it runs), `source` (the CUDA), `plan`, `resources`.
    """

    def __init__(self, spec: AttentionSpec, target: Target, engine: Engine, plan: ForwardPlan | None = None) -> None:
        self.spec, self.target, self.engine = spec, target, engine
        self._kernel = render_forward(spec, target, plan)
        prebuild = f"flashgen show --what resources --target {target.name} '{spec.to_json()}'"
        self._forward = ForwardPass(spec, self._kernel, engine, prebuild)

    def __repr__(self) -> str:
        return f"<flashgen.Attention {self._kernel.name} on {self.engine.name}>"

    @property
    def name(self) -> str:
        """The kernel's readable name."""
        return self._kernel.name

    @property
    def source(self) -> str:
        """The emitted CUDA of the kernel."""
        return self._kernel.source

    @property
    def sources(self) -> dict[str, str]:
        """The emitted CUDA of every kernel a call launches, by readable name, in the order of the launches."""
        return {kernel.name: kernel.source for kernel in self.kernels}

    @property
    def kernels(self) -> tuple[RenderedKernel, ...]:
        """The kernels a call launches, in order."""
        return (self._lister.kernel, self._kernel) if self._lister else (self._kernel,)

    @property
    def plan(self) -> ForwardPlan:
        """Tile sizes, warps and stages."""
        return self._kernel.plan

    @cached_property
    def resources(self) -> Resources:
        """Registers, spills and shared memory of the kernel, by the GPU's assembler; needs NVRTC, but no GPU."""
        return build(self._kernel, f"flashgen show --what resources --target {self.target.name}").resources

    def tiles(self, len_q: int, len_k: int | None = None, batch: int = 1, heads: int = 1, **captures: Any) -> TileMap:
        """Which tiles a call of these lengths visits, and which of them need their mask; computed on the CPU.

        Captures are NumPy arrays and numbers, needed only if the mask reads them.
        """
        from flashgen.analysis.tiles import tile_map

        length_k = len_q if len_k is None else len_k
        needed = {capture.name for capture in self.spec.mask.captures}
        given = {name: value for name, value in captures.items() if name in needed}
        tile = (self.plan.tile_q, self.plan.tile_k)
        return tile_map(self.spec.mask.expression, tile, len_q, length_k, batch, heads, given)

    def tile_lists(
        self, len_q: int, len_k: int | None = None, batch: int = 1, heads: int = 1, **captures: Any
    ) -> TileLists:
        """The tiles that calls of these lengths visit, listed once: `attention(q, k, v, tile_lists=lists, ...)`.

        Of use where several calls, or the layers of a model, share a mask: by itself a call makes its lists anew, or,
        if the mask reads no capture, remembers them by lengths. Not for a stream that is being captured.

        Args:
            len_q: queries. len_k: keys; None for as many.
            batch: of q. heads: query heads. Lists differ between them only where the mask does.
            captures: what the mask captures, on the device where the calls will be; NumPy arrays are copied there.

        Raises ArgumentError where the mask has a closed form and needs no lists, or a capture does not fit.
        """
        if self._lister is None:
            raise ArgumentError(f"{self.spec.mask.name} needs no lists: its tiles are known in closed form")
        return self._lister.make(len_q, len_q if len_k is None else len_k, batch, heads, captures)

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        seed: int | None = None,
        offset: int = 0,
        return_lse: bool = False,
        out: Any = None,
        tile_lists: TileLists | None = None,
        **captures: Any,
    ) -> Any:
        """Attention of q over k and v.

        Args:
            q: (batch, heads_q, len_q, head_dim), or as the spec's layout says; any strides with a contiguous last
                dimension and rows at multiples of 16 bytes. NumPy, CuPy, PyTorch, JAX, DLPack or CUDA array interface.
            k: (batch, heads_kv, len_k, head_dim); heads_q is a multiple of heads_kv.
            v: (batch, heads_kv, len_k, value_dim).
            seed: of the dropout, 0 <= seed < 2**64; required if the spec has dropout.
            offset: of the dropout's counter, 0 <= offset < 2**32.
            return_lse: give the log-sum-exp of the scores too.
            out: an array to write the output to, and with return_lse a pair of arrays; None makes new ones.
            tile_lists: what `tile_lists(...)` made for the sizes and captures of this call; None makes them.
            captures: the arrays and numbers that the spec declares, by name; a layout may be a BlockLayout.

        Returns:
            The output, (batch, heads_q, len_q, value_dim) in the spec's layout, of q's kind; with return_lse a pair
            with the LSE, float32 (batch, heads_q, len_q). Rows with nothing to attend to are 0, their LSE -inf.

        Raises:
            ArgumentError: an argument does not fit the spec; the message says what to give.
            LaunchError: the kernel could not be launched, or the emulator found a fault.
        """
        return self._forward(q, k, v, captures, seed, offset, return_lse, out, tile_lists)

    @property
    def _lister(self) -> TileLister | None:
        return self._forward.lister
