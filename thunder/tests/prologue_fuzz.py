"""Searches for a state in which a fused prologue and the unfused one disagree.

    python -m thunder.tests.prologue_fuzz --steps 10000

A small model is generated and compiled. Then a sequence of changes is applied to it, to its ThunderModule, to the inputs
and to PyTorch's global state, and undone. After each change both prologues of each cache entry are run on the same
arguments: both must accept and return the very same objects, or both must refuse with the same type of exception. The
fused one is run more than once, so that it is asked on its fast path too.

A model is a Python text (:func:`source_of`), and a change is a small dataclass that holds Python expressions, so that a
failure is saved as a test that can be read: ``Assign("model.child.config.scale", "float(old)")``.

The computations are not compared, as nothing here changes them, but see :class:`CallSession`, which calls the compiled
models and compares what they return, and whether they compiled anew.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import copy
import dataclasses
import functools
import hashlib
import io
import itertools
import math
import random
import re
import sys
import textwrap
import time
import types
import unittest.mock as mock
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.stateful
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import thunder
from thunder.core import guard_blocks
from thunder.core.compile_data import compile_data_and_stats
from thunder.core.guard_blocks import Blocks
from thunder.core.module import ThunderModule
from thunder.core.transform_common import Transform
from thunder.executors import pythonex
from thunder.executors.passes import transform_for_execution
from thunder.transforms import ExtractionOnlyPrologueTransform, PrunePrologueChecks, fused_prologue_transform
from thunder.transforms.fast_dispatch_transform import FastDispatchTransform
from thunder.transforms.fused_prologue_transform import FusedPrologueTransform, _ModuleGuard

#
# Models
#


@dataclasses.dataclass(frozen=True)
class Feature:
    """Something that a module has and its forward reads."""

    init: str = ""
    forward: str = ""
    body: str = ""
    places: tuple[str, ...] = ()
    """What can be assigned to, with @ for the module."""
    tensors: tuple[str, ...] = ()
    """The names of parameters and buffers."""


BUFFERS = ("buffer", "mask", "updated")
FEATURES = {
    "integer": Feature("self.integer = 3", "x = x + self.integer", places=("@.integer",)),
    "number": Feature("self.number = 0.5", "x = x * self.number", places=("@.number",)),
    "one": Feature("self.one = 1", "x = x * self.one", places=("@.one",)),
    "nan": Feature("self.nan = math.nan", "x = x + (1.0 if self.nan != self.nan else 2.0)", places=("@.nan",)),
    "zero": Feature("self.zero = -0.0", "x = x + self.zero", places=("@.zero",)),
    "infinite": Feature("self.infinite = math.inf", "x = torch.clamp(x, max=self.infinite)", places=("@.infinite",)),
    "flag": Feature("self.flag = True", "x = x + 1.0 if self.flag else x", places=("@.flag",)),
    "text": Feature("self.text = 'relu'", "x = torch.relu(x) if self.text == 'relu' else x", places=("@.text",)),
    "nothing": Feature("self.nothing = None", "x = x + 2.0 if self.nothing is None else x", places=("@.nothing",)),
    "dtype": Feature("self.dtype = torch.float32", "x = x.to(self.dtype)", places=("@.dtype",)),
    "device": Feature("self.device = torch.device('cpu')", "x = x.to(self.device)", places=("@.device",)),
    "training": Feature("", "x = x * 1.5 if self.training else x"),
    "pair": Feature(
        "self.pair = (2.0, (3, 'a'))", "x = x * self.pair[0] + self.pair[1][0]", places=("@.pair",)
    ),
    "items": Feature(
        "self.items = [1.0, 2.0]",
        "x = x * self.items[1] + len(self.items)",
        places=("@.items", "@.items[1]", "@.items[0]", "@.items[:]"),
    ),
    "table": Feature("self.table = {'a': 5.0}", "x = x + self.table['a']", places=("@.table", "@.table['a']")),
    "config": Feature(
        "self.config = shared.config",
        "x = x * self.config.scale + self.config.inner.count if self.config.use else x",
        places=("@.config", "@.config.scale", "@.config.inner", "@.config.inner.count", "@.config.use", "Config.scale",
                "vars(@.config)['use']"),
    ),
    "namespace": Feature(
        "self.namespace = types.SimpleNamespace(scale=2.0)",
        "x = x * self.namespace.scale",
        places=("@.namespace", "@.namespace.scale"),
    ),
    "slotted": Feature("self.slotted = Slotted()", "x = x * self.slotted.gain", places=("@.slotted", "@.slotted.gain")),
    "dynamic": Feature(
        "self.dynamic = Dynamic()",
        "x = x * self.dynamic.gain",
        places=("@.dynamic", "@.dynamic._table", "@.dynamic._table['gain']", "vars(@.dynamic)['gain']"),
    ),
    "intercepting": Feature(
        "self.intercepting = Intercepting()",
        "x = x * self.intercepting.gain",
        places=("@.intercepting", "@.intercepting.gain", "@.intercepting.gains[0]"),
    ),
    "property": Feature(
        "self.factor_ = 2.0",
        "x = x * self.factor",
        "@property\ndef factor(self):\n    return self.factor_",
        places=("@.factor_", "type(@).factor"),
    ),
    "computed": Feature(
        "self.factors = [2.0]",
        "x = x * self.product",
        "@property\ndef product(self):\n    return self.factors[0]",
        places=("@.factors[0]", "@.factors", "type(@).product"),
    ),
    "class_attribute": Feature("", "x = x * self.gain", "gain = 1.5", places=("type(@).gain", "@.gain")),
    "inherited": Feature(
        "", "x = x * self.inherited", places=("type(@).inherited", "Base.inherited", "@.inherited", "type(@).__bases__")
    ),
    "absent": Feature("", "x = x * getattr(self, 'absent', 1.0)", places=("@.absent", "type(@).absent")),
    "made_up": Feature(
        "self.made_up_ = 2.0",
        "x = x * self.made_up",
        "def __getattr__(self, name):\n    return self.made_up_ if name == 'made_up' else super().__getattr__(name)",
        places=("@.made_up_", "@.made_up"),
    ),
    "weight": Feature("self.weight = parameter(4)", "x = x * self.weight", tensors=("weight",)),
    "matrix": Feature("self.matrix = parameter(4, 4)", "x = x @ self.matrix", tensors=("matrix",)),
    "frozen": Feature(
        "self.frozen = parameter(4, requires_grad=False)", "x = x + self.frozen", tensors=("frozen",)
    ),
    "scalar": Feature("self.scalar = parameter()", "x = x * self.scalar", tensors=("scalar",)),
    "many_dims": Feature(
        "self.many_dims = parameter(1, 1, 1, 1, 1, 4)", "x = x + self.many_dims[0, 0, 0, 0, 0]", tensors=("many_dims",)
    ),
    "tied": Feature("self.tied = shared.tied", "x = x + self.tied", tensors=("tied",)),
    "other": Feature("self.other = OtherParameter(parameter(4).data)", "x = x + self.other", tensors=("other",)),
    "moody": Feature("self.moody = Moody(parameter(4).data)", "x = x + self.moody", places=("Moody.lies",), tensors=("moody",)),
    "buffer": Feature(
        "self.register_buffer('buffer', parameter(4).data)", "x = x + self.buffer", tensors=("buffer",)
    ),
    "mask": Feature(
        "self.register_buffer('mask', torch.tensor([True, False, True, True]), persistent=False)",
        "x = torch.where(self.mask, x, 0.0)",
        tensors=("mask",),
    ),
    "no_buffer": Feature(
        "self.register_buffer('no_buffer', None)", "x = x + 1.0 if self.no_buffer is None else x", places=("@.no_buffer",)
    ),
    "no_parameter": Feature(
        "self.register_parameter('no_parameter', None)",
        "x = x + 1.0 if self.no_parameter is None else x",
        places=("@.no_parameter",),
    ),
    "updated": Feature(
        "self.register_buffer('updated', torch.zeros(4))",
        "self.updated.add_(1.0)\nx = x + self.updated",
        tensors=("updated",),
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Node:
    """A module of a generated model."""

    features: tuple[str, ...] = ()
    children: tuple[Node, ...] = ()
    container: str = "attribute"
    """How it has its children: "attribute", "list", "dict", or "twice", with each under two names."""


@dataclasses.dataclass(frozen=True)
class Tree:
    """A generated model."""

    root: Node
    is_function: bool = False
    """Whether a function is compiled that reaches the model through its closure."""


PREAMBLE = """
@dataclasses.dataclass
class Inner:
    count: int = 2

