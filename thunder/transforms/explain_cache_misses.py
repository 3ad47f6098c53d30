from __future__ import annotations

import collections
import itertools
import logging
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch

from thunder.core.compile_data import get_compile_data
from thunder.core.prims import PrimIDs
from thunder.core.prologue_explanations import PrologueExplainer, Refusal, ValueName
from thunder.core.trace import TraceCtx
from thunder.core.transform_common import Transform

__all__ = ["ExplainCacheMisses"]

logger = logging.getLogger("thunder.prologue")


class ExplainCacheMisses(Transform):
    """Logs why a call was compiled anew: which check of which cache entry refused it.

    Thunder catches every exception of a prologue, and compiles again in silence. With this transform each such call
    logs, at level INFO to the logger ``thunder.prologue``, a line for each cache entry that refused it::

        GPT, called at train.py:12: cache entry 0 refused: input 'idx': compiled for shape (1, 5), is of shape (1, 6)

    The number is the entry's place in ``thunder.compile_stats(cmodel).interpreter_cache``. An entry refuses by the first
    check that fails, there may be more. Where the user's code that first used an input or parameter is known, the line
    ends with it.

    A check that fails again and again is a recompile storm. When the same value has been refused ``warn_after`` times,
    one WARNING says so, and what to do about it; from then on that value is no longer reported.

    It changes no trace, may stand anywhere in the list of transforms, and costs a cache hit nothing: it does its work
    when Thunder compiles, by running the older prologues again with the arguments of this call. Where the logger is not
    enabled for WARNING it does nothing at all.

    Args:
        warn_after (int): How many times the same value is refused before the warning.
        max_entries (int): How many cache entries are explained in a miss, the newest first. The others are counted.

    Raises:
        TypeError: At construction, if an argument is not an int.
        ValueError: At construction, if an argument is less than 1.

    Example::

        >>> import logging, sys, torch, thunder
        >>> from thunder.transforms.explain_cache_misses import ExplainCacheMisses
        >>> logging.basicConfig(level=logging.INFO)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout()).eval()
        >>> cmodel = thunder.jit(model, transforms=[ExplainCacheMisses()])
        >>> _ = cmodel(torch.randn(3, 4)), model.train(), cmodel(torch.randn(3, 4))  # logs one line
    """

    #: Tells transforms that care which others come after them that this one does not count.
    edits_traces = False

    def __init__(self, *, warn_after: int = 8, max_entries: int = 3):
        for name, value in (("warn_after", warn_after), ("max_entries", max_entries)):
            if type(value) is not int:
                raise TypeError(f"{name} must be an int, is {value!r} of type {type(value).__name__}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, is {value}")
        self.warn_after = warn_after
        self.max_entries = max_entries
        # How many times each value was refused, for each compiled function.
        self._times_refused: weakref.WeakKeyDictionary[Any, collections.Counter] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._cannot_tell = False

    def __repr__(self) -> str:
        arguments = f"warn_after={self.warn_after}, max_entries={self.max_entries}"
        return f"{type(self).__module__}.{type(self).__name__}({arguments})"

    def transform_traces_pre_prologue(
        self, prologue_trace: TraceCtx, computation_trace: TraceCtx, epilogue_trace: TraceCtx | None, **kwargs
    ) -> tuple[TraceCtx, TraceCtx, TraceCtx | None]:
        # Thunder asks for a transformed prologue exactly when no cache entry has accepted the call.
        if logger.isEnabledFor(logging.WARNING):
            try:
                self._explain_miss()
            except Exception as e:  # the call itself is fine
                # As text: the error's traceback would keep the call's tensors alive.
                logger.warning("cannot say why a call was compiled anew: %s", f"{type(e).__name__}: {e}")
                logger.debug("%s", traceback.format_exc())
        return prologue_trace, computation_trace, epilogue_trace

    def _explain_miss(self) -> None:
        call = _find_call()
        if call is None:
            if not self._cannot_tell:
                self._cannot_tell = True
                logger.warning(
                    "cannot say why calls are compiled anew: the call cannot be found on the stack in this version of "
                    "Thunder or of Python"
                )
            return
        entries = call.stats.interpreter_cache
        if not entries:
            return
        first = max(0, len(entries) - self.max_entries)
        verdicts = {i: _run_again(entries[i], call) for i in range(len(entries) - 1, first - 1, -1)}
        # By the newest entry where a value is refused by several.
        refusals = {v.value: v for v in reversed(verdicts.values()) if isinstance(v, Refusal)}
        told = self._count(call, refusals)
        subject = f"{_describe_function(get_compile_data().fn)}, called at {call.site}"
        lines = [
            f"{subject}: cache entry {i} {_describe_verdict(verdict, entries[i])}"
            for i, verdict in verdicts.items()
            if not isinstance(verdict, Refusal) or verdict.value in told
        ]
        if lines and first:
            lines.append(f"{subject}: {first} older cache {'entry' if first == 1 else 'entries'} refused, too")
        for line in lines:
            logger.info("%s", line)

    def _count(self, call: _Call, refused: dict[ValueName, Refusal]) -> set[ValueName]:
        """Counts the values that were refused in a call, warns of those that were too often, and returns those that are
        still to be reported."""
        with self._lock:
            times_refused = self._times_refused.setdefault(call.stats, collections.Counter())
            times_refused.update(refused.keys())
            times = {value: times_refused[value] for value in refused}
        for value, refusal in refused.items():
            if times[value] == self.warn_after:
                logger.warning(
                    "%s has been compiled anew %d times because of %s (%s), and that is no longer reported. Each time "
                    "takes long, and is kept in memory. To avoid it, %s.",
                    _describe_function(get_compile_data().fn),
                    self.warn_after,
                    value,
                    refusal.text,
                    _advice(refusal),
                )
        return {value for value in refused if times[value] <= self.warn_after}


