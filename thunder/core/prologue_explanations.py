"""Says in a user's words why a prologue refused a call: which value differs, what it was compiled for, what it is.

A prologue refuses by an exception. Which of its statements raised is in the exception's traceback, what that statement
reads or checks is in the prologue's traces, and the present value is in the frame.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import linecache
import re
import reprlib
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch

from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol
from thunder.executors import pythonex

__all__ = ["PrologueExplainer", "Refusal", "ValueName", "difference"]


@dataclasses.dataclass(frozen=True)
class ValueName:
    """What a value of a prologue is to the user, and its qualified name: ``parameter 'lm_head.weight'``."""

    kind: str
    path: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.path!r}" if self.path else self.kind


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why a prologue refused a call.

    Its text is ``attribute 'norm.eps': compiled for 1e-05, is 10.0``.
    """

    value: ValueName
    proxy_name: str
    """The value's name in the trace."""
    check: BoundSymbol | None
    """The check that failed, None where the value could not even be read."""
    text: str

    def __str__(self) -> str:
        return f"{self.value}{':' if self.check is not None else ''} {self.text}"


_TENSORS_AND_MODULES = {
    PrimIDs.UNPACK_PARAMETER: "parameter",
    PrimIDs.UNPACK_BUFFER: "buffer",
    PrimIDs.UNPACK_SUBMODULE: "module",
}
# What is reached from these by attributes and items is still called by their kind.
_KINDS_THAT_STAY = {"input", "global variable", "closure variable"}
_MODULE = ValueName("module")
_POSITIONAL, _KEYWORD = ValueName("number of positional arguments"), ValueName("number of keyword arguments")
_GLOBALS, _CLOSURE, _CELL = ValueName("__globals__"), ValueName("__closure__"), ValueName("closure cell")
_GLOBAL_STATE = ValueName("global state")
# The functions that Thunder makes of a prologue, and FusedPrologueTransform of the statements that it replaces.
_PROLOGUE_FILE = re.compile(r"thunder\.(prologue|read_and_check_all)_\d+")


class PrologueExplainer:
    """Explains the refusals of a prologue.

    Args:
        bsyms (Iterable[BoundSymbol]): The statements of the prologue, of all its traces or of the one to be explained.
            Where they name a value more than once, the last one holds.
        fn (Callable | None): The module or function that was compiled, for the names of its arguments. It is not kept.

    Example::

        >>> import torch, thunder
        >>> from thunder.core.prologue_explanations import PrologueExplainer
        >>> cmodel = thunder.jit(torch.nn.ReLU())
        >>> _ = cmodel(torch.randn(3))
        >>> trace = thunder.last_prologue_traces(cmodel)[0]
        >>> str(PrologueExplainer(trace.bound_symbols, trace.fn).names["input"])
        "input 'input'"
    """

    def __init__(self, bsyms: Iterable[BoundSymbol], fn: Callable | None = None):
        self._bsyms = bsyms
        self._arguments, self._rest_argument = _positional_names(fn)
        self._free_variables = getattr(getattr(fn, "__code__", None), "co_freevars", ())

    @functools.cached_property
    def names(self) -> dict[str, ValueName]:
        """What each value is, by its name in the trace."""
        names: dict[str, ValueName] = {}
        for bsym in self._bsyms:
            if isinstance(bsym.output, Proxy):
                name = self._name(bsym, names)
                if name is not None:
                    names[bsym.output.name] = name
        return names

    @functools.cached_property
    def _checks(self) -> dict[tuple[str, str], BoundSymbol]:
        """Each check, by the names of the value and of the function that runs it."""
        return {
            (bsym.args[0].name, pythonex.ex.implmap[bsym.sym.id].symbol.name): bsym
            for bsym in self._bsyms
            if not bsym.flat_proxy_outs
            and bsym.args
            and isinstance(bsym.args[0], Proxy)
            and bsym.sym.id in pythonex.ex.implmap
        }

    def _name(self, bsym: BoundSymbol, names: dict[str, ValueName]) -> ValueName | None:
        id_ = bsym.sym.id
        if id_ is PrimIDs.UNPACK_TRIVIAL:
            return {"args": _POSITIONAL, "kwargs": _KEYWORD}.get(bsym.output.name)
        if id_ is PrimIDs.UNPACK_FUNCTION_OBJ:
            return _MODULE
        if id_ is PrimIDs.UNPACK_CACHE_INFO:
            return _GLOBAL_STATE
        if not bsym.args or not isinstance(bsym.args[0], Proxy):
            return None
        source, *key = bsym.args
        parent = names.get(source.name, _MODULE)
        if id_ is PrimIDs.UNPACK_THUNDER_MODULE:
            return ValueName("module", parent.path)
        if id_ in _TENSORS_AND_MODULES:
            return ValueName(_TENSORS_AND_MODULES[id_], _join(parent.path, key[0]))
        if id_ is PrimIDs.UNPACK_ATTR:
            return self._attribute(parent, key[0])
        if id_ is PrimIDs.UNPACK_GETITEM:
            return self._item(parent, key[0])
        return None

    def _attribute(self, parent: ValueName, name: str) -> ValueName:
        if parent == _MODULE and name == "__globals__":
            return _GLOBALS
        if parent == _MODULE and name == "__closure__":
            return _CLOSURE
        if parent.kind == _CELL.kind and name == "cell_contents":
            return ValueName("closure variable", parent.path)
        return ValueName(parent.kind if parent.kind in _KINDS_THAT_STAY else "attribute", _join(parent.path, name))

    def _item(self, parent: ValueName, key: Any) -> ValueName:
        key_text = key.name if isinstance(key, Proxy) else repr(key)
        if parent == _POSITIONAL:
            return ValueName("input", self._argument(key))
        if parent == _KEYWORD:
            return ValueName("input", str(key))
        if parent == _GLOBALS:
            return ValueName("global variable", str(key))
        if parent == _CLOSURE and isinstance(key, int) and key < len(self._free_variables):
            return ValueName(_CELL.kind, self._free_variables[key])
        if parent == _GLOBAL_STATE:
            return ValueName("global state", str(key))
        return ValueName(
            parent.kind if parent.kind in _KINDS_THAT_STAY else "attribute", f"{parent.path or parent.kind}[{key_text}]"
        )

    def _argument(self, index: int) -> str:
        if index < len(self._arguments):
            return self._arguments[index]
        if self._rest_argument is not None:
            return f"{self._rest_argument}[{index - len(self._arguments)}]"
        return f"args[{index}]"

    def explain(self, error: BaseException) -> Refusal | None:
        """Returns why the prologue that raised ``error`` did so, None where its statement cannot be told."""
        for frame, line in _prologue_frames(error):
            refusal = self._refusal(frame, line)
            if refusal is not None:
                return refusal
        return None

    def _refusal(self, frame: FrameType, line: int) -> Refusal | None:
        statement = _parse(linecache.getline(frame.f_code.co_filename, line))
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
            return self._not_read(name) if name in self.names else None
        if not isinstance(statement, ast.Expr):
            return None
        # `len(args) == 1 or check_len(args, 1)`
        call = statement.value.values[-1] if isinstance(statement.value, ast.BoolOp) else statement.value
        if not isinstance(call, ast.Call) or not call.args or not isinstance(call.args[0], ast.Name):
            return None
        name = call.args[0].id
        check = self._checks.get((name, getattr(call.func, "id", "")))
        if check is None or name not in self.names or name not in frame.f_locals:
            return None
        return Refusal(self.names[name], name, check, difference(check, frame.f_locals[name]))

    def _not_read(self, name: str) -> Refusal:
        value = self.names[name]
        text = "cannot be read"
        if value.kind == "input" and re.fullmatch(r"\w+", value.path):
            text = "is not given"
        elif value.kind == "global state":
            compiled = next((check.args[1] for (of, _), check in self._checks.items() if of == name), None)
            reason = " (autocast is off)" if value.path.startswith("autocast") else ""
            text = f"is not set{reason}, compiled for {_show(compiled)}"
        return Refusal(value, name, None, text)


