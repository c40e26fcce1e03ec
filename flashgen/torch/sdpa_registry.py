"""flashgen as an implementation of torch's flash operators, in torch's registry of such implementations."""

from __future__ import annotations

import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flashgen.errors import UnsupportedError
from flashgen.torch.flash_operators import OPERATORS, REFUSALS
from flashgen.torch.table import set_eval_frame, warn_once
from flashgen.torch.varlen_operators import varlen_operators

NAME = "flashgen"
"""The name of the implementation in torch's registry."""
FIRST_TORCH = "2.11"
_MAX_REASONS = 100
_OTHER = "other reasons"


class SdpaCalls(NamedTuple):
    """How many calls of torch's flash operators each implementation has computed.

    Attributes:
        forward, backward: the calls that flashgen computed.
        torch: the calls that flashgen passed to torch's own kernels, by the reason.
    """

    forward: int
    backward: int
    torch: dict[str, int]


def register_sdpa() -> None:
    """Registers flashgen as an implementation of torch's flash operators, under the name "flashgen".

    `torch.nn.attention.activate_flash_attention_impl("flashgen")` then replaces torch's kernels, in this process and on
    CUDA tensors, and `restore_flash_attention_impl()` restores them. This reaches
    `torch.nn.functional.scaled_dot_product_attention` where torch chooses its flash backend, `varlen_attn` of
    torch.nn.attention.varlen, and what is built on them: forward and backward, also under torch.compile, where the
    operators of aten stay in the graph. A call that flashgen does not support is passed to torch's own kernel, with one
    warning for each reason. `sdpa_calls` returns how often. Registering again changes nothing.

    With dropout, the forward and the backward of a call must run with the same implementation: activate flashgen before
    the forward, and restore torch's kernels after the backward.

    Raises:
        UnsupportedError: torch is older than 2.11 and has no such registry. Activating raises it if torch is built
            without CUDA.
    """
    problem = why_no_registry()
    if problem is not None:
        raise UnsupportedError(problem)
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_activate)


def sdpa_calls(reset: bool = False) -> SdpaCalls:
    """Returns which implementation has computed the calls of torch's flash operators since flashgen was activated.

    A call is counted when it is launched from the host: replays of a CUDA graph are not.

    Args:
        reset: also begin to count from 0.
    """
    with _LOCK:
        calls = SdpaCalls(_COUNTS["forward"], _COUNTS["backward"], dict(_REASONS))
        if reset:
            _COUNTS.update(forward=0, backward=0)
            _REASONS.clear()
    return calls


def why_no_registry() -> str | None:
    """Returns why this version of torch has no registry of flash implementations, or None if it has one."""
    if hasattr(torch.nn.attention, "register_flash_attention_impl") and hasattr(torch.library, "get_kernel"):
        return None
    return (
        f"torch {torch.__version__} has no registry of flash attention implementations: install torch {FIRST_TORCH} or "
        "later, or call flashgen.torch.scaled_dot_product_attention instead of torch's"
    )


def why_not_active() -> str | None:
    """Returns why flashgen cannot be activated in torch's registry, or None if it can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA, and only CUDA tensors reach its flash operators"
    return why_no_registry()


def why_not_here() -> str | None:
    """Returns why no call of this machine can reach flashgen in torch's registry, or None if calls can."""
    problem = why_not_active()
    if problem is None and not torch.cuda.is_available():
        problem = f"torch {torch.__version__} sees no GPU, and only CUDA tensors reach its flash operators"
    return problem


_COUNTS = {"forward": 0, "backward": 0}
_REASONS: Counter[str] = Counter()
_LOCK = threading.Lock()


class _Thread(threading.local):
    """Whether a thread is inside of torch's own kernel, which may call another operator of the same implementation."""

    in_own_kernel = False


_THREAD = _Thread()


