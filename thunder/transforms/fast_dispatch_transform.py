from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from thunder.core import prims
from thunder.core import trace as trace_module
from thunder.core.module import ThunderModule
from thunder.core.options import CACHE_OPTIONS
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.distributed import get_skip_data_parallel_grad_sync
from thunder.executors.torch_autograd import connect_to_autograd
from thunder.executors.torchex import no_autocast
from thunder.transforms.fused_prologue_transform import (
    FusedPrologueTransform,
    _callable,
    _ModuleGuard,
    _names,
    _print_check,
    _print_fused,
    _unused,
)

if TYPE_CHECKING:
    from thunder.common import CompileData, CompileStats

__all__ = ["FastDispatchTransform"]


class FastDispatchTransform(FusedPrologueTransform):
    """Calls the compiled code of a cache hit without Thunder's dispatcher.

    It does all that :class:`FusedPrologueTransform` does. In addition, the compiled module tries its cache entries,
    newest first, each through one flat check of the arguments, the global state (read directly and not collected first)
    and the module guard, and runs the computation and the epilogue of the first that fits. Whatever the flat check does
    not know (a miss, a state of the module that has just changed, tracing, autocast, a cache option other than the
    default) is left to Thunder's own dispatcher, unchanged.

    It is safe to use always: it says yes only where the prologue that it stands for would. Outputs, gradients, in-place
    updates, epilogue, grad mode, hooks and exceptions are as without it, and so are ``thunder.cache_hits``,
    ``thunder.cache_misses`` and the ``thunder.last_*`` traces. The timers of ``thunder.compile_stats(cm)``
    (``last_trace_host_start`` and the like) are not touched by such a hit: they keep what Thunder's dispatcher last wrote.

    It is for modules: in a jitted function it does what FusedPrologueTransform does, and no more.

    Raises:
        RuntimeError: At compilation, as FusedPrologueTransform does.

    Example::

        >>> import torch, thunder
        >>> from thunder.transforms.fast_dispatch_transform import FastDispatchTransform
        >>> cmodel = thunder.jit(torch.nn.Linear(4, 2), transforms=[FastDispatchTransform()])
        >>> for _ in range(3):
        ...     y = cmodel(torch.randn(3, 4))
        >>> thunder.cache_hits(cmodel), thunder.cache_misses(cmodel)
        (2, 1)
    """

    def transform_module(self, model: ThunderModule) -> None:
        """Puts the dispatcher before the module's own call."""
        if any(isinstance(transform, FastDispatchTransform) for transform in model._lc_transforms):
            return
        if model._lc_cd.cache_option is CACHE_OPTIONS.CONSTANT_VALUES and _is_of_thunder(model._forward_fn):
            model._forward_fn = _dispatcher(model._forward_fn, model._lc_cd, model._lc_cs)


def _is_of_thunder(call: Callable) -> bool:
    """False for what another transform has put before Thunder's dispatcher, which must run on each call."""
    return getattr(call, "__globals__", {}).get("__name__") == "thunder"


def _dispatcher(call_thunder: Callable, cd: CompileData, cs: CompileStats) -> Callable:
    """Makes the function that a ThunderModule calls in place of Thunder's own."""
    options = cd.compile_options
    made: dict[int, tuple[Any, Callable | None]] = {}
    # The cache as it was last seen, and what was made of its entries, newest first. Assigned as one, since another thread
    # may be looking.
    seen: tuple[list, tuple[Callable, ...]] = [], ()

    def look_up_entries() -> tuple[Callable, ...]:
        nonlocal made, seen
        entries = list(cs.interpreter_cache)
        now = {id(entry): made.get(id(entry)) or (entry, _make_hit(entry, cs, options)) for entry in entries}
        hits = tuple(hit for _, hit in reversed(now.values()) if hit is not None)
        made, seen = now, (entries, hits)
        return hits

    def dispatch(*args, **kwargs):
        # Thunder traces through this function when it meets the module in another one.
        if _tracing_context.get(None) is None:
            known, hits = seen
            if known != cs.interpreter_cache:
                hits = look_up_entries()
            for hit in hits:
                result = hit(args, kwargs)
                if result is not _NO_HIT:
                    return result
        return call_thunder(*args, **kwargs)

    return dispatch


_NO_HIT = object()
_tracing_context = trace_module._tracectx


#
# A cache hit
#


