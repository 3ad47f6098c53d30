from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import functools
import os
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from thunder.core import prims
from thunder.core.compile_data import get_compile_data
from thunder.core.module import get_thunder_module
from thunder.core.prologue_explanations import PrologueExplainer, ValueName, difference
from thunder.core.proxies import Proxy, ProxyTag
from thunder.core.symbol import BoundSymbol, Symbol, has_tags
from thunder.core.trace import TraceProvenance, from_trace
from thunder.core.transform_common import Transform
from thunder.executors import pythonex
from thunder.torch.experimental.dtensor_proxy import is_dtensor_proxy
from thunder.torch.experimental.dtensor_torch_and_prims import check_dtensor_spec_repr

if TYPE_CHECKING:
    from thunder.core.trace import TraceCtx

__all__ = ["ExtractionOnlyPrologueTransform", "PrologueVerificationError"]

#: Set to 1 in the environment, it has the checks run that are left out.
VERIFY_VARIABLE = "THUNDER_PROLOGUE_VERIFY"


class PrologueVerificationError(BaseException):
    """A check that was left out would have failed, found with ``THUNDER_PROLOGUE_VERIFY=1`` in the environment.

    It is no :class:`Exception`, because Thunder takes every Exception of a prologue for a cache miss: it would compile
    again in silence, and hide what this is to show. ``except Exception`` in a program does not catch it either.
    """