class Activation:
    """The registrations in torch's dispatcher, as a handle of torch's registry. They live until `remove`.

    Beside the flash operators, they replace those of `varlen_attn`, for calls that repeat a launch.
    """

    def __init__(self, dispatch_key: str) -> None:
        own = {name: _own_kernel(name, dispatch_key) for name in _operators()}
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():  # of torch, that a kernel is replaced
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            for name, kernel in own.items():
                library.impl(name, _implementation(name, kernel), dispatch_key)
        custom = torch.library.Library("torch_attn", "IMPL")
        for name, function in varlen_operators().items():
            custom.impl(name, _shortcut(name, function, dispatch_key), dispatch_key)
        self._libraries = [library, custom]

    def remove(self) -> None:
        """Restores the kernels that were registered before."""
        self._libraries.clear()  # torch removes the registrations of a library that is no longer referenced


def _activate() -> Activation:
    """Replaces torch's flash kernels. torch's registry has restored them before, if they were replaced."""
    problem = why_not_active()
    if problem is not None:
        raise UnsupportedError(problem)
    return Activation("CUDA")


def _operators() -> list[str]:
    """Returns the names of the operators that this version of torch has."""
    return [name for name in OPERATORS if hasattr(torch.ops.aten, name)]


def _own_kernel(name: str, dispatch_key: str) -> Callable[..., Any]:
    """Returns the present kernel of an operator as a function."""
    kernel = torch.library.get_kernel(f"aten::{name}", dispatch_key)
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, dispatch_key))

    def call(*given: Any, **named: Any) -> Any:
        before, _THREAD.in_own_kernel = _THREAD.in_own_kernel, True
        try:
            return kernel.call_boxed(keys, *given, **named)
        finally:
            _THREAD.in_own_kernel = before

    return call


def _implementation(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the implementation of an operator: by flashgen, or by torch's own kernel if flashgen refuses the call."""
    function: Any = OPERATORS[name]
    counted = _counted(name)

    def implementation(*given: Any, **named: Any) -> Any:
        if _THREAD.in_own_kernel:
            return own(*given, **named)
        before = set_eval_frame(None)  # what `outside_of_graphs` does, without another call
        try:
            device = given[0].get_device()
            if device < 0 or device == torch._C._cuda_getDevice():
                results = function(*given, **named)
            else:
                with torch.cuda.device(device):  # torch sets no device for kernels in Python
                    results = function(*given, **named)
            with _LOCK:
                _COUNTS[counted] += 1
            return results
        except REFUSALS as error:
            _count_refusal(f"{counted}: {error}")
            return own(*given, **named)
        finally:
            set_eval_frame(before)

    return implementation


def _shortcut(name: str, repeat: Callable[..., Any], dispatch_key: str) -> Callable[..., Any]:
    """Returns the implementation of an operator by `repeat`, or by its present kernel if that returns None."""
    kernel = torch.library.get_kernel(name, dispatch_key)
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, dispatch_key))
    counted = _counted(name)

    def implementation(*given: Any) -> Any:
        device = given[0].get_device()
        if device < 0 or device != torch._C._cuda_getDevice() or _THREAD.in_own_kernel:
            return kernel.call_boxed(keys, *given)
        before = set_eval_frame(None)
        try:
            results = repeat(*given)
            if results is None:
                return kernel.call_boxed(keys, *given)
            with _LOCK:
                _COUNTS[counted] += 1
            return results
        finally:
            set_eval_frame(before)

    return implementation


def _counted(name: str) -> str:
    """Returns whether an operator counts as a "forward" or a "backward"."""
    return "backward" if name.endswith("backward") else "forward"


def _count_refusal(reason: str) -> None:
    reason = re.sub(r"0x[0-9a-f]+", "0x...", reason)  # addresses differ from call to call
    with _LOCK:
        known = reason in _REASONS or len(_REASONS) < _MAX_REASONS
        _REASONS[reason if known else _OTHER] += 1
    if known:
        warn_once(f"torch's own kernel computes a call that flashgen does not take, {reason}")