def _make_hit(entry, cs: CompileStats, options: dict[str, Any]) -> Callable[[tuple, dict], Any] | None:
    """Makes a function that checks whether a cache entry fits the arguments and the state, and then runs it. It returns
    ``_NO_HIT`` where it does not know. None if the entry has something that only Thunder's dispatcher knows."""
    flat = _flat_check(entry)
    if flat is None:
        return None
    check, global_state = flat
    compute = _without_modes(entry.computation_fn, global_state.is_grad_enabled)
    finish = _without_modes(entry.epilogue_fn, global_state.is_grad_enabled)
    computation, prologue = entry.computation_fn, entry.prologue_fn
    computation_traces, prologue_traces = entry.computation_traces, entry.prologue_traces
    connect = None
    if entry.backward_fn:
        connect = _autograd_connection(entry, options)
        if connect is None:
            return None

    def hit(args, kwargs):
        try:
            values = check(args, kwargs)
        except Exception:
            return _NO_HIT  # Thunder's dispatcher, which comes next, sees it again
        if values is None:
            return _NO_HIT
        inputs, for_epilogue = values
        cs.calls += 1
        cs.cache_hits += 1
        cs.last_traces = computation_traces
        cs.last_prologue_traces = prologue_traces
        cs.last_prologue = prologue
        cs.last_interpreted_instructions = cs.last_interpreter_log = None
        cs.last_prologue_transformation_start = cs.last_prologue_transformation_stop = 0
        cs.last_computation_transformation_start = cs.last_computation_transformation_stop = 0
        result = compute(*inputs)
        if connect is not None:
            result = connect(*result)
        result = finish(*for_epilogue, *result)
        cs.last_computation = computation
        return result

    return hit


def _autograd_connection(entry, options: dict[str, Any]) -> Callable[[dict, tuple], Any] | None:
    """Makes a function that connects what the computation returns to autograd, as Thunder's dispatcher does."""
    call = functools.partial(
        connect_to_autograd,
        backward_fn=entry.backward_fn,
        return_none_instead_of_grads=entry.return_none_instead_of_grads,
        disable_split_autograd=options.get("thunderfx_disable_split_autograd", False),
        is_differentiable_outputs=options.get("is_differentiable_outputs", None),
    )
    if set(inspect.signature(connect_to_autograd).parameters) != {*call.keywords, *_OF_A_CALL}:
        return None

    def connect(data, saved):
        saved_tensors, saved_other = saved
        call(
            flat_args=data["flat_args"],
            flat_output=data["flat_output"],
            saved_tensors=saved_tensors,
            saved_other=saved_other,
        )
        return data["output"]

    return connect


_OF_A_CALL = ("flat_args", "flat_output", "saved_tensors", "saved_other")


def _without_modes(function: Callable, is_grad_enabled: bool) -> Callable:
    """Returns what a trace's callable runs with gradients and autocast off, so that it costs less to switch those off.
    Autocast is off in every state that the flat check accepts."""
    beneath = getattr(function, "__wrapped__", None)
    decorated = getattr(beneath, "__wrapped__", None)
    if decorated is None or [function.__code__, beneath.__code__] != _decorators:
        return function
    if not is_grad_enabled:
        return decorated

    def without_grad(*args):
        _set_grad_enabled(False)
        try:
            return decorated(*args)
        finally:
            _set_grad_enabled(True)

    return without_grad


# What Thunder decorates the callables of computation and epilogue with, from the outside in.
_decorators = [torch.no_grad()(lambda: None).__code__, no_autocast(lambda: None).__code__]

#
# The flat check
#


