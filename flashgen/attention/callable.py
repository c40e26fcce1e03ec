"""`Attention`: a compiled spec that can be called, tuned and inspected."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from flashgen.attention.call import Call, Splits
from flashgen.attention.decode_schedule import DecodeSchedule, Scheduler, given_schedule
from flashgen.attention.edits import NO_EDITS, Edits
from flashgen.attention.forward import ForwardPass
from flashgen.attention.forward_dispatch import ForwardKernels
from flashgen.attention.gradients import Gradients, differentiated, given_gradients, gradients_of_rows
from flashgen.attention.outputs import given_outputs
from flashgen.attention.problem import given_cache
from flashgen.attention.repeated_calls import RepeatedCalls
from flashgen.attention.row_arrays import arrays_of_rows, without_values
from flashgen.attention.tile_lists import TileLister, TileLists, sizes_of
from flashgen.attention.tuned_plans import TunedPlans
from flashgen.attention.varlen import refuse_varlen, split_varlen_arguments
from flashgen.build.cache import KernelCache
from flashgen.build.resources import Resources
from flashgen.codegen.families import backward_family
from flashgen.codegen.plan import Plan
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.stages import Kernels, backward_kernels, forward_kernels
from flashgen.codegen.targets import Target
from flashgen.errors import ArgumentError
from flashgen.language.operations import BATCH, HEAD
from flashgen.language.spec import AttentionSpec
from flashgen.launch.engines import Engine, build
from flashgen.runtime.caching import locked_cached_property

if TYPE_CHECKING:
    from flashgen.analysis.tile_classes import TileMap
    from flashgen.attention.backward import BackwardPass
    from flashgen.attention.backward_tile_lists import BackwardTileLists
    from flashgen.attention.repeated_calls import RepeatedLaunch
    from flashgen.attention.trials import Tuning


_OUTPUT, _BOTH = ("o",), ("o", "lse")
_NOTHING: dict[str, Any] = {}
Function = TypeVar("Function")


def _outside_of_graphs(function: Function) -> Function:
    """Makes torch.compile break its graph before a method, as its launches cannot be traced.

    torch.compiler.disable sets the same attributes. torch shows the reason with fullgraph=True.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        "a compiled attention launches its kernels itself: call flashgen.torch.attention(attention, q, k, v), which is "
        "an operator in the graph and has gradients, in place of attention(q, k, v)"
    )
    return function