def _join(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


def _positional_names(fn: Callable | None) -> tuple[list[str], str | None]:
    """Returns the names of the parameters that positional arguments go to, and the name of ``*args``."""
    fn = fn.forward if isinstance(fn, torch.nn.Module) else fn
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # a builtin has none
        return [], None
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return positional, next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)


def _prologue_frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """The frames of prologues that ``error`` went through, the innermost first, with the line that each was at."""
    if error.__cause__ is not None:
        yield from _prologue_frames(error.__cause__)
    frames = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if _PROLOGUE_FILE.fullmatch(frame.f_code.co_filename)
    ]
    yield from reversed(frames)


def _parse(line: str) -> ast.stmt | None:
    try:
        (statement,) = ast.parse(line.strip()).body
    except (SyntaxError, ValueError):  # the source is no longer in linecache, or has been edited
        return None
    return statement


def difference(check: BoundSymbol, present: Any) -> str:
    """Says what ``check`` expects and what it has found: ``compiled for torch.float32, is torch.float16``."""
    id_, (source, *compiled) = check.sym.id, check.args
    if id_ is PrimIDs.CHECK_TENSOR_SHAPE_AND_METADATA:
        return _tensor_difference(*compiled, present)
    if id_ is PrimIDs.CHECK_LEN:
        if source.name in ("args", "kwargs"):
            return f"compiled for {compiled[0]}, is {len(present)}"
        return f"compiled for length {compiled[0]}, is of length {len(present)}"
    if id_ in (PrimIDs.CHECK_TYPE, PrimIDs.CHECK_INSTANCE):
        return f"compiled for type {_show(compiled[0])}, is of type {type(present).__name__}"
    if id_ is PrimIDs.CHECK_EMPTY:
        return f"compiled for length 0, is of length {len(present)}"
    if check.sym.name == "check_dtensor_spec_repr":
        return f"compiled for {compiled[0]}, is {present!r}"
    value = compiled[0] if compiled else None
    texts = _show(value), _show(present)
    if texts[0] == texts[1]:
        texts = (f"{texts[0]} of type {type(value).__name__}", f"{texts[1]} of type {type(present).__name__}")
    return f"compiled for {texts[0]}, is {texts[1]}"


def _tensor_difference(shape, device, dtype, requires_grad, present: Any) -> str:
    if not isinstance(present, torch.Tensor):
        return f"compiled for a tensor, is of type {type(present).__name__}"
    if len(shape) != present.dim() or any(
        not isinstance(size, Proxy) and size != actual for size, actual in zip(shape, present.shape)
    ):
        compiled = tuple(getattr(size, "name", size) for size in shape)
        return f"compiled for shape {compiled}, is of shape {tuple(present.shape)}"
    for word, compiled, actual in (
        ("", str(device), str(present.device)),
        ("", dtype, present.dtype),
        ("requires_grad=", requires_grad, present.requires_grad),
    ):
        if compiled != actual:
            return f"compiled for {word}{compiled}, is {word}{actual}"
    return "differs"


def _show(value: Any) -> str:
    """A short text of one line for any value."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = str(value) if isinstance(value, (torch.dtype, torch.device)) else reprlib.repr(value)
    return " ".join(text.split())