def _flat_check(entry) -> tuple[Callable[[tuple, dict], tuple | None], _GlobalState] | None:
    """Makes a function of ``args`` and ``kwargs`` that returns what an entry's prologue returns, or None where that may
    raise, and says which global state it asks for. It has the prologue's statements, but for those about the global
    state, which is asked for and not read from a dict. Returns None where the prologue reads what is not known here."""
    prologue = entry.prologue_traces[-1]
    *bsyms, result = prologue.bound_symbols
    taken = {name for bsym in bsyms for name in _names((*bsym.flat_proxy_outs, *bsym.flat_proxy_args))}
    inputs: list[Proxy] = []
    statements: list[BoundSymbol] = []
    state: dict[str, Any] = {}
    state_keys: dict[str, str | None] = {}  # by proxy; None for the dict itself
    of_modules = []
    for bsym in bsyms:
        source = bsym.args[0].name if bsym.args and isinstance(bsym.args[0], Proxy) else None
        if bsym.sym.id is PrimIDs.UNPACK_TRIVIAL:
            inputs.append(bsym.output)
        elif bsym.sym.id is PrimIDs.UNPACK_CACHE_INFO:
            state_keys[bsym.output.name] = None
        elif source in state_keys:
            key = state_keys[source]
            if key is None and bsym.sym.id is PrimIDs.UNPACK_GETITEM:
                state_keys[bsym.output.name] = bsym.args[1]
            elif key is not None and not bsym.flat_proxy_outs and len(bsym.args) == 2:
                state[key] = bsym.args[1]
            else:
                return None
        else:
            if bsym.sym.id == "read_and_check_modules":
                of_modules.append(len(statements))
            statements.append(_without_exception(bsym, taken))
    global_state = _GlobalState.make(state, prologue.fn)
    if global_state is None or _names(inputs) != ["args", "kwargs"]:
        return None
    # The arguments decide between most entries, and the modules are the dearest.
    position = min(of_modules, default=len(statements))
    tensor = _only_tensor(bsyms)
    if tensor is not None and global_state.alias_tensor_indices == "":
        global_state = global_state._replace(alias_tensor_indices=None)
        # As where Thunder looks for aliases, this raises if there is no storage (`torch.func.vmap`).
        statements.insert(position, _statement("has_storage", f"{tensor}.data_ptr()"))
    name = _unused("global_state_is_as_compiled", taken)
    line = f"if not {name}(args, kwargs): return None"
    statements.insert(position, _statement(name, line, {name: global_state.check()}))
    return _callable("flat_check", inputs, statements, result, prologue.fn), global_state


def _only_tensor(bsyms: Sequence[BoundSymbol]) -> str | None:
    """Returns the name of the tensor that is the only argument which the prologue accepts, so that nothing can share its
    storage. None if it accepts others."""
    lengths, arguments, tensors = [], set(), set()
    for bsym in bsyms:
        source = bsym.args[0].name if bsym.args and isinstance(bsym.args[0], Proxy) else None
        if bsym.sym.name == "check_tensor_metadata":
            tensors.add(source)
        elif source in ("args", "kwargs"):
            if bsym.sym.name == "check_len":
                lengths.append(bsym.args[1])
            elif bsym.sym.id is PrimIDs.UNPACK_GETITEM:
                arguments.add(bsym.output.name)
    return next(iter(tensors & arguments), None) if sorted(lengths) == [0, 1] else None


def _statement(name: str, line: str, context: dict[str, Any] | None = None) -> BoundSymbol:
    """Makes a statement of a line of Python, which ``context`` is given to."""
    symbol = Symbol(
        name,
        id=name,
        is_prim=True,
        tags=(prims.OpTags.DONT_DCE,),
        meta=lambda: None,
        python_impl=lambda: None,
        python_printer=lambda *_: [line],
    )
    return symbol.bind(output=None, _call_ctx=context or {})


def _without_exception(bsym: BoundSymbol, taken: set[str]) -> BoundSymbol:
    """Returns ``bsym`` so that it returns from the function where it is sure, or likely, to be about to raise."""
    printer = bsym.sym.python_printer
    kind = printer.func if isinstance(printer, functools.partial) else None
    context = bsym._call_ctx
    if kind is _print_check:
        (condition,) = printer.args
        lines = [f"if not ({condition}): return None"]
    elif kind is _print_fused:
        name, targets, is_one_run = printer.args
        guard: _ModuleGuard = context[name]
        context = {**context, name: guard.values_if_unchanged}
        values = targets[0] if is_one_run else _unused("values", taken)
        lines = [f"{values} = {name}({', '.join(_names(bsym.args))})", f"if {values} is None: return None"]
        if targets and not is_one_run:
            lines.append(f"{', '.join(targets)}, = {values}")
    else:
        return bsym
    new = bsym.from_bsym(
        sym=dataclasses.replace(bsym.sym, python_printer=lambda *_: lines, _bind_postprocess=None), subsymbols=()
    )
    new._call_ctx = context
    return new


