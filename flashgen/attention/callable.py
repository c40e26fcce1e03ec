"""`Attention`: a compiled spec, to be called, and to be asked what it is and does."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flashgen.attention.call import Call, Splits
from flashgen.attention.decode_schedule import DecodeSchedule, Scheduler, given_schedule
from flashgen.attention.edits import NO_EDITS, Edits
from flashgen.attention.forward import ForwardPass
from flashgen.attention.forward_dispatch import ForwardKernels
from flashgen.attention.gradients import ROWS, Gradients, differentiated, given_gradients
from flashgen.attention.outputs import given_outputs
from flashgen.attention.problem import given_cache
from flashgen.attention.ragged import refuse_ragged, taken_apart
from flashgen.attention.tile_lists import TileLister, TileLists, sizes_of
from flashgen.attention.tuned_plans import TunedPlans
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
from flashgen.runtime.remembered import made_once

if TYPE_CHECKING:
    from flashgen.analysis.tile_classes import TileMap
    from flashgen.attention.backward import BackwardPass
    from flashgen.attention.backward_tile_lists import BackwardTileLists
    from flashgen.attention.trials import Tuning


_OUTPUT, _BOTH = ("o",), ("o", "lse")
_NOTHING: dict[str, Any] = {}


class Attention:
    """A spec compiled for a target: call it with q, k and v; `backward` and `vjp` give gradients.

    Many threads may call one at once, on one stream or several; Python without a global lock is not promised. A copy of
    one is itself. Pickle writes its spec and how it was compiled, and it is compiled again where it is loaded; one with
    edited kernels, or whose functions close over arrays, raises UnsupportedError there.

    Attributes: `spec`, `target`, `engine` (where it runs), `source` (the CUDA), `plan`, `resources`, `edited`,
    `deterministic` (whether gradients are bitwise equal from run to run), `compiled_with` (plan, deterministic and
    backward_plan as `compile` was given them), and of the backward pass, rendered when it is first asked for,
    `backward_kernels` and `backward_plan`.
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
        """`compile` makes them.

        tuned: where tuned plans are kept; None is the cache of the environment on a GPU, and on the emulator
            nowhere. A plan that is given, or an edited kernel, wins over them.
        """
        self.spec, self.target, self.engine, self.deterministic = spec, target, engine, deterministic
        self._tuned = tuned
        self.compiled_with = (plan, deterministic, backward_plan)
        self._given_backward_plan, self._edits = backward_plan, edits
        self._gradients = (*ROWS, *(capture.name for capture in differentiated(spec)))
        kernels = forward_kernels(spec, target, plan=plan)
        self._kernels = {role: edits.of(role, kernel) for role, kernel in kernels.items()}
        self._kernel = self._kernels["forward"]
        own_plan = plan is None and not edits.of_the_forward and not spec.is_ragged
        follows = own_plan and (engine.measures or tuned is not None)
        tuned_plans = TunedPlans(self._kernel, tuned) if follows else None
        with edits.told():
            self._forward = ForwardPass(
                spec, self._kernels, engine, self._prebuild("forward"), tuned_plans, by_sizes=own_plan, decodes=own_plan
            )

    def _prebuild(self, which: str) -> str:
        """The command that builds the kernels of a pass."""
        if self._edits.texts:
            built = "backward_resources" if which == "backward" else "resources"
            return f"flashgen.compile(spec, target={self.target.name!r}, source=...).{built}"
        shown = f"--what resources --target {self.target.name} {shlex.quote(self.spec.to_json())}"
        if which == "backward":
            return f"flashgen show --pass backward {'--deterministic ' if self.deterministic else ''}{shown}"
        command = f"flashgen show {shown}"
        return f"{command} && flashgen show --kernel lists {shown}" if self._kernel.reads else command

    def __copy__(self) -> Attention:
        """Itself: nothing of an attention changes."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Attention:
        return self

    def __repr__(self) -> str:
        edited = f", edited: {', '.join(self.edited)}" if self.edited else ""
        return f"<flashgen.Attention {self._kernel.name} on {self.engine.name}{edited}>"

    @property
    def name(self) -> str:
        """The kernel's readable name; that of an edited one ends in `-edited-` and the begin of its text's hash."""
        return self._kernel.name

    @property
    def edited(self) -> tuple[str, ...]:
        """The kernels whose text is that of `compile(..., source=...)`: "forward", "lists", "keys", ..."""
        return tuple(self._edits.texts)

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
        return tuple(self._kernels.values())

    @property
    def plan(self) -> Plan:
        """Tile sizes, warps and stages: those of the default, or what `compile` was given."""
        return self._kernel.plan

    def plan_for(
        self, len_q: int, len_k: int | None = None, batch: int = 1, heads: int = 1, heads_kv: int | None = None
    ) -> Plan:
        """The plan of calls of these sizes on the current GPU.

        That is `plan`, or what `tune` found for such lengths; where the target packs heads, either with the query heads
        of a head of k and v packed into tiles, where that fills them better. Few queries over many keys have that of a
        decode kernel.

        Args: as of `tile_lists`; heads_kv: heads of k and v, None for as many. Raises LaunchError without a GPU.
        """
        return self._built_for(len_q, len_q if len_k is None else len_k, batch, heads, heads_kv).kernel.plan

    def _built_for(self, len_q: int, len_k: int, batch: int, heads: int, heads_kv: int | None = None) -> ForwardKernels:
        refuse_ragged(self.spec, "plan_for", "its plan is `plan`, whatever the lengths are")
        sizes = sizes_of(len_q, len_k, batch, heads, heads_kv)
        if not self._forward.dispatch.depends_on_sizes:
            return self._forward.dispatch.default
        return self._forward.built_for(sizes, self.engine.here())

    @made_once
    def resources(self) -> Resources:
        """Registers, spills and shared memory of the kernel, by the GPU's assembler; needs NVRTC, but no GPU."""
        with self._edits.told():
            return build(self._kernel, self._prebuild("forward")).resources

    @made_once
    def backward_kernels(self) -> Kernels:
        """The kernels that a backward call launches, by their roles, in order; UnsupportedError where none can run."""
        given = self._given_backward_plan
        kernels = backward_kernels(self.spec, self.target, self.deterministic, plan=given)
        parts = {role: "backward_lists" if role == "lists" else role for role in kernels}
        return {role: self._edits.of(parts[role], kernel) for role, kernel in kernels.items()}

    def build_backward(self) -> None:
        """Builds the backward's kernels now, and not when it is called first; BuildError where one does not compile."""
        _ = self._backward

    @property
    def backward_plan(self) -> Any:
        """The plan of the kernel that walks tiles of keys."""
        return self.backward_kernels["keys"].plan

    @property
    def backward_sources(self) -> dict[str, str]:
        """The emitted CUDA of every kernel that a backward call launches, by readable name, in their order."""
        return {kernel.name: kernel.source for kernel in self.backward_kernels.values()}

    @made_once
    def backward_resources(self) -> dict[str, Resources]:
        """Registers, spills and shared memory of each kernel that a backward call launches, by readable name."""
        prebuild = self._prebuild("backward")
        with self._edits.told():
            return {kernel.name: build(kernel, prebuild).resources for kernel in self.backward_kernels.values()}

    @made_once
    def _backward(self) -> BackwardPass:
        """Compiled when it is first asked for."""
        from flashgen.attention.backward import BackwardPass

        kernels, prebuild = self.backward_kernels, self._prebuild("backward")
        own_plan = self._given_backward_plan is None and not self._edits.of_the_backward
        head_split = backward_family(self.target).head_split if own_plan and not self.deterministic else None
        follows = own_plan and not self.spec.is_ragged and (self.engine.measures or self._tuned is not None)
        tuned = TunedPlans(kernels["keys"], self._tuned) if follows else None
        with self._edits.told():
            return BackwardPass(self.spec, kernels, self.engine, prebuild, head_split, tuned, self.deterministic)

    def tiles(
        self, len_q: int, len_k: int | None = None, batch: int | None = None, heads: int | None = None, **captures: Any
    ) -> TileMap:
        """Which tiles a call of these lengths visits, and which of them need their mask; computed on the CPU.

        The tiles are those of `plan`.

        Args:
            len_q: queries. len_k: keys; None for as many.
            batch: sequences; None for as many as the captures have values for, or one where they do not say. The map
                has an entry for each only where the mask differs between them.
            heads: query heads; None likewise.
            captures: NumPy arrays and numbers, needed only if the mask reads them.

        Raises ArgumentError for a size that cannot be, and for captures that are missing or say different sizes.
        """
        refuse_ragged(self.spec, "tiles", "ask the spec of layout 'bshd' about one sequence")
        from flashgen.analysis.captured_extents import captured_extent
        from flashgen.analysis.tile_classes import tile_map

        mask = self.spec.mask
        length_k = len_q if len_k is None else len_k
        given = {capture.name: captures[capture.name] for capture in mask.captures if capture.name in captures}
        of_batch, of_heads = (
            captured_extent(mask.expression, index, given) or 1 if size is None else size
            for index, size in ((BATCH, batch), (HEAD, heads))
        )
        tile = (self.plan.tile_q, self.plan.tile_k)
        return tile_map(mask.expression, tile, len_q, length_k, of_batch, of_heads, given)

    def tile_lists(
        self, len_q: int, len_k: int | None = None, batch: int = 1, heads: int = 1, **captures: Any
    ) -> TileLists:
        """The tiles that calls of these lengths visit, listed once: `attention(q, k, v, tile_lists=lists, ...)`.

        Of use where several calls, or the layers of a model, share a mask: by itself a call makes its lists anew, or,
        if the mask reads no capture, remembers them by lengths. Not for a stream that is being captured. Where calls on
        another stream than the current one use them, keep them until those are done, as any array.

        Args:
            len_q: queries. len_k: keys; None for as many.
            batch: of q. heads: query heads. Lists differ between them only where the mask does.
            captures: what the mask captures, on the device where the calls will be; NumPy arrays are copied there.

        Raises ArgumentError where the mask has a closed form and needs no lists, or a capture does not fit.
        """
        refuse_ragged(self.spec, "tile_lists", "each call makes its own")
        if self._lister is None:
            raise ArgumentError(f"{self.spec.mask.name} needs no lists: its tiles are known in closed form")
        length_k = len_q if len_k is None else len_k
        lister = self._built_for(len_q, length_k, batch, heads).lister
        assert lister is not None, "every plan's kernel reads lists where one does"
        return lister.make(len_q, length_k, batch, heads, captures)

    def backward_tile_lists(
        self, len_q: int, len_k: int | None = None, batch: int = 1, heads: int = 1, **captures: Any
    ) -> BackwardTileLists:
        """The tiles that backward calls of these lengths visit, listed once: `backward(..., tile_lists=lists)`.

        As `tile_lists`, of which it has the arguments and errors; by tiles of keys, and of the backward's own sizes.
        """
        refuse_ragged(self.spec, "backward_tile_lists", "each call makes its own")
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
        """How the blocks of calls over pages share the keys, by the lengths of this step: made once, for all layers.

        By itself each block of a call sums up the lengths of the batch, which costs a microsecond or so. The host reads
        nothing; `update` makes a schedule anew in its memory, also in a captured graph, before which it is to be made.

        Args:
            len_q: queries of each sequence.
            page_table: that of the calls, int32 (batch, pages of a sequence), of which only the shape is looked at.
            seqused_k: int32 (batch): keys of each sequence, read when the kernel runs, on its library's current stream.
            heads: query heads. heads_kv: heads of k and v; None for as many.
            captures: what the mask's bounds read: a window that is a Scalar, say.

        Raises ArgumentError for a spec without pages, and for what does not fit; LaunchError without a GPU.
        """
        return self._scheduler.make(
            len_q, page_table, seqused_k, heads, heads if heads_kv is None else heads_kv, captures
        )

    @made_once
    def _scheduler(self) -> Scheduler:
        return Scheduler(self.spec, self.target, self.engine, self.plan)

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
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
        """Attention of q over k and v.

        Args:
            q: (batch, heads_q, len_q, head_dim), or as the spec's layout says; any strides with a contiguous last
                dimension and rows at multiples of 16 bytes, on sm_90a none that are negative. NumPy, CuPy, PyTorch,
                JAX, DLPack or CUDA array interface.
            k: (batch, heads_kv, len_k, head_dim); heads_q is a multiple of heads_kv.
            v: (batch, heads_kv, len_k, value_dim).
            seed: of the dropout, 0 <= seed < 2**64; required if the spec has dropout. Or an array beside q that holds
                it, one int64 or uint64, or two uint32, low half first: kernels read it when they run, so that a
                captured graph drops anew with each replay for which another is written there.
            offset: of the dropout's counter, 0 <= offset < 2**32.
            return_lse: give the log-sum-exp of the scores too.
            out: an array to write the output to, and with return_lse a pair of arrays; None makes new ones. No element
                may share memory with one of another array of the call, also not with the same one of q; slices of one
                packed buffer may be given.
            tile_lists: what `tile_lists(...)` made for the sizes and captures of this call; None makes them.
            num_splits: take the decode kernel, the keys split into so many parts, 1 to 1024: a sequence then has the
                same bits whatever else is in the batch. None lets the sizes choose the kernel and the parts.
            decode_schedule: of a spec with pages, what `decode_schedule(...)` made for the sizes of this call: take the
                decode kernel, whose blocks share the keys as it says. None has each block sum up the lengths.
            page_table: of a spec with pages, int32 (batch, pages of a sequence): which page of k and v, (pages,
                page_size, heads_kv, dim), has a sequence's keys 0 to page_size - 1, which the next ones, and so on.
                Entries beyond a sequence's keys are not read; one that is no page is the last page.
            seqused_k: likewise, int32 (batch): the keys that each sequence has, which masks and scores know as len_k;
                bounded by 0 and what its part of the table holds. Both are read on the device alone.
            k_scale, v_scale: of a spec with a kv_dtype, float32 (1,) or (heads_kv,): by what k and v are multiplied.
            captures: the arrays and numbers that the spec declares, by name; a layout may be a BlockLayout.

        With layout "thd", a ragged batch, q, k and v are (tokens, heads, dim), and a call takes beside the captures:
            cu_seqlens_q: int32 (sequences + 1,) on q's device, rising: sequence b is rows cu_seqlens_q[b] to
                cu_seqlens_q[b + 1] of q. The host never reads it, and a launch is the same whatever it holds.
            cu_seqlens_k: the same of k and v; None is cu_seqlens_q, where k has as many tokens as q.
            seqused_k: int32 (sequences,): how many of a sequence's keys there are, the first ones; None is all.
                Over pages k, v, page_table and seqused_k are as above, of sequences, and there is no cu_seqlens_k.
            max_seqlen_q, max_seqlen_k: how many queries and keys a sequence has at most, for the memory of lists and
                the sizes of captures; None is all tokens. What a sequence has beyond that is not attended to, and a
                query beyond it not written.
        In masks and scores b is a sequence's number, q, k, len_q and len_k are its own. The output is (tokens, heads_q,
        value_dim), the LSE (heads_q, tokens). Rows of q before the first sequence and behind the last attend to
        nothing; gradients of keys that are in no sequence, or not used, are 0.

        Returns:
            The output, (batch, heads_q, len_q, value_dim) in the spec's layout, of q's kind; with return_lse a pair
            with the LSE, float32 (batch, heads_q, len_q). In memory it has no gaps, and its axes nest as q's do, so
            that a model's swapped views are joined again without a copy. Rows with nothing to attend to are
            0, their LSE -inf, or that of the sink alone where the spec has one, whatever k and v hold. Where the mask
            forbids a key, k may hold anything, and v any finite numbers: its rows are multiplied by 0 where a tile has
            keys that count, and 0 * NaN is NaN, as in every attention that masks scores. Set v to 0 in padding that
            may hold garbage.
            Nothing is read behind the last key.

        Raises:
            ArgumentError: an argument does not fit the spec; the message says what to give.
            LaunchError: the kernel could not be launched, or the emulator found a fault.
        """
        wanted = _BOTH if return_lse else _OUTPUT
        given = _NOTHING if out is None else given_outputs(out, return_lse)
        if seqused_k is not None and self.spec.is_ragged and not self.spec.page_size:
            captures["seqused_k"], seqused_k = seqused_k, None
        ragged, bounds, captured = taken_apart(self.spec, captures, q, k)
        inputs = {"q": q, "k": k, "v": v, **ragged}
        if self.spec.of_cache or not page_table is seqused_k is k_scale is v_scale is None:
            cache = {"page_table": page_table, "seqused_k": seqused_k, "k_scale": k_scale, "v_scale": v_scale}
            inputs |= given_cache(self.spec, **cache)
        splits: Splits = num_splits
        if decode_schedule is not None:
            schedule = given_schedule(decode_schedule, num_splits, self.spec)
            inputs["schedule"], splits = schedule.memory, schedule.sizes
        call = Call(inputs, captured, seed, offset, wanted, given, tile_lists, bounds, splits)
        results = self._forward(call)
        if out is not None:
            return out
        return (results["o"], results["lse"]) if return_lse else results["o"]

    def tune(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        seed: Any = None,
        page_table: Any = None,
        seqused_k: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        **captures: Any,
    ) -> Tuning:
        """Times the plans that may be the best for calls like this one on this GPU, and keeps the winner on disk.

        Calls of such lengths then run it, in this process and later ones: those whose lengths have the same nearest
        powers of 2, and whose heads x batch have, too, unless they are so many that more make no difference, or the
        mask is read from lists. Sizes that take a decode kernel have winners among the plans of its rows, and their
        query heads that share a head of k and v the same nearest power of 2, too; `num_splits` and `decode_schedule`
        keep the default plan, whatever is tuned. `compile(..., plan=...)` wins over it. What is kept holds for this
        kind of GPU, and until flashgen or its compiler makes another kernel of the spec; `flashgen cache clear` forgets
        it.

        Takes some seconds. Up to 12 plans are compiled; left out are those whose registers do not suffice, and any
        whose output is not the default one's up to rounding. The others take turns, the L2 flushed before each run;
        medians are compared. The default plan stays where none is at least 1% faster. Tile lists are made in each call,
        as calls do that are given none. Do not tune while others use the GPU.

        Args:
            q, k, v, seed, page_table, seqused_k, k_scale, v_scale, captures: those of a call. Over pages the lengths
                are those that `seqused_k` holds; the class is of what the table may hold, as the host knows no other.

        Returns:
            What was found: the winner, the default plan, the milliseconds of each, what was gained. Print it.

        Raises:
            ArgumentError: as a call; or this attention was compiled with plan=... or source=....
            BuildError: FLASHGEN_JIT=0, or the cache cannot be written.
            LaunchError: there is no GPU, or this attention is the emulator's.
        """
        from flashgen.attention.tuning import tune

        cache = {"page_table": page_table, "seqused_k": seqused_k, "k_scale": k_scale, "v_scale": v_scale}
        return tune(self._forward, (q, k, v), captures, seed, cache=cache)

    def tune_backward(self, q: Any, k: Any, v: Any, *, seed: Any = None, **captures: Any) -> Tuning:
        """The same of the backward: times the plans of its kernel that walks queries, for calls like this one.

        Backward calls of such lengths then run the winner: those of the class that `tune` describes whose query heads
        that share a head of k and v have the same nearest power of 2, too. Tried are all plans of the default one's
        kind that fit; where several query heads share a head of k and v, beside each the one that gives them blocks of
        their own (not in the deterministic mode, which adds up no shares of dk and dv); where the mask is read from
        lists those of the default one's tiles, so that lists that a caller keeps stay right. `compile(...,
        backward_plan=...)` wins over it. A deterministic attention is tuned by itself.

        Args: as of `tune`; the output and its LSE are computed first, and a random gradient of the output is taken.
        Returns and raises what `tune` does.
        """
        from flashgen.attention.backward_tuning import tune_backward

        advice = "tune the spec of layout 'bshd', and give its plan to compile(..., backward_plan=...)"
        refuse_ragged(self.spec, "tune_backward", advice)
        return tune_backward(self._backward, self._forward, (q, k, v), captures, seed)

    def backward_plan_for(
        self, len_q: int, len_k: int | None = None, batch: int = 1, heads: int = 1, heads_kv: int | None = None
    ) -> Any:
        """The plan of backward calls of these sizes on the current GPU.

        That is `backward_plan`, or what `tune_backward` found for such lengths; where the target has it, one that gives
        query heads blocks of their own, where few heads of k and v leave a card idle.

        Args: as of `tile_lists`; heads_kv: heads of k and v, None for as many. Raises LaunchError without a GPU.
        """
        refuse_ragged(self.spec, "backward_plan_for", "its plan is `backward_plan`, whatever the lengths are")
        sizes = sizes_of(len_q, len_q if len_k is None else len_k, batch, heads, heads_kv)
        dispatch = self._backward.dispatch
        if not dispatch.depends_on(sizes):
            return self.backward_plan
        return dispatch.choose(sizes, self.engine.here()).kernels["keys"].plan

    @property
    def backward_pass(self) -> BackwardPass:
        """What a backward call goes through; `flashgen.attention.backward_tuning` wants it."""
        return self._backward

    def backward(
        self,
        d_out: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        *,
        d_lse: Any = None,
        seed: Any = None,
        offset: int = 0,
        tile_lists: BackwardTileLists | None = None,
        into: Any = None,
        **captures: Any,
    ) -> Gradients:
        """The gradients of a call, given those of its results: P is computed anew from q, k and the LSE, tile by tile.

        Compiles the backward's kernels when it is called first. Memory beside the gradients is linear in the lengths:
        two float32 numbers for each query and head, and dq in float32 (not where the deterministic mode makes dq by a
        kernel of its own); it is taken from the caller's library and freed when the call returns. Gradients of captures
        are added up by atomic additions, as dq is, whose order differs from run to run, unless
        `compile(..., deterministic=True)`.

        Args:
            d_out: the gradient of the output; shape and dtype of `out`, any strides with a contiguous last dimension
                and rows at multiples of 16 bytes.
            q, k, v: as the call had them.
            out, lse: what the call gave with return_lse=True.
            d_lse: the gradient of the LSE, float32 (batch, heads_q, len_q), C-contiguous; None is none.
            seed, offset: of the dropout, those of the call.
            tile_lists: what `backward_tile_lists(...)` made for the sizes and captures of this call; None makes them.
            into: a tuple of arrays to write the gradients to, in the order of the result; None makes new ones. No
                element may share memory with one of another array of the call, as with `out` of a call.
            captures: those of the call.

        Returns:
            Gradients (dq, dk, dv, one of each capture declared with grad=True): of the shapes and dtypes of what they
            are gradients of, dq, dk and dv of q's kind, in memory nested as q, k and v; the others of their captures'
            kind. What attends to nothing,
            and what nothing attends to, has gradients of 0; that dq is 0 whatever k and v hold. Otherwise q, k, v and
            d_out must be finite, also where the mask forbids them: 0 * NaN is NaN. Beyond an LSE of 3000 or so its own
            rounding shows: P is 1 where it differs from that by no more.

        Raises:
            ArgumentError: an argument does not fit the spec; the message says what to give.
            UnsupportedError: the target cannot run the backward of the spec.
            LaunchError: a kernel could not be launched, or the emulator found a fault.
        """
        if self.spec.of_cache:
            self.build_backward()  # which says that there is none
        ragged, bounds, captured = taken_apart(self.spec, captures, q, k)
        inputs = {"q": q, "k": k, "v": v, "o": out, "d_o": d_out, "lse": lse, **ragged}
        if d_lse is not None:
            inputs["d_lse"] = d_lse
        given = _NOTHING if into is None else given_gradients(self.spec, into)
        call = Call(inputs, captured, seed, offset, self._gradients, given, tile_lists, bounds)
        return Gradients.of(self._backward(call))

    def vjp(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        seed: Any = None,
        offset: int = 0,
        return_lse: bool = False,
        tile_lists: TileLists | None = None,
        **captures: Any,
    ) -> tuple[Any, Callable[..., Gradients]]:
        """The output, and the function that pulls its gradient back: `out, pullback = attention.vjp(q, k, v)`.

        Args: those of a call. return_lse: give a pair (output, LSE) in place of the output.

        Returns:
            The output and `pullback(d_out, d_lse=None, *, tile_lists=None, into=None) -> Gradients`, which may be
            called any number of times; it keeps the inputs, the output and the LSE alive. Its arguments are those of
            `backward`.
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
        """What a call goes through; `flashgen.attention.tuning` wants it."""
        return self._forward

    @property
    def _lister(self) -> TileLister | None:
        return self._forward.lister
