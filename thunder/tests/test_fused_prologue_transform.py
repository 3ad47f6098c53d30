import ast
import collections
import contextlib
import dataclasses
import doctest
import functools
import gc
import linecache
import math
import os
import subprocess
import sys
import threading
import time
import types
import weakref

import pytest
import torch

import thunder
from thunder.core import guard_blocks
from thunder.core.compile_data import compile_data_and_stats
from thunder.core.module import ThunderModule
from thunder.core.transform_common import Transform
from thunder.executors import pythonex
from thunder.executors.passes import transform_for_execution
from thunder.transforms import ExtractionOnlyPrologueTransform, LORATransform, PrunePrologueChecks
from thunder.transforms import fused_prologue_transform as fused_prologue
from thunder.transforms.fused_prologue_transform import FusedPrologueTransform

WAYS = {
    "private": {},
    "torch tensor guards": {"tensor_words": False},
    "polled attributes": {"instance_versions": False},
    "portable": None,
}


@pytest.fixture(autouse=True, params=WAYS)
def way(request, monkeypatch):
    """Lets the guards be made of some of the building blocks only."""
    without = WAYS[request.param]
    found = guard_blocks.Blocks() if without is None else guard_blocks.available_blocks()._replace(**without)
    monkeypatch.setattr(guard_blocks, "available_blocks", lambda: found)
    return request.param


one_way = pytest.mark.parametrize("way", ["private"], indirect=True)
two_ways = pytest.mark.parametrize("way", ["private", "portable"], indirect=True)


#
# The harness: what the unfused prologue says, the fused prologue must say too
#


def jit(fn, *transforms, **kwargs):
    return thunder.jit(fn, transforms=[*transforms, FusedPrologueTransform()], **kwargs)


def run(prologue, cm, *args, **kwargs):
    """Runs a prologue as Thunder does; returns what it returns, or the exception that it raises."""
    cache_info = {}
    token = thunder._cache_info_ctx.set(cache_info)
    try:
        cm._lc_cd.populate_cache_info(cache_info, *args, **kwargs)
        with compile_data_and_stats(cm._lc_cd, cm._lc_cs):
            try:
                return prologue(*args, **kwargs)
            except Exception as e:
                return e
    finally:
        thunder._cache_info_ctx.reset(token)


def is_same(expected, actual, cms) -> bool:
    """Whether nested tuples hold the very same objects, each ThunderModule taken for its counterpart."""
    if type(expected) is tuple:
        return (
            type(actual) is tuple
            and len(actual) == len(expected)
            and all(is_same(e, a, cms) for e, a in zip(expected, actual))
        )
    return expected is actual or (expected is cms[0] and actual is cms[-1])


class Pair:
    """An unfused and a fused prologue of the same model or function, which say the same in every state.

    They are those of one compiled function or, given ``transforms``, of two.
    """

    def __init__(self, fn, *args, transforms=None, grad=False, cm=None, **kwargs):
        self.model, self.grad, self.args, self.kwargs = fn, grad, args, kwargs
        self.cms = [cm or thunder.jit(fn, transforms=list(transforms or ()))]
        if transforms is not None:
            self.cms.append(jit(fn, *transforms))
        self.prologues = []
        if cm is None:
            self.compile(*args)
        else:
            self.add_entry()

    def compile(self, *args):
        """Makes a cache entry for these inputs."""
        entries = len(self.prologues)
        with torch.set_grad_enabled(self.grad):
            for cm in self.cms:
                cm(*args, **self.kwargs)
                assert len(cm._lc_cs.interpreter_cache) == entries + 1
        self.add_entry()

    def add_entry(self):
        entries = [cm._lc_cs.interpreter_cache[len(self.prologues)] for cm in self.cms]
        fused = entries[1].prologue_fn if len(entries) > 1 else fuse(self.cms[0], entries[0].prologue_traces[0])
        self.prologues.append((entries[0].prologue_fn, fused))

    def check(self, accepted=True, message="", times=2, entry=0, args=None, grad=None):
        """Demands the same verdict and values of both, and that it is the one that the test is about."""
        args = self.args if args is None else args
        with torch.set_grad_enabled(self.grad if grad is None else grad):
            for _ in range(times):
                expected, actual = (
                    run(prologue, cm, *args, **self.kwargs)
                    for prologue, cm in zip(self.prologues[entry], (self.cms[0], self.cms[-1]))
                )
                assert isinstance(expected, Exception) is not accepted, expected
                assert type(actual) is type(expected), actual
                if accepted:
                    assert is_same(expected, actual, self.cms)
                else:
                    assert message in str(actual)


def fuse(cm, prologue_trace):
    """Makes the fused prologue of a trace of an unfused one."""
    with compile_data_and_stats(cm._lc_cd, cm._lc_cs):
        fused, _, _ = FusedPrologueTransform().transform_traces_pre_prologue(prologue_trace, None, None)
        executable = transform_for_execution(fused, (pythonex.ex,))
    return executable.python_callable(include_decorators=False)


def exercise(pair, change, accepted, message="", grad=None):
    """Makes a change and undoes it, several times, with so many calls in between that a guard is hit or renewed."""
    pair.check(times=3)
    for times in (3, 1, 1, 1, 1, 3):
        with change(pair):
            pair.check(accepted, message, times, grad=grad)
        pair.check(times=times)


@functools.cache
def compiled(model_class, grad=False):
    """A model and its compiled function. Tests leave it as they found it; one that fails throws it away."""
    model = model_class().eval()
    cm = thunder.jit(model)
    with torch.set_grad_enabled(grad):
        cm(torch.randn(3, 4))
    return model, cm


@contextlib.contextmanager
def pair_of(model_class, grad=False):
    model, cm = compiled(model_class, grad)
    try:
        yield Pair(model, torch.randn(3, 4), grad=grad, cm=cm)
    except BaseException:
        compiled.cache_clear()
        raise


def patch(change):
    """Makes a context manager of a function of a MonkeyPatch, which undoes it, and of a pair."""

    @contextlib.contextmanager
    def changed(pair):
        with pytest.MonkeyPatch.context() as patches:
            change(patches, pair)
            yield

    return changed


def change(path, value):
    """The attribute at the path has a value for a while."""
    owner, _, attribute = path.rpartition(".")
    return patch(lambda mp, pair: mp.setattr(find(pair.model, owner), attribute, value))


def find(obj, path):
    return functools.reduce(getattr, path.split("."), obj) if path else obj


#
# Attributes
#


@dataclasses.dataclass
class Config:
    scale: float = 2.0
    use_relu: bool = True
    activation: str = "relu"
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")  # noqa: RUF009
    nothing: None = None


class Slotted:
    __slots__ = ("gain",)

    def __init__(self):
        self.gain = 3.0


class Dynamic:
    def __getattr__(self, name):
        if name == "gain":
            return self._table["gain"]
        raise AttributeError(name)


class Intercepting:
    def __init__(self):
        self.gain = 5.0
        self.offset = 0.0

    def __getattribute__(self, name):
        value = object.__getattribute__(self, name)
        return value + object.__getattribute__(self, "offset") if name == "gain" else value


class Base(torch.nn.Module):
    inherited = 4.0


class OtherBase(torch.nn.Module):
    inherited = 6.0


class Leaf(Base):
    gain = 1.5

    def __init__(self, config):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4))
        self.config = config
        self.eps = 1e-5
        self.factor_ = 2.0
        self.not_a_number = math.nan

    @property
    def factor(self):
        return self.factor_

    def forward(self, x):
        x = x * self.weight * self.gain * self.inherited * self.factor * self.not_a_number + self.eps
        if self.config.use_relu and self.config.activation == "relu" and self.config.nothing is None:
            x = torch.relu(x)
        return torch.nn.functional.dropout(x, training=self.training) * self.config.scale