class _GlobalState(NamedTuple):
    """What Thunder writes into ``cache_info``."""

    default_dtype: torch.dtype
    default_device: torch.device
    is_grad_enabled: bool
    no_grad_sync: bool
    alias_tensor_indices: str | None
    """None where the prologue does not check it, or need not."""
    fn: Any

    @classmethod
    def make(cls, state: dict[str, Any], fn: Any) -> _GlobalState | None:
        """Returns None if something else is checked, or not all that is relied on."""
        state = {"alias_tensor_indices": None, **state, "fn": fn}
        # With autocast on, Thunder's dispatcher does more than to compare.
        is_autocast_enabled = state.pop("is_autocast_enabled", True)
        return cls(**state) if is_autocast_enabled is False and state.keys() == set(cls._fields) else None

    def check(self) -> Callable[[tuple, dict], bool]:
        """Makes a function of ``args`` and ``kwargs`` that says whether the state is this one."""
        default_dtype, default_device, is_grad_enabled, no_grad_sync, aliases, fn = self
        may_be_unset = default_device == torch.device("cpu")
        # Where the class may say so, too, or answers for attributes that an instance does not have.
        is_asked = any(hasattr(type(fn), name) for name in _PARALLEL) or (
            type(fn).__getattr__ is not torch.nn.Module.__getattr__
        )

        def is_as_compiled(args, kwargs) -> bool:
            return (
                _is_grad_enabled() is is_grad_enabled
                and _get_default_dtype() is default_dtype
                and not (_may_autocast() and (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")))
                and ((may_be_unset and _has_no_default_device()) or torch.get_default_device() == default_device)
                and (aliases is None or _alias_tensor_indices(args, kwargs) == aliases)
                and (
                    (not no_grad_sync and not is_asked and _PARALLEL.isdisjoint(vars(fn)))
                    or _no_grad_sync(fn) == no_grad_sync
                )
            )

        return is_as_compiled


_is_grad_enabled, _get_default_dtype = torch.is_grad_enabled, torch.get_default_dtype

_PARALLEL = frozenset({"use_ddp", "use_fsdp"})


def _no_grad_sync(fn: Any) -> bool:
    return any(getattr(fn, name, False) for name in _PARALLEL) and get_skip_data_parallel_grad_sync()


_LEAF_TYPES = frozenset(
    {torch.Tensor, torch.nn.Parameter, bool, int, float, complex, str, type(None), torch.dtype, torch.device}
)


def _alias_tensor_indices(args: tuple, kwargs: dict[str, Any]) -> str:
    """Which arguments share their storage, as Thunder writes it into ``cache_info``: ``"0,2-1,3"``."""
    leaves = (*args, *[kwargs[name] for name in sorted(kwargs)]) if kwargs else args
    if not _LEAF_TYPES.issuperset(map(type, leaves)):
        leaves, _ = tree_flatten((args, kwargs))
    elif len(leaves) < 2:
        for leaf in leaves:
            if type(leaf) is torch.Tensor and leaf.layout is torch.strided:
                leaf.data_ptr()  # raises where a tensor has no storage of its own, as Thunder does (`torch.func.vmap`)
        return ""
    groups: dict[int, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if type(leaf) is torch.Tensor and leaf.layout is torch.strided:
            groups.setdefault(leaf.untyped_storage().data_ptr(), []).append(i)
    if len(groups) == len(leaves):
        return ""
    return "-".join([",".join(map(str, group)) for group in groups.values() if len(group) > 1])


#
# Private parts of torch, with public ones in their place where they are not as expected
#


def _find_set_grad_enabled() -> Callable[[bool], Any]:
    private = getattr(torch._C, "_set_grad_enabled", None)
    if private is None:
        return torch.set_grad_enabled
    with torch.enable_grad():
        private(False)
        if torch.is_grad_enabled():
            return torch.set_grad_enabled
    return private


def _find_has_no_default_device() -> Callable[[], bool]:
    """Finds a function that is only true where ``torch.get_default_device()`` is the CPU since nothing was set, at a tenth
    of its cost. Where torch does not keep this where it is looked for, that function says no."""
    stack_length = getattr(torch._C, "_len_torch_function_stack", None)
    set_globally = getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None)
    if stack_length is None or set_globally is None:
        return lambda: False

    def has_no_default_device() -> bool:
        return not stack_length() and vars(set_globally).get("device_context") is None

    with torch.device("meta"):
        is_noticed = not has_no_default_device()
    return has_no_default_device if is_noticed else lambda: False


def _find_may_autocast() -> Callable[[], bool]:
    """Finds a function that is only false where autocast is off for all devices."""
    is_any = getattr(torch._C, "_is_any_autocast_enabled", None)
    if is_any is None:
        return lambda: True
    with torch.autocast("cpu", enabled=True):
        return is_any if is_any() else lambda: True


_set_grad_enabled = _find_set_grad_enabled()
_may_autocast = _find_may_autocast()
_has_no_default_device = _find_has_no_default_device()