class ExtractionOnlyPrologueTransform(Transform):
    """Lets the prologue only read parameters and buffers, and no longer check their metadata.

    Thunder's prologue runs before every call. Among much else it checks that each parameter and buffer still has the
    shape, device, dtype and ``requires_grad`` that the model was compiled for. This transform leaves those checks out:
    each :func:`~thunder.core.prims.check_tensor_shape_and_metadata` of a tensor proxy that is tagged
    ``ProxyTag.STATIC_MEMORY_LOCATION``, and of the spec and the local tensor of one that is a ``DTensor``. Everything
    else stays, in its order: all reads, and the checks of inputs, of module attributes (``model.train()`` still
    recompiles) and of global state. See lightning-thunder issue #1531.

    **When it is safe.** You vouch that after compilation no parameter or buffer changes its shape, device, dtype,
    ``requires_grad`` or, as a ``DTensor``, its placements. New values in place (an optimizer, ``load_state_dict``) are
    fine. If that does not hold, Thunder silently runs what it has compiled: a parameter that was frozen at compilation
    and is unfrozen later (``requires_grad_(True)``) silently trains nothing, a parameter whose ``.data`` became float64
    goes into a computation that was traced for float32. ``test_unfreezing_silently_trains_nothing`` and
    ``test_changed_dtype_is_not_noticed`` in ``thunder/tests/test_extraction_only_prologue_transform.py`` show both.

    ``THUNDER_PROLOGUE_VERIFY=1`` in the environment when the model is compiled finds out whether it is safe: the checks
    that are left out then run as well, after all others, and where one fails on a call that this cache entry is used for,
    :class:`PrologueVerificationError` names the parameter and says what has changed. Without it, nothing is added.

    It may stand before or after other transforms. When a transform that edits the prologue comes after it
    (:class:`~thunder.transforms.LORATransform` and the quantizations expect to find each parameter's check), the checks
    stay in the trace for those to edit, marked as left out, until Thunder makes the prologue executable.

    Args:
        skip_check_on_input_tensors (bool): Leave out the metadata checks of *all* tensors, inputs too. You then also
            vouch for the inputs, as TorchDynamo's guards do for :class:`~thunder.dynamo.ThunderCompiler`, which sets
            this. Without such guards an input of a new shape silently runs the code compiled for the old one.
        keep (Sequence[str]): Shell-style patterns (``"*.lora_*"``) for names as ``named_parameters()`` and
            ``named_buffers()`` of the compiled module give them. Parameters and buffers that match keep their check, with
            ``skip_check_on_input_tensors`` too.
            A tensor that has several names (tied weights) matches by any of them. In a jitted function the names are
            those within each module that it uses.

    Raises:
        TypeError: At construction, if ``skip_check_on_input_tensors`` is not a bool or ``keep`` is not a sequence of
            strings.
        ValueError: At construction, if a pattern is empty. At compilation, if a pattern matches no parameter and no
            buffer.
        RuntimeError: At compilation with ``THUNDER_PROLOGUE_VERIFY=1``, if another transform comes after it and the
            transforms were not given as a list.
        PrologueVerificationError: In a call, with ``THUNDER_PROLOGUE_VERIFY=1``.

    Example::

        >>> import torch, thunder
        >>> from thunder.transforms import ExtractionOnlyPrologueTransform
        >>> model = torch.nn.Linear(4, 2)
        >>> cmodel = thunder.jit(model, transforms=[ExtractionOnlyPrologueTransform()])
        >>> cmodel(torch.randn(3, 4)).shape
        torch.Size([3, 2])
        >>> prologue = str(thunder.last_prologue_traces(cmodel)[-1])
        >>> prologue.count("check_tensor_metadata(")  # the input's
        1
    """

    def __init__(self, skip_check_on_input_tensors: bool = False, *, keep: Sequence[str] = ()):
        if not isinstance(skip_check_on_input_tensors, bool):
            raise TypeError(
                f"skip_check_on_input_tensors must be a bool, is {skip_check_on_input_tensors!r} "
                f"of type {type(skip_check_on_input_tensors).__name__}"
            )
        if isinstance(keep, str):
            raise TypeError(f"keep must be a sequence of patterns, is the string {keep!r}; write keep=[{keep!r}]")
        if not isinstance(keep, Sequence):
            raise TypeError(f"keep must be a sequence of patterns, is {keep!r} of type {type(keep).__name__}")
        for pattern in keep:
            if not isinstance(pattern, str):
                raise TypeError(f"keep must hold strings, has {pattern!r} of type {type(pattern).__name__}")
            if not pattern:
                raise ValueError("keep has an empty pattern, which matches nothing; leave it out")
        self.skip_check_on_input_tensors = skip_check_on_input_tensors
        self.keep = tuple(keep)

    def __repr__(self) -> str:
        arguments = []
        if self.skip_check_on_input_tensors:
            arguments.append("skip_check_on_input_tensors=True")
        if self.keep:
            arguments.append(f"keep={list(self.keep)!r}")
        return f"{type(self).__module__}.{type(self).__name__}({', '.join(arguments)})"

    def transform_traces_pre_prologue(
        self, prologue_trace: TraceCtx, computation_trace: TraceCtx, epilogue_trace: TraceCtx | None, **kwargs
    ) -> tuple[TraceCtx, TraceCtx, TraceCtx | None]:
        start_time_ns = time.perf_counter_ns()

        kept, owners = self._kept_proxies(prologue_trace), _owners_of_parts(prologue_trace)
        checks = [bsym for bsym in prologue_trace.bound_symbols if self._leaves_out(bsym, kept, owners)]
        if not checks:
            return prologue_trace, computation_trace, epilogue_trace

        new_prologue_trace = from_trace(prologue_trace)
        following = transforms_that_follow(self)
        if os.environ.get(VERIFY_VARIABLE, "0") != "0":
            marked = _mark(prologue_trace.bound_symbols, checks, _checks_to_verify)
            if following:
                _verify_after(following)
                new_prologue_trace.bound_symbols = marked
            else:
                new_prologue_trace.bound_symbols = _verify_at_the_end(marked, prologue_trace)
        elif any(not isinstance(other, ExtractionOnlyPrologueTransform) for other in following):
            new_prologue_trace.bound_symbols = _mark(prologue_trace.bound_symbols, checks, _left_out_checks)
        else:
            new_prologue_trace.bound_symbols = _leave_out(prologue_trace.bound_symbols, checks)

        elapsed_time_millis = (time.perf_counter_ns() - start_time_ns) // 1000000
        new_prologue_trace.set_provenance(
            TraceProvenance(
                f"Extraction only prologue, {len(checks)} checks left out (took {elapsed_time_millis} milliseconds)"
            )
        )
        return new_prologue_trace, computation_trace, epilogue_trace

    def _leaves_out(self, bsym: BoundSymbol, kept: set[str], owners: dict[str, Proxy]) -> bool:
        id_ = bsym.sym.id
        if id_ not in _left_out_checks or bsym.sym is _left_out_checks[id_] or bsym.sym is _checks_to_verify[id_]:
            return False
        tensor = owners.get(bsym.args[0].name, bsym.args[0])
        if tensor.name in kept:
            return False
        return self.skip_check_on_input_tensors or ProxyTag.STATIC_MEMORY_LOCATION in tensor.tags

    def _kept_proxies(self, prologue_trace: TraceCtx) -> set[str]:
        """The names of the proxies of parameters and buffers that a pattern of ``keep`` matches."""
        if not self.keep:
            return set()
        names_by_proxy = {
            bsym.output.name: bsym.args[1] for bsym in prologue_trace.bound_symbols if bsym.sym.id in _tensor_reads
        }
        aliases = _aliases(prologue_trace.fn)
        for name in names_by_proxy.values():
            aliases.setdefault(name, {name})
        for pattern in self.keep:
            if not fnmatch.filter(aliases, pattern):
                raise ValueError(
                    f"keep pattern {pattern!r} matches no parameter and no buffer of {_describe(prologue_trace.fn)}; "
                    f"{_nearest(pattern, aliases)}"
                )
        return {
            proxy
            for proxy, name in names_by_proxy.items()
            if any(fnmatch.fnmatchcase(alias, pattern) for pattern in self.keep for alias in aliases[name])
        }