@dataclasses.dataclass
class Config:
    scale: float = 2.0
    use: bool = True
    inner: Inner = dataclasses.field(default_factory=Inner)

class Slotted:
    __slots__ = ("gain",)
    def __init__(self):
        self.gain = 3.0

class Dynamic:
    def __init__(self):
        self._table = {"gain": 4.0}
    def __getattr__(self, name):
        if name == "gain":
            return self._table["gain"]
        raise AttributeError(name)

class Intercepting:
    def __init__(self):
        self.gain, self.gains = 5.0, [None]
    def __getattribute__(self, name):
        (instead,) = object.__getattribute__(self, "gains") if name == "gain" else (None,)
        return object.__getattribute__(self, name) if instead is None else instead

class Base(torch.nn.Module):
    inherited = 4.0

class OtherBase(torch.nn.Module):
    inherited = 6.0

box = [None]

class Computed:
    def __get__(self, obj, cls=None):
        return box[0]

def computed(value):
    box[0] = value
    return Computed()

def hiding(value):
    box[0] = value
    return property(lambda self: box[0])

def parameter(*size, requires_grad=True):
    count = math.prod(size)
    return torch.nn.Parameter((torch.arange(count) / count + 0.5).reshape(size), requires_grad=requires_grad)
"""


@dataclasses.dataclass(frozen=True)
class Program:
    """A generated model as a Python text, and what in it can be changed."""

    source: str
    modules: tuple[str, ...]
    """Expressions for the modules: "model", "model.child_0"."""
    places: tuple[str, ...]
    """Expressions for what can be assigned to."""
    tensors: tuple[str, ...]
    """The qualified names of parameters and buffers."""
    is_function: bool


@functools.cache
def program_of(tree: Tree) -> Program:
    """Writes a generated model as a Python text that defines ``make_model()`` and, for a function, ``make_function()``."""
    classes: list[str] = []
    modules: list[str] = []
    places: list[str] = []
    tensors: list[str] = []

    def write(node: Node, path: str) -> str:
        name = f"Module{len(modules)}"
        modules.append(path)
        features = [FEATURES[feature] for feature in node.features]
        qualified = _qualified(path)
        for feature in features:
            places.extend(place.replace("@", path) for place in feature.places)
            tensors.extend(".".join(filter(None, (qualified, tensor))) for tensor in feature.tensors)
        init = ["super().__init__()", *(feature.init for feature in features if feature.init)]
        forward = [feature.forward for feature in features]
        made = []
        for i, child in enumerate(node.children):
            where = {"list": f"children_[{i}]", "dict": f"children_['k{i}']"}.get(node.container, f"child_{i}")
            made.append(f"{write(child, f'{path}.{where}')}(shared)")
            if node.container in ("list", "dict"):
                continue
            init.append(f"self.{where} = {made[-1]}")
            forward.append(f"x = self.{where}(x)")
            if node.container == "twice":
                init.append(f"self.again_{i} = self.{where}")
                forward.append(f"x = self.again_{i}(x)")
        if node.children and node.container == "list":
            init.append(f"self.children_ = torch.nn.ModuleList([{', '.join(made)}])")
            forward.append("for child in self.children_:\n    x = child(x)")
        if node.children and node.container == "dict":
            items = ", ".join(f"'k{i}': {child}" for i, child in enumerate(made))
            init.append(f"self.children_ = torch.nn.ModuleDict({{{items}}})")
            forward.extend(f"x = self.children_['k{i}'](x)" for i in range(len(made)))
        arguments = "self, x"
        if path == "model":
            arguments = "self, x, *rest, scale=1.0, extra=None"
            forward.append(
                "x = x * scale + len(rest)\nif extra is not None:\n    x = x + extra['a'][0] * extra['a'][1]"
            )
        body = [feature.body for feature in features if feature.body]
        body.append("def __init__(self, shared):\n" + _indented(init))
        body.append(f"def forward({arguments}):\n" + _indented([*forward, "return x"]))
        classes.append(f"class {name}(Base):\n" + _indented(body))
        return name

    root = write(tree.root, "model")
    classes.append(
        "def make_model():\n"
        "    shared = types.SimpleNamespace(config=Config(), tied=parameter(4))\n"
        f"    return {root}(shared)"
    )
    if tree.is_function:
        classes.append("def make_function(model):\n    return lambda *args, **kwargs: model(*args, **kwargs) * 2")
    source = "\n\n".join((PREAMBLE.strip(), *classes)) + "\n"
    return Program(
        source, tuple(modules), tuple(dict.fromkeys(places)), tuple(dict.fromkeys(tensors)), tree.is_function
    )


def _indented(parts: Iterable[str]) -> str:
    return "\n".join("    " + line for part in parts for line in part.split("\n"))


class Number(float):
    """A float of another type."""


class Text(str):
    """A string of another type."""


class Equal:
    """Equal to everything."""

    def __eq__(self, other):
        return True

    __hash__ = None


class Raising:
    """Raises where it is compared or its truth is asked for."""

    def __eq__(self, other):
        raise ValueError("compared")

    def __bool__(self):
        raise ValueError("asked for its truth")

    __hash__ = None


class OtherTensor(torch.Tensor):
    pass


class OtherParameter(torch.nn.Parameter):
    pass


class Lying(torch.Tensor):
    """Is not of the shape that it has."""

    @property
    def shape(self):
        return torch.Size([9])


class Moody(torch.nn.Parameter):
    """Is of another dtype when it wants to be."""

    lies = False

    @property
    def dtype(self):
        return torch.int64 if Moody.lies is True else self.detach().as_subclass(torch.Tensor).dtype


NAMES = {
    "Equal": Equal,
    "Lying": Lying,
    "Moody": Moody,
    "Number": Number,
    "OtherParameter": OtherParameter,
    "OtherTensor": OtherTensor,
    "Parameter": torch.nn.Parameter,
    "Raising": Raising,
    "Text": Text,
    "ThunderModule": ThunderModule,
    "collections": collections,
    "copy": copy,
    "dataclasses": dataclasses,
    "math": math,
    "torch": torch,
    "types": types,
}


#
# Changes
#


class NotApplicable(Exception):
    """A change cannot be made in this state: what it is about is not there, or torch refuses it."""


class Step:
    """One step of a session. All text in it is Python, evaluated with the names of the session."""

    def apply(self, session: Session) -> Callable[[], Any] | None:
        """Makes the change; returns what undoes it."""
        raise NotImplementedError

    @property
    def kind(self) -> str:
        """What it is counted as."""
        return type(self).__name__


_MISSING = object()


class Place:
    """Something that can be assigned to: an attribute, or an item of a list or dict."""

    def __init__(self, session: Session, text: str):
        target = ast.parse(text, mode="eval").body
        self.owner = session.evaluate(ast.unparse(target.value))
        self.is_attribute = isinstance(target, ast.Attribute)
        self.key = target.attr if self.is_attribute else session.evaluate(_key_text(target))
        # An attribute of the instance, not one of its class.
        self.old = self._own()
        self.old_items = list(self.owner) if isinstance(self.owner, list) else None

    def _own(self) -> Any:
        if not self.is_attribute:
            try:
                value = self.owner[self.key]
            except (KeyError, IndexError):
                return _MISSING
            return list(value) if isinstance(self.key, slice) else value
        if isinstance(self.owner, type) and self.key != "__bases__":
            return vars(self.owner).get(self.key, _MISSING)
        if self.key in ("__class__", "__dict__", "__bases__"):
            return getattr(self.owner, self.key)
        dicts = [getattr(self.owner, "__dict__", {})]
        if isinstance(self.owner, torch.nn.Module):
            dicts += [dicts[0].get(name, {}) for name in ("_parameters", "_buffers", "_modules")]
        for d in dicts:
            if self.key in d:
                return d[self.key]
        is_slot = type(getattr(type(self.owner), self.key, None)) is types.MemberDescriptorType
        return getattr(self.owner, self.key, _MISSING) if is_slot else _MISSING

    def present(self) -> Any:
        """What is read there now, be it the instance's or its class's."""
        if not self.is_attribute:
            return self.old
        return getattr(self.owner, self.key, _MISSING)

    def put(self, value: Any) -> None:
        if self.is_attribute:
            setattr(self.owner, self.key, value)
        else:
            self.owner[self.key] = value

    def delete(self) -> None:
        if self.is_attribute:
            delattr(self.owner, self.key)
        else:
            del self.owner[self.key]

    def undo(self) -> None:
        if self.old_items is not None:
            self.owner[:] = self.old_items
        elif self.old is not _MISSING:
            self.put(self.old)
        elif self._own() is not _MISSING:
            self.delete()


def _change_places(session: Session, text: str, change: Callable[[Place], Any]) -> Callable[[], Any]:
    """Changes the place, in each ThunderModule if it is there; returns what undoes it."""
    places = []
    for _ in session.each_cm() if "cm" in text else [None]:
        places.append(Place(session, text))
        change(places[-1])
    return lambda: [place.undo() for place in places]


def _key_text(target: ast.Subscript) -> str:
    if isinstance(target.slice, ast.Slice):
        return "slice(None)"
    return ast.unparse(target.slice)


@dataclasses.dataclass(frozen=True)
class Assign(Step):
    """Assigns ``value``, an expression of the session's names and of ``old``, to ``place``."""

    place: str
    value: str

    def apply(self, session):
        def assign(place):
            place.put(session.evaluate(self.value, old=place.present()))

        return _change_places(session, self.place, assign)

    @property
    def kind(self):
        return f"Assign {_kind_of(self.place)}"


