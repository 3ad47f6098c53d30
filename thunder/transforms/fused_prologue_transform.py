from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
import operator
import re
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from thunder.core import codeutils, prims
from thunder.core import guard_blocks as blocks
from thunder.core.codeutils import SigInfo
from thunder.core.compile_data import _compile_data, compile_data_and_stats, get_compile_data
from thunder.core.module import ThunderModule
from thunder.core.prims import PrimIDs
from thunder.core.prologue_explanations import PrologueExplainer
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol, Symbol, default_python_printer, has_tags
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx
from thunder.core.transform_common import Transform
from thunder.executors import pythonex
from thunder.executors.passes import transform_for_execution
from thunder.transforms.extraction_only_prologue_transform import transforms_that_follow

__all__ = ["FusedPrologueTransform"]


class FusedPrologueTransform(Transform):
    """Replaces all that a prologue reads from modules and checks about them by one bulk read and one bulk guard.

    Nothing is left out: the prologue accepts exactly what it accepted before, returns the same objects, and raises where
    it raised, with a message that names the first thing that differs (``attribute 'norm.eps': compiled for 1e-05, is
    10.0``). It only runs faster, and is therefore safe to use always. Checks that other transforms have left out
    (:class:`~thunder.transforms.ExtractionOnlyPrologueTransform`, :class:`~thunder.transforms.PrunePrologueChecks`) stay
    left out.

    The first call runs every read and check that was replaced, and remembers the state that they accepted. Later calls
    compare with that state in bulk: the versions of the modules' dicts, the words in which torch keeps tensors' metadata
    (see ``thunder/core/guard_blocks.py``, also for what is done where those cannot be trusted, and for
    ``THUNDER_PROLOGUE_PORTABLE=1``, which uses public interfaces alone). When the comparison says no, everything is read
    and checked in full again. What cannot be compared (properties, lists, tensor subclasses) is read and checked as
    before on each call.

    It works on the prologue that all other transforms leave. Where it is not the last in the list of transforms, it adds
    another FusedPrologueTransform to the end of the list and leaves the work to that.

    The fused prologue prints in a few lines; ``print(thunder.last_prologue_traces(cm)[-3])`` prints the one that it
    replaced, with every read and check.

    Raises:
        RuntimeError: At compilation, if another transform that edits the prologue comes after it and the transforms
            were not given as a list.

    Example::

        >>> import torch, thunder
        >>> from thunder.transforms.fused_prologue_transform import FusedPrologueTransform
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout()).eval()
        >>> cmodel = thunder.jit(model, transforms=[FusedPrologueTransform()])
        >>> cmodel(torch.randn(3, 4)).shape
        torch.Size([3, 4])
        >>> _ = cmodel(torch.randn(3, 4)), model.train(), cmodel(torch.randn(3, 4))
        >>> thunder.cache_hits(cmodel), thunder.cache_misses(cmodel)
        (1, 2)
    """

    def transform_traces_pre_prologue(
        self, prologue_trace: TraceCtx, computation_trace: TraceCtx, epilogue_trace: TraceCtx | None, **kwargs
    ) -> tuple[TraceCtx, TraceCtx, TraceCtx | None]:
        start_time_ns = time.perf_counter_ns()

        following = transforms_that_follow(self)
        if following:
            if not any(isinstance(other, FusedPrologueTransform) for other in following):
                _append_to_transforms(type(self)(), following)
            return prologue_trace, computation_trace, epilogue_trace

        new_prologue_trace = from_trace(prologue_trace)
        new_prologue_trace.bound_symbols = _fuse(prologue_trace.bound_symbols, prologue_trace.fn)
        elapsed_time_millis = (time.perf_counter_ns() - start_time_ns) // 1000000
        new_prologue_trace.set_provenance(TraceProvenance(f"Fused prologue (took {elapsed_time_millis} milliseconds)"))
        return new_prologue_trace, computation_trace, epilogue_trace


def _append_to_transforms(transform: Transform, following: Sequence[Transform]) -> None:
    """Gives ``transform`` the last turn in the compilation that is going on."""
    transforms = get_compile_data().transforms
    if not isinstance(transforms, list):
        raise RuntimeError(
            f"FusedPrologueTransform must be the last transform, {type(following[0]).__name__} comes after it; put it last, "
            "or give the transforms as a list"
        )
    transforms.append(transform)


#
# The pass
#

_MOST_RUNS = 6

_TENSOR_READS = {PrimIDs.UNPACK_PARAMETER: "parameter", PrimIDs.UNPACK_BUFFER: "buffer"}


def _names(proxies: Iterable[Proxy]) -> list[str]:
    return [proxy.name for proxy in proxies]