_tensor_reads = {prims.PrimIDs.UNPACK_PARAMETER, prims.PrimIDs.UNPACK_BUFFER}


def _owners_of_parts(prologue_trace: TraceCtx) -> dict[str, Proxy]:
    """Returns the DTensor that each spec and local tensor belongs to, by the name of their proxies."""
    return {
        bsym.output.name: bsym.args[0]
        for bsym in prologue_trace.bound_symbols
        if bsym.sym.id is prims.PrimIDs.UNPACK_ATTR and is_dtensor_proxy(bsym.args[0])
    }


def _print_left_out_check(bsym: BoundSymbol, out_printables, arg_printables, kwarg_printables) -> str:
    tensor, *expected = bsym.args
    if bsym.sym.id is prims.PrimIDs.CHECK_TENSOR_SHAPE_AND_METADATA:
        expected[0] = tuple(getattr(size, "name", size) for size in expected[0])
    return f"# left out: {bsym.sym.name}({', '.join([tensor.name, *map(repr, expected)])})"


# The checks with nothing to keep them from dead code elimination, which Thunder runs before it makes a prologue
# executable. Thunder holds symbols of the same id for equal, so transforms that look for the checks find these.
_left_out_checks: dict[Any, Symbol] = {
    check.id: dataclasses.replace(check, tags=None, python_printer=_print_left_out_check)
    for check in (prims.check_tensor_shape_and_metadata, check_dtensor_spec_repr)
}
# Those that are still to be moved to the end of the prologue, which dead code elimination must not drop before.
_checks_to_verify: dict[Any, Symbol] = {
    check.id: dataclasses.replace(check, python_printer=_print_left_out_check)
    for check in (prims.check_tensor_shape_and_metadata, check_dtensor_spec_repr)
}