class Unrelated(Assign):
    """Assigns to something that nothing reads; it is not undone."""

    kind = "Assign what is not read"

    def apply(self, session):
        Assign.apply(self, session)


@dataclasses.dataclass(frozen=True)
class Delete(Step):
    """Deletes ``place``."""

    place: str

    def apply(self, session):
        return _change_places(session, self.place, Place.delete)

    @property
    def kind(self):
        return f"Delete {_kind_of(self.place)}"


def _kind_of(place: str) -> str:
    for start, kind in (("cm.", "ThunderModule"), ("vars(cm)", "ThunderModule"), ("ThunderModule.", "class"), ("type(", "class"), ("Base.", "class"), ("Config.", "class"), ("Moody.", "class"), ("torch.nn.Module.", "class")):  # fmt: skip
        if place.startswith(start):
            return kind
    last = place.rpartition(".")[2]
    if last in ("__dict__", "__class__"):
        return last
    return "item" if place.endswith("]") else "attribute"


@dataclasses.dataclass(frozen=True)
class Train(Step):
    """``model.train(mode)`` of a module and all below it."""

    module: str
    mode: bool

    def apply(self, session):
        module = session.evaluate(self.module)
        before = [(m, m.training) for m in module.modules()]
        module.train(self.mode)
        return lambda: [setattr(m, "training", training) for m, training in before]


@dataclasses.dataclass(frozen=True)
class ChangeTensor(Step):
    """Runs a statement about ``t``, the parameter or buffer of a qualified name, without gradients."""

    name: str
    statement: str

    def apply(self, session):
        tensors = session.tensors(self.name)
        if not tensors:
            raise NotApplicable
        undos = [self._change(t, session.names) for t in tensors]
        return lambda: [undo() for undo in undos]

    def _change(self, t, names):
        data, requires_grad, type_ = t.data, t.requires_grad, type(t)
        local_names = {"t": t}
        with torch.set_grad_enabled("graph" in self.statement):
            exec(self.statement, names, local_names)

        @torch.no_grad()
        def undo():
            if "other" in local_names:
                torch.utils.swap_tensors(t, local_names["other"])
                return
            if not t.is_leaf:
                t.detach_()
            t.__class__ = type_
            t.data = data
            t.requires_grad_(requires_grad)

        return undo

    @property
    def kind(self):
        return f"tensor: {self.statement.split('(')[0].split('=')[0].strip()}"


@dataclasses.dataclass(frozen=True)
class LoadStateDict(Step):
    """Loads a state dict into the ThunderModule, of tensors made of ``t`` by an expression."""

    make: str
    assign: bool

    def apply(self, session):
        before = []
        for cm in session.each_cm():
            if not isinstance(cm, ThunderModule):
                raise NotApplicable
            dicts = [cm._overrides_parameters, cm._overrides_buffers]
            # Where the tensors are not assigned, their values change, which no prologue looks at.
            before += [(d, dict(d)) for d in dicts]
            state = {name: session.evaluate(self.make, t=t) for name, t in cm.state_dict().items()}
            if self.assign:
                state = {name: torch.nn.Parameter(t) if name in dicts[0] else t for name, t in state.items()}
            cm.load_state_dict(state, strict=False, assign=self.assign)
        return lambda: [d.update(old) for d, old in before]


@dataclasses.dataclass(frozen=True)
class Inputs(Step):
    """What the prologues are run on from now on."""

    args: str
    kwargs: str = "{}"

    def apply(self, session):
        old = session.inputs
        with torch.device("cpu"):
            session.inputs = (session.evaluate(self.args), session.evaluate(self.kwargs))

        def undo():
            session.inputs = old

        return undo


@dataclasses.dataclass(frozen=True)
class Mode(Step):
    """A part of PyTorch's global state in which the prologues are run from now on."""

    name: str
    value: str

    def apply(self, session):
        old = session.mode
        session.mode = old | {self.name: session.evaluate(self.value)}

        def undo():
            session.mode = old

        return undo


@dataclasses.dataclass(frozen=True)
class Call(Step):
    """Calls the compiled model with the present inputs, which compiles anew where no cache entry fits."""

    def apply(self, session):
        session.call()


@dataclasses.dataclass(frozen=True)
class Undo(Step):
    """Undoes a change that has not been undone: the last, for -1."""

    index: int = -1

    def apply(self, session):
        if not session.undos:
            raise NotApplicable
        session.undos.pop(self.index % len(session.undos))()


USUAL_MODE = {
    "grad": True,
    "inference": False,
    "autocast": None,
    "default_dtype": torch.float32,
    "default_device": None,
}


@contextlib.contextmanager
def in_mode(mode: dict[str, Any]) -> Iterator[None]:
    """Sets the parts of PyTorch's global state for a while."""
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_grad_enabled, grad)  # Thunder sets it after a call
        if mode["default_dtype"] is not dtype:
            stack.callback(torch.set_default_dtype, dtype)
            torch.set_default_dtype(mode["default_dtype"])
        if mode["default_device"] is not None:
            stack.enter_context(torch.device(mode["default_device"]))
        if mode["autocast"] is not None:
            dtype, enabled = mode["autocast"]
            stack.enter_context(torch.autocast("cpu", dtype, enabled=enabled))
        if mode["inference"]:
            stack.enter_context(torch.inference_mode())
        else:
            torch.set_grad_enabled(mode["grad"])
        yield


#
# Sessions
#