@dataclasses.dataclass(frozen=True)
class _Region:
    """The statements of a prologue that depend on modules alone."""

    roots: list[Proxy]
    """What they start from: the compiled module or function."""
    bsyms: list[BoundSymbol]
    targets: list[list[Proxy] | Proxy]
    """What the fused statement assigns: runs of values that are returned next to each other, and single values."""
    taken: frozenset[str]
    """The names of all values of the prologue."""
    explainer: PrologueExplainer

    @functools.cached_property
    def reads(self) -> list[Proxy]:
        return list({proxy.name: proxy for bsym in self.bsyms for proxy in bsym.flat_proxy_outs}.values())

    @functools.cached_property
    def flat_targets(self) -> list[str]:
        targets = (target if isinstance(target, list) else [target] for target in self.targets)
        return list(dict.fromkeys(_names(itertools.chain.from_iterable(targets))))

    def pack(self, value: Callable[[str], Any]) -> Any:
        """Returns the values of the targets as the fused statement returns them."""
        packed = tuple(
            tuple(map(value, _names(target))) if isinstance(target, list) else value(target.name)
            for target in self.targets
        )
        return packed[0] if self.is_one_run else packed

    @property
    def is_one_run(self) -> bool:
        return len(self.targets) == 1 and isinstance(self.targets[0], list)


def _fuse(bsyms: Sequence[BoundSymbol], fn: Callable | None) -> list[BoundSymbol]:
    roots, region, rest, first_check = _split(bsyms)
    taken = frozenset(name for bsym in bsyms for name in _names((*bsym.flat_proxy_outs, *bsym.flat_proxy_args)))
    *rest, result = [_with_fast_path(bsym, taken) for bsym in rest]
    if not region:
        return [*rest, result]

    from_modules = {proxy.name: proxy for bsym in region for proxy in bsym.flat_proxy_outs}
    kinds = dict.fromkeys(from_modules, "module_values")
    kinds |= {bsym.output.name: f"{_TENSOR_READS[id_]}s" for bsym in region if (id_ := bsym.sym.id) in _TENSOR_READS}
    users = [i for i, bsym in enumerate(rest) if not from_modules.keys().isdisjoint(_names(bsym.flat_proxy_args))]
    used = {name for i in users for name in _names(rest[i].flat_proxy_args)}
    singles = [proxy for name, proxy in from_modules.items() if name in used]
    result, runs = _return_runs(result, kinds, taken)

    fused_region = _Region(roots, region, [*runs.values(), *singles], taken, PrologueExplainer(bsyms, fn))
    guard = _ModuleGuard(fused_region)
    name = _unused("read_and_check_modules", taken)
    # Thunder's dead code elimination drops a statement whose output is an empty collection, whatever its tags.
    output = (*map(tuple, runs.values()), *singles) or None
    symbol = Symbol(
        name,
        id="read_and_check_modules",
        is_prim=True,
        tags=(prims.OpTags.DONT_DCE,),
        meta=lambda *roots: output,
        python_impl=guard,
        python_printer=functools.partial(_print_fused, name, [*runs, *_names(singles)], fused_region.is_one_run),
    )
    fused = symbol.bind(*roots, output=output, _call_ctx={name: guard})
    fused.header = _summary(region)
    position = min([first_check, *users])
    return [*rest[:position], fused, *rest[position:], result]