def transforms_that_follow(transform: Transform) -> list[Transform]:
    """Returns the transforms that will be given the prologue after ``transform`` in the compilation that is going on.

    Raises:
        RuntimeError: ``transform`` is to be given it twice, so that nobody can tell which turn this is.
    """
    transforms = list(getattr(get_compile_data(), "transforms", None) or ())
    positions = [i for i, other in enumerate(transforms) if other is transform]
    if len(positions) > 1:
        raise RuntimeError(f"{transform!r} stands {len(positions)} times in the transforms; give each place its own")
    following = transforms[positions[0] + 1 :] if positions else []
    return [
        t
        for t in following
        if type(t).transform_traces_pre_prologue is not Transform.transform_traces_pre_prologue
        and getattr(t, "edits_traces", True)  # ExplainCacheMisses only looks at them
    ]


def _mark(bsyms: Iterable[BoundSymbol], checks: Iterable[BoundSymbol], symbols: dict[Any, Symbol]) -> list[BoundSymbol]:
    marked = {id(check) for check in checks}
    return [bsym.from_bsym(sym=symbols[bsym.sym.id]) if id(bsym) in marked else bsym for bsym in bsyms]


def _leave_out(bsyms: Sequence[BoundSymbol], checks: Iterable[BoundSymbol]) -> list[BoundSymbol]:
    """Returns ``bsyms`` without ``checks`` and without the reads that fed nothing but them."""
    left_out = {id(check) for check in checks}
    needed: set[str] = set()
    fed_left_out: set[str] = set()
    remaining = []
    for bsym in reversed(bsyms):
        outputs = {proxy.name for proxy in bsym.flat_proxy_outs}
        is_unneeded_read = (
            bool(outputs)
            and outputs <= fed_left_out
            and outputs.isdisjoint(needed)
            and not has_tags(bsym, {prims.OpTags.DONT_DCE})
        )
        # Of a copy: a bound symbol caches them, and transforms that add outputs change the return's in place.
        arguments = {proxy.name for proxy in bsym.from_bsym().flat_proxy_args}
        if id(bsym) in left_out or is_unneeded_read:
            fed_left_out |= arguments
        else:
            needed |= arguments
            remaining.append(bsym)
    remaining.reverse()
    return remaining