class Divergence(AssertionError):
    """The fused and the unfused prologue, or what they are part of, disagree."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """Two lists of transforms that must be the same to a user but for their cost."""

    reference: Callable[[], list[Transform]]
    """Those of the reference, made anew for each compilation."""
    tested: Callable[[], list[Transform]]
    calls: bool = False
    """Whether whole calls are compared, and not only prologues."""
    blocks: Callable[[Blocks], Blocks] = lambda found: found
    """Which of the building blocks that were found the guards are made of."""
    few: int | None = 0
    """Up to how many attributes and tensors are looked at one by one; None for what it is elsewhere. The models are so
    small that nothing would be compared by version, were it not less."""


VARIANTS = {
    "fused": Variant(list, lambda: [FusedPrologueTransform()]),
    "fused, few looked at": Variant(list, lambda: [FusedPrologueTransform()], few=None),
    "fused, torch tensor guards": Variant(
        list, lambda: [FusedPrologueTransform()], blocks=lambda found: found._replace(tensor_words=False)
    ),
    "fused, portable": Variant(list, lambda: [FusedPrologueTransform()], blocks=lambda found: Blocks()),
    "extraction-only+fused": Variant(
        lambda: [ExtractionOnlyPrologueTransform()],
        lambda: [ExtractionOnlyPrologueTransform(), FusedPrologueTransform()],
    ),
    "prune+fused": Variant(lambda: [PrunePrologueChecks()], lambda: [PrunePrologueChecks(), FusedPrologueTransform()]),
    "fused, calls": Variant(list, lambda: [FusedPrologueTransform()], calls=True),
    "fast dispatch, calls": Variant(list, lambda: [FastDispatchTransform()], calls=True),
}


@dataclasses.dataclass
class Coverage:
    """What a run has tried."""

    steps: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    not_applicable: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    verdicts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    examples: int = 0
    compiled: int = 0
    spoilt: int = 0
    """Examples whose changes could not all be undone, so that the model was thrown away."""

    @property
    def made(self) -> int:
        """How many changes were made, undoings included."""
        return self.steps.total()


MAX_ENTRIES = 3


class Session:
    """A model in which steps are made, after each of which what is tested is compared with the reference.

    Args:
        variant (str): A key of ``VARIANTS``.
        program (Program): The model.
        coverage (Coverage): What is tried is counted there.
    """

    def __new__(cls, variant: str, *args, **kwargs):
        return object.__new__(CallSession if VARIANTS[variant].calls else PrologueSession)

    def __init__(self, variant: str, program: Program, coverage: Coverage | None = None):
        self.program = program
        self.coverage = coverage or Coverage()
        self.is_accepted = True
        # Those that outlive the session.
        self._shared_classes = {cls: dict(vars(cls)) for cls in (ThunderModule, torch.nn.Module, Moody)}
        self.undos: list[Callable[[], Any]] = []
        self.mode = dict(USUAL_MODE)
        self.inputs: tuple[tuple, dict[str, Any]] = ((torch.ones(3, 4),), {})
        found = VARIANTS[variant].blocks(guard_blocks.available_blocks())
        few = VARIANTS[variant].few
        self._patches = [mock.patch.object(guard_blocks, "available_blocks", lambda: found)]
        if few is not None:
            self._patches.append(mock.patch.object(fused_prologue_transform, "_FEW", few))
        for patch in self._patches:
            patch.start()
        self.coverage.examples += 1
        try:
            self.start(VARIANTS[variant])
            self.compare(2)
        except BaseException:
            Session.close(self)  # nobody else can
            raise

    def start(self, variant: Variant) -> None:
        """Sets ``names`` and ``cms``."""
        raise NotImplementedError

    def compare(self, times: int) -> None:
        """Raises Divergence where the reference and what is tested differ."""
        raise NotImplementedError

    def call(self) -> None:
        """Calls what is compiled."""
        raise NotImplementedError

    def evaluate(self, text: str, **names: Any) -> Any:
        return eval(text, self.names, names)

    def each_cm(self) -> Iterator[Any]:
        """The ThunderModules or compiled functions, each as ``cm`` in expressions."""
        for cm in self.cms:
            self.names["cm"] = cm
            yield cm

    def tensors(self, name: str) -> list[torch.Tensor]:
        """The parameters or buffers that the compiled functions have by a qualified name."""
        owners = [cm if isinstance(cm, ThunderModule) else self.names["model"] for cm in self.cms]
        found = []
        for owner in owners:
            try:
                found.append(owner.get_parameter(name))
            except AttributeError:
                found.append(owner.get_buffer(name))
        return list({id(t): t for t in found if isinstance(t, torch.Tensor)}.values())

    def step(self, step: Step, times: int = 2) -> bool:
        """Makes a step, and then compares so many times. Returns whether it could be made."""
        try:
            undo = step.apply(self)
        except Divergence:
            raise
        except Exception:
            # It is not there, or Python, torch or Thunder refuses it. A part of it may have been done nevertheless.
            self.coverage.not_applicable[step.kind] += 1
            undo, applicable = None, False
        else:
            self.coverage.steps[step.kind] += 1
            applicable = True
        if undo is not None:
            self.undos.append(undo)
        if times:
            self.compare(times)
        return applicable

    def close(self) -> None:
        """Undoes all changes, the last first."""
        while self.undos:
            with contextlib.suppress(Exception):
                self.undos.pop()()
        for cls, before in self._shared_classes.items():
            for name in vars(cls).keys() - before.keys():
                delattr(cls, name)
            for name, value in before.items():
                if vars(cls).get(name) is not value:
                    setattr(cls, name, value)
        for patch in self._patches:
            patch.stop()


@dataclasses.dataclass
class _Compiled:
    names: dict[str, Any]
    cm: Any
    inputs: tuple[tuple, dict[str, Any]]
    mode: dict[str, Any]
    accepted: Any


def _names_of(program: Program) -> dict[str, Any]:
    names = dict(NAMES)
    exec(program.source, names)
    names["model"] = names["make_model"]()
    return names


def _function_of(names: dict[str, Any]) -> Any:
    return names["make_function"](names["model"]) if "make_function" in names else names["model"]


class PrologueSession(Session):
    """Compares the prologues of each cache entry of one compiled model: the unfused one, and what is made of its trace."""

    def start(self, variant):
        self._key = variant.reference, self.program
        if self._key not in _compiled:
            _compiled[self._key] = _compile(variant, self.program)
        self._compiled = _compiled[self._key]
        self.names, self.cms = self._compiled.names, [self._compiled.cm]
        for t in (*self.names["model"].parameters(), *self.names["model"].buffers()):
            if not t.requires_grad:
                # Another session may have let it require a gradient, of which a trace remains.
                new = t.detach().clone()
                torch.utils.swap_tensors(
                    t, torch.nn.Parameter(new, False) if isinstance(t, torch.nn.Parameter) else new
                )
        self.inputs = self._compiled.inputs
        self.entries: list[tuple] = []
        self._add_entries()

    def _add_entries(self) -> None:
        (cm,) = self.cms
        for entry in cm._lc_cs.interpreter_cache[len(self.entries) :]:
            fused = _fuse(cm, entry.prologue_traces[-2])
            self.entries.append((entry.prologue_fn, fused, self.inputs, self.mode))

    def call(self):
        (cm,) = self.cms
        if len(self.entries) >= MAX_ENTRIES:
            raise NotApplicable
        args, kwargs = self.inputs
        try:
            with in_mode(self.mode):
                cm(*args, **kwargs)
        finally:
            self.coverage.compiled += len(cm._lc_cs.interpreter_cache) - len(self.entries)
            self._add_entries()

    def compare(self, times):
        self.is_accepted = False
        for unfused, fused, own_inputs, own_mode in self.entries:
            with in_mode(own_mode):
                self.is_accepted |= self._compare(unfused, fused, times, own_inputs)
            if own_inputs is not self.inputs or own_mode != self.mode:
                with in_mode(self.mode):
                    # Where inputs or modes differ, too, another check may be the first to fail.
                    self.is_accepted |= self._compare(unfused, fused, times, self.inputs, same_exception=False)

    def _compare(
        self, unfused: Callable, fused: Callable, times: int, inputs: tuple[tuple, dict], same_exception: bool = True
    ) -> bool:
        """Returns whether both accept."""
        args, kwargs = inputs
        (cm,) = self.cms
        expected = run_prologue(unfused, cm, *args, **kwargs)
        guard = _guard_of(fused)
        for _ in range(times):
            hits = guard._hits if guard is not None else 0
            actual = run_prologue(fused, cm, *args, **kwargs)
            if isinstance(expected, Exception) or isinstance(actual, Exception):
                both_refuse = isinstance(expected, Exception) and isinstance(actual, Exception)
                if not both_refuse or (same_exception and type(expected) is not type(actual)):
                    raise Divergence(f"unfused: {_described(expected)}; fused: {_described(actual)}")
                self.coverage.verdicts[f"refused: {type(expected).__name__}"] += 1
            elif not _is_same(expected, actual):
                raise Divergence(f"unfused returned {expected!r}; fused returned {actual!r}")
            elif guard is not None and guard._hits == hits + 1:
                self.coverage.verdicts["accepted on the fast path"] += 1
            else:
                self.coverage.verdicts["accepted after a full check"] += 1
        return not isinstance(expected, Exception)

    def close(self):
        super().close()
        (cm,) = self.cms
        del cm._lc_cs.interpreter_cache[1:]
        unfused, _, (args, kwargs), mode = self.entries[0]
        with in_mode(mode):
            result = run_prologue(unfused, cm, *args, **kwargs)
        if not _is_same(self._compiled.accepted, result):
            del _compiled[self._key]  # it could not be undone
            self.coverage.spoilt += 1


#: Compiled models, which many sessions share.
_compiled: dict[Any, _Compiled] = {}


def _compile(variant: Variant, program: Program) -> _Compiled:
    """Compiles without what is tested. A session leaves the model as it found it, so that another can start with it."""
    names = _names_of(program)
    cm = thunder.jit(_function_of(names), transforms=variant.reference())
    args = (torch.ones(3, 4),)
    cm(*args)
    (entry,) = cm._lc_cs.interpreter_cache
    accepted = run_prologue(entry.prologue_fn, cm, *args)
    assert type(accepted) is tuple, accepted
    return _Compiled(names, cm, (args, {}), dict(USUAL_MODE), accepted)


def _fuse(cm: Any, trace: Any) -> Callable:
    """Makes the fused prologue of a trace of an unfused one."""
    with compile_data_and_stats(cm._lc_cd, cm._lc_cs):
        fused, _, _ = FusedPrologueTransform().transform_traces_pre_prologue(trace, None, None)
        executable = transform_for_execution(fused, (pythonex.ex,))
    return executable.python_callable(include_decorators=False)


def _guard_of(fused: Callable) -> _ModuleGuard | None:
    return next((value for value in fused.__globals__.values() if isinstance(value, _ModuleGuard)), None)


def run_prologue(prologue: Callable, cm: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs a prologue in the context in which Thunder does; returns what it returns, or the exception that it raises."""
    cache_info: dict[str, Any] = {}
    token = thunder._cache_info_ctx.set(cache_info)
    try:
        cm._lc_cd.populate_cache_info(cache_info, *args, **kwargs)
        with compile_data_and_stats(cm._lc_cd, cm._lc_cs):
            return prologue(*args, **kwargs)
    except Exception as e:
        return e
    finally:
        thunder._cache_info_ctx.reset(token)