class Branch(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.leaf = Leaf(config)

    def forward(self, x):
        return self.leaf(x).to(device=self.leaf.config.device, dtype=self.leaf.config.dtype)


class Attributes(torch.nn.Module):
    """Behaviour that depends on attributes of all kinds, at three depths."""

    def __init__(self):
        super().__init__()
        self.config = Config()
        self.branch = Branch(self.config)
        self.scale, self.count, self.flag, self.text, self.none = 2.0, 1, True, "a", None
        self.items, self.pair, self.table = [1.0, 2.0], (3.0, (4.0, self.config)), {"a": 5.0}
        self.slotted, self.dynamic, self.intercepting = Slotted(), Dynamic(), Intercepting()
        self.dynamic._table = {"gain": 4.0}

    def forward(self, x):
        x = self.branch(x) * self.scale
        if self.flag and self.text == "a" and self.none is None:
            x = x + self.count
        x = x * self.items[1] + self.pair[0] + self.pair[1][0] + self.table["a"] * self.pair[1][1].scale
        return x * self.slotted.gain * self.dynamic.gain * self.intercepting.gain


def other_dict(mp, obj, **changes):
    mp.setattr(obj, "__dict__", vars(obj) | changes)


def subclass(obj, **attributes):
    return type("Other", (type(obj),), attributes)


@contextlib.contextmanager
def other_bases(pair):
    Leaf.__bases__ = (OtherBase,)
    try:
        yield
    finally:
        Leaf.__bases__ = (Base,)


def list_changes(apply):
    @contextlib.contextmanager
    def changed(pair):
        items = pair.model.items
        before = list(items)
        apply(items)
        try:
            yield
        finally:
            items[:] = before

    return changed


equal_text = "".join(["re", "lu"])
ATTRIBUTE_CHANGES = {
    "train the root": (change("training", True), False, "attribute 'training': compiled for False, is True"),
    "train a leaf": (change("branch.leaf.training", True), False, "'branch.leaf.training': compiled for False, is True"),
    "train in between": (change("branch.training", True), False, "'branch.training': compiled for False, is True"),
    "train all": (patch(lambda mp, p: (mp.setattr(p.model, "training", False), mp.setattr(p.model.branch, "training", True), mp.setattr(p.model.branch.leaf, "training", True))), False, "compiled for False, is True"),
    "another float": (change("branch.leaf.eps", 10.0), False, "attribute 'branch.leaf.eps': compiled for 1e-05, is 10.0"),
    "float to int": (change("scale", 2), False, "attribute 'scale': compiled for 2.0, is 2"),
    "bool to int": (change("flag", 1), False, "attribute 'flag': compiled for True, is 1"),
    "int to bool": (change("count", True), False, "attribute 'count': compiled for 1, is True"),
    "float to NaN": (change("scale", math.nan), False, "attribute 'scale': compiled for 2.0, is nan"),
    "NaN to another NaN": (change("branch.leaf.not_a_number", float("nan")), True, ""),
    "NaN to a number": (change("branch.leaf.not_a_number", 1.0), False, "'branch.leaf.not_a_number': compiled for nan, is 1.0"),
    "equal float": (change("scale", float("2")), True, ""),
    "equal string": (change("config.activation", equal_text), True, ""),
    "another string": (change("config.activation", "gelu"), False, "attribute 'config.activation': compiled for 'relu', is 'gelu'"),
    "string to None": (change("text", None), False, "attribute 'text': compiled for 'a', is None"),
    "None to a number, which Thunder does not check": (change("none", 0), True, ""),
    "another dtype, which Thunder does not check": (change("config.dtype", torch.float64), True, ""),
    "another device": (change("config.device", torch.device("meta")), False, "attribute 'config.device': compiled for "),
    "equal device": (change("config.device", torch.empty(0).device), True, ""),
    "deleted": (patch(lambda mp, p: mp.delattr(p.model, "scale")), False, "attribute 'scale' cannot be read"),
    "deleted in a leaf": (patch(lambda mp, p: mp.delattr(p.model.branch.leaf, "eps")), False, "attribute 'branch.leaf.eps' cannot be read"),
    "set by object.__setattr__": (patch(lambda mp, p: mp.setitem(vars(p.model.branch.leaf), "eps", 1.0)), False, "'branch.leaf.eps'"),
    "unrelated, new": (patch(lambda mp, p: mp.setattr(p.model, "unrelated", 1, raising=False)), True, ""),
    "shared config": (change("config.scale", 3.0), False, "config.scale': compiled for 2.0, is 3.0"),
    "equal config": (patch(lambda mp, p: (mp.setattr(p.model.branch.leaf, "config", Config()), mp.setattr(p.model, "config", Config()))), True, ""),
    "another config": (change("config", Config(scale=3.0)), False, "'config.scale': compiled for 2.0, is 3.0"),
    "another config that is not read": (change("branch.leaf.config", Config(scale=3.0)), True, ""),
    "config of another class": (change("config", types.SimpleNamespace(**vars(Config()))), True, ""),
    "config that is no config": (change("config", None), False, "attribute 'config.use_relu' cannot be read"),
    "list item": (list_changes(lambda items: items.__setitem__(1, 7.0)), False, "attribute 'items[1]': compiled for 2.0, is 7.0"),
    "equal list item": (list_changes(lambda items: items.__setitem__(1, float("2"))), True, ""),
    "list that grows": (list_changes(lambda items: items.append(3.0)), True, ""),
    "list that shrinks": (list_changes(lambda items: items.clear()), False, ""),
    "equal list": (change("items", [1.0, 2.0]), True, ""),
    "shorter list": (change("items", [1.0]), False, ""),
    "equal tuple": (patch(lambda mp, p: mp.setattr(p.model, "pair", (3.0, (4.0, p.model.config)))), True, ""),
    "another tuple": (patch(lambda mp, p: mp.setattr(p.model, "pair", (3.0, (9.0, p.model.config)))), False, "attribute 'pair[1][0]': compiled for 4.0, is 9.0"),
    "list for tuple": (patch(lambda mp, p: mp.setattr(p.model, "pair", [3.0, (4.0, p.model.config)])), True, ""),
    "dict item": (patch(lambda mp, p: mp.setitem(p.model.table, "a", 7.0)), False, "attribute \"table['a']\": compiled for 5.0, is 7.0"),
    "dict item deleted": (patch(lambda mp, p: mp.delitem(p.model.table, "a")), False, ""),
    "equal dict": (change("table", {"a": 5.0}), True, ""),
    "slot": (change("slotted.gain", 7.0), False, "attribute 'slotted.gain': compiled for 3.0, is 7.0"),
    "slot deleted": (patch(lambda mp, p: mp.delattr(p.model.slotted, "gain")), False, "attribute 'slotted.gain' cannot be read"),
    "what __getattr__ returns": (patch(lambda mp, p: mp.setitem(p.model.dynamic._table, "gain", 7.0)), False, ""),
    "instead of __getattr__": (patch(lambda mp, p: mp.setattr(p.model.dynamic, "_table", {"gain": 8.0})), False, ""),
    "what __getattribute__ returns": (change("intercepting.offset", 1.0), False, ""),
    "__getattribute__ added": (patch(lambda mp, p: mp.setattr(Leaf, "__getattribute__", lambda self, name: 7.0 if name == "eps" else object.__getattribute__(self, name), raising=False)), False, "'branch.leaf.eps': compiled for 1e-05, is 7.0"),
    "__getattribute__ added to the root's class": (patch(lambda mp, p: mp.setattr(Attributes, "__getattribute__", lambda self, name: 7.0 if name == "scale" else object.__getattribute__(self, name), raising=False)), False, "'scale': compiled for 2.0, is 7.0"),
    "what a property reads": (change("branch.leaf.factor_", 7.0), False, "'branch.leaf.factor_': compiled for 2.0, is 7.0"),
    "property added": (patch(lambda mp, p: mp.setattr(Leaf, "eps", property(lambda self: 7.0), raising=False)), False, "'branch.leaf.eps': compiled for 1e-05, is 7.0"),
    "property added to a config's class": (patch(lambda mp, p: mp.setattr(Config, "scale", property(lambda self: 7.0))), False, "config.scale': compiled for 2.0, is 7.0"),
    "class attribute": (patch(lambda mp, p: mp.setattr(Leaf, "gain", 7.0)), False, "'branch.leaf.gain': compiled for 1.5, is 7.0"),
    "class attribute to a property": (patch(lambda mp, p: mp.setattr(Leaf, "gain", property(lambda self: 1.5))), True, ""),
    "class attribute deleted": (patch(lambda mp, p: mp.delattr(Leaf, "gain")), False, "'branch.leaf.gain' cannot be read"),
    "class attribute shadowed": (patch(lambda mp, p: mp.setitem(vars(p.model.branch.leaf), "gain", 7.0)), False, "'branch.leaf.gain': compiled for 1.5, is 7.0"),
    "inherited attribute": (patch(lambda mp, p: mp.setattr(Base, "inherited", 7.0)), False, "'branch.leaf.inherited': compiled for 4.0, is 7.0"),
    "inherited attribute overridden": (patch(lambda mp, p: mp.setattr(Leaf, "inherited", 7.0, raising=False)), False, "'branch.leaf.inherited'"),
    "other bases": (other_bases, False, "'branch.leaf.inherited': compiled for 4.0, is 6.0"),
    "another class": (patch(lambda mp, p: mp.setattr(p.model.branch.leaf, "__class__", subclass(p.model.branch.leaf, eps=property(lambda self: 7.0)))), False, "'branch.leaf.eps': compiled for 1e-05, is 7.0"),
    "another class, same attributes": (patch(lambda mp, p: mp.setattr(p.model.branch.leaf, "__class__", subclass(p.model.branch.leaf))), True, ""),
    "another class for the root": (patch(lambda mp, p: mp.setattr(p.model, "__class__", subclass(p.model, scale=property(lambda self: 7.0)))), False, "'scale': compiled for 2.0, is 7.0"),
    "another __dict__": (patch(lambda mp, p: other_dict(mp, p.model.branch.leaf, eps=7.0)), False, "'branch.leaf.eps': compiled for 1e-05, is 7.0"),
    "equal __dict__": (patch(lambda mp, p: other_dict(mp, p.model.branch.leaf)), True, ""),
    "another __dict__ for the config": (patch(lambda mp, p: other_dict(mp, p.model.config, scale=7.0)), False, "config.scale': compiled for 2.0, is 7.0"),
    "the ThunderModule has the attribute": (patch(lambda mp, p: [mp.setitem(vars(cm), "scale", 7.0) for cm in p.cms]), False, "'scale': compiled for 2.0, is 7.0"),
    "the ThunderModule trains": (patch(lambda mp, p: [mp.setitem(vars(cm), "training", True) for cm in p.cms]), False, "'training': compiled for False, is True"),
    "ThunderModule's class has the attribute": (patch(lambda mp, p: mp.setattr(ThunderModule, "scale", 7.0, raising=False)), False, "'scale': compiled for 2.0, is 7.0"),
    "Module's class has the attribute": (patch(lambda mp, p: mp.setattr(torch.nn.Module, "scale", 7.0, raising=False)), False, "'scale': compiled for 2.0, is 7.0"),
    "ThunderModule of another class": (patch(lambda mp, p: [mp.setattr(cm, "__class__", subclass(cm, scale=7.0)) for cm in p.cms]), False, "'scale': compiled for 2.0, is 7.0"),
    "ThunderModule of another model": (patch(lambda mp, p: [mp.setitem(cm._modules, "_model", Attributes().eval()) for cm in p.cms]), True, ""),
    "ThunderModule forgotten": (patch(lambda mp, p: [mp.setattr(cm._lc_cd, "_thunder_module_map", {}) for cm in p.cms]), True, ""),
    "submodule swapped in the model": (patch(lambda mp, p: mp.setitem(p.model._modules, "branch", torch.nn.Identity())), True, ""),
    "submodule swapped in the ThunderModule": (patch(lambda mp, p: [mp.setitem(cm._module_cache, "branch.leaf", torch.nn.Identity()) for cm in p.cms]), False, ""),
    "equal submodule in the ThunderModule": (patch(lambda mp, p: [mp.setitem(cm._module_cache, "branch.leaf", Leaf(p.model.config).eval()) for cm in p.cms]), True, ""),
    "submodule deleted in the ThunderModule": (patch(lambda mp, p: [mp.delitem(cm._module_cache, "branch.leaf") for cm in p.cms]), True, ""),
    "get_submodule of the instance": (patch(lambda mp, p: [mp.setitem(vars(cm), "get_submodule", lambda name: torch.nn.Identity()) for cm in p.cms]), False, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTRIBUTE_CHANGES)
def test_attributes(name):
    with pair_of(Attributes) as pair:
        exercise(pair, *ATTRIBUTE_CHANGES[name])


def another_class_comes_in(patches, pair):
    leaf = pair.model.branch.leaf
    patches.setattr(leaf, "__class__", subclass(leaf))
    return lambda: patches.setattr(type(leaf), "eps", property(lambda self: 7.0), raising=False)


def other_bases_come_in(patches, pair):
    leaf = pair.model.branch.leaf
    patches.setattr(leaf, "__class__", subclass(leaf))
    pair.check()
    other = type("Other", (Leaf,), {"inherited": 4.0})
    type(leaf).__bases__ = (other,)
    return lambda: setattr(other, "inherited", 7.0)


def a_property_hides_an_attribute(patches, pair):
    leaf = pair.model.branch.leaf
    values = {"eps": leaf.eps}
    patches.setattr(type(leaf), "eps", property(lambda self: values["eps"]), raising=False)
    return lambda: patches.setitem(values, "eps", 7.0)


def getattribute_comes_in(patches, pair):
    leaf = pair.model.branch.leaf
    values = {"eps": leaf.eps}
    get = lambda self, name: values[name] if name in values else object.__getattribute__(self, name)  # noqa: E731
    patches.setattr(leaf, "__class__", subclass(leaf, __getattribute__=get))
    return lambda: patches.setitem(values, "eps", 7.0)


CLASS_CHANGES = (another_class_comes_in, other_bases_come_in, a_property_hides_an_attribute, getattribute_comes_in)


@pytest.mark.parametrize("come_in", CLASS_CHANGES)
@pytest.mark.parametrize("rounds", (1, 5))
def test_what_a_change_of_a_class_that_was_accepted_brings_in(come_in, rounds):
    with pair_of(Attributes) as pair:
        pair.check()
        for _ in range(rounds):
            with pytest.MonkeyPatch.context() as patches:
                change = come_in(patches, pair)
                pair.check()
                change()
                pair.check(False, "compiled for ")
            pair.check()


def test_a_class_that_changes_on_each_call():
    with pair_of(Attributes) as pair:
        for i in range(12):
            Leaf.calls = i
            pair.check(times=1)
        for _ in range(2):
            exercise(pair, *ATTRIBUTE_CHANGES["train a leaf"])
            exercise(pair, *ATTRIBUTE_CHANGES["property added"])
            exercise(pair, *ATTRIBUTE_CHANGES["other bases"])
        del Leaf.calls
        pair.check()


def test_two_changes_undone_one_after_the_other():
    with pair_of(Attributes) as pair:
        pair.check()
        for outer, inner in (("scale", "branch.leaf.eps"), ("branch.leaf.eps", "scale"), ("config.scale", "scale")) * 2:
            with change(outer, 7.0)(pair):
                pair.check(False)
                with change(inner, 8.0)(pair):
                    pair.check(False)
                pair.check(False)
            pair.check()


def test_attributes_of_a_model_that_changes_itself_on_each_call():
    with pair_of(Attributes) as pair:
        for i in range(12):
            pair.model.unrelated = pair.model.branch.leaf.unrelated = i
            pair.check(times=1)
        exercise(pair, *ATTRIBUTE_CHANGES["train a leaf"])
        exercise(pair, *ATTRIBUTE_CHANGES["property added"])
        exercise(pair, *ATTRIBUTE_CHANGES["other bases"])
        for i in range(12):
            pair.model.unrelated = pair.model.branch.leaf.unrelated = i
            exercise(pair, *ATTRIBUTE_CHANGES["train the root"])
        del pair.model.unrelated, pair.model.branch.leaf.unrelated


#
# Tensors
#


class OtherTensor(torch.Tensor):
    pass


class OtherParameter(torch.nn.Parameter):
    pass


class Tensors(torch.nn.Module):
    """Parameters and buffers of all kinds."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))
        self.bias = torch.nn.Parameter(torch.randn(4))
        self.frozen = torch.nn.Parameter(torch.randn(4), requires_grad=False)
        self.scalar = torch.nn.Parameter(torch.randn(()))
        self.many_dims = torch.nn.Parameter(torch.randn(1, 1, 1, 1, 1, 4))
        self.other = OtherParameter(torch.randn(4))
        self.tied = self.bias
        self.register_buffer("offset", torch.randn(4))
        self.register_buffer("mask", torch.tensor([True, False, True, True]), persistent=False)

    def forward(self, x):
        x = x @ self.weight + self.bias * self.frozen * self.scalar + self.many_dims[0, 0, 0, 0, 0] + self.other
        return torch.where(self.mask, x + self.offset, self.tied)


def tensor(pair, name):
    return find(pair.model, name)


@contextlib.contextmanager
def no_grad_change(apply, undo):
    with torch.no_grad():
        apply()
    try:
        yield
    finally:
        with torch.no_grad():
            undo()


def data(name, new):
    def changed(pair):
        t = tensor(pair, name)
        old = t.data
        return no_grad_change(lambda: setattr(t, "data", new(old)), lambda: setattr(t, "data", old))

    return changed


def requires_grad(name, value):
    def changed(pair):
        t = tensor(pair, name)
        return no_grad_change(lambda: t.requires_grad_(value), lambda: t.requires_grad_(not value))

    return changed


def swapped(name, new):
    def changed(pair):
        t = tensor(pair, name)
        other = new(t)
        return no_grad_change(
            lambda: torch.utils.swap_tensors(t, other),
            lambda: torch.utils.swap_tensors(t, other),
        )

    return changed


def in_place(name, apply, undo):
    """Something that torch only does to tensors that do not require a gradient."""
    return lambda pair: no_grad_change(lambda: apply(tensor(pair, name)), lambda: undo(tensor(pair, name)))


@contextlib.contextmanager
def in_a_graph(pair):
    """The buffer becomes a result of what requires a gradient, and is taken out of the graph."""
    with torch.enable_grad():
        pair.model.offset.mul_(torch.ones((), requires_grad=True))
    assert pair.model.offset.requires_grad
    yield
    pair.model.offset.detach_()


def overridden(name, new, kind="parameters"):
    """Another tensor in both ThunderModules."""

    def apply(mp, pair):
        other = new(tensor(pair, name))
        for cm in pair.cms:
            mp.setitem(getattr(cm, f"_overrides_{kind}"), name, other)

    return patch(apply)


def not_overridden(name, kind="parameters"):
    return patch(lambda mp, pair: [mp.delitem(getattr(cm, f"_overrides_{kind}"), name) for cm in pair.cms])


@contextlib.contextmanager
def set_buffer(pair):
    other = torch.zeros(4)
    for cm in pair.cms:
        cm.set_buffer("offset", other)
    yield
    for cm in pair.cms:
        cm.set_buffer("offset", pair.model.offset)


@contextlib.contextmanager
def loaded_with_assign(pair):
    """Each ThunderModule has a state dict of its own assigned, as tensors of another dtype."""
    before = [dict(cm._overrides_parameters) for cm in pair.cms]
    buffers = [dict(cm._overrides_buffers) for cm in pair.cms]
    state = {name: t.detach().double() for name, t in pair.cms[0].state_dict().items()}
    state = {name: t if name == "offset" else torch.nn.Parameter(t) for name, t in state.items()}
    for cm in pair.cms:
        cm.load_state_dict(state, strict=False, assign=True)
    yield
    for cm, parameters, other in zip(pair.cms, before, buffers):
        cm._overrides_parameters.update(parameters)
        cm._overrides_buffers.update(other)


@contextlib.contextmanager
def loaded(pair):
    state = {name: t.detach().clone() for name, t in pair.cms[0].state_dict().items()}
    for cm in pair.cms:
        cm.load_state_dict(state)
    yield


@contextlib.contextmanager
def moved_to_meta(pair):
    """What ``model.to("meta")`` does in place where torch is told to swap tensors."""
    t = pair.model.weight
    other = torch.nn.Parameter(t.detach().to("meta"))
    torch.utils.swap_tensors(t, other)
    yield
    torch.utils.swap_tensors(t, other)


def other_overrides(make):
    return patch(
        lambda mp, pair: [
            mp.setitem(vars(cm), "_overrides_parameters", make(cm._overrides_parameters)) for cm in pair.cms
        ]
    )


def parameter(make):
    return lambda t: torch.nn.Parameter(make(t.detach()), requires_grad=t.requires_grad)


TENSOR_CHANGES = {
    "data of another dtype": (data("weight", lambda t: t.double()), False, "parameter 'weight': compiled for torch.float32, is torch.float64"),
    "data of another dtype of the same size": (data("weight", lambda t: t.to(torch.int32)), None, ""),
    "data of a half type": (data("bias", lambda t: t.bfloat16()), False, "compiled for torch.float32, is torch.bfloat16"),
    "data of another shape": (data("weight", lambda t: torch.zeros(4, 5)), False, "parameter 'weight': compiled for shape (4, 4), is of shape (4, 5)"),
    "data of fewer dimensions": (data("weight", lambda t: torch.zeros(4)), False, "compiled for shape (4, 4), is of shape (4,)"),
    "data of more dimensions": (data("weight", lambda t: torch.zeros(4, 4, 1)), False, "is of shape (4, 4, 1)"),
    "data of many dimensions": (data("weight", lambda t: torch.zeros(4, 4, 1, 1, 1, 1, 1)), False, "is of shape (4, 4, 1, 1, 1, 1, 1)"),
    "data of no dimension": (data("bias", lambda t: torch.zeros(())), False, "compiled for shape (4,), is of shape ()"),
    "empty data": (data("weight", lambda t: torch.zeros(0, 4)), False, "is of shape (0, 4)"),
    "data of a scalar": (data("scalar", lambda t: torch.zeros(1)), False, "parameter 'scalar': compiled for shape (), is of shape (1,)"),
    "data of a scalar of another dtype": (data("scalar", lambda t: t.double()), False, "parameter 'scalar'"),
    "data of many, one of them": (data("many_dims", lambda t: torch.zeros(1, 1, 1, 2, 1, 4)), False, "parameter 'many_dims'"),
    "last of many dimensions": (data("many_dims", lambda t: torch.zeros(1, 1, 1, 1, 1, 5)), False, "is of shape (1, 1, 1, 1, 1, 5)"),
    "many dimensions, dtype": (data("many_dims", lambda t: t.double()), False, "parameter 'many_dims'"),
    "fewer of many dimensions": (data("many_dims", lambda t: torch.zeros(4)), False, "parameter 'many_dims'"),
    "data of a Parameter subclass": (data("other", lambda t: t.double()), False, "parameter 'other': compiled for torch.float32, is torch.float64"),
    "data of a buffer": (data("offset", lambda t: t.double()), False, "buffer 'offset': compiled for torch.float32, is torch.float64"),
    "data of a mask": (data("mask", lambda t: t.to(torch.uint8)), False, "buffer 'mask': compiled for torch.bool, is torch.uint8"),
    "data of a tied weight": (data("bias", lambda t: torch.zeros(5)), False, "compiled for shape (4,), is of shape (5,)"),
    "new data": (data("weight", lambda t: t.clone()), True, ""),
    "strides": (data("weight", lambda t: t.t()), True, ""),
    "strides of many dimensions": (data("many_dims", lambda t: torch.zeros(4, 1, 1, 1, 1, 1).permute(1, 2, 3, 4, 5, 0)), True, ""),
    "expanded": (data("weight", lambda t: torch.zeros(1, 4).expand(4, 4)), True, ""),
    "frozen": (requires_grad("weight", False), False, "parameter 'weight': compiled for requires_grad=True, is requires_grad=False"),
    "unfrozen": (requires_grad("frozen", True), False, "parameter 'frozen': compiled for requires_grad=False, is requires_grad=True"),
    "Parameter subclass frozen": (requires_grad("other", False), False, "parameter 'other'"),
    "many dimensions frozen": (requires_grad("many_dims", False), False, "parameter 'many_dims'"),
    "tied weight frozen": (requires_grad("bias", False), False, "compiled for requires_grad=True, is requires_grad=False"),
    "buffer requires grad": (requires_grad("offset", True), False, "buffer 'offset': compiled for requires_grad=False, is requires_grad=True"),
    "buffer in a graph": (in_a_graph, False, "buffer 'offset': compiled for requires_grad=False, is requires_grad=True"),
    "resize_": (in_place("offset", lambda t: t.resize_(2), lambda t: t.resize_(4)), False, "buffer 'offset': compiled for shape (4,), is of shape (2,)"),
    "unsqueeze_": (in_place("offset", lambda t: t.unsqueeze_(0), lambda t: t.squeeze_(0)), False, "compiled for shape (4,), is of shape (1, 4)"),
    "t_ of a square": (in_place("weight", lambda t: t.t_(), lambda t: t.t_()), True, ""),
    "t_ of a vector": (in_place("offset", lambda t: t.unsqueeze_(0).t_(), lambda t: t.squeeze_(1)), False, "is of shape (4, 1)"),
    "set_": (in_place("offset", lambda t: t.set_(torch.zeros(5)), lambda t: t.set_(torch.zeros(4))), False, "compiled for shape (4,), is of shape (5,)"),
    "set_ to the same shape": (in_place("offset", lambda t: t.set_(torch.zeros(4)), lambda t: None), True, ""),
    "in place": (in_place("weight", lambda t: t.mul_(2), lambda t: t.div_(2)), True, ""),
    "swap_tensors, dtype": (swapped("weight", parameter(lambda t: t.double())), False, "parameter 'weight': compiled for torch.float32, is torch.float64"),
    "swap_tensors, equal": (swapped("weight", parameter(lambda t: t.clone())), True, ""),
    "swap_tensors, frozen": (swapped("weight", lambda t: torch.nn.Parameter(t.detach().clone(), requires_grad=False)), False, "requires_grad=False"),
    "swap_tensors, a plain tensor": (swapped("weight", lambda t: t.detach().clone().requires_grad_()), True, ""),
    "swap_tensors, a subclass": (swapped("weight", lambda t: t.detach().clone().as_subclass(OtherTensor).requires_grad_()), True, ""),
    "swap_tensors, a buffer": (swapped("offset", lambda t: t.double()), False, "buffer 'offset'"),
    "moved to meta": (moved_to_meta, False, "parameter 'weight': compiled for cpu, is meta"),
    "class of a tensor": (patch(lambda mp, p: mp.setattr(p.model.offset, "__class__", OtherTensor)), True, ""),
    "class of a parameter": (patch(lambda mp, p: mp.setattr(p.model.weight, "__class__", OtherParameter)), True, ""),
    "set_buffer": (set_buffer, True, ""),
    "load_state_dict": (loaded, True, ""),
    "load_state_dict with assign": (loaded_with_assign, False, "compiled for torch.float32, is torch.float64"),
    "another parameter": (overridden("weight", parameter(lambda t: t.clone())), True, ""),
    "another parameter, dtype": (overridden("weight", parameter(lambda t: t.double())), False, "parameter 'weight': compiled for torch.float32, is torch.float64"),
    "another parameter, on meta": (overridden("weight", parameter(lambda t: t.to("meta"))), False, "compiled for cpu, is meta"),
    "a plain tensor instead": (overridden("weight", lambda t: t.detach().clone().requires_grad_()), True, ""),
    "a subclass instead": (overridden("weight", lambda t: torch.nn.Parameter(torch.randn(4, 4).as_subclass(OtherTensor))), True, ""),
    "a subclass of another shape instead": (overridden("weight", lambda t: OtherParameter(torch.randn(4, 5))), False, "parameter 'weight'"),
    "a sparse tensor instead": (overridden("weight", lambda t: torch.nn.Parameter(torch.eye(4).to_sparse())), True, ""),
    "None instead": (overridden("weight", lambda t: None), False, "parameter 'weight': compiled for a tensor, is of type NoneType"),
    "a number instead": (overridden("offset", lambda t: 1.0, "buffers"), False, "buffer 'offset': compiled for a tensor, is of type float"),
    "another buffer": (overridden("offset", lambda t: t.clone(), "buffers"), True, ""),
    "another buffer, shape": (overridden("offset", lambda t: torch.zeros(5), "buffers"), False, "buffer 'offset': compiled for shape (4,), is of shape (5,)"),
    "another subclass": (overridden("other", lambda t: OtherParameter(torch.randn(4))), True, ""),
    "another one of many dimensions": (overridden("many_dims", parameter(lambda t: t.clone())), True, ""),
    "tied later": (overridden("frozen", lambda t: torch.nn.Parameter(torch.zeros(4), requires_grad=False)), True, ""),
    "tied to the buffer": (patch(lambda mp, p: [mp.setitem(cm._overrides_buffers, "offset", cm._overrides_parameters["frozen"]) for cm in p.cms]), True, ""),
    "two parameters exchanged": (patch(lambda mp, p: [mp.setitem(cm._overrides_parameters, "bias", p.model.other) for cm in p.cms]), True, ""),
    "not overridden": (not_overridden("weight"), True, ""),
    "buffer not overridden": (not_overridden("offset", "buffers"), True, ""),
    "not overridden, then another": (patch(lambda mp, p: ([mp.delitem(cm._overrides_parameters, "weight") for cm in p.cms], mp.setitem(p.model._parameters, "weight", torch.nn.Parameter(torch.zeros(5, 4))))), False, "parameter 'weight': compiled for shape (4, 4), is of shape (5, 4)"),
    "not anywhere": (patch(lambda mp, p: ([mp.delitem(cm._overrides_parameters, "weight") for cm in p.cms], mp.delitem(p.model._parameters, "weight"))), False, "parameter 'weight' cannot be read"),
    "swapped in the model only": (patch(lambda mp, p: mp.setitem(p.model._parameters, "weight", torch.nn.Parameter(torch.zeros(5, 4)))), True, ""),
    "another dict of overrides": (other_overrides(dict), True, ""),
    "another type of overrides": (other_overrides(collections.OrderedDict), True, ""),
    "another dict with another parameter": (other_overrides(lambda d: d | {"weight": torch.nn.Parameter(torch.zeros(5, 4))}), False, "is of shape (5, 4)"),
    "no dict of overrides": (patch(lambda mp, p: [mp.delitem(vars(cm), "_overrides_parameters") for cm in p.cms]), False, ""),
    "get_parameter of the instance": (patch(lambda mp, p: [mp.setitem(vars(cm), "get_parameter", lambda name: torch.zeros(())) for cm in p.cms]), False, ""),
    "get_parameter of the class": (patch(lambda mp, p: mp.setattr(ThunderModule, "get_parameter", lambda self, name: torch.zeros(()))), False, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", TENSOR_CHANGES)
def test_tensors(name):
    with pair_of(Tensors) as pair:
        change, accepted, message = TENSOR_CHANGES[name]
        if accepted is None:
            with pytest.raises(RuntimeError), change(pair):
                pass
            pair.check()
            return
        exercise(pair, change, accepted, message)


GRAD_CHANGES = ("frozen", "unfrozen", "buffer requires grad", "buffer in a graph", "swap_tensors, frozen", "strides")


@pytest.mark.parametrize("name", GRAD_CHANGES)
def test_tensors_under_grad(name):
    with pair_of(Tensors, grad=True) as pair:
        exercise(pair, *TENSOR_CHANGES[name])
        # Made in one mode, asked in another: refused by the inputs' part of the prologue, whatever the guard says.
        change, *_ = TENSOR_CHANGES[name]
        for _ in range(3):
            pair.check(False, grad=False)
            with change(pair):
                pair.check(False, grad=False)
            pair.check()


#
# Global state, inputs, cache entries
#


@contextlib.contextmanager
def default(setter, value, old):
    setter(value)
    try:
        yield
    finally:
        setter(old)


def set_default_device(device):
    torch.set_default_device(device)
    try:
        torch.get_default_device()
    except AttributeError:  # torch 2.7.1, where this fails, also in Thunder, once the device was unset
        del torch._GLOBAL_DEVICE_CONTEXT.device_context


def sees_device_contexts():
    """Whether ``torch.get_default_device()``, which is what Thunder checks, does: that of torch 2.7.1 does not."""
    with torch.device("meta"):
        return torch.get_default_device().type == "meta"


GLOBAL_CHANGES = {
    "grad": (lambda _: contextlib.nullcontext(), False, "", True),
    "inference_mode": (lambda _: torch.inference_mode(), True, ""),
    "autocast": (lambda _: torch.autocast("cpu", torch.bfloat16), False, ""),
    "autocast that is off": (lambda _: torch.autocast("cpu", torch.bfloat16, enabled=False), True, ""),
    "default device": (lambda _: default(set_default_device, "meta", None), False, ""),
    "device context": (lambda _: torch.device("meta"), not sees_device_contexts(), ""),
    "same default device": (lambda _: default(set_default_device, "cpu", None), True, ""),
    "default dtype": (lambda _: default(torch.set_default_dtype, torch.float64, torch.float32), False, ""),
}


@pytest.mark.parametrize("name", GLOBAL_CHANGES)
def test_global_state(name):
    with pair_of(Tensors) as pair:
        exercise(pair, *GLOBAL_CHANGES[name])
        with GLOBAL_CHANGES[name][0](pair):  # the guard is renewed in that state
            with TENSOR_CHANGES["another parameter, dtype"][0](pair):
                pair.check(False)
            pair.check(GLOBAL_CHANGES[name][1], grad=name == "grad")
            with TENSOR_CHANGES["frozen"][0](pair):
                pair.check(False)
        exercise(pair, *TENSOR_CHANGES["data of another dtype"])


INPUTS = {
    "equal": (lambda: torch.zeros(3, 4), True),
    "strides": (lambda: torch.zeros(4, 3).t(), True),
    "parameter": (lambda: torch.nn.Parameter(torch.zeros(3, 4), requires_grad=False), True),
    "subclass": (lambda: torch.zeros(3, 4).as_subclass(OtherTensor), True),
    "shape": (lambda: torch.zeros(5, 4), False),
    "dims": (lambda: torch.zeros(4), False),
    "dtype": (lambda: torch.zeros(3, 4, dtype=torch.float64), False),
    "meta": (lambda: torch.zeros(3, 4, device="meta"), False),
    "requires_grad": (lambda: torch.zeros(3, 4, requires_grad=True), False),
    "number": (lambda: 1.0, False),
    "none": (lambda: None, False),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs(name):
    make, accepted = INPUTS[name]
    with pair_of(Tensors) as pair:
        for _ in range(2):
            pair.check()
            pair.check(accepted, args=(make(),))
        pair.check(False, args=())
        pair.check(False, args=(make(), make()))


class Options(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)

    def forward(self, x, *rest, scale=1.0, flag=None, extra=None):
        x = self.fc(x) * scale
        if extra is not None:
            x = x + extra["a"][0]
        return torch.relu(x) if flag else x + len(rest)


@one_way
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"scale": 2.0}, {"scale": math.nan}, {"flag": True}, {"extra": {"a": [torch.ones(4), 1]}}],
    ids=("none", "number", "NaN", "bool", "nested"),
)
def test_keyword_inputs(kwargs):
    pair = Pair(Options(), torch.randn(3, 4), **kwargs)
    given = [{}, {"scale": 2.0}, {"scale": 2}, {"scale": float("nan")}, {"scale": math.inf}, {"scale": "2"}]
    given += [{"flag": True}, {"flag": 1}, {"flag": False}, {"flag": "yes"}, {"scale": 2.0, "flag": True}]
    given += [{"extra": {"a": [torch.zeros(size), n]}} for size in (4, 5) for n in (1, 2)]
    for pair.kwargs in (kwargs, *given, kwargs):
        pair.check(str(pair.kwargs).replace("0.", "1.") == str(kwargs))
    with change("fc.training", False)(pair):
        pair.check(False)


ARGUMENT_NAMES = (
    "module_values", "module_values1", "read_and_check_modules", "type", "len", "int", "float", "Tensor", "cpu", "fn",
    "input", "shape", "range", "str",
)  # fmt: skip


@one_way
@pytest.mark.parametrize("name", ARGUMENT_NAMES)
def test_names_of_arguments(name):
    namespace = {}
    exec(f"def forward(self, {name}, scale=3):\n    return self.fc({name}) * scale", namespace)
    model = type("Model", (torch.nn.Module,), namespace)()
    model.fc = torch.nn.Linear(4, 4)
    cm, x = jit(model), torch.randn(3, 4)
    with torch.no_grad():
        for misses, scale in ((1, 3), (1, 3), (2, 2.0), (2, 3), (2, 2.0)):
            torch.testing.assert_close(cm(x, scale), model(x, scale))
            assert thunder.cache_misses(cm) == misses


def test_several_cache_entries_have_guards_of_their_own():
    inputs = [torch.randn(n, 4) for n in (1, 2, 3)]
    pair = Pair(Options(), inputs[0])
    for x in inputs[1:]:
        pair.compile(x)
    for changed in (None, "training", None, "fc.training", "weight", None):
        context = contextlib.nullcontext()
        if changed == "weight":
            context = overridden("fc.weight", lambda _: torch.zeros(()))(pair)
        elif changed is not None:
            context = change(changed, False)(pair)
        with context:
            for _ in range(3):
                for i, x in enumerate(inputs):
                    pair.check(changed is None, entry=i, args=(x,))
                    if changed is None:
                        pair.check(False, entry=i, args=(inputs[i - 1],))


def same_calls(fn, steps, *transforms, make_input=lambda: torch.randn(3, 4)):
    """Calls what is compiled with and without, in all the states, and demands as many cache hits of both."""
    reference, cm = thunder.jit(fn, transforms=list(transforms)), jit(fn, *transforms)
    for step in steps:
        step()
        x = make_input()
        for _ in range(3):
            torch.testing.assert_close(cm(x), reference(x))
            assert thunder.cache_misses(cm) == thunder.cache_misses(reference)
    return cm


@two_ways
@torch.no_grad()
def test_models_in_closures():
    first, second, unused = (torch.nn.Linear(4, 4) for _ in range(3))
    scale = 2.0

    def fn(x):
        return second(torch.relu(first(x))) * scale

    steps = (
        lambda: None,
        lambda: second.train(False),
        lambda: second.train(),
        lambda: first.weight.requires_grad_(False),
        lambda: setattr(second.bias, "data", torch.zeros(4)),
        lambda: setattr(first, "weight", torch.nn.Parameter(torch.ones(4, 4))),
        lambda: unused.train(False),
    )
    cm = same_calls(fn, steps)
    assert thunder.cache_misses(cm) == 3
    torch.testing.assert_close(cm(torch.ones(3, 4)), fn(torch.ones(3, 4)))


@two_ways
@torch.no_grad()
def test_closure_cell_gets_another_model():
    model = torch.nn.Linear(4, 4)

    def fn(x):
        return model(x)

    cm, x = jit(fn), torch.randn(3, 4)
    reference = thunder.jit(fn)
    for new in (model, torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).eval(), model, torch.nn.Identity()):
        model = new
        for _ in range(2):
            assert torch.equal(cm(x), reference(x))
            assert thunder.cache_misses(cm) == thunder.cache_misses(reference)


@two_ways
@torch.no_grad()
def test_model_at_the_address_of_another():
    models = [torch.nn.Linear(4, 4).requires_grad_(False)]

    def fn(x):
        return models[0](x)

    cm, reference, x = jit(fn), thunder.jit(fn), torch.randn(3, 4)
    for bias in (True, False, True) * 3:
        models.clear()
        models.append(torch.nn.Linear(4, 4, bias=bias).requires_grad_(False).eval())
        for _ in range(2):
            assert torch.equal(cm(x), reference(x))
            assert thunder.cache_misses(cm) == thunder.cache_misses(reference)


@two_ways
@torch.no_grad()
def test_thunder_module_in_a_function():
    inner = jit(torch.nn.Linear(4, 4))

    def fn(x):
        return inner(x) * 2

    x = torch.randn(3, 4)
    inner(x)
    steps = (lambda: None, lambda: inner._model.train(False), lambda: inner._model.train())
    cm = same_calls(fn, steps)
    torch.testing.assert_close(cm(x), inner._model(x) * 2)
    inner._overrides_parameters["weight"] = torch.nn.Parameter(torch.zeros(4, 4))
    reference = thunder.jit(fn)
    torch.testing.assert_close(cm(x), reference(x))


@one_way
@pytest.mark.parametrize("fn", (torch.nn.ReLU(), torch.relu, lambda x: x * 2), ids=("ReLU", "relu", "lambda"))
def test_without_parameters_or_modules(fn):
    model = fn if isinstance(fn, torch.nn.Module) else torch.nn.Module()
    cm = same_calls(fn, (lambda: None, lambda: model.train(False), lambda: model.train()))
    assert thunder.cache_misses(cm) == 1 or isinstance(fn, torch.nn.Module)


@two_ways
@torch.no_grad()
def test_batch_norm_in_training():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    other = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    other.load_state_dict(model.state_dict())
    cm, reference = jit(model), thunder.jit(other)
    for i in range(12):
        x = torch.randn(3, 4)
        torch.testing.assert_close(cm(x), reference(x))
        torch.testing.assert_close(cm.get_buffer("1.running_mean"), reference.get_buffer("1.running_mean"))
        assert cm.get_buffer("1.num_batches_tracked") == i + 1
    assert thunder.cache_misses(cm) == 1
    for training in (False, True, False):
        model.train(training), other.train(training)
        torch.testing.assert_close(cm(x), reference(x))
    assert thunder.cache_misses(cm) == thunder.cache_misses(reference) == 2
    replaced = torch.ones(4)
    for compiled_model in (cm, reference):
        compiled_model.set_buffer("1.running_mean", replaced)
    torch.testing.assert_close(cm(x), reference(x))
    assert thunder.cache_misses(cm) == 2


@one_way
@pytest.mark.parametrize("cache", ("no caching", "symbolic values"))
def test_cache_options(cache):
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.ReLU()).eval()
    cm = jit(model, cache=cache)
    for n in (3, 5, 3):
        x = torch.randn(n, 4)
        torch.testing.assert_close(cm(x), model(x))


#
# Composition
#


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)
        self.gain = torch.nn.Parameter(torch.randn(4))
        self.register_buffer("offset", torch.ones(4))
        self.scale = 2.0

    def forward(self, x):
        return self.fc(x) * self.gain * self.scale + self.offset


class Custom(Transform):
    """Leaves out the checks of one attribute, as a transform that edits the prologue may."""

    def transform_traces_pre_prologue(self, prologue_trace, computation_trace, epilogue_trace, **kwargs):
        new = thunder.core.trace.from_trace(prologue_trace)
        scales = [
            bsym.output.name for bsym in prologue_trace.bound_symbols if bsym.args[1:] == ("scale",) and bsym.output
        ]
        new.bound_symbols = [
            bsym
            for bsym in prologue_trace.bound_symbols
            if bsym.flat_proxy_outs or not bsym.args or getattr(bsym.args[0], "name", None) not in scales
        ]
        return new, computation_trace, epilogue_trace


COMPOSED = {
    "alone": (list, {"training", "scale", "dtype"}),
    "ExtractionOnly": (lambda: [ExtractionOnlyPrologueTransform()], {"training", "scale"}),
    "PrunePrologueChecks": (lambda: [PrunePrologueChecks()], set()),
    "PrunePrologueChecks, all": (lambda: [PrunePrologueChecks(prune_all_checks=True)], set()),
    "custom": (lambda: [Custom()], {"training", "dtype"}),
}
STATES = {
    "training": lambda model: model.fc.train(False),
    "scale": lambda model: setattr(model, "scale", 3.0),
    "dtype": lambda model: setattr(model.offset, "data", torch.ones(4, dtype=torch.float64)),
}


@one_way
@pytest.mark.parametrize("last", (True, False), ids=("last", "first"))
@pytest.mark.parametrize("name", COMPOSED)
def test_composition(name, last):
    make, noticed = COMPOSED[name]
    model, x, y = Net(), torch.randn(3, 4), torch.randn(5, 4)
    transforms = [*make(), FusedPrologueTransform()] if last else [FusedPrologueTransform(), *make()]
    cm, reference = thunder.jit(model, transforms=transforms), thunder.jit(model, transforms=make())
    with torch.no_grad():
        for state, apply in STATES.items():
            for _ in range(2):
                torch.testing.assert_close(cm(x), reference(x))
            before = thunder.cache_misses(cm)
            apply(model)
            for _ in range(2):
                torch.testing.assert_close(cm(x), reference(x))
            assert thunder.cache_misses(cm) == before + (state in noticed)
        if name != "PrunePrologueChecks, all":
            torch.testing.assert_close(cm(y), reference(y))
    assert thunder.cache_misses(cm) == thunder.cache_misses(reference)
    for entry in cm._lc_cs.interpreter_cache:
        assert str(entry.prologue_traces[-1]).count("= read_and_check_modules(") == 1


@one_way
@pytest.mark.parametrize("order", ("fused, lora", "lora, fused", "fused, extraction, lora", "extraction, lora, fused"))
def test_composition_with_lora(order):
    make = {"fused": FusedPrologueTransform, "lora": lambda: LORATransform(r=2), "extraction": ExtractionOnlyPrologueTransform}  # fmt: skip
    transforms = [make[name]() for name in order.split(", ")]
    torch.manual_seed(0)
    model = Net()
    cm = thunder.jit(model, transforms=transforms)
    torch.manual_seed(0)
    reference = thunder.jit(Net(), transforms=[LORATransform(r=2)])
    torch.nn.init.ones_(cm.get_parameter("fc.weight.lora_b"))
    reference._overrides_parameters.update(cm._overrides_parameters)
    # more than one cache entry: the list of transforms is used again for each
    for misses, n in ((1, 3), (1, 3), (2, 5), (2, 3)):
        torch.testing.assert_close(cm(torch.ones(n, 4)), reference(torch.ones(n, 4)))
        assert thunder.cache_misses(cm) == misses
        assert str(thunder.last_prologue_traces(cm)[-1]).count("= read_and_check_modules(") == 1
    model.scale = 3.0
    cm(torch.ones(3, 4))
    assert thunder.cache_misses(cm) == 3


@one_way
def test_one_list_of_transforms_for_two_models():
    transforms = [FusedPrologueTransform(), ExtractionOnlyPrologueTransform()]
    x = torch.randn(3, 4)
    for _ in range(2):
        model = Net()
        cm = thunder.jit(model, transforms=transforms)
        for n in (3, 3, 5):
            torch.testing.assert_close(cm(torch.ones(n, 4)), model(torch.ones(n, 4)))
        model.eval()
        torch.testing.assert_close(cm(x), model(x))
        assert thunder.cache_misses(cm) == 3
        assert str(thunder.last_prologue_traces(cm)[-1]).count("= read_and_check_modules(") == 1


@one_way
def test_transforms_that_cannot_be_appended_to():
    cm = thunder.jit(Net(), transforms=(FusedPrologueTransform(), Custom()))
    with pytest.raises(RuntimeError, match=r"FusedPrologueTransform .*\bCustom\b"):
        cm(torch.randn(3, 4))
    cm = thunder.jit(Net(), transforms=(Custom(), FusedPrologueTransform()))
    cm(torch.randn(3, 4))


@one_way
def test_prints_short():
    model = torch.nn.Sequential(*(Net() for _ in range(8)))
    cm = jit(model)
    with torch.no_grad():
        cm(torch.randn(3, 4))
    *_, replaced, _, last = thunder.last_prologue_traces(cm)
    assert len(str(last).splitlines()) < 40
    for trace in thunder.last_prologue_traces(cm):
        ast.parse(str(trace))
    assert "reads 24 parameters and 8 buffers, checks the metadata of 32" in str(last)
    assert str(replaced).count("get_parameter(") == 24
    assert str(replaced).count("check_tensor_shape_and_metadata(") == 33


@one_way
def test_explains_when_the_source_is_no_longer_cached():
    with pair_of(Tensors) as pair:
        pair.check()
        with change("training", True)(pair):
            linecache.clearcache()
            pair.check(False)


@one_way
def test_docstring_example():
    failures, attempted = doctest.testmod(fused_prologue)
    assert attempted and not failures


#
# Lifetimes, threads, processes
#


def collected(transforms, name):
    """What is freed as soon as the compiled function is deleted, and then the model, without the garbage collector."""
    x = torch.randn(3, 4)
    model = Net()
    cm = thunder.jit(model, transforms=transforms)
    for n in (3, 3, 3, 5, 5) if name == "as compiled" else (3, 3, 3):
        cm(torch.randn(n, 4))
    LIFETIMES[name](model, cm, x)
    gc.collect()  # compiling leaves cycles behind
    refs = [weakref.ref(o) for o in (cm, cm._lc_cd, cm._lc_cs, model.fc, model.fc.weight, model.offset, model)]
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        del model.fc, cm
        after_compiled = [ref() is None for ref in refs]
        del model
        return after_compiled, [ref() is None for ref in refs]
    finally:
        if was_enabled:
            gc.enable()


LIFETIMES = {
    "as compiled": lambda model, cm, x: None,
    "refused": lambda model, cm, x: (model.train(False), cm(x), cm(x), model.train(), cm(x)),
    "churn": lambda model, cm, x: [(setattr(model, "unrelated", i), cm(x)) for i in range(8)],
    "another dict": lambda model, cm, x: (setattr(model, "__dict__", dict(vars(model))), cm(x), cm(x)),
}


@functools.cache
def collected_without(name):
    return collected([], name)


@two_ways
@pytest.mark.parametrize("name", LIFETIMES)
@torch.no_grad()
def test_is_collected_as_promptly_as_without(name):
    expected = collected_without(name)
    assert expected[1][-1], "Thunder itself needs the garbage collector"
    assert collected([FusedPrologueTransform()], name) == expected


@two_ways
def test_replaced_parameters_are_not_kept_alive():
    model, x, y = Net(), torch.randn(3, 4), torch.randn(5, 4)
    cm = jit(model)
    for args in (x, x, y, y):
        cm(args)
    gc.collect()
    gc.disable()
    try:
        refs = [weakref.ref(model.fc.weight), weakref.ref(model.offset), weakref.ref(model.gain)]
        new = torch.nn.Parameter(torch.zeros(4, 4))
        model.fc.weight = cm._overrides_parameters["fc.weight"] = new
        model.gain = cm._overrides_parameters["gain"] = torch.nn.Parameter(torch.zeros(4))
        model.offset = torch.zeros(4)
        cm.set_buffer("offset", model.offset)
        del new
        assert [ref() for ref in refs] == [None] * 3
        cm(x)
        refs = [weakref.ref(model.fc.weight)]
        del model.fc.weight, cm._overrides_parameters["fc.weight"]
        assert refs[0]() is None
    finally:
        gc.enable()


def test_threads():
    """Two threads run the prologue of the same cache entry while a third toggles what it checks."""
    model, cm = compiled(Tensors)
    pair = Pair(model, torch.randn(3, 4), cm=cm)
    _, fused = pair.prologues[0]
    with torch.no_grad():
        accepted = run(fused, cm, *pair.args)
    results, errors, stop = collections.Counter(), [], threading.Event()

    def call():
        try:
            with torch.no_grad():
                while not stop.is_set():
                    result = run(fused, cm, *pair.args)
                    results[type(result)] += 1
                    assert type(result) in (tuple, RuntimeError, AssertionError), repr(result)
                    assert type(result) is not tuple or is_same(accepted, result, [cm])
        except BaseException as e:
            errors.append(e)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=call) for _ in range(2)]
    weight = model.weight
    try:
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 0.5
        for i in range(10**6):
            model.training = bool(i % 2)
            model.unrelated = i
            cm._overrides_parameters["unrelated"] = i
            if i % 50 == 0:
                with torch.no_grad():
                    weight.requires_grad_(False)
                    model.training = False
                    # What holds before and after the call holds for it, whatever the other threads do.
                    assert type(run(fused, cm, *pair.args)) is AssertionError
                    weight.requires_grad_(True)
                    assert type(run(fused, cm, *pair.args)) is tuple
                    model.training = True
                    assert type(run(fused, cm, *pair.args)) is RuntimeError
            if errors or time.monotonic() > deadline:
                break
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
        model.training = False
        weight.requires_grad_(True)
        del model.unrelated, cm._overrides_parameters["unrelated"]
    assert not errors, errors
    assert len(results) >= 2  # it was accepted and refused
    pair.check()


@pytest.mark.parametrize("few", (0, 10**6), ids=("by version", "looked at"))
def test_a_submodule_that_comes_from_the_model_itself(few, monkeypatch):
    """The ThunderModule reads it there when it has none of its own. Found by the fuzzer."""
    monkeypatch.setattr(fused_prologue, "_FEW", few)
    model = torch.nn.Sequential(torch.nn.Sequential(Scaled()), torch.nn.Linear(4, 4)).eval()
    pair = Pair(model, torch.randn(3, 4))
    (cm,) = pair.cms
    pair.check()
    with pytest.MonkeyPatch.context() as patches:
        patches.delitem(cm._module_cache, "0.0")
        pair.check(times=3)
        with pytest.MonkeyPatch.context() as more:
            more.delitem(model[0]._modules, "0")
            pair.check(accepted=False)
        pair.check()
    pair.check()


MEANWHILE = {
    "attribute": change("training", True),
    "requires_grad": requires_grad("weight", False),
    "dtype": data("weight", torch.Tensor.double),
    "shape": data("offset", lambda t: t[:1].clone()),
    "device": swapped("offset", lambda t: torch.zeros(4, device="meta")),
    "parameter": overridden("weight", lambda t: torch.nn.Parameter(t.detach().double())),
}


@pytest.mark.parametrize("few", (0, 10**6), ids=("by version", "looked at"))
@pytest.mark.parametrize("name", MEANWHILE)
def test_a_change_that_is_undone_while_all_is_checked(name, few, monkeypatch):
    """As another thread can do it. The state before and after, which is the same, must not be remembered as accepted."""
    monkeypatch.setattr(fused_prologue, "_FEW", few)
    change = MEANWHILE[name]
    with pair_of(Tensors) as pair:
        _, fused = pair.prologues[0]
        (guard,) = (g for g in fused.__globals__.values() if isinstance(g, fused_prologue._ModuleGuard))
        pair.check()
        with contextlib.ExitStack() as changed:
            changed.enter_context(change(pair))
            check_all = guard._read_and_check_all

            def undone_meanwhile(*roots):
                changed.pop_all().close()
                try:
                    return check_all(*roots)
                finally:
                    changed.enter_context(change(pair))

            guard._read_and_check_all = undone_meanwhile
            with torch.no_grad():
                for _ in range(3):
                    assert type(run(fused, pair.cms[0], *pair.args)) is tuple
            guard._read_and_check_all = check_all
            pair.check(accepted=False)
        pair.check()


@two_ways
@torch.no_grad()
def test_threads_call_the_compiled_model():
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), Scaled()), torch.randn(3, 4)
    cm = jit(model)
    with torch.no_grad():
        right = [(model.train(training), cm(x), cm(x))[-1] for training in (True, False)]
    assert not torch.equal(*right)
    misses, results, errors = thunder.cache_misses(cm), [], []

    def call():
        try:
            with torch.no_grad():
                for _ in range(100):
                    results.append(cm(x))
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    flags = model[1].__dict__
    for i in range(100):
        flags["training"] = bool(i % 2)
        time.sleep(1e-4)
    for thread in threads:
        thread.join()
    # The two cache entries are tried one after the other, so that a toggle in between may be seen by none.
    assert all("compiled for" in str(e) for e in errors)
    assert all(any(torch.equal(result, value) for value in right) for result in results)
    assert results and thunder.cache_misses(cm) >= misses


class Scaled(torch.nn.Module):
    def forward(self, x):
        return x * 2 if self.training else x


SCRIPT = """
import os, torch, thunder
from thunder.transforms.fused_prologue_transform import FusedPrologueTransform
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
cm, x = thunder.jit(model, transforms=[FusedPrologueTransform()]), torch.randn(3, 4)
for _ in range(3):
    cm(x).sum().backward()
if hasattr(os, "fork"):
    child = os.fork()
    if not child:
        cm(x)
        model.eval()
        cm(x), cm(x)
        os._exit(thunder.cache_misses(cm) - 2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert thunder.cache_misses(cm) == 1
cm(x)
print("done")
"""


@one_way
def test_fork_and_interpreter_exit():
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, env=environment, check=False
    )
    assert (process.returncode, process.stdout) == (0, "done\n"), process.stderr