def _aliases(fn) -> dict[str, set[str]]:
    """Returns all names of the parameters and buffers of ``fn``, each with all the names that its tensor has."""
    if not isinstance(fn, torch.nn.Module):
        return {}
    # The ThunderModule also has what other transforms have added (LoRA's matrices, say).
    module = get_thunder_module(fn) if get_compile_data() is not None else fn
    names_by_tensor: dict[int, set[str]] = {}
    aliases: dict[str, set[str]] = {}
    for named in (module.named_parameters, module.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            aliases[name] = names_by_tensor.setdefault(id(tensor), set())
            aliases[name].add(name)
    return aliases


def _describe(fn) -> str:
    return (
        f"{type(fn).__name__}" if isinstance(fn, torch.nn.Module) else f"the modules in {getattr(fn, '__name__', fn)}"
    )


def _nearest(pattern: str, names: Iterable[str]) -> str:
    names = list(names)
    if not names:
        return "it has none"
    nearest = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
    return f"the nearest names are {', '.join(map(repr, nearest))}"


#
# THUNDER_PROLOGUE_VERIFY=1: the checks that are left out run at the end of the prologue
#


class _VerifyLeftOutChecks(Transform):
    """Moves the checks that are to be verified to the end of the prologue, when other transforms have edited them."""

    def transform_traces_pre_prologue(
        self, prologue_trace: TraceCtx, computation_trace: TraceCtx, epilogue_trace: TraceCtx | None, **kwargs
    ) -> tuple[TraceCtx, TraceCtx, TraceCtx | None]:
        if not any(map(_is_to_verify, prologue_trace.bound_symbols)):
            return prologue_trace, computation_trace, epilogue_trace
        new_prologue_trace = from_trace(prologue_trace)
        new_prologue_trace.bound_symbols = _verify_at_the_end(prologue_trace.bound_symbols, prologue_trace)
        new_prologue_trace.set_provenance(TraceProvenance("Verification of the checks that were left out"))
        return new_prologue_trace, computation_trace, epilogue_trace


def _verify_after(following: Sequence[Transform]) -> None:
    """Gives the verification a turn after all transforms of the compilation that is going on."""
    if any(isinstance(other, _VerifyLeftOutChecks) for other in following):
        return
    transforms = get_compile_data().transforms
    if not isinstance(transforms, list):
        raise RuntimeError(
            f"with {VERIFY_VARIABLE}=1 ExtractionOnlyPrologueTransform adds a transform to the transforms, which must "
            f"therefore be a list, are a {type(transforms).__name__}"
        )
    transforms.append(_VerifyLeftOutChecks())


def _is_to_verify(bsym: BoundSymbol) -> bool:
    return bsym.sym is _checks_to_verify.get(bsym.sym.id)


def _verify_at_the_end(bsyms: Sequence[BoundSymbol], prologue_trace: TraceCtx) -> list[BoundSymbol]:
    """Returns ``bsyms`` with the marked checks in one statement just before the return: that is only reached on a call
    that all other checks accept."""
    names, owners = PrologueExplainer(bsyms, prologue_trace.fn).names, _owners_of_parts(prologue_trace)

    def name(proxy: Proxy) -> ValueName:
        return names.get(proxy.name) or ValueName("value", proxy.name)

    to_verify, others = [], []
    for bsym in bsyms:
        (to_verify if _is_to_verify(bsym) else others).append(bsym)
    values = [bsym.args[0] for bsym in to_verify]
    left_out = [
        _LeftOutCheck(name(value), name(owners.get(value.name, value)), bsym) for value, bsym in zip(values, to_verify)
    ]
    verify = functools.partial(_verify_left_out_checks, left_out)
    symbol = Symbol(
        "verify_left_out_checks",
        id="verify_left_out_checks",
        is_prim=True,
        tags=(prims.OpTags.DONT_DCE,),
        meta=lambda *_: None,
        python_impl=verify,
    )
    # `args` is there because FusedPrologueTransform takes what depends on modules alone out of its place.
    args = next(bsym.output for bsym in bsyms if bsym.sym.id is prims.PrimIDs.UNPACK_TRIVIAL)
    statement = symbol.bind(args, *values, output=None, _call_ctx={symbol.name: verify})
    return [*others[:-1], statement, others[-1]]


class _LeftOutCheck(NamedTuple):
    value: ValueName
    tensor: ValueName
    """What ``keep`` would name, or the input: the value itself, or the DTensor that it is a part of."""
    bsym: BoundSymbol

    def difference(self, present: Any) -> str | None:
        """Runs the check, and says what differs if it fails."""
        executable = pythonex.ex.implmap[self.bsym.sym.id].symbol
        (run,) = executable.bind(*self.bsym.args, output=None)._call_ctx.values()
        try:
            run(present, *self.bsym.args[1:])
        except Exception:  # Thunder takes any for a miss
            return difference(self.bsym, present)
        return None


def _verify_left_out_checks(checks: Sequence[_LeftOutCheck], args: tuple, *values: Any) -> None:
    differences = [(check, check.difference(value)) for check, value in zip(checks, values)]
    failed = [(check, text) for check, text in differences if text is not None]
    if not failed:
        return
    (check, text), *more = failed
    is_input = check.tensor.kind == "input"
    advice = "skip_check_on_input_tensors=False" if is_input else f"keep=[{check.tensor.path!r}]"
    raise PrologueVerificationError(
        f"{check.value}: {text}; ExtractionOnlyPrologueTransform left this check out{_and_more(len(more))}: compile again "
        f"after such a change, or keep the check with {advice}"
    )


def _and_more(number: int) -> str:
    return f", and {number} more that {'fails' if number == 1 else 'fail'}" if number else ""