def _is_same(expected: Any, actual: Any) -> bool:
    """Whether nested tuples hold the very same objects."""
    if type(expected) is not tuple:
        return expected is actual
    return type(actual) is tuple and len(actual) == len(expected) and all(map(_is_same, expected, actual))


def _described(result: Any) -> str:
    if isinstance(result, Exception):
        return f"raised {type(result).__name__}: {result}"
    return "accepted"


def _is_expanded(t: torch.Tensor) -> bool:
    """Whether elements share their memory, so that torch refuses to write to it."""
    return t.layout is torch.strided and any(n > 1 and not stride for n, stride in zip(t.shape, t.stride()))


class CallSession(Session):
    """Calls a model that is compiled with and without what is tested, and compares what the calls return and whether
    they compiled anew."""

    def start(self, variant):
        self.names = _names_of(self.program)
        function = _function_of(self.names)
        self.cms = [thunder.jit(function, transforms=make()) for make in (variant.reference, variant.tested)]

    def call(self):
        raise NotApplicable  # each comparison is one

    def compare(self, times):
        for _ in range(times):
            # A call may change buffers in place: each starts from the same values.
            before = [(t, t.detach().clone()) for t in self._tensors() if not _is_expanded(t)]
            results = []
            for cm in self.cms:
                results.append(self._result(cm))
                for t, value in before:
                    with torch.no_grad():
                        t.data.copy_(value)
            (expected, *expected_values), (actual, *actual_values) = results
            try:
                assert expected == actual, f"{expected} without, {actual} with"
                torch.testing.assert_close(actual_values, expected_values, rtol=0, atol=0, equal_nan=True)
            except AssertionError as e:
                raise Divergence(str(e)) from e
            self.coverage.verdicts[expected] += 1

    def _tensors(self) -> list[torch.Tensor]:
        held: list[Any] = []
        for cm in self.cms:
            # A step may have put something else there.
            for name in ("_overrides_parameters", "_overrides_buffers"):
                overrides = vars(cm).get(name) if isinstance(cm, ThunderModule) else None
                held += overrides.values() if isinstance(overrides, dict) else ()
        for module in self.names["model"].modules():
            if isinstance(module, torch.nn.Module):
                held += (*module._parameters.values(), *module._buffers.values())
        return list({id(t): t for t in held if isinstance(t, torch.Tensor)}.values())

    def _result(self, cm: Any) -> tuple:
        """Whether the call was a hit, or what it raised; what it returned, and the gradients."""
        args, kwargs = self.inputs
        misses = thunder.cache_misses(cm)
        with in_mode(self.mode):
            try:
                result = cm(*args, **kwargs)
            except Exception as e:
                return (f"raised {type(e).__name__}",)
        verdict = "hit" if thunder.cache_misses(cm) == misses else "miss"
        if not isinstance(result, torch.Tensor):
            return verdict, result
        gradients: list[torch.Tensor | None] = []
        if result.requires_grad:
            owner = cm if isinstance(cm, ThunderModule) else self.names["model"]
            trained = [t for t in owner.parameters() if isinstance(t, torch.Tensor) and t.requires_grad]
            gradients = [g for g in torch.autograd.grad(result.sum(), trained, allow_unused=True) if g is not None]
        return verdict, result.detach(), gradients


#
# What is drawn
#

OLD = (
    "old", "copy.copy(old)", "float(old)", "int(old)", "bool(old)", "str(old)", "Number(old)", "Text(old)", "-old",
    "type(old)(str(old))", "type(old)(old)", "(old,)", "[*old]", "tuple(old)", "dict(old)", "old[:1]", "[*old, 1.0]",
    "dataclasses.replace(old)", "collections.OrderedDict(old)", "types.SimpleNamespace(**vars(old))", "complex(old)",
)  # fmt: skip
OTHER = (
    "True", "False", "0", "1", "2", "7", "0.0", "-0.0", "1.0", "2.0", "7.0", "math.nan", "float('nan')", "math.inf",
    "-math.inf", "None", "'a'", "'relu'", "''.join(['re', 'lu'])", "torch.float32", "torch.float64",
    "torch.device('cpu')", "torch.empty(0).device", "torch.device('meta')", "()", "[]", "{}", "[1.0, 2.0]",
    "(2.0, (3, 'a'))", "(2.0, (4, 'a'))", "[2.0, [3, 'a']]", "{'a': 5.0}", "{'a': 5}", "Equal()", "Raising()", "object()",
    "torch.ones(4)", "torch.ones(())", "Parameter(torch.ones(4))", "torch.nn.Identity()",
)  # fmt: skip
VALUES = st.sampled_from(OLD) | st.sampled_from(OTHER)
SOME = ("7.0", "1", "True", "False", "math.nan", "None", "'a'")
DESCRIPTORS = (
    "property(lambda self: 7.0)", "property(lambda self: True)", "property(lambda self: False)",
    "classmethod(lambda cls: 1.0)", "property(lambda self, value=old: value)",
)  # fmt: skip
TENSOR_VALUES = (
        "old", "Parameter(old.detach().clone())", "Parameter(old.detach().clone(), requires_grad=old.requires_grad)",
        "Parameter(old.detach().double(), requires_grad=old.requires_grad)", "old.detach()",
        "old.detach().clone().requires_grad_(old.requires_grad)", "Parameter(torch.ones(5), requires_grad=old.requires_grad)",
        "Parameter(old.detach().to('meta'), requires_grad=old.requires_grad)", "None", "1.0", "torch.zeros(())",
        "Parameter(old.detach().as_subclass(OtherTensor), requires_grad=old.requires_grad)",
        "OtherParameter(old.detach(), requires_grad=old.requires_grad)", "old.detach().to_sparse().requires_grad_(old.requires_grad)",
        "next(iter(cm._overrides_parameters.values()))", "next(iter(cm._overrides_buffers.values()))",
)  # fmt: skip
STATEMENTS = (
    "t.data = t.data.clone()", "t.data = t.data.double()", "t.data = t.data.bfloat16()", "t.data = t.data.t()",
    "t.data = torch.zeros(())", "t.data = torch.zeros(5)", "t.data = torch.zeros(4)", "t.data = torch.zeros(4, 5)",
    "t.data = torch.zeros(0, 4)", "t.data = torch.zeros(4, 4, 1)", "t.data = torch.zeros(1, 1, 1, 1, 1, 4)",
    "t.data = torch.zeros(1, 1, 1, 1, 1, 5)", "t.data = torch.zeros(1, 1, 1, 1, 1, 1, 4)",
    "t.data = torch.zeros(1, *t.shape[1:]).expand(t.shape)", "t.data = t.data.to(torch.uint8)",
    "t.requires_grad_(False)", "t.requires_grad_(True)", "t.requires_grad_(not t.requires_grad)",
    "t.requires_grad = not t.requires_grad",
    "t.resize_(2)", "t.unsqueeze_(0)", "t.t_()", "t.set_(torch.zeros(5))", "t.set_(torch.zeros(4))", "t.zero_()",
    "other = Parameter(t.detach().double()); torch.utils.swap_tensors(t, other)",
    "other = Parameter(t.detach().clone(), requires_grad=t.requires_grad); torch.utils.swap_tensors(t, other)",
    "other = Parameter(t.detach().clone(), requires_grad=not t.requires_grad); torch.utils.swap_tensors(t, other)",
    "other = Parameter(t.detach().to('meta')); torch.utils.swap_tensors(t, other)",
    "other = t.detach().clone().requires_grad_(t.requires_grad); torch.utils.swap_tensors(t, other)",
    "other = t.detach().clone().as_subclass(OtherTensor).requires_grad_(t.requires_grad); torch.utils.swap_tensors(t, other)",
    "t.__class__ = OtherParameter", "t.__class__ = OtherTensor", "t.__class__ = Lying", "t.__class__ = torch.Tensor", "t.__class__ = Parameter",
    "t.mul_(torch.ones((), requires_grad=True))  # becomes part of a graph", "t.grad = torch.zeros_like(t)",
)  # fmt: skip
INPUTS = (
    ("(torch.ones(3, 4),)", "{}"), ("(torch.zeros(3, 4),)", "{}"), ("(torch.ones(5, 4),)", "{}"), ("(torch.ones(4),)", "{}"),
    ("(torch.ones(4, 3).t(),)", "{}"), ("(torch.ones(3, 4, dtype=torch.float64),)", "{}"),
    ("(torch.ones(3, 4, dtype=torch.bfloat16),)", "{}"), ("(torch.ones(3, 4, dtype=torch.int64),)", "{}"),
    ("(torch.ones(3, 4, requires_grad=True),)", "{}"), ("(torch.ones(3, 4, requires_grad=True) * 1,)", "{}"),
    ("(torch.ones(3, 4, device='meta'),)", "{}"), ("(Parameter(torch.ones(3, 4), requires_grad=False),)", "{}"),
    ("(torch.ones(3, 4).as_subclass(OtherTensor),)", "{}"), ("(torch.ones(3, 4).to_sparse(),)", "{}"),
    ("(torch.ones(1, 1, 1, 1, 3, 4),)", "{}"), ("([[1.0] * 4] * 3,)", "{}"), ("(1.0,)", "{}"), ("(None,)", "{}"), ("()", "{}"),
    ("(torch.ones(3, 4), torch.ones(3, 4))", "{}"), ("(torch.ones(3, 4), 1)", "{}"), ("(torch.ones(3, 4), True)", "{}"),
    ("(torch.ones(3, 4), 1.0)", "{}"), ("(torch.ones(3, 4), 'a')", "{}"), ("(torch.ones(3, 4), None)", "{}"),
    ("(torch.ones(3, 4),) * 2", "{}"), ("()", "{'x': torch.ones(3, 4)}"),
    ("(torch.ones(3, 4),)", "{'scale': 1.0}"), ("(torch.ones(3, 4),)", "{'scale': 1}"), ("(torch.ones(3, 4),)", "{'scale': True}"),
    ("(torch.ones(3, 4),)", "{'scale': 2.0}"), ("(torch.ones(3, 4),)", "{'scale': math.nan}"),
    ("(torch.ones(3, 4),)", "{'scale': -0.0}"), ("(torch.ones(3, 4),)", "{'scale': 0.0}"), ("(torch.ones(3, 4),)", "{'scale': Number(2)}"),
    ("(torch.ones(3, 4),)", "{'scale': torch.ones(())}"), ("(torch.ones(3, 4),)", "{'scale': Equal()}"),
    ("(torch.ones(3, 4),)", "{'extra': {'a': [torch.ones(4), 1]}}"), ("(torch.ones(3, 4),)", "{'extra': {'a': [torch.ones(4), 1.0]}}"),
    ("(torch.ones(3, 4),)", "{'extra': {'a': (torch.ones(4), 1)}}"), ("(torch.ones(3, 4),)", "{'extra': {'a': [torch.ones(1), 1]}}"),
    ("(torch.ones(3, 4),)", "{'extra': {'a': [torch.ones(4)]}}"), ("(torch.ones(3, 4),)", "{'extra': {'a': [torch.ones(4), 1], 'b': 1}}"),
    ("(torch.ones(3, 4),)", "{'extra': None}"), ("(torch.ones(3, 4),)", "{'other': 1}"),
)  # fmt: skip
GET_PARAMETER = (
    "lambda self, name, made=torch.zeros(()): made",
    "lambda self, name, old=old: old(self, name)",
    "lambda self, name, old=old, made={}: made.setdefault(name, copy.deepcopy(old(self, name)))",
)
MODES = (
    ("grad", "True"), ("grad", "False"), ("inference", "True"), ("inference", "False"), ("autocast", "None"),
    ("autocast", "(torch.bfloat16, True)"), ("autocast", "(torch.float16, True)"), ("autocast", "(torch.bfloat16, False)"),
    ("default_dtype", "torch.float32"), ("default_dtype", "torch.float64"), ("default_dtype", "torch.bfloat16"),
    ("default_device", "None"), ("default_device", "'cpu'"), ("default_device", "'meta'"),
)  # fmt: skip