def _unused(name: str, taken: Iterable[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _split(bsyms: Sequence[BoundSymbol]) -> tuple[list[Proxy], list[BoundSymbol], list[BoundSymbol], int]:
    """Returns the function objects that modules are reached from, the statements that depend on nothing but those, the
    other statements, and where among these the first check of the former stood."""
    roots, region, rest = [], [], []
    reached: set[str] = set()
    first_check = None
    for bsym in bsyms:
        is_root = bsym.sym.id is PrimIDs.UNPACK_FUNCTION_OBJ
        arguments = _names(bsym.flat_proxy_args)
        if not is_root and (not arguments or not reached.issuperset(arguments) or bsym.sym.id is PrimIDs.RETURN):
            rest.append(bsym)
            continue
        reached.update(_names(bsym.flat_proxy_outs))
        if is_root:
            roots.append(bsym.output)
            rest.append(bsym)
        elif bsym.flat_proxy_outs:
            region.append(bsym)
        elif has_tags(bsym, {prims.OpTags.DONT_DCE}):  # else it is dead: a check that was left out
            region.append(bsym)
            first_check = len(rest) if first_check is None else first_check
    # The return is the last of the rest.
    return roots, region, rest, len(rest) - 1 if first_check is None else first_check


def _return_runs(
    result: BoundSymbol, kinds: dict[str, str], taken: Iterable[str]
) -> tuple[BoundSymbol, dict[str, list[Proxy]]]:
    """Returns ``result`` so that it prints values from modules that it returns next to each other under one name, and
    those values by that name.

    Values of one kind are read by one C call. So a run is of one kind, unless those would be too many to be joined.
    """

    def grouped(kind_of: Callable[[str], str]) -> list[list[tuple[str | None, list]]]:
        def key(value: Any) -> str | None:
            return kind_of(value.name) if isinstance(value, Proxy) and value.name in kinds else None

        return [[(kind, list(group)) for kind, group in itertools.groupby(values, key)] for values in result.args[0]]

    groups = grouped(kinds.__getitem__)
    if sum(kind is not None for parts in groups for kind, _ in parts) > _MOST_RUNS:
        groups = grouped(lambda _: "module_values")
    runs: dict[str, list[Proxy]] = {}

    def name_run(kind: str, values: list[Proxy]) -> str:
        name = next(n for i in itertools.count() if (n := _unused(f"{kind}{i or ''}", taken)) not in runs)
        runs[name] = values
        return name

    texts = []
    for parts in groups:
        texts.append(
            " + ".join(
                f"({', '.join(map(codeutils.prettyprint, values))},)" if kind is None else name_run(kind, values)
                for kind, values in parts
            )
            or "()"
        )
    text = f"return ({', '.join(texts)})"
    symbol = dataclasses.replace(result.sym, python_printer=lambda *_: text)
    return result.from_bsym(sym=symbol), runs


def _print_fused(
    name: str, targets: list[str], is_one_run: bool, bsym: BoundSymbol, out_printables, arg_printables, kwarg_printables
) -> str:
    call = f"{name}({', '.join(codeutils.prettyprint(root) for root in arg_printables)})"
    if not targets:
        return call
    return f"{', '.join(targets)}{',' if len(targets) == 1 and not is_one_run else ''} = {call}"


def _summary(region: Sequence[BoundSymbol]) -> str:
    ids = [bsym.sym.id for bsym in region]
    checks = [bsym for bsym in region if not bsym.flat_proxy_outs]
    tensors = sum(bsym.sym.id is PrimIDs.CHECK_TENSOR_SHAPE_AND_METADATA for bsym in checks)
    return (
        f"reads {ids.count(PrimIDs.UNPACK_PARAMETER)} parameters and {ids.count(PrimIDs.UNPACK_BUFFER)} buffers, "
        f"checks the metadata of {tensors} and {len(checks) - tensors} other values"
    )


#
# Checks whose usual case is written out before the call: `len(args) == 1 or check_len(args, 1)`
#


def _with_fast_path(bsym: BoundSymbol, taken: frozenset[str]) -> BoundSymbol:
    """Returns ``bsym`` with an expression in front of it that is only true where the check passes."""
    write, context = _conditions.get(bsym.sym.id), {}
    if write is None or not isinstance(bsym.args[0], Proxy):
        return bsym
    if not has_tags(bsym, {prims.OpTags.DONT_DCE}):
        return bsym  # it is dead: a check that was left out
    condition = write(bsym.args[0].name, *bsym.args[1:], context)
    template = write("", *bsym.args[1:], context)
    # A value of the prologue may have a name that the expression uses for something else: an argument called `type`.
    if condition is None or not taken.isdisjoint(re.findall(r"(?<![\w.])[A-Za-z_]\w*", template)):
        return bsym
    check = pythonex.ex.implmap[bsym.sym.id].symbol

    def add_context(new: BoundSymbol) -> None:
        check._bind_postprocess(new)
        new._call_ctx = new._call_ctx | context

    printer = functools.partial(_print_check, condition)
    symbol = dataclasses.replace(check, python_printer=printer, _bind_postprocess=add_context)
    new = bsym.from_bsym(sym=symbol, subsymbols=())
    add_context(new)
    return new


def _print_check(condition: str, *args) -> str:
    return f"{condition} or {default_python_printer(*args)}"


def _tensor_condition(name, shape, device, dtype, requires_grad, context) -> str | None:
    kind, _, index = device.partition(":")
    is_there = {"cpu": f"{name}.is_cpu", "meta": f"{name}.is_meta"}.get(device)
    if kind == "cuda" and index:
        is_there = f"{name}.is_cuda and {name}.get_device() == {index}"
    if is_there is None or not all(type(size) is int for size in shape):
        return None
    context["dense_tensors"] = blocks.DENSE_TENSOR_TYPES
    return (
        f"type({name}) in dense_tensors and {name}.shape == {tuple(shape)!r} and {name}.dtype is {dtype} "
        f"and {name}.requires_grad is {requires_grad} and {is_there}"
    )


def _number_condition(name, value, context) -> str | None:
    if type(value) is bool:
        return f"{name} is {value}"
    if type(value) is int or (type(value) is float and math.isfinite(value)):
        return f"type({name}) is {type(value).__name__} and {name} == {value!r}"
    return None


def _literal_condition(name, value, context) -> str | None:
    if isinstance(value, torch.dtype):
        return f"{name} is {value}"
    if isinstance(value, torch.device):
        variable = re.sub(r"\W", "_", str(value))
        context[variable] = value
        return f"{name} == {variable}"
    return None


_conditions: dict[PrimIDs, Callable[..., str | None]] = {
    PrimIDs.CHECK_TENSOR_SHAPE_AND_METADATA: _tensor_condition,
    PrimIDs.CHECK_NUMBER_TYPE_AND_VALUE: _number_condition,
    PrimIDs.CHECK_LITERAL_LIKE: _literal_condition,
    PrimIDs.CHECK_STRING_VALUE: lambda name, value, _: f"{name} == {value!r}" if type(value) is str else None,
    PrimIDs.CHECK_LEN: lambda name, length, _: f"len({name}) == {length}",
    PrimIDs.CHECK_NONE: lambda name, _: f"{name} is None",
}


def _callable(
    name: str, inputs: Sequence[Proxy], bsyms: Iterable[BoundSymbol], outputs: Sequence[Proxy] | BoundSymbol, fn=None
) -> Callable:
    """Makes a function of statements, with the implementations that the Python executor has for them.

    ``outputs`` are the values that it returns, or its last statement; ``fn`` is what ``UNPACK_FUNCTION_OBJ`` gives.
    """
    trace = TraceCtx(fn)
    trace.args = tuple(inputs)
    trace._siginfo = SigInfo(name)
    trace._siginfo.args = [(proxy.name, None) for proxy in inputs]
    if not isinstance(outputs, BoundSymbol):
        with tracectx(trace):
            outputs = prims.python_return.bind(tuple(outputs), output=None)
    trace.bound_symbols = [*bsyms, outputs]
    function = transform_for_execution(trace, (pythonex.ex,)).python_callable(include_decorators=False)
    # As Thunder does for a prologue: a function that is in its own globals is only freed by the garbage collector.
    del function.__globals__[name]
    return function


#
# The guard
#

_IMMUTABLE = frozenset(
    {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
# Checks that say the same of the same immutable value each time.
_VALUE_CHECKS = frozenset(
    {
        PrimIDs.CHECK_NONE,
        PrimIDs.CHECK_LITERAL_LIKE,
        PrimIDs.CHECK_TYPE,
        PrimIDs.CHECK_INSTANCE,
        PrimIDs.CHECK_NUMBER_TYPE_AND_VALUE,
        PrimIDs.CHECK_BOOL_CONVERSION,
        PrimIDs.CHECK_STRING_VALUE,
    }
)


# What changes between calls, harmlessly, so many times with no more hits than that in between, is looked at itself on
# each call and no longer compared by version.
_TIMES_TO_TOLERATE, _HITS_TO_FORGET = 3, 3
# So few attributes, items and tensors are sooner looked at than their versions.
_FEW = 12


class _ModuleGuard:
    """Reads and checks what a part of a prologue read and checked: in full, or by comparison with the state that the
    last full check has accepted."""

    def __init__(self, region: _Region):
        self._region = region
        checks = [_with_fast_path(bsym, region.taken) for bsym in region.bsyms]
        self._read_and_check_all = _callable("read_and_check_all", region.roots, checks, region.reads)
        self._plan: _Plan | None = None
        self._values_if_unchanged: Callable | None = None
        self._hits = 0
        self._was_refused = False
        self._pauses = self._calls_to_pause = 0

    def __call__(self, *roots):
        values = self.values_if_unchanged(*roots)
        return self._check_in_full(roots) if values is None else values

    def values_if_unchanged(self, *roots):
        """Returns what the fused statement returns if the state is the one that was accepted last, and else None."""
        values_if_unchanged = self._values_if_unchanged
        values = None if values_if_unchanged is None else values_if_unchanged(*roots)
        if values is not None:
            self._hits += 1
        return values

    def _check_in_full(self, roots: tuple):
        if self._was_refused:
            # It is likely to be again (`train()`, with the entry for `eval()` tried first), and then no state is needed.
            self._run(roots)
        plan = self._plan and self._plan.after_changes(is_often=self._hits <= _HITS_TO_FORGET)
        if plan is not None:
            values = self._accept(plan, roots)
            if values is not None:
                return values
        read = self._run(roots)
        if self._calls_to_pause > 0:
            self._calls_to_pause -= 1
        else:
            values = self._accept(_Plan(self._region, roots, read), roots)
            if values is not None:
                self._pauses = 0
                return values
            # A state that is new on each call is not worth to be remembered; to try costs more than a full check.
            self._pauses += 1
            self._calls_to_pause = min(2**self._pauses, 1000)
        return self._region.pack(dict(zip(_names(self._region.reads), read)).__getitem__)

    def _accept(self, plan: _Plan, roots: tuple):
        """Checks everything, and remembers the state if that is what was checked: another thread may change it meanwhile,
        and change it back. Returns the values, or None if it is not."""
        values = values_if_unchanged = None
        versions = plan.take_versions()
        if versions is not None:
            values_if_unchanged = plan.fast_path(versions, self._run(roots))
        if values_if_unchanged is not None:
            values = values_if_unchanged(*roots)
        accepted = (plan, values_if_unchanged) if values is not None else (None, None)
        self._plan, self._values_if_unchanged = accepted
        self._hits = 0
        self._was_refused = False
        return values

    def _run(self, roots: tuple) -> tuple:
        try:
            return self._read_and_check_all(*roots)
        except Exception as e:
            self._was_refused, self._values_if_unchanged = True, None
            # Errors of other kinds speak for themselves (a missing key), or cannot be made with another text.
            is_told_more = type(e) in (AssertionError, AttributeError, RuntimeError)
            refusal = self._region.explainer.explain(e) if is_told_more else None
            if refusal is None:
                raise
            raise type(e)(f"{refusal} ({e})") from e


_HANDLE_METHODS = ("get_parameter", "get_buffer", "get_submodule")
_reads_as_usual = blocks.poll_attributes([(ThunderModule, name) for name in _HANDLE_METHODS])


@dataclasses.dataclass
class _Handle:
    """The ThunderModule that a prologue belongs to, without a reference that would make a cycle."""

    reference: weakref.ref[ThunderModule]
    root: Proxy
    """The proxy of its model, which the prologue starts from."""
    model: torch.nn.Module
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    submodules: dict[str, torch.nn.Module]
    absent: set[str] = dataclasses.field(default_factory=lambda: set(_HANDLE_METHODS))
    """What it must not have itself: attributes that it passes on to its model, and other ways to read than its class's."""

    @classmethod
    def make(cls, root: Proxy, model: Any, thunder_module: Any) -> _Handle | None:
        """Returns None where this is not the ThunderModule that lives as long as the guard: the one whose prologue is
        being run."""
        compile_data = get_compile_data()
        if type(thunder_module) is not ThunderModule or compile_data is None or not _reads_as_usual():
            return None
        if compile_data._thunder_module_map.get(id(model)) is not thunder_module or thunder_module._model is not model:
            return None
        own = vars(thunder_module)
        dicts = [own.get(name) for name in ("_overrides_parameters", "_overrides_buffers", "_module_cache")]
        if any(type(d) is not dict for d in dicts):
            return None
        return cls(weakref.ref(thunder_module), root, model, *dicts)


class _Plan:
    """How to compare a state with the one that a full check has accepted: what can be compared in bulk, and what must be
    read and checked each time."""

    def __init__(self, region: _Region, roots: tuple, read: tuple):
        self._region = region
        self._handles: dict[str, _Handle] = {}
        self._tensors: dict[str, tuple[dict, str]] = {}  # proxy: the dict that it is read from, its key
        self._held: dict[str, Any] = {}  # proxy: an object whose identity is compared
        self._attributes: dict[str, tuple[Any, str]] = {}  # proxy: the object and the name of its attribute
        self._items: dict[str, tuple[dict, str]] = {}  # proxy: the dict and the key
        self._checked: dict[str, blocks.Metadata] = {}  # proxy of a tensor: what it is compiled for
        # The ids of objects and dicts that change so often that versions are of no use.
        self._polled: frozenset[int] = frozenset()
        self._times_changed: dict[frozenset[int], int] = {}
        self._state = None

        values = dict(zip(_names((*region.reads, *region.roots)), (*read, *roots)))
        self._make_residual([bsym for bsym in region.bsyms if not self._compares(bsym, values)])
        self._lay_out()

    def _compares(self, bsym: BoundSymbol, values: dict[str, Any]) -> bool:
        """Takes up what ``bsym`` reads or checks, if that can be compared in bulk."""
        id_, args = bsym.sym.id, bsym.args
        if not args or not isinstance(args[0], Proxy):
            return False
        source = args[0].name
        value = values.get(bsym.output.name) if isinstance(bsym.output, Proxy) else None
        handle = self._handles.get(source)

        if id_ is PrimIDs.UNPACK_THUNDER_MODULE:
            is_of_root = source in _names(self._region.roots)
            made = _Handle.make(args[0], values[source], value) if is_of_root else None
            if made is not None:
                self._handles[bsym.output.name] = made
            return made is not None
        if id_ in _TENSOR_READS and handle is not None:
            tensors = handle.parameters if id_ is PrimIDs.UNPACK_PARAMETER else handle.buffers
            if value is None or tensors.get(args[1]) is not value:
                return False
            self._tensors[bsym.output.name] = (tensors, args[1])
            return True
        if id_ is PrimIDs.UNPACK_SUBMODULE and handle is not None:
            if value is None or handle.submodules.get(args[1]) is not value:
                return False
            self._items[bsym.output.name] = handle.submodules, args[1]
            self._held[bsym.output.name] = value
            return True
        if id_ is PrimIDs.UNPACK_ATTR and (handle is not None or source in self._held):
            owner = handle.model if handle is not None else self._held[source]
            if handle is not None:
                if any(args[1] in vars(base) for base in ThunderModule.__mro__):
                    return False
                handle.absent.add(args[1])  # it passes the read on to its model
            if not blocks.is_plain_attribute(owner, args[1]) or getattr(owner, args[1]) is not value:
                return False
            self._attributes[bsym.output.name] = owner, args[1]
            self._held[bsym.output.name] = value
            return True
        if id_ is PrimIDs.UNPACK_GETITEM and type(self._held.get(source)) is tuple and type(args[1]) is int:
            self._held[bsym.output.name] = value
            return True
        if id_ is PrimIDs.CHECK_TENSOR_SHAPE_AND_METADATA and source in self._tensors:
            metadata = blocks.Metadata.make(*args[1:])
            if metadata is None or not blocks.are_guardable([values[source]]):
                return False
            return self._checked.setdefault(source, metadata) == metadata
        return id_ in _VALUE_CHECKS and source in self._held and type(self._held[source]) in _IMMUTABLE

    def _make_residual(self, residual: Sequence[BoundSymbol]) -> None:
        """Makes the function of the statements that are run each time."""
        region = self._region
        # A tensor that such a statement needs is read once more by it.
        needed = {name for bsym in residual for name in _names(bsym.flat_proxy_args)} & self._tensors.keys()
        chosen = {id(bsym) for bsym in residual}
        statements = [
            self._past_the_handle(_with_fast_path(bsym, region.taken))
            for bsym in region.bsyms
            if id(bsym) in chosen or not needed.isdisjoint(_names(bsym.flat_proxy_outs))
        ]
        made = {proxy.name: proxy for bsym in statements for proxy in bsym.flat_proxy_outs}
        used = {proxy.name: proxy for bsym in statements for proxy in bsym.flat_proxy_args if proxy.name not in made}
        handles = [proxy for name, proxy in used.items() if name in self._handles]
        constants = [proxy for name, proxy in used.items() if name in self._held]
        self._handles_used = [self._handles[proxy.name] for proxy in handles]
        self._constants = _names(constants)
        self._results = [name for name in region.flat_targets if name in made and name not in self._tensors]
        self._run_residual = None
        if statements:
            inputs, outputs = [*region.roots, *handles, *constants], [made[name] for name in self._results]
            self._run_residual = _callable("read_and_check_the_rest", inputs, statements, outputs)

    def _past_the_handle(self, bsym: BoundSymbol) -> BoundSymbol:
        """Reads a property of the model from the model itself, as the ThunderModule would in more steps."""
        if bsym.sym.id is PrimIDs.UNPACK_ATTR:
            handle = self._handles.get(bsym.args[0].name)
            if handle is not None and bsym.args[1] in handle.absent:
                return bsym.from_bsym(args=(handle.root, *bsym.args[1:]))
        return bsym

    def _lay_out(self) -> None:
        """Decides what is compared by version and what is polled, and where each value comes from."""
        objects = {id(obj): obj for obj, _ in self._attributes.values()}
        dicts = {id(d): d for d, _ in (*self._tensors.values(), *self._items.values())}
        versioned: dict[int, Any] = {}
        versioned_dicts: dict[int, dict] = {}
        if len(self._attributes) + len(self._items) + len(self._checked) > _FEW:
            versioned = {i: obj for i, obj in objects.items() if i not in self._polled and blocks.is_versioned(obj)}
            if blocks.available_blocks().dict_versions:
                versioned_dicts = {i: d for i, d in dicts.items() if i not in self._polled}
        self._versions = None
        if versioned or versioned_dicts:
            self._versions = blocks.Versions(versioned.values(), [ThunderModule], versioned_dicts.values())
        attributes, items = self._attributes.items(), self._items.items()
        self._polled_attributes = {proxy: read for proxy, read in attributes if id(read[0]) not in versioned}
        self._polled_items = {proxy: read for proxy, read in items if id(read[0]) not in versioned_dicts}
        # A version says that nothing has changed since; that an attribute is still the instance's is seen here, and that an
        # item is still in its dict: what is not is read from somewhere else.
        self._versioned_items = {proxy: read for proxy, read in items if id(read[0]) in versioned_dicts}
        self._in_instance = [
            (obj, name) for obj, name in self._attributes.values() if id(obj) in versioned and name in vars(obj)
        ]

        targets = self._region.flat_targets
        names = dict.fromkeys(name for name in (*targets, *self._checked) if name in self._tensors)
        source_of = {name: id(self._tensors[name][0]) for name in names}
        segments = [list(group) for _, group in itertools.groupby(names, source_of.__getitem__)]
        if len(segments) > max(len(self._region.targets), 2):
            segments = [[n for n in names if source_of[n] == source] for source in dict.fromkeys(source_of.values())]
        tensors = [name for segment in segments for name in segment]
        self._segments = [(dicts[source_of[s[0]]], [self._tensors[name][1] for name in s]) for s in segments]
        # The segments are the very runs of values that are returned.
        targets_are_segments = segments == [t if isinstance(t, Proxy) else _names(t) for t in self._region.targets]
        position = {name: i for i, name in enumerate(tensors)}
        checked = sorted(position[name] for name in self._checked)
        self._metadata = {position[name]: metadata for name, metadata in self._checked.items()}
        # Those of which the version of their dict says that they are the same tensors.
        same = [i for i in checked if source_of[tensors[i]] in versioned_dicts]
        self._compared_by_words = same if len(same) > _FEW and blocks.available_blocks().tensor_words else []
        self._compared_alone = sorted({*checked}.difference(self._compared_by_words))
        # The fused statement's values: tensors, then what the other statements make, then what was held on to.
        self._rest = [name for name in targets if name not in position and name not in self._results]
        for name in (*self._results, *self._rest):
            position[name] = len(position)
        if targets_are_segments:
            self._arrange = _first if self._region.is_one_run else _all
        else:
            self._arrange = _arrange(
                [
                    position[target.name] if isinstance(target, Proxy) else [position[proxy.name] for proxy in target]
                    for target in self._region.targets
                ],
                self._region.is_one_run,
            )
        self._given = {*self._rest, *self._constants}
        index = {name: i for i, name in enumerate(_names(self._region.reads))}
        self._held_positions = [index[name] for name in self._held]

    def after_changes(self, *, is_often: bool) -> _Plan | None:
        """Returns the plan to go on with: this one, or one that polls what has changed often and looks at the classes
        that the objects have now. None if an attribute no longer only lies in a dict."""
        if not is_often:
            self._times_changed.clear()
        if self._versions is None or self._state is None:
            return self
        polled = set(self._polled)
        objects, dicts = self._versions.changed(self._state)
        changed = [{id(obj)} for obj in (*objects, *dicts)]
        classes_are_unchanged = self._versions.classes_are_unchanged()
        if not classes_are_unchanged:
            changed.append({id(obj) for obj in (*self._versions.objects, *self._versions.dicts)})
        for ids in map(frozenset, changed):
            times = self._times_changed[ids] = self._times_changed.get(ids, 0) + 1
            if times >= _TIMES_TO_TOLERATE:
                polled |= ids
        if polled == self._polled and classes_are_unchanged:
            return self
        # Another thread may be using this one.
        plan = copy.copy(self)
        plan._polled = frozenset(polled)
        plan._lay_out()
        # This is asked last: what changes later, the new versions notice.
        return plan if all(itertools.starmap(blocks.is_plain_attribute, plan._attributes.values())) else None

    def take_versions(self) -> tuple[Callable[[], bool], ...] | None:
        """Returns guards of what is compared by version, from now on. None if this plan does not fit the state."""
        if self._handles and not self._class_guard()():
            return None
        if self._versions is None:
            return (self._class_guard(),) if self._handles else ()
        self._state = self._versions.guard()
        return None if self._state is None else (self._state,)

    def fast_path(self, versions: tuple[Callable[[], bool], ...], read: tuple) -> Callable | None:
        """Makes a function that returns the values of the fused statement if the state is what a full check has accepted,
        and else None.

        Args:
            versions (tuple): What :meth:`take_versions` returned before that check.
            read (tuple): What it read. What is not compared by version is compared with this and not with what is there
                now, since no more is known of that.

        Returns:
            None if this plan does not fit what was read or what is there now.
        """
        if not self.still_fits(read):
            return None
        guards, values = [*versions], dict(zip(_names(self._region.reads), read))
        for make_guard, polled in (
            (blocks.poll_attributes, self._polled_attributes),
            (blocks.poll_items, self._polled_items),
        ):
            if polled:
                guards.append(make_guard([*polled.values()], [values[proxy] for proxy in polled]))
        read_segments = _reader(self._segments)
        try:
            segments = read_segments()
        except KeyError:
            return None
        tensors = list(itertools.chain.from_iterable(segments))
        if not blocks.are_guardable([tensors[i] for i in self._metadata]):
            return None
        if self._compared_by_words:
            guards.append(blocks.words_guard(*self._with_metadata(self._compared_by_words, tensors)))
        select_tensors = _select(self._compared_alone, segments)
        tensors_are_unchanged = select_tensors and blocks.tensor_guard(
            *self._with_metadata(self._compared_alone, tensors)
        )
        if None in guards or (select_tensors and tensors_are_unchanged is None):
            return None
        return _fast_path(
            handles=tuple(self._handles.values()),
            run_residual=self._run_residual and _with_compile_data(self._run_residual),
            inputs=(*self._handles_used, *(self._held[name] for name in self._constants)),
            read_segments=read_segments,
            guards=tuple(guards),
            select_tensors=select_tensors,
            tensors_are_unchanged=tensors_are_unchanged,
            rest=tuple(self._handles.get(name) or self._held[name] for name in self._rest),
            arrange=self._arrange,
        )

    def _with_metadata(self, indices: list[int], tensors: Sequence[torch.Tensor]) -> tuple[list, list]:
        return [tensors[i] for i in indices], [self._metadata[i] for i in indices]

    def _class_guard(self) -> Callable[[], bool]:
        """Makes a guard that says whether a ThunderModule reads parameters as it does, and passes on the attributes that
        it passed on."""
        passed_on = {name for handle in self._handles.values() for name in handle.absent}.difference(_HANDLE_METHODS)
        resolution_order = ThunderModule.__mro__
        of_classes = [vars(base).keys().isdisjoint for base in resolution_order if base is not object]

        def is_as_usual() -> bool:
            if ThunderModule.__mro__ is not resolution_order or not _reads_as_usual():
                return False
            for has_none in of_classes:
                if not has_none(passed_on):
                    return False
            return True

        return is_as_usual

    def still_fits(self, read: tuple) -> bool:
        """Whether what a full check has just read is the very structure that this plan was made for."""
        present = [read[i] for i in self._held_positions]
        if not all(map(operator.is_, present, self._held.values())):
            # An equal value of the same type in place of another is as good where nobody is given it.
            for (name, value), new in zip(self._held.items(), present):
                if new is not value and (
                    name in self._given or type(value) not in _IMMUTABLE or type(new) is not type(value)
                ):
                    return False
        return all(name in obj.__dict__ for obj, name in self._in_instance) and all(
            d.get(key) is self._held[proxy] for proxy, (d, key) in self._versioned_items.items()
        )


def _fast_path(
    *,
    handles: tuple[_Handle, ...],
    run_residual: Callable[..., tuple] | None,
    inputs: tuple,
    read_segments: Callable[[], list[tuple]],
    guards: tuple[Callable[[], bool], ...],
    select_tensors: Callable[[list[tuple]], tuple] | None,
    tensors_are_unchanged: Callable[[Sequence[torch.Tensor]], bool] | None,
    rest: tuple,
    arrange: Callable[[list[tuple], tuple], Any],
) -> Callable:
    """Makes the function that a call whose state is unchanged runs."""
    resolve_inputs, resolve_rest = _resolver(inputs), _resolver(rest)

    expected = [(h.reference, h.parameters, h.buffers, h.submodules, h.model, h.absent) for h in handles]

    def values_if_unchanged(*roots):
        results = ()
        try:
            # Which ThunderModule a model has never changes while both are alive.
            for reference, parameters, buffers, submodules, model, absent in expected:
                thunder_module = reference()
                own = thunder_module.__dict__
                if (
                    own["_overrides_parameters"] is not parameters
                    or own["_overrides_buffers"] is not buffers
                    or own["_module_cache"] is not submodules
                    or own["_modules"]["_model"] is not model
                    or not own.keys().isdisjoint(absent)
                    or type(thunder_module) is not ThunderModule
                ):
                    return None
            if run_residual is not None:
                results = run_residual(*roots, *resolve_inputs())
            segments = read_segments()
        except Exception:
            return None  # the full check, which comes next, says what is wrong
        # The tensors were read first, so that they are alive; the versions say that they are the same as before.
        for unchanged in guards:
            if not unchanged():
                return None
        if select_tensors is not None and not tensors_are_unchanged(select_tensors(segments)):
            return None
        return arrange(segments, results + resolve_rest() if rest else results)

    return values_if_unchanged


def _with_compile_data(function: Callable) -> Callable:
    """Makes a function that calls ``function`` with the compile data that are set now, as Thunder calls a prologue."""
    compile_data, compile_stats = map(weakref.ref, _compile_data.get())

    def with_compile_data(*args):
        own = compile_data()
        if get_compile_data() is own:
            return function(*args)
        with compile_data_and_stats(own, compile_stats()):
            return function(*args)

    return with_compile_data


def _resolver(values: tuple) -> Callable[[], tuple]:
    """Makes a function that returns ``values`` with ThunderModules in place of their handles."""
    if not any(isinstance(value, _Handle) for value in values):
        return lambda: values
    return lambda: tuple([value.reference() if isinstance(value, _Handle) else value for value in values])


def _reader(segments: Sequence[tuple[dict, list[str]]]) -> Callable[[], list[tuple]]:
    """Makes a function that reads keys of dicts, with a C call for each segment."""
    reads = [
        (operator.itemgetter(*keys) if len(keys) > 1 else lambda d, key=keys[0]: (d[key],), source)
        for source, keys in segments
    ]
    return lambda: [read(source) for read, source in reads]


def _select(indices: list[int], segments: Sequence[tuple]) -> Callable[[list[tuple]], tuple] | None:
    """Makes a function that selects items, counted through all segments; None if they are none."""
    if not indices:
        return None
    if len(segments) == 1 and len(indices) == len(segments[0]):
        return _first
    select = _getter(indices)
    return lambda segments: select(tuple(itertools.chain.from_iterable(segments)))


def _getter(indices: list[int]) -> Callable[[tuple], tuple]:
    return operator.itemgetter(*indices) if len(indices) > 1 else lambda values, i=indices[0]: (values[i],)


def _first(segments: list[tuple], others: tuple = ()) -> tuple:
    return segments[0]


def _all(segments: list[tuple], others: tuple = ()) -> list[tuple]:
    return segments


def _arrange(positions: Sequence[int | list[int]], is_one_run: bool) -> Callable[[list[tuple], tuple], Any]:
    """Makes a function that arranges tensors and other values as the fused statement returns them."""
    selects = [operator.itemgetter(p) if isinstance(p, int) else _getter(p) for p in positions]

    def arrange(segments: list[tuple], others: tuple) -> Any:
        values = (*itertools.chain.from_iterable(segments), *others)
        return selects[0](values) if is_one_run else [select(values) for select in selects]

    return arrange