class _Call(NamedTuple):
    """The call that is being compiled."""

    stats: Any
    args: tuple
    kwargs: dict[str, Any]
    site: str
    """Where the user's code made it."""


def _find_call() -> _Call | None:
    """Finds the call that is being compiled on the stack: Thunder does not pass it on to transforms.

    This is all that depends on the names of variables within Thunder.
    """
    get_frame = getattr(sys, "_getframe", None)
    frames = () if get_frame is None else _frames_up(get_frame(1))
    for frame in frames:
        if frame.f_code.co_name != "get_computation_and_inputs" or frame.f_globals.get("__name__") != "thunder":
            continue
        variables = frame.f_locals
        if variables.get("cd") is get_compile_data() and {"cs", "args", "kwargs"} <= variables.keys():
            site = next(
                (f"{f.f_code.co_filename}:{f.f_lineno}" for f in frames if not _is_library(f)), "an unknown line"
            )
            return _Call(variables["cs"], variables["args"], variables["kwargs"], site)
    return None


def _frames_up(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_library(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("thunder", "torch", "contextlib", "functools")


def _run_again(entry: Any, call: _Call) -> Refusal | str | None:
    """Runs the prologue of a cache entry again, and says why it refuses the call; None if it does not."""
    try:
        entry.prologue_fn(*call.args, **call.kwargs)
    except Exception as e:
        traces = entry.prologue_traces
        bsyms = list(itertools.chain.from_iterable(trace.bound_symbols for trace in traces))
        # The text holds no frame, the error does.
        return PrologueExplainer(bsyms, traces[0].fn).explain(e) or f"{type(e).__name__}: {' '.join(str(e).split())}"
    return None


def _describe_function(fn: Any) -> str:
    return type(fn).__name__ if isinstance(fn, torch.nn.Module) else getattr(fn, "__qualname__", repr(fn))


def _describe_verdict(verdict: Refusal | str | None, entry: Any) -> str:
    if verdict is None:
        return "accepts it now: what it refused has changed meanwhile, in another thread or by the call itself"
    line = _line_of_first_use(verdict.proxy_name, entry) if isinstance(verdict, Refusal) else None
    return f"refused: {verdict}" + (f"; first used at {line}" if line else "")


def _line_of_first_use(proxy_name: str, entry: Any) -> str | None:
    """The line of the user's code that first computes with a value of the prologue."""
    for bsym in entry.computation_traces[0].bound_symbols:
        if bsym.source_filename is None or all(proxy.name != proxy_name for proxy in bsym.flat_proxy_args):
            continue
        return f"{bsym.source_filename}:{bsym.source_positions.lineno}" if _is_users(bsym.source_filename) else None
    return None


def _is_users(filename: str) -> bool:
    return not filename.startswith(tuple(path for name in ("thunder", "torch") for path in sys.modules[name].__path__))


def _advice(refusal: Refusal) -> str:
    kind, check = refusal.value.kind, None if refusal.check is None else refusal.check.sym.id
    if kind == "global state":
        if refusal.value.path == "alias_tensor_indices":
            return "pass tensors that share memory in the same places each time, or none that do"
        return "make all calls under the same grad mode, autocast, default dtype and default device"
    if kind.startswith("number of"):
        return "pass the same arguments each time"
    if kind in ("parameter", "buffer"):
        return f"keep the {kind} as it is and change only its values, in place"
    if check is PrimIDs.CHECK_TENSOR_SHAPE_AND_METADATA:
        if "shape" in refusal.text:
            return "pad it, or sort calls into few shapes"
        return "give it the same dtype, device and requires_grad each time"
    if check is PrimIDs.CHECK_NUMBER_TYPE_AND_VALUE and kind == "input":
        return "pass the number as a tensor: a tensor's values are not compiled in, a number is"
    if check is PrimIDs.CHECK_NUMBER_TYPE_AND_VALUE:
        return "make it a tensor (a buffer, an input): a tensor's values are not compiled in, a number is"
    return "keep it the same, or to few values"