def make_trees(seed: int, count: int) -> list[Tree]:
    """Makes models that have each feature at least once, the smallest first.

    They are not drawn by hypothesis: to compile one takes as long as hundreds of steps, so that many examples share them.
    """
    rng = random.Random(seed)
    deck: list[str] = []

    def features() -> tuple[str, ...]:
        chosen = []
        for _ in range(rng.randint(1, 2)):
            if not deck:
                deck.extend(rng.sample(sorted(FEATURES), len(FEATURES)))
            chosen.append(deck.pop())
        return tuple(dict.fromkeys(chosen))

    def node(depth: int) -> Node:
        children = tuple(node(depth - 1) for _ in range(rng.randint(1, 2))) if depth else ()
        return Node(features(), children, rng.choice(("attribute", "list", "dict", "twice")))

    trees = [Tree(node(rng.choice((0, 1, 1))), is_function=rng.random() < 0.2) for _ in range(count)]
    # What is left of the features goes to the roots, and each of these has a parameter or buffer.
    with_tensors = sorted(name for name, feature in FEATURES.items() if feature.tensors)
    for i, tree in enumerate(trees):
        chosen = dict.fromkeys((*tree.root.features, *deck[i::count], rng.choice(with_tensors)))
        trees[i] = dataclasses.replace(tree, root=dataclasses.replace(tree.root, features=tuple(chosen)))
    return sorted(trees, key=lambda tree: len(program_of(tree).source))