class Attention:
    """A spec compiled for a target. Call it with q, k and v; `backward` and `vjp` compute gradients.

    Many threads may call one attention at once, on one stream or on several; free-threaded Python may not work.
    Copying returns the attention itself. Pickle stores the spec and the arguments of `compile`, and unpickling compiles
    again; an attention with edited kernels, or with functions that close over arrays, raises UnsupportedError instead.

    Attributes: `spec`, `target`, `engine` (a GPU or the emulator), `source` (the CUDA source), `plan`, `resources`,
    `edited`, `deterministic` (whether gradients are bitwise equal from run to run), `compiled_with` (the plan,
    deterministic and backward_plan arguments of `compile`), and for the backward pass, which is rendered on first
    access, `backward_kernels` and `backward_plan`.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        target: Target,
        engine: Engine,
        plan: Plan | None = None,
        deterministic: bool = False,
        backward_plan: Any | None = None,
        tuned: KernelCache | None = None,
        edits: Edits = NO_EDITS,
    ) -> None:
        """Use `compile` to create one.

        Args:
            spec, plan, deterministic, backward_plan: as in `compile`.
            target: the record of the target.
            engine: the GPU or the emulator.
            tuned: the cache that holds tuned plans. None is the default cache on a GPU, and no cache on the emulator. A
                given plan or an edited kernel takes precedence over tuned plans.
            edits: the edited kernels.
        """
        self.spec, self.target, self.engine, self.deterministic = spec, target, engine, deterministic
        self._tuned = tuned
        self.compiled_with = (plan, deterministic, backward_plan)
        self._given_backward_plan, self._edits = backward_plan, edits
        self._gradients = (*gradients_of_rows(spec), *(capture.name for capture in differentiated(spec)))
        kernels = forward_kernels(spec, target, plan=plan)
        self._kernels = {role: edits.apply(role, kernel) for role, kernel in kernels.items()}
        self._kernel = self._kernels["forward"]
        self._by_sizes = spec.batch_layout.supports("plans by sizes")
        own_plan = plan is None and not edits.touches_forward and self._by_sizes
        uses_tuned = own_plan and (engine.measures or tuned is not None)
        tuned_plans = TunedPlans(self._kernel, tuned) if uses_tuned else None
        with edits.named_in_errors():
            self._forward = ForwardPass(
                spec, self._kernels, engine, self._prebuild("forward"), tuned_plans, by_sizes=own_plan, decodes=own_plan
            )
        self._repeats = RepeatedCalls.of(self._forward)

    def _prebuild(self, which: str) -> str:
        """Returns the command that builds the kernels of a pass ahead of time, for error messages."""
        if self._edits.texts:
            built = "backward_resources" if which == "backward" else "resources"
            return f"flashgen.compile(spec, target={self.target.name!r}, source=...).{built}"
        shown = f"--what resources --target {self.target.name} {shlex.quote(self.spec.to_json())}"
        if which == "backward":
            return f"flashgen show --pass backward {'--deterministic ' if self.deterministic else ''}{shown}"
        command = f"flashgen show {shown}"
        return f"{command} && flashgen show --kernel lists {shown}" if self._kernel.reads else command

    def __copy__(self) -> Attention:
        """Returns the attention itself, which is immutable."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Attention:
        return self

    def __repr__(self) -> str:
        edited = f", edited: {', '.join(self.edited)}" if self.edited else ""
        return f"<flashgen.Attention {self._kernel.name} on {self.engine.name}{edited}>"

    @property
    def name(self) -> str:
        """The readable name of the forward kernel. An edited one ends in `-edited-` and the first digits of a hash."""
        return self._kernel.name

    @property
    def edited(self) -> tuple[str, ...]:
        """The kernels that `compile(..., source=...)` replaced: "forward", "lists", "dkdv", ..."""
        return tuple(self._edits.texts)

    @property
    def source(self) -> str:
        """The CUDA source of the forward kernel."""
        return self._kernel.source

    @property
    def sources(self) -> dict[str, str]:
        """The CUDA source of each kernel that a call launches, by readable name, in launch order."""
        return {kernel.name: kernel.source for kernel in self.kernels}

    @property
    def kernels(self) -> tuple[RenderedKernel, ...]:
        """The kernels that a call launches, in launch order."""
        return tuple(self._kernels.values())

    @property
    def plan(self) -> Plan:
        """Tile sizes, warps and stages of the forward kernel: the plan given to `compile`, or the default plan."""
        return self._kernel.plan

    def plan_for(
        self, len_q: int, len_k: int | None = None, batch: int = 1, heads: int = 1, heads_kv: int | None = None
    ) -> Plan:
        """Returns the plan that calls of these sizes use on the current GPU.

        This is `plan`, or the plan that `tune` found for such lengths. Where the target supports it and it fills tiles
        better, the query heads that share a KV head are packed into one tile. Few queries over many keys use the plan
        of a decode kernel.

        Args:
            len_q, len_k, batch, heads: as in `tile_lists`.
            heads_kv: the number of KV heads; None for `heads`.

        Raises:
            LaunchError: there is no GPU.
        """
        return self._built_for(len_q, len_q if len_k is None else len_k, batch, heads, heads_kv).kernel.plan

    def _built_for(self, len_q: int, len_k: int, batch: int, heads: int, heads_kv: int | None = None) -> ForwardKernels:
        refuse_varlen(self.spec, "plan_for", "its plan is `plan`, whatever the lengths are")
        sizes = sizes_of(len_q, len_k, batch, heads, heads_kv)
        if not self._forward.dispatch.depends_on_sizes:
            return self._forward.dispatch.default
        return self._forward.built_for(sizes, self.engine.current_device())

    @locked_cached_property
    def resources(self) -> Resources:
        """Registers, spills and shared memory of the forward kernel, as ptxas reports them. Needs NVRTC, but no GPU."""
        with self._edits.named_in_errors():
            return build(self._kernel, self._prebuild("forward")).resources

    @locked_cached_property
    def backward_kernels(self) -> Kernels:
        """The kernels that a backward call launches, by role, in launch order.

        Raises UnsupportedError if the target cannot run the backward of the spec.
        """
        given = self._given_backward_plan
        kernels = backward_kernels(self.spec, self.target, self.deterministic, plan=given)
        parts = {role: "backward_lists" if role == "lists" else role for role in kernels}
        return {role: self._edits.apply(parts[role], kernel) for role, kernel in kernels.items()}

    def build_backward(self) -> None:
        """Builds the backward kernels now instead of in the first call. Raises BuildError if one does not compile."""
        _ = self._backward

    @property
    def backward_plan(self) -> Any:
        """The plan of the backward's main kernel, which computes dK and dV."""
        return self.backward_kernels["dkdv"].plan

    @property
    def backward_sources(self) -> dict[str, str]:
        """The CUDA source of each kernel that a backward call launches, by readable name, in launch order."""
        return {kernel.name: kernel.source for kernel in self.backward_kernels.values()}

    @locked_cached_property
    def backward_resources(self) -> dict[str, Resources]:
        """Registers, spills and shared memory of each kernel that a backward call launches, by readable name."""
        prebuild = self._prebuild("backward")
        with self._edits.named_in_errors():
            return {kernel.name: build(kernel, prebuild).resources for kernel in self.backward_kernels.values()}

    @locked_cached_property
    def _backward(self) -> BackwardPass:
        """The backward pass, built on first access."""
        from flashgen.attention.backward import BackwardPass

        kernels, prebuild = self.backward_kernels, self._prebuild("backward")
        own_plan = self._given_backward_plan is None and not self._edits.touches_backward
        head_split = backward_family(self.target).head_split if own_plan and not self.deterministic else None
        uses_tuned = own_plan and self._by_sizes and (self.engine.measures or self._tuned is not None)
        tuned = TunedPlans(kernels["dkdv"], self._tuned) if uses_tuned else None
        with self._edits.named_in_errors():
            return BackwardPass(self.spec, kernels, self.engine, prebuild, head_split, tuned, self.deterministic)

    @locked_cached_property
    def _repeated_backward(self) -> RepeatedCalls | None:
        return RepeatedCalls.of(self._backward)

    def tiles(
        self, len_q: int, len_k: int | None = None, batch: int | None = None, heads: int | None = None, **captures: Any
    ) -> TileMap:
        """Returns which tiles of `plan` a call of these sizes visits, and which of them need the mask.

        Computed on the CPU.

        Args:
            len_q: the number of queries.
            len_k: the number of keys; None for `len_q`.
            batch: the number of sequences; None for the size that the captures imply, or 1. The map has an entry for
                each sequence only if the mask differs between sequences.
            heads: the number of query heads; None as for `batch`.
            captures: NumPy arrays and numbers, needed only if the mask reads them.

        Raises:
            ArgumentError: a size is out of range, or captures are missing or imply different sizes.
        """
        refuse_varlen(self.spec, "tiles", "ask the spec of layout 'bshd' about one sequence")
        from flashgen.analysis.captured_extents import captured_extent
        from flashgen.analysis.tile_classes import tile_map

        mask = self.spec.mask
        length_k = len_q if len_k is None else len_k
        given = {capture.name: captures[capture.name] for capture in mask.captures if capture.name in captures}
        batch, heads = (
            captured_extent(mask.expression, index, given) or 1 if size is None else size
            for index, size in ((BATCH, batch), (HEAD, heads))
        )
        tile = (self.plan.tile_q, self.plan.tile_k)
        return tile_map(mask.expression, tile, len_q, length_k, batch, heads, given)

    def tile_lists(
        self, len_q: int, len_k: int | None = None, batch: int = 1, heads: int = 1, **captures: Any
    ) -> TileLists:
        """Returns the lists of tiles that calls of these sizes visit: `attention(q, k, v, tile_lists=lists, ...)`.

        Create them once where several calls, such as the layers of a model, share a mask. Without them each call lists
        its tiles; only the lists of masks without captures are cached, by their lengths. Do not call this while the
        stream is being captured into a graph. Keep the lists alive until calls on other streams that use them are done.

        Args:
            len_q: the number of queries.
            len_k: the number of keys; None for `len_q`.
            batch: the batch size.
            heads: the number of query heads. Lists differ between sequences or heads only if the mask does.
            captures: the captures of the mask, on the device of the calls; NumPy arrays are copied there.

        Raises:
            ArgumentError: the mask has a closed form and needs no lists, or a capture does not fit the spec.
        """
        refuse_varlen(self.spec, "tile_lists", "each call makes its own")
        if self._lister is None:
            raise ArgumentError(f"{self.spec.mask.name} needs no lists: its tiles are known in closed form")
        length_k = len_q if len_k is None else len_k
        lister = self._built_for(len_q, length_k, batch, heads).lister
        assert lister is not None, "every plan's kernel reads lists where one does"
        return lister.make(len_q, length_k, batch, heads, captures)

    def backward_tile_lists(
        self, len_q: int, len_k: int | None = None, batch: int = 1, heads: int = 1, **captures: Any
    ) -> BackwardTileLists:
        """Returns the lists of tiles that backward calls of these sizes visit: `backward(..., tile_lists=lists)`.

        Arguments and errors are those of `tile_lists`. These lists have the backward's own tile sizes, and hold the
        tiles of queries for each tile of keys.
        """
        refuse_varlen(self.spec, "backward_tile_lists", "each call makes its own")
        listers = self._backward.listers
        if listers is None:
            raise ArgumentError(f"{self.spec.mask.name} needs no lists: its tiles are known in closed form")
        return listers.make(len_q, len_q if len_k is None else len_k, batch, heads, captures)

    def decode_schedule(
        self,
        len_q: int = 1,
        *,
        page_table: Any,
        seqused_k: Any,
        heads: int,
        heads_kv: int | None = None,
        **captures: Any,
    ) -> DecodeSchedule:
        """Returns a schedule that divides the keys of a paged decode step among CTAs, for all layers of the step.

        Without a schedule each CTA sums up the sequence lengths of the batch itself, which takes about a microsecond
        per call. The host reads no lengths. `DecodeSchedule.update` recomputes a schedule in place for the next step,
        also inside a captured graph; the schedule itself must be created before the capture begins.

        Args:
            len_q: the number of queries of each sequence.
            page_table: the page table of the calls, int32 (batch, pages of a sequence); only its shape is read.
            seqused_k: int32 (batch,), the number of keys of each sequence, read when the kernel runs, on the current
                stream of its library.
            heads: the number of query heads.
            heads_kv: the number of KV heads; None for `heads`.
            captures: the captures that the mask's bounds read, such as a window that is a Scalar.

        Raises:
            ArgumentError: the spec has no pages, or an argument does not fit it.
            LaunchError: there is no GPU.
        """
        return self._scheduler.make(
            len_q, page_table, seqused_k, heads, heads if heads_kv is None else heads_kv, captures
        )

    @locked_cached_property
    def _scheduler(self) -> Scheduler:
        return Scheduler(self.spec, self.target, self.engine, self.plan)

    @_outside_of_graphs
    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any = None,
        *,
        seed: Any = None,
        offset: int = 0,
        return_lse: bool = False,
        out: Any = None,
        tile_lists: TileLists | None = None,
        num_splits: int | None = None,
        decode_schedule: DecodeSchedule | None = None,
        page_table: Any = None,
        seqused_k: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        **captures: Any,
    ) -> Any:
        """Computes the attention of q over k and v.

        Args:
            q: (batch, heads_q, len_q, head_dim), or the order of the spec's layout. The last dimension must be
                contiguous and rows must start at multiples of 16 bytes; other strides are free, but not negative on
                sm_90a. NumPy, CuPy, PyTorch, JAX, DLPack or CUDA array interface.
            k: (batch, heads_kv, len_k, head_dim); heads_q is a multiple of heads_kv.
            v: (batch, heads_kv, len_k, value_dim); None for a spec with `shared_kv`, whose V is the first columns of k.
            seed: the seed of the dropout, 0 <= seed < 2**64; required if the spec has dropout. It may also be an array
                on the device of q: one int64 or uint64, or two uint32, the low half first. Kernels read the array when
                they run, so each replay of a captured graph can use a new seed.
            offset: the offset of the dropout's random counter, 0 <= offset < 2**32.
            return_lse: also return the log-sum-exp (LSE) of the scores.
            out: an array for the output, with return_lse a pair of arrays; None allocates. None of its elements may
                share memory with another array of the call, not even with q; slices of one packed buffer are allowed.
            tile_lists: the result of `tile_lists(...)` for the sizes and captures of this call; None to list the tiles
                in the call.
            num_splits: use the decode kernel with the keys in this number of splits, 1 to 1024. The result for a
                sequence then does not depend on the rest of the batch, bit by bit. None chooses by the sizes.
            decode_schedule: for a spec with pages, the result of `decode_schedule(...)` for the sizes of this call: use
                the decode kernel and divide the keys among CTAs by this schedule. None computes it in each CTA.
            page_table: for a spec with pages, int32 (batch, pages of a sequence): the i-th entry of a sequence is the
                page of k and v, (pages, page_size, heads_kv, dim), that holds its keys from i * page_size on. Entries
                beyond a sequence's last key are not read. An entry out of range is read as the last page.
            seqused_k: for a spec with pages, int32 (batch,): the number of keys of each sequence, which is len_k in
                masks and scores, clamped to what the table can hold. Kernels read both arrays; the host does not.
            k_scale, v_scale: for a spec with a kv_dtype, float32 (1,) or (heads_kv,): factors of k and v.
            captures: the captured arrays and numbers of the spec, by name; a layout may be a BlockLayout.

        With layout "thd" (varlen), q, k and v are (tokens, heads, dim), and a call also takes:
            cu_seqlens_q: int32 (sequences + 1,), ascending, on q's device: sequence b is rows cu_seqlens_q[b] to
                cu_seqlens_q[b + 1] of q. The host never reads it, and launches do not depend on its values.
            cu_seqlens_k: the same for k and v; None for cu_seqlens_q if k has as many tokens as q.
            seqused_k: int32 (sequences,): how many keys of each sequence to use, from its first one; None for all.
                With pages, k, v, page_table and seqused_k are as described before, and there is no cu_seqlens_k.
            max_seqlen_q, max_seqlen_k: the maximum numbers of queries and keys of a sequence, which bound the memory of
                tile lists and the sizes of captures; None for all tokens. Keys of a sequence beyond the maximum are not
                attended to, and rows of queries beyond it are not written.
        In masks and scores b is the index of a sequence, and q, k, len_q and len_k are relative to it. The output is
        (tokens, heads_q, value_dim), the LSE (heads_q, tokens). Rows of q before the first sequence and after the last
        attend to nothing; gradients of keys that belong to no sequence or are not used are 0.

        Returns:
            The output, (batch, heads_q, len_q, value_dim) in the spec's layout, from the library of q; with return_lse
            a pair of it and the LSE, float32 (batch, heads_q, len_q). The output is dense in memory with the axis order
            of q, so merging the heads of a transposed view needs no copy. A row that attends to no key is 0, and its
            LSE is -inf, or that of the sink if the spec has one, whatever k and v hold. At keys that the mask forbids,
            k may hold anything but v must be finite: its rows are multiplied by 0 in tiles with other keys, and 0 * NaN
            is NaN, as in every attention that masks scores. Set v to 0 in padding that may hold garbage. Nothing is
            read beyond the last key.

        Raises:
            ArgumentError: an argument does not fit the spec; the message says what to give.
            LaunchError: the kernel could not be launched, or the emulator found a fault.
        """
        repeats = self._repeats if tile_lists is None and decode_schedule is None else None
        if repeats is not None and repeats.takes(q, seed):
            named, common = (*captures,), (q, k, v, out, page_table, seqused_k, k_scale, v_scale)
            arguments = (*common, return_lse, num_splits, *captures.values())
            found = repeats.launch(named, arguments, seed, offset)
            if found is not None:
                return out if out is not None else tuple(found) if return_lse else found[0]
        else:
            repeats = None
        wanted = _BOTH if return_lse else _OUTPUT
        given = _NOTHING if out is None else given_outputs(out, return_lse)
        if seqused_k is not None and "seqused_k" in self.spec.sequence_arrays:
            captures["seqused_k"], seqused_k = seqused_k, None
        varlen, bounds, captured = split_varlen_arguments(self.spec, captures, q, k)
        inputs = {**arrays_of_rows(self.spec, q, k, v), **varlen}
        if self.spec.of_cache or not page_table is seqused_k is k_scale is v_scale is None:
            cache = {"page_table": page_table, "seqused_k": seqused_k, "k_scale": k_scale, "v_scale": v_scale}
            inputs |= given_cache(self.spec, **cache)
        splits: Splits = num_splits
        if decode_schedule is not None:
            schedule = given_schedule(decode_schedule, num_splits, self.spec)
            inputs["schedule"], splits = schedule.memory, schedule.sizes
        call = Call(inputs, captured, seed, offset, wanted, given, tile_lists, bounds, splits)
        results = self._forward(call)
        if repeats is not None:
            repeats.remember(named, arguments, call)
        if out is not None:
            return out
        return (results["o"], results["lse"]) if return_lse else results["o"]

    def repeated_call(
        self,
        q: Any,
        k: Any,
        v: Any = None,
        *,
        out: Any = None,
        page_table: Any = None,
        seqused_k: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        **captures: Any,
    ) -> tuple[RepeatedLaunch, tuple[Any, ...]] | None:
        """Returns the launch that a call with these arguments repeats, and the arrays that it takes.

        None if the call repeats none, or the spec has dropout. `flashgen.torch.views` uses this.

        Args:
            q, k, v, out, page_table, seqused_k, k_scale, v_scale, captures: the arguments of a call.
        """
        if self._repeats is None or self.spec.dropout:
            return None
        common = (q, k, v, out, page_table, seqused_k, k_scale, v_scale)
        repeated, arrays = self._repeats.find((*captures,), (*common, False, None, *captures.values()))
        return None if repeated is None else (repeated, arrays)

    def tune(
        self,
        q: Any,
        k: Any,
        v: Any = None,
        *,
        seed: Any = None,
        page_table: Any = None,
        seqused_k: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        **captures: Any,
    ) -> Tuning:
        """Times candidate plans for calls like this one on this GPU, and stores the fastest on disk.

        Calls of the same class of sizes then use it, in this process and in later ones. A class consists of lengths
        with the same nearest powers of 2, and the same nearest power of 2 of heads x batch; the latter is ignored for
        masks that are read from lists, and beyond the number that fills the GPU. Sizes that use a decode kernel are
        tuned among decode plans for the same number of rows; their class also has the nearest power of 2 of the query
        heads per KV head. Calls with `num_splits` or `decode_schedule` always use the default plan, and
        `compile(..., plan=...)` takes precedence. A stored plan is valid for this model of GPU, until another version
        of flashgen or of its compiler generates another kernel for the spec. `flashgen cache clear` removes it.

        Tuning takes some seconds. Up to 12 plans are compiled. Plans that need too many registers are skipped, and so
        are plans with an output that differs from the default plan's by more than rounding. The others run in rotation,
        with the L2 cache flushed before each run, and their medians are compared. The default plan stays unless another
        is at least 1% faster. Tile lists are created in each call. Do not tune while others use the GPU.

        Args:
            q, k, v, seed, page_table, seqused_k, k_scale, v_scale, captures: the arguments of a call. With pages, the
                kernels run with the lengths in `seqused_k`, but the class is that of the longest sequence that the page
                table can hold, because the host does not read lengths.

        Returns:
            The winner, the default plan, the milliseconds of each and the gain; print it for a summary.

        Raises:
            ArgumentError: as in a call, or this attention was compiled with plan=... or source=....
            BuildError: FLASHGEN_JIT=0, or the cache cannot be written.
            LaunchError: there is no GPU, or this attention runs on the emulator.
        """
        from flashgen.attention.tuning import tune

        cache = {"page_table": page_table, "seqused_k": seqused_k, "k_scale": k_scale, "v_scale": v_scale}
        return tune(self._forward, tuple(arrays_of_rows(self.spec, q, k, v).values()), captures, seed, cache=cache)

    def tune_backward(self, q: Any, k: Any, v: Any = None, *, seed: Any = None, **captures: Any) -> Tuning:
        """Times candidate plans of the backward's main kernel for calls like this one, and stores the fastest on disk.

        Backward calls of the class that `tune` describes, with the same nearest power of 2 of query heads per KV head,
        then use it. The candidates are all plans of the default plan's kind that fit. If several query heads share a KV
        head, each candidate is also timed with one CTA per query head, except in the deterministic mode, which does not
        sum partial dK and dV. If the mask is read from lists, the candidates have the default plan's tile sizes, so
        that tile lists of the caller stay valid. `compile(..., backward_plan=...)` takes precedence. Deterministic and
        other attentions are tuned separately.

        Arguments are those of `tune`, as are the result and the errors. The output and its LSE are computed first, and
        the gradient of the output is random.
        """
        from flashgen.attention.backward_tuning import tune_backward

        advice = "tune the spec of layout 'bshd', and give its plan to compile(..., backward_plan=...)"
        refuse_varlen(self.spec, "tune_backward", advice)
        return tune_backward(
            self._backward, self._forward, tuple(arrays_of_rows(self.spec, q, k, v).values()), captures, seed
        )

    def backward_plan_for(
        self, len_q: int, len_k: int | None = None, batch: int = 1, heads: int = 1, heads_kv: int | None = None
    ) -> Any:
        """Returns the plan that backward calls of these sizes use on the current GPU.

        This is `backward_plan`, or the plan that `tune_backward` found for such lengths. Where the target supports it,
        calls with too few KV heads to fill the GPU use a plan with one CTA per query head.

        Arguments and errors are those of `plan_for`.
        """
        refuse_varlen(self.spec, "backward_plan_for", "its plan is `backward_plan`, whatever the lengths are")
        sizes = sizes_of(len_q, len_q if len_k is None else len_k, batch, heads, heads_kv)
        dispatch = self._backward.dispatch
        if not dispatch.depends_on(sizes):
            return self.backward_plan
        return dispatch.choose(sizes, self.engine.current_device()).kernels["dkdv"].plan

    @property
    def backward_pass(self) -> BackwardPass:
        """The backward pass, which `flashgen.attention.backward_tuning` and the operators of frameworks use."""
        return self._backward

    @_outside_of_graphs
    def backward(
        self,
        d_out: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any = None,
        lse: Any = None,
        *,
        d_lse: Any = None,
        seed: Any = None,
        offset: int = 0,
        tile_lists: BackwardTileLists | None = None,
        into: Any = None,
        **captures: Any,
    ) -> Gradients:
        """Computes the gradients of a call from the gradients of its results.

        P is recomputed tile by tile from q, k and the LSE. The first call compiles the backward kernels. Workspaces are
        linear in the lengths: two float32 numbers for each query and head, and a float32 dQ accumulator, which the
        deterministic mode does not need where a separate kernel computes dQ. They are allocated by the caller's library
        and freed when the call returns. dQ and the gradients of captures are summed by atomic additions, with an order
        that differs from run to run, unless compiled with `compile(..., deterministic=True)`.

        Args:
            d_out: the gradient of the output, with the shape of `out` and the dtype of q; any strides with a contiguous
                last dimension and rows at multiples of 16 bytes.
            q, k, v: the inputs of the call. With `shared_kv` there is no v: `backward(d_out, q, kv, out, lse)`.
            out, lse: the results of the call with return_lse=True.
            d_lse: the gradient of the LSE, float32 (batch, heads_q, len_q), C-contiguous; None for 0.
            seed, offset: the dropout's arguments of the call.
            tile_lists: the result of `backward_tile_lists(...)` for the sizes and captures of this call; None to list
                the tiles in the call.
            into: a tuple of arrays for the gradients, in the order of the result; None allocates them. None of their
                elements may share memory with another array of the call.
            captures: those of the call.

        Returns:
            Gradients (dq, dk, dv, one of each capture declared with grad=True), or (dq, dk, ...) with `shared_kv`,
            where dk is that of kv. They have the shapes and dtypes of what they are gradients of, but dq, dk and dv
            have the `grad_dtype` of the spec, if any. dq, dk and dv come from the library of q, with the axis order of
            q, k and v in memory; the others come from the libraries of their captures. Queries that attend to nothing,
            and keys that no query
            attends to, have gradients of 0; dq of such queries is 0 whatever k and v hold. Otherwise q, k, v and d_out
            must be finite, also at positions that the mask forbids, because 0 * NaN is NaN. For an LSE above about 3000
            its rounding error shows: P is 1 where a score differs from the LSE by less than that error.

        Raises:
            ArgumentError: an argument does not fit the spec; the message says what to give.
            UnsupportedError: the target cannot run the backward of the spec.
            LaunchError: a kernel could not be launched, or the emulator found a fault.
        """
        if self.spec.of_cache:
            self.build_backward()  # raises UnsupportedError
        repeats = self._repeated_backward if tile_lists is None and (into is None or type(into) is tuple) else None
        if repeats is not None and repeats.takes(q, seed):
            named, arguments = (*captures,), (d_out, q, k, v, out, lse, d_lse, *(into or ()), *captures.values())
            found = repeats.launch(named, arguments, seed, offset)
            if found is not None:
                return Gradients.of(dict(zip(self._gradients, found or into, strict=True)))
        else:
            repeats = None
        varlen, bounds, captured = split_varlen_arguments(self.spec, captures, q, k)
        if lse is None:
            v, out, lse = without_values(self.spec, v, out)
        inputs = {**arrays_of_rows(self.spec, q, k, v), "o": out, "d_o": d_out, "lse": lse, **varlen}
        if d_lse is not None:
            inputs["d_lse"] = d_lse
        given = _NOTHING if into is None else given_gradients(self._gradients, into)
        call = Call(inputs, captured, seed, offset, self._gradients, given, tile_lists, bounds)
        results = self._backward(call)
        if repeats is not None:
            repeats.remember(named, arguments, call)
        return Gradients.of(results)

    def vjp(
        self,
        q: Any,
        k: Any,
        v: Any = None,
        *,
        seed: Any = None,
        offset: int = 0,
        return_lse: bool = False,
        tile_lists: TileLists | None = None,
        **captures: Any,
    ) -> tuple[Any, Callable[..., Gradients]]:
        """Returns the output and a function that computes its vector-Jacobian product.

        Use it as `out, pullback = attention.vjp(q, k, v)`. Arguments are those of `__call__`; with return_lse, a
        pair (output, LSE) takes the place of the output.

        Returns:
            The output and `pullback(d_out, d_lse=None, *, tile_lists=None, into=None) -> Gradients`, which takes the
            arguments of `backward`. It can be called many times, and keeps the inputs, the output and the LSE alive.
        """
        out, lse = self(q, k, v, seed=seed, offset=offset, return_lse=True, tile_lists=tile_lists, **captures)

        def pullback(
            d_out: Any, d_lse: Any = None, *, tile_lists: BackwardTileLists | None = None, into: Any = None
        ) -> Gradients:
            rest: dict[str, Any] = {"seed": seed, "offset": offset, "tile_lists": tile_lists, "into": into, **captures}
            return self.backward(d_out, q, k, v, out, lse, d_lse=d_lse, **rest)

        return ((out, lse) if return_lse else out), pullback

    @property
    def forward(self) -> ForwardPass:
        """The forward pass, which `flashgen.attention.tuning` and the operators of frameworks use."""
        return self._forward

    @property
    def _lister(self) -> TileLister | None:
        return self._forward.lister