@functools.cache
def steps_of(program: Program) -> dict[str, st.SearchStrategy[Step]]:
    """The changes that can be made to a model, by what they are about."""
    steps: dict[str, list[st.SearchStrategy[Step]]] = collections.defaultdict(list)
    modules = st.sampled_from(program.modules)
    attributes = [(module, "training") for module in program.modules]
    attributes += [tuple(place.rsplit(".", 1)) for place in program.places if re.fullmatch(r"model[^()]*\.\w+", place)]
    attribute = st.sampled_from(attributes)

    def assign(kind: str, place: st.SearchStrategy[str] | str, *values: str | st.SearchStrategy[str]) -> None:
        place = st.just(place) if isinstance(place, str) else place
        value = st.one_of(*(st.just(value) if isinstance(value, str) else value for value in values))
        steps[kind].append(st.builds(Assign, place, value))

    def of_attribute(template: str) -> st.SearchStrategy[str]:
        return attribute.map(lambda pair: template.format(*pair))

    def of_two(template: str, values: Sequence[str], pairs: Sequence[tuple[str, str]] = attributes):
        """The template is a place and a value."""
        return st.builds(
            lambda pair, value: Assign(*template.format(*pair, value).split(" = ", 1)),
            st.sampled_from(pairs),
            st.sampled_from(values),
        )

    own = [place for place in program.places if _kind_of(place) != "class"]
    for some in (own, own, [place for place in own if place.endswith("]")]):
        if some:
            assign("attribute", st.sampled_from(some), VALUES)
            steps["attribute"].append(st.builds(Delete, st.sampled_from(some)))
    assign("attribute", of_attribute("vars({})[{!r}]"), VALUES)
    steps["training"].append(st.builds(Train, modules, st.booleans()))
    assign("training", modules.map("{}.training".format), "True", "False", "1", "not old")

    of_class = [place for place in program.places if _kind_of(place) == "class" and "__bases__" not in place]
    if of_class:
        assign("class", st.sampled_from(of_class), VALUES, st.sampled_from(DESCRIPTORS))
        steps["class"].append(st.builds(Delete, st.sampled_from(of_class)))
    assign("class", of_attribute("type({}).{}"), st.sampled_from(DESCRIPTORS))
    # What is read is the same for now, but is no longer an attribute that lies in a dict.
    ways = ("computed", "hiding")
    steps["hidden"].append(of_two("type({0}).{1} = {2}({0}.{1})", ways))
    steps["hidden"].append(of_two("{0}.__class__ = type('Other', (old,), {{{1!r}: {2}({0}.{1})}})", ways))
    assign("box", "box[0]", st.sampled_from(SOME))
    for base in ("Base", "torch.nn.Module"):
        assign("class", of_attribute(base + ".{1}"), "7.0", "old", *DESCRIPTORS)
    assign(
        "class",
        modules.map("type({}).__bases__".format),
        "(OtherBase,)",
        "(OtherBase,)",
        "(Base,)",
        "(torch.nn.Module,)",
    )
    get = "(lambda self, name: {2} if name == {1!r} else object.__getattribute__(self, name))"
    steps["class"].append(of_two("type({0}).__getattribute__ = " + get, SOME))

    assign("another class or dict", modules.map("{}.__class__".format), "type('Other', (old,), {})")
    steps["another class or dict"].append(
        of_two("{0}.__class__ = type('Other', (old,), {{{1!r}: {2}}})", (*SOME, *DESCRIPTORS[:-1]))
    )
    assign("another class or dict", modules.map("{}.__dict__".format), "dict(old)")
    steps["another class or dict"].append(of_two("{0}.__dict__ = old | {{{1!r}: {2}}}", SOME))

    children = [module for module in program.modules if module != "model"]
    if children:
        held = st.sampled_from(["{}._modules[{!r}]".format(*_parent(child)) for child in children])
        assign("module", held, "torch.nn.Identity()", "copy.copy(old)", "None")
        steps["module"].append(st.builds(Delete, held))

    if program.tensors:
        tensors = st.sampled_from(program.tensors)
        for about in ("", "data", "requires_grad", "__class__"):
            statements = [text for text in STATEMENTS if about in text]
            steps["tensor"].append(st.builds(ChangeTensor, tensors, st.sampled_from(statements)))
    if program.is_function:
        steps["inputs"].append(st.sampled_from([Inputs(*texts) for texts in INPUTS]))
        steps["mode"].append(st.sampled_from([Mode(*texts) for texts in MODES]))
        return {kind: st.one_of(*strategies) for kind, strategies in steps.items()}

    loaded = st.sampled_from(("t", "t.clone()", "t.double()", "t[:1]", "t.to('meta')"))
    steps["load_state_dict"].append(st.builds(LoadStateDict, loaded, st.booleans()))
    of_model = [pair for pair in attributes if pair[0] == "model"]
    kind = "ThunderModule"
    qualified = [_qualified(module) for module in program.modules]
    cached = st.sampled_from(qualified).map("cm._module_cache[{!r}]".format)
    dicts = st.sampled_from(("cm._overrides_parameters", "cm._overrides_buffers", "cm._module_cache"))
    steps[kind].append(of_two("vars(cm)[{1!r}] = {2}", (*SOME, "old"), of_model))
    steps[kind].append(of_two("ThunderModule.{1} = {2}", (*SOME, *DESCRIPTORS), of_model))
    steps[kind].append(
        of_two("cm.__class__ = type('Other', (old,), {{{1!r}: {2}}})", (*SOME, *DESCRIPTORS[:-1]), of_model)
    )
    assign(kind, dicts, "dict(old)", "collections.OrderedDict(old)", "{}", "None")
    steps[kind].append(st.builds(Delete, dicts))
    assign(kind, cached, "torch.nn.Identity()", "copy.copy(old)", "None", "model")
    steps[kind].append(st.builds(Delete, cached))
    assign(kind, "cm._module_cache", *(f"{{**old, {name!r}: torch.nn.Identity()}}" for name in qualified[1:]))
    assign(kind, "ThunderModule.get_parameter", *GET_PARAMETER)
    assign(kind, "vars(cm)['get_parameter']", "lambda name, made=torch.zeros(()): made")
    assign(kind, "vars(cm)['get_submodule']", "lambda name, made=torch.nn.Identity(): made")
    assign(kind, "cm._modules['_model']", "torch.nn.Identity()", "make_model()", "make_model().eval()")
    kind = "tensor of the ThunderModule"
    for name in program.tensors:
        for overrides in ("cm._overrides_parameters", "cm._overrides_buffers"):
            if (overrides == "cm._overrides_buffers") is (name.rpartition(".")[2] in BUFFERS):
                place = f"{overrides}[{name!r}]"
                assign(kind, place, st.sampled_from(TENSOR_VALUES))
                steps[kind].append(st.just(Delete(place)))
                assign(
                    kind,
                    overrides,
                    f"{{**old, {name!r}: torch.zeros(5)}}",
                    f"{{**old, {name!r}: copy.deepcopy(old[{name!r}])}}",
                )
        *path, last = name.split(".")
        held = "_buffers" if last in BUFFERS else "_parameters"
        place = "model" + "".join(f"._modules[{part!r}]" for part in path) + f".{held}[{last!r}]"
        assign("tensor of the model", place, st.sampled_from(TENSOR_VALUES))
    steps["inputs"].append(st.sampled_from([Inputs(*texts) for texts in INPUTS]))
    steps["mode"].append(st.sampled_from([Mode(*texts) for texts in MODES]))
    return {kind: st.one_of(*strategies) for kind, strategies in steps.items()}


def _qualified(module: str) -> str:
    return module.removeprefix("model").lstrip(".").replace("[", ".").replace("]", "").replace("'", "")


def _parent(module: str) -> tuple[str, str]:
    path, _, name = _qualified(module).rpartition(".")
    return "model" + "".join(f"._modules[{part!r}]" for part in path.split(".") if part), name


@dataclasses.dataclass(frozen=True)
class Failure:
    """Steps after which what is tested differs from the reference."""

    variant: str
    program: Program
    steps: tuple[tuple[Step, int], ...]
    message: str

    @property
    def is_unsound(self) -> bool:
        """Whether the fused prologue has accepted what the unfused one refuses, or has returned something else."""
        return "fused: accepted" in self.message or "; fused returned" in self.message


KINDS = (
    "attribute", "attribute", "attribute", "training", "class", "class", "another class or dict", "module",
    "tensor", "tensor", "tensor", "tensor", "tensor", "tensor of the ThunderModule", "tensor of the ThunderModule", "load_state_dict",
    "tensor of the model", "ThunderModule", "ThunderModule", "ThunderModule", "inputs", "inputs", "mode",
)  # fmt: skip
# The first is the one that hypothesis prefers when it makes a failure smaller.
ACTIONS = ("change", "try_changes", "try_changes", "try_changes", "undo", "undo_all", "toggle", "churn", "hide", "call")
# After more than a few hits, what has changed before is no longer taken to change often.
TIMES = st.sampled_from((2, 2, 2, 5, 5, 1, 3, 0))


class PrologueMachine(RuleBasedStateMachine):
    """Draws a model and steps."""

    variant = "fused"
    trees: Sequence[Tree] = ()
    max_calls = 2
    coverage: Coverage = Coverage()
    failure: Failure | None = None
    """The last failure: the smallest, when hypothesis is done."""

    @initialize(data=st.data())
    def build(self, data):
        self.program = program_of(data.draw(st.sampled_from(self.trees)))
        self.log: list[tuple[Step, int]] = []
        self.calls = 0
        self.changes = steps_of(self.program)
        with self.noticed():
            self.session = Session(self.variant, self.program, self.coverage)

    @contextlib.contextmanager
    def noticed(self):
        try:
            yield
        except Divergence as e:
            type(self).failure = Failure(self.variant, self.program, tuple(self.log), str(e))
            raise

    def step(self, step, times):
        self.log.append((step, times))
        with self.noticed():
            self.session.step(step, times)

    def draw(self, data, kind):
        return data.draw(self.changes.get(kind, self.changes["attribute"]))

    # One rule for all: of several, hypothesis leaves out some in each example, and with them most of what is to be tried.
    @rule(data=st.data(), action=st.sampled_from(ACTIONS))
    def act(self, data, action):
        getattr(self, action)(data)

    # What is drawn never depends on what was accepted: hypothesis must be able to draw it again, and not all that a change
    # leaves behind is undone.

    def try_changes(self, data):
        """Makes changes, and undoes each that is refused, so that most are made to what is accepted."""
        for kind in data.draw(st.lists(st.sampled_from(KINDS), min_size=3, max_size=10)):
            step, times, after = self.draw(data, kind), data.draw(TIMES), data.draw(TIMES)
            if not self.session.is_accepted:
                self.undo_all(data)
            undos = len(self.session.undos)
            self.step(step, max(1, times))
            if not self.session.is_accepted and len(self.session.undos) > undos:
                self.step(Undo(), after)

    def change(self, data):
        self.step(self.draw(data, data.draw(st.sampled_from(KINDS))), data.draw(TIMES))

    def undo(self, data):
        step, times = Undo(data.draw(st.sampled_from((-1, -1, -1, 0)))), data.draw(TIMES)
        if self.session.undos:
            self.step(step, times)

    def undo_all(self, data):
        while self.session.undos:
            self.step(Undo(), 0 if len(self.session.undos) > 1 else 2)

    def toggle(self, data):
        """Makes a change and undoes it, several times, with so many calls in between that a guard is hit or renewed."""
        step = self.draw(data, data.draw(st.sampled_from(KINDS)))
        times, after = data.draw(st.sampled_from((1, 2, 5))), data.draw(st.sampled_from((1, 2, 5)))
        for _ in range(data.draw(st.integers(2, 5))):
            undos = len(self.session.undos)
            self.step(step, times)
            if len(self.session.undos) > undos:
                self.step(Undo(), after)

    def churn(self, data):
        """Something that does not matter changes before each call, so that it is no longer compared by version."""
        unrelated = [f"{module}.unrelated" for module in self.program.modules]
        if not self.program.is_function:
            unrelated += ["cm._overrides_parameters['unrelated']", "cm._overrides_buffers['unrelated']"] * 2
        place = data.draw(st.sampled_from(unrelated))
        for i in range(5):
            self.step(Unrelated(place, str(i)), 1)
        self.try_changes(data)

    def hide(self, data):
        """Makes a change that is accepted, and lets what it has brought in change."""
        if not self.session.is_accepted:
            self.undo_all(data)
        for kind in ("hidden", "box"):
            self.step(self.draw(data, kind), 2)
        for _ in range(data.draw(st.integers(0, 2))):
            self.undo(data)

    def call(self, data):
        times = data.draw(TIMES)
        if self.calls < self.max_calls:
            self.calls += 1
            self.step(Call(), times)

    def teardown(self):
        if hasattr(self, "session"):
            self.session.close()


# How many sequences of how many actions are made at a time, where prologues are compared and where whole calls are.
# Hypothesis makes most sequences by changing earlier ones a little, so that many short runs see more than a long one. And
# only between runs is it looked at whether that was enough: with calls, most of which compile, that must be often.
PROLOGUES_AT_A_TIME, CALLS_AT_A_TIME = (6, 50), (3, 8)


def search(
    variant: str,
    seed: int,
    *,
    steps: int,
    trees: int,
    calls: int = 1,
    shrink: bool = True,
    seconds: float = math.inf,
    coverage: Coverage | None = None,
) -> Failure | None:
    """Searches for a failure with generated models and sequences of steps, the same for the same arguments.

    Args:
        variant (str): A key of ``VARIANTS``.
        seed (int): Other models and steps for each.
        steps (int): At least so many changes are made.
        trees (int): The number of models.
        calls (int): How many times at most the compiled model is called in a sequence.
        shrink (bool): Whether to make a failure smaller.
        seconds (float): It stops after these.
        coverage (Coverage | None): What is tried is counted there.

    Returns:
        The smallest failure that was found, or None.
    """
    coverage = coverage or Coverage()
    models = make_trees(seed, trees)
    phases = (hypothesis.Phase.generate, *((hypothesis.Phase.shrink,) if shrink else ()))
    examples, actions = CALLS_AT_A_TIME if VARIANTS[variant].calls else PROLOGUES_AT_A_TIME
    settings = hypothesis.settings(
        max_examples=examples,
        stateful_step_count=actions,
        phases=phases,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    start, made_before = time.monotonic(), coverage.made
    for batch in itertools.count():
        attributes = {"variant": variant, "trees": models, "max_calls": calls, "coverage": coverage, "failure": None}
        machine = hypothesis.seed(seed * 10**6 + batch)(type("Machine", (PrologueMachine,), attributes))
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                hypothesis.stateful.run_state_machine_as_test(machine, settings=settings)
        except Divergence:
            return machine.failure
        if coverage.made - made_before >= steps or time.monotonic() - start > seconds:
            return None


def replay(variant: str, source: str, is_function: bool, steps: Iterable[tuple[Step, int]]) -> None:
    """Makes the steps of a failure again.

    Raises:
        Divergence: Where what is tested differs from the reference.
    """
    session = Session(variant, Program(source, (), (), (), is_function))
    try:
        for step, times in steps:
            session.step(step, times)
    finally:
        session.close()


def as_test(failure: Failure) -> str:
    """Writes a failure as a test."""
    steps = "".join(f"    ({step!r}, {times}),\n" for step, times in failure.steps)
    message = textwrap.indent(failure.message, "# ")
    return (
        "from thunder.tests.prologue_fuzz import *\n\n"
        f"SOURCE = {_quoted(failure.program.source)}\n\n"
        "# After each step the prologues are run as many times as the number says.\n"
        f"STEPS = [\n{steps}]\n\n\n"
        f"{message}\n"
        "def test_failure():\n"
        f"    replay({failure.variant!r}, SOURCE, {failure.program.is_function}, STEPS)\n"
    )


def _quoted(text: str) -> str:
    return f'"""\\\n{text}"""' if '"""' not in text and "\\" not in text else repr(text)


def save(failure: Failure, folder: Path) -> Path:
    """Saves a failure as a test in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    text = as_test(failure)
    name = re.sub(r"\W+", "_", failure.variant)
    file = folder / f"test_{name}_{hashlib.sha256(text.encode()).hexdigest()[:8]}.py"
    file.write_text(text)
    return file


#
# The command
#


def print_coverage(coverage: Coverage, console: Any) -> None:
    from rich.table import Table

    table = Table(title=f"{coverage.made} changes in {coverage.examples} sequences")
    for column in ("change", "made", "not possible"):
        table.add_column(column, justify="left" if column == "change" else "right")
    for kind in sorted(coverage.steps.keys() | coverage.not_applicable.keys()):
        table.add_row(kind, str(coverage.steps[kind]), str(coverage.not_applicable[kind] or ""))
    console.print(table)
    table = Table(title=f"verdicts, the same of both; {coverage.compiled} cache entries were added")
    table.add_column("verdict")
    table.add_column("times", justify="right")
    for verdict, times in coverage.verdicts.most_common():
        table.add_row(verdict, str(times))
    console.print(table)


def run_mutants(seed: int, steps: int, console: Any, coverage: Coverage) -> list[str]:
    """Searches with each mutant in the place of the code; returns the names of those that are not noticed."""
    from rich.table import Table

    from thunder.tests.prologue_mutants import MUTANTS, mutated

    table = Table(title="mutants, each of which must be noticed")
    for column in ("mutant", "what is wrong with it", "noticed after"):
        table.add_column(column)
    survivors = []
    for name, mutant in MUTANTS.items():
        tried = Coverage()
        with mutated(mutant):
            failure = search(mutant.variant, seed, steps=steps, trees=6, calls=0, shrink=False, coverage=tried)
        coverage.examples += tried.examples
        if failure is None or not failure.is_unsound:
            survivors.append(name)
            table.add_row(name, mutant.sentence, f"[red]{failure.message if failure else f'not in {tried.made}'}")
        else:
            table.add_row(name, mutant.sentence, f"{tried.made} changes")
    console.print(table)
    return survivors


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status: 1 where a failure was found or a mutant not noticed."""
    parser = argparse.ArgumentParser(prog="python -m thunder.tests.prologue_fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=10_000, help="changes to make, of all variants together")
    parser.add_argument("--seed", type=int, default=None, help="0, 1, ...: the same search each time; else a new one")
    parser.add_argument("--variant", choices=VARIANTS, action="append", help="compare this one only; may be repeated")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop each variant after so many")
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"), help="the folder for tests that fail")
    parser.add_argument("--mutants", action="store_true", help="show that the search notices mutants of the code, too")
    options = parser.parse_args(argv)
    from rich.console import Console

    console = Console(width=120)
    warnings.simplefilter("ignore")
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    variants = options.variant or list(VARIANTS)
    coverage, failures = Coverage(), []
    # A change costs more where whole calls are compared, since many of those compile.
    weights = {variant: 1 if VARIANTS[variant].calls else 20 for variant in variants}
    for variant, weight in weights.items():
        share = math.ceil(options.steps * weight / sum(weights.values()))
        made = coverage.made
        with console.status(f"{variant}, seed {seed}"):
            failure = search(
                variant,
                seed,
                steps=share,
                trees=max(2, min(20, share // 200)),
                seconds=options.minutes * 60,
                coverage=coverage,
            )
        console.print(
            f"{variant}: {coverage.made - made} changes, seed {seed}: {'FAILED' if failure else 'no difference'}"
        )
        if failure:
            failures.append(save(failure, options.failures))
            console.print(f"{failure.message}\nsaved as a test: {failures[-1]}", markup=False)
    print_coverage(coverage, console)
    survivors = run_mutants(0, 20_000, console, coverage) if options.mutants else []
    for name in survivors:
        console.print(f"[red]not noticed:[/] {name}")
    return 1 if failures or survivors else 0


if __name__ == "__main__":
    # As a module it is imported by the tests that are saved; its classes must be the same ones.
    from thunder.tests import prologue_fuzz

    sys.exit(prologue_fuzz.main())
