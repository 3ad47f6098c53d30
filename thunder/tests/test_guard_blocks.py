import doctest
import itertools
import os
import subprocess
import sys

import pytest
import torch

from thunder.core import guard_blocks as blocks
from thunder.core.guard_blocks import Blocks, Versions, available_blocks

found = available_blocks()
needs_dicts = pytest.mark.skipif(not found.dict_versions, reason="dict versions are not to be trusted here")
needs_instances = pytest.mark.skipif(not found.instance_versions, reason="dict versions miss obj.attr = value here")


def fresh_blocks(monkeypatch):
    """What is found when probing starts anew."""
    monkeypatch.setattr(blocks, "available_blocks", available_blocks.__wrapped__)
    return blocks.available_blocks()


#
# Attributes and dicts
#


class Plain:
    shared = 1.0

    def __init__(self):
        self.training, self.gain = True, 2.0


class Module(torch.nn.Module):
    shared = 1.0

    def __init__(self):
        super().__init__()
        self.gain = 2.0


class Slotted:
    __slots__ = ("gain",)

    def __init__(self):
        self.gain = 2.0


class SlottedWithDict(Slotted):
    pass


class WithProperty(Plain):
    @property
    def factor(self):
        return self.gain

    def method(self):
        pass


class WithGetattr(Plain):
    def __getattr__(self, name):
        return 3.0


class WithGetattribute(Plain):
    def __getattribute__(self, name):
        return object.__getattribute__(self, name)


class WithDescriptor(Plain):
    class Descriptor:
        def __get__(self, obj, cls):
            return 5.0

    computed = Descriptor()


@pytest.mark.parametrize(
    "obj, name, expected",
    [
        (Plain(), "gain", True),
        (Plain(), "shared", True),
        (Module(), "training", True),
        (Module(), "shared", True),
        (SlottedWithDict(), "gain", False),
        (Slotted(), "gain", False),
        (WithProperty(), "factor", False),
        (WithProperty(), "method", False),
        (WithProperty(), "gain", True),
        (WithGetattr(), "gain", True),
        (WithGetattr(), "made_up", False),
        (WithGetattribute(), "gain", False),
        (WithDescriptor(), "computed", False),
        (Plain(), "missing", False),
        (Plain(), "__dict__", False),
        (Plain, "shared", False),
        (torch, "float32", False),
        (1.0, "real", False),
        (torch.zeros(1), "shape", False),
    ],
)
def test_is_plain_attribute(obj, name, expected):
    assert blocks.is_plain_attribute(obj, name) is expected


def test_an_instance_attribute_hides_what_is_no_data_descriptor():
    obj = WithDescriptor()
    vars(obj)["computed"] = 1.0
    assert blocks.is_plain_attribute(obj, "computed") and obj.computed == 1.0
    hidden = WithProperty()
    vars(hidden)["factor"] = 1.0
    assert not blocks.is_plain_attribute(hidden, "factor") and hidden.factor == 2.0


def new_class(base):
    """A class, and a base of it, that a test may change."""
    return type("Class", (type("Base", (base,), {}),), {})


CHANGES = {
    "set": lambda obj: setattr(obj, "gain", 3.0),
    "set to another type": lambda obj: setattr(obj, "gain", 2),
    "deleted": lambda obj: delattr(obj, "gain"),
    "object.__setattr__": lambda obj: object.__setattr__(obj, "gain", 3.0),
    "object.__delattr__": lambda obj: object.__delattr__(obj, "gain"),
    "item of __dict__": lambda obj: vars(obj).__setitem__("gain", 3.0),
    "item of __dict__ deleted": lambda obj: vars(obj).pop("gain"),
    "__dict__ updated": lambda obj: vars(obj).update(gain=3.0),
    "__dict__ cleared": lambda obj: vars(obj).clear(),
    "another __dict__": lambda obj: setattr(obj, "__dict__", {"gain": 3.0}),
    "class attribute shadowed": lambda obj: setattr(obj, "shared", 3.0),
    "class attribute": lambda obj: setattr(type(obj), "shared", 3.0),
    "property added": lambda obj: setattr(type(obj), "gain", property(lambda self: 3.0)),
    "property added to a base": lambda obj: setattr(type(obj).__mro__[1], "gain", property(lambda self: 3.0)),
    "__getattribute__ added": lambda obj: setattr(type(obj), "__getattribute__", lambda self, name: 3.0),
    "another class": lambda obj: setattr(obj, "__class__", type("Other", type(obj).__mro__[:1], {"gain": property(lambda self: 3.0)})),
    "other bases": lambda obj: setattr(type(obj), "__bases__", (type("Other", type(obj).__mro__[1:2], {"shared": 3.0}),)),
}  # fmt: skip


def read(obj):
    return [getattr(obj, name, None) for name in ("gain", "shared")]


@pytest.mark.parametrize("base", (Plain, Module))
@pytest.mark.parametrize("name", CHANGES)
def test_poll_attributes(name, base):
    obj, other = new_class(base)(), Plain()
    unchanged = blocks.poll_attributes([(other, "gain"), (obj, "gain"), (obj, "shared")])
    assert unchanged() and unchanged()
    CHANGES[name](obj)
    assert not unchanged() and not unchanged()
    assert blocks.poll_attributes([(other, "gain")])()


@needs_instances
@pytest.mark.parametrize("base", (Plain, Module))
@pytest.mark.parametrize("name", CHANGES)
def test_versions_of_objects(name, base):
    obj, others = new_class(base)(), [Plain(), Module()]
    assert vars(obj) and blocks.is_versioned(obj)
    versions = Versions([others[0], obj, others[1]])
    before, unchanged = read(obj), versions.guard()
    for _ in range(3):
        assert unchanged() and versions.changed(unchanged) == ([], [])
        [read(o) for o in (obj, *others)]
    CHANGES[name](obj)
    assert read(obj) != before or name == "set to another type"
    assert not unchanged() and not unchanged()
    objects, dicts = versions.changed(unchanged)
    assert all(o is obj for o in objects) and not dicts


@needs_instances
def test_an_object_whose_dict_nobody_has_asked_for_is_versioned():
    assert blocks.is_versioned(new_class(Plain)())


@needs_instances
def test_versions_name_what_has_changed():
    objects, dicts = [Plain() for _ in range(3)], [{"a": 1}, {"b": 2}]
    versions = Versions(objects, (), dicts)
    unchanged = versions.guard()
    objects[1].gain = 3.0
    assert versions.changed(unchanged) == ([objects[1]], [])
    dicts[0]["a"] = 2
    changed = versions.changed(unchanged)
    assert changed[0] == [objects[1]] and len(changed[1]) == 1 and changed[1][0] is dicts[0]
    objects[2].gain = 4.0
    assert versions.changed(unchanged)[0] == objects[1:]
    renewed = versions.guard()
    assert renewed() and not unchanged()
    assert versions.changed(renewed) == ([], [])


@needs_instances
def test_versions_of_classes_alone():
    class Other:
        pass

    versions = Versions([], [Other])
    unchanged = versions.guard()
    assert unchanged()
    Other.attribute = 1
    assert not unchanged() and not versions.classes_are_unchanged()
    assert versions.guard() is None
    assert Versions([], [Other]).guard()()


@needs_instances
def test_versions_keep_what_they_look_at():
    obj, d = Plain(), {"a": 1}
    versions = Versions([obj], (), [d])
    unchanged = versions.guard()
    count = sys.getrefcount(d)
    del versions
    assert unchanged() and sys.getrefcount(d) == count
    address = id(d)
    del obj, d
    made = [{"a": i} for i in range(100)]
    assert address not in map(id, made) and unchanged()


@pytest.mark.parametrize("obj", (Slotted(), 1.0, Plain), ids=("slots", "float", "class"))
def test_objects_that_have_no_version(obj):
    assert not blocks.is_versioned(obj)


@needs_instances
def test_an_object_whose_dict_is_made_up_has_no_version():
    class Odd:
        __dict__ = property(lambda self: {"gain": 1.0})

    assert not blocks.is_versioned(Odd())


def test_nothing_is_versioned_where_versions_are_not_trusted(monkeypatch):
    monkeypatch.setattr(blocks, "available_blocks", Blocks)
    assert not blocks.is_versioned(Plain())


DICT_CHANGES = {
    "set": lambda d: d.__setitem__("a", object()),
    "new": lambda d: d.__setitem__("c", 1),
    "deleted": lambda d: d.__delitem__("a"),
    "pop": lambda d: d.pop("a"),
    "popitem": lambda d: (d.popitem(), d.popitem()),
    "clear": lambda d: d.clear(),
    "update": lambda d: d.update(a=object()),
    "|=": lambda d: d.__ior__({"a": object()}),
    "__init__": lambda d: d.__init__(a=object()),
}


@pytest.mark.parametrize("name", DICT_CHANGES)
def test_dicts(name):
    d, other = {"a": object(), "b": object()}, {"a": object()}
    guards = [blocks.poll_items([(other, "a"), (d, "a")])]
    if found.dict_versions:
        versions = Versions((), (), [other, d])
        guards.append(versions.guard())
    assert all(unchanged() and unchanged() for unchanged in guards)
    DICT_CHANGES[name](d)
    if name != "new":
        assert not guards[0]()
    if found.dict_versions:
        assert not guards[1]()
        ((changed,),) = versions.changed(guards[1])[1:]
        assert changed is d


#
# Tensors
#


def torch_tensor_guard(tensors):
    return blocks._torch_tensor_guard(tensors)


def words_guard(tensors):
    return blocks._tensor_words_guard(tensors, found.layout)


GUARDS = {
    "portable": (blocks._portable_tensor_guard, True),
    "TensorGuards": (blocks._torch_tensor_guard, found.tensor_guards),
    "words": (words_guard, found.tensor_words),
}


@pytest.fixture(params=GUARDS)
def make_guard(request):
    make, is_found = GUARDS[request.param]
    if not is_found:
        pytest.skip("not to be trusted here")
    return make


def set_data(make):
    return lambda t: setattr(t, "data", make(t.data))


def swap(make):
    return lambda t: torch.utils.swap_tensors(t, make(t.detach().clone()))


def in_a_graph(t):
    with torch.enable_grad():
        t.mul_(torch.ones((), requires_grad=True))


TENSOR_CHANGES = {
    "requires_grad": lambda t: t.requires_grad_(not t.requires_grad),
    "in a graph": in_a_graph,
    "dtype": set_data(lambda d: d.double()),
    "dtype of the same size": set_data(lambda d: d.to(torch.int32)),
    "bool": set_data(lambda d: d.bool()),
    "shape": set_data(lambda d: torch.zeros(*d.shape[:-1], 9)),
    "first size": set_data(lambda d: torch.zeros(9, *d.shape[1:])),
    "transposed": set_data(lambda d: torch.zeros(*reversed(d.shape), 1)),
    "fewer dims": set_data(lambda d: d.sum()),
    "more dims": set_data(lambda d: d[None]),
    "many dims": set_data(lambda d: d[None, None, None, None, None]),
    "empty": set_data(lambda d: torch.zeros(0)),
    "swapped, dtype": swap(lambda d: d.double()),
    "swapped, meta": swap(lambda d: d.to("meta")),
    "swapped, requires_grad": swap(lambda d: d.requires_grad_()),
    "resize_": lambda t: t.resize_(7),
    "unsqueeze_": lambda t: t.unsqueeze_(0),
    "set_": lambda t: t.set_(torch.zeros(7)),
}  # fmt: skip
HARMLESS_CHANGES = {
    "values": lambda t: t.fill_(3.0),
    "data": set_data(lambda d: d.clone()),
    "gradient": lambda t: setattr(t, "grad", torch.zeros(t.shape)),
    "attribute": lambda t: setattr(t, "note", 1),
}
TENSORS = {
    "scalar": lambda: torch.zeros(()),
    "1 dim": lambda: torch.zeros(4),
    "2 dims": lambda: torch.zeros(3, 4),
    "5 dims": lambda: torch.zeros(2, 3, 1, 2, 4),
    "requires grad": lambda: torch.zeros(3, 4, requires_grad=True),
    "frozen again": lambda: torch.zeros(3, 4, requires_grad=True).requires_grad_(False),
    "parameter": lambda: torch.nn.Parameter(torch.zeros(3, 4)),
    "frozen parameter": lambda: torch.nn.Parameter(torch.zeros(3, 4), requires_grad=False),
}
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


def metadata(t):
    return type(t), t.shape, t.dtype, t.device, t.requires_grad


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("change", TENSOR_CHANGES | HARMLESS_CHANGES)
def test_tensor_guards(make_guard, change, tensor):
    others = [torch.zeros(2), torch.zeros(2, requires_grad=True)]
    for i, (made_in, asked_in) in itertools.product(range(3), itertools.product(MODES, MODES)):
        t = TENSORS[tensor]()
        tensors = [*others[:i], t, *others[i:]]
        with MODES[made_in]():
            unchanged = make_guard(tensors)
            assert unchanged(tensors) and unchanged(tensors)
        before = metadata(t)
        try:
            with torch.no_grad():
                (TENSOR_CHANGES | HARMLESS_CHANGES)[change](t)
        except RuntimeError:
            pytest.skip("torch does not allow this change of such a tensor")
        with MODES[asked_in]():
            if metadata(t) != before:
                assert not unchanged(tensors)
            elif made_in == asked_in and change in HARMLESS_CHANGES and change != "gradient":
                assert unchanged(tensors)


def test_changes_are_changes():
    """Each change makes a difference to the metadata of one kind of tensor at least, so that no test above is empty."""
    for name, apply in TENSOR_CHANGES.items():
        differs = False
        for make in TENSORS.values():
            t = make()
            before = metadata(t)
            try:
                with torch.no_grad():
                    apply(t)
            except RuntimeError:
                continue
            differs |= metadata(t) != before
        assert differs, name


def test_class_of_a_tensor(make_guard):
    class Other(torch.nn.Parameter):
        pass

    for t, cls in ((torch.zeros(2), torch.nn.Parameter), (torch.nn.Parameter(torch.zeros(2)), Other)):
        tensors = [torch.zeros(3), t]
        unchanged = make_guard(tensors)
        assert unchanged(tensors)
        t.__class__ = cls
        assert not unchanged(tensors)


def test_a_tensor_twice(make_guard):
    t, other = torch.zeros(2), torch.zeros(2)
    tensors = [t, other, t, t, other]
    unchanged = make_guard(tensors)
    assert unchanged(tensors)
    with torch.no_grad():
        t.resize_(3)
    assert not unchanged(tensors)


@pytest.mark.parametrize("with_torch", (False, True), ids=("portable", "TensorGuards"))
def test_other_tensors(with_torch, monkeypatch):
    """A guard that is not told that the tensors are the same looks at those that it is given."""
    guards = with_torch and found.tensor_guards
    monkeypatch.setattr(blocks, "available_blocks", lambda: found._replace(tensor_guards=guards))
    tensors = [torch.zeros(2), torch.zeros(3, 4)]
    unchanged = blocks.tensor_guard(tensors)
    assert unchanged([torch.ones(2), torch.ones(3, 4)])
    for other in (torch.zeros(4, 3), torch.zeros(3, 4).double(), torch.zeros(3, 4, requires_grad=True), torch.zeros(3, 4, device="meta"), torch.nn.Parameter(torch.zeros(3, 4), requires_grad=False)):  # fmt: skip
        assert not unchanged([tensors[0], other])


@pytest.mark.parametrize(
    "tensor, expected",
    [
        (torch.zeros(2), True),
        (torch.zeros(()), True),
        (torch.nn.Parameter(torch.zeros(1, 1, 1, 1, 1)), True),
        (torch.zeros(1, 1, 1, 1, 1, 1), False),
        (torch.nn.Buffer(torch.zeros(2)), True),
        (torch.nn.UninitializedParameter(), False),
        (torch.zeros(2).as_subclass(type("Other", (torch.Tensor,), {})), False),
        (torch.eye(2).to_sparse(), False),
        (torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8), False),
    ],
)
def test_are_guardable(tensor, expected):
    assert blocks.are_guardable([torch.zeros(1), tensor]) is expected


def test_nothing_to_guard():
    assert blocks.are_guardable([])
    assert blocks.poll_attributes([])() and blocks.poll_items([])()


#
# Which blocks are trusted
#


def test_what_is_found_here():
    assert found.tensor_guards or found.tensor_words
    if sys.version_info[:2] in ((3, 10), (3, 11), (3, 12)) and sys.implementation.name == "cpython":
        assert found.dict_versions and found.instance_versions and found.tensor_words
    if sys.version_info[:3] == (3, 13, 0):
        assert not found.instance_versions


def test_a_guard_that_always_says_yes_is_refused(monkeypatch):
    monkeypatch.setattr(blocks._MemoryGuard, "__call__", lambda self: True)
    probed = fresh_blocks(monkeypatch)
    assert not probed.dict_versions and not probed.instance_versions and not probed.tensor_words
    assert probed.tensor_guards == found.tensor_guards


def test_a_guard_that_always_says_no_is_refused(monkeypatch):
    monkeypatch.setattr(blocks._MemoryGuard, "__call__", lambda self: False)
    probed = fresh_blocks(monkeypatch)
    assert not probed.dict_versions and not probed.instance_versions and not probed.tensor_words


@pytest.mark.parametrize("answer", (True, False))
def test_tensor_guards_that_always_say_the_same_are_refused(monkeypatch, answer):
    class Same:
        def check(self, *tensors):
            return answer

    monkeypatch.setattr(blocks, "_make_torch_guard", lambda tensors: Same())
    probed = fresh_blocks(monkeypatch)
    assert not probed.tensor_guards
    assert probed.tensor_words == found.tensor_words


def tensor_guard_that_misses(kind):
    """TensorGuards that compares all but one kind of metadata."""

    def make(tensors):
        def describe(t):
            described = {
                "type": type(t), "shape": t.shape, "dtype": t.dtype, "device": t.device, "requires_grad": t.requires_grad,
            }  # fmt: skip
            described.pop(kind, None)
            return described

        expected = list(map(describe, tensors))

        class Guard:
            def check(self, *tensors):
                return list(map(describe, tensors)) == expected

        return Guard()

    return make


@pytest.mark.parametrize("kind", ("type", "shape", "dtype", "device", "requires_grad", "nothing"))
def test_tensor_guards_that_miss_a_change_are_refused(monkeypatch, kind):
    monkeypatch.setattr(blocks, "_make_torch_guard", tensor_guard_that_misses(kind))
    assert fresh_blocks(monkeypatch).tensor_guards == (kind == "nothing")


@pytest.mark.skipif(not found.tensor_words, reason="TensorImpl's words are not found here")
@pytest.mark.parametrize("field", ("implementation", "autograd", "sizes", "kind", "requires_grad"))
def test_words_that_miss_a_change_are_refused(monkeypatch, field):
    """A layout that is wrong in one place does not pass the probe."""
    # The first word of a Python object counts its references, that of a C++ object is its table of functions.
    wrong = {"implementation": 8, "autograd": 0, "sizes": 8, "kind": (0,), "requires_grad": (0,)}[field]
    layout = found.layout._replace(**{field: wrong})
    guard = blocks._tensor_words_guard
    if field in ("autograd", "implementation"):  # what is found there is not to be followed
        right = found.layout
        monkeypatch.setattr(blocks, "_find_layout", lambda: right)
        words = blocks._MemoryGuard._words
        dropped = getattr(right, field)

        def without(tensors, layout):
            checks = guard(tensors, layout)
            return lambda tensors, checks=checks: all(
                g() for i, g in enumerate(checks.__defaults__[1:]) if i != (field == "autograd")
            )

        monkeypatch.setattr(blocks, "_tensor_words_guard", without)
        assert dropped and words
    else:
        monkeypatch.setattr(blocks, "_find_layout", lambda: layout)
    assert not fresh_blocks(monkeypatch).tensor_words


@needs_instances
@pytest.mark.parametrize("stale", ("dict", "slot", "type", "class"))
def test_versions_that_miss_a_change_are_refused(monkeypatch, stale):
    """Versions that do not look at one kind of word do not pass the probe."""

    class Stale(Versions):
        def guard(self):
            n = len(self.objects)
            fixed = self._fixed
            if n:
                slots = slice(len(fixed) - 2 * n, len(fixed) - n)
                types = slice(len(fixed) - n, len(fixed))
                wrong = {"slot": slots, "type": types, "class": slice(0, len(fixed) - 2 * n)}.get(stale)
                if wrong is not None:
                    self._fixed = fixed.copy()
                    self._fixed[wrong] = id(None) // 8 * 8 + 8  # the type of None stays what it is
            made = super().guard()
            self._fixed = fixed
            if n and stale == "dict":
                indices = made._indices.copy()
                indices[-n:] = indices[-n - 1]
                made._indices = indices
                made._expected = made._words()
            return made

    monkeypatch.setattr(blocks, "Versions", Stale)
    probed = fresh_blocks(monkeypatch)
    assert probed.dict_versions and not probed.instance_versions


def test_a_probe_that_fails_leaves_the_portable_ones(monkeypatch):
    def fail():
        raise OSError("no memory to look at")

    monkeypatch.setattr(blocks, "_find_layout", fail)
    with pytest.warns(UserWarning, match="no private building blocks.*no memory to look at"):
        assert fresh_blocks(monkeypatch) == Blocks()


@pytest.mark.parametrize("value, is_portable", (("1", True), ("yes", True), ("0", False)))
def test_portable_variable(monkeypatch, value, is_portable):
    monkeypatch.setenv(blocks.PORTABLE_VARIABLE, value)
    assert fresh_blocks(monkeypatch) == (Blocks() if is_portable else found)
    descriptions = blocks.describe_blocks()
    assert all(text.startswith("portable (THUNDER_PROLOGUE_PORTABLE") for text in descriptions.values()) is is_portable


@pytest.mark.parametrize(
    "available, attributes, tensors",
    [
        (found._replace(dict_versions=True, instance_versions=True, tensor_words=True), "dict versions", "words"),
        (found._replace(instance_versions=False, tensor_words=False, tensor_guards=True), "portable", "TensorGuards"),
        (Blocks(), "portable", "portable"),
    ],
)
def test_describe_blocks(monkeypatch, available, attributes, tensors):
    monkeypatch.delenv(blocks.PORTABLE_VARIABLE, raising=False)
    monkeypatch.setattr(blocks, "available_blocks", lambda: available)
    described = blocks.describe_blocks()
    assert described.keys() == {"attributes", "tensors"}
    assert described["attributes"].startswith(attributes) and tensors in described["tensors"]


CONTEXTS = (
    "torch.inference_mode()",
    "torch.no_grad()",
    "torch.device('meta')",
    "torch.autocast('cpu', torch.bfloat16)",
    "Refusing()",
    "RefusingToDispatch()",
    "defaults()",
)
SCRIPT = """
import contextlib, torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from thunder.core import guard_blocks

class Refusing(TorchFunctionMode):
    def __torch_function__(self, *args, **kwargs):
        raise RuntimeError("not here")

class RefusingToDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, *args, **kwargs):
        raise RuntimeError("not here")

@contextlib.contextmanager
def defaults():
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    yield
"""


def test_contexts_to_probe_in():
    script = SCRIPT
    for context in CONTEXTS:
        script += f"\nguard_blocks.available_blocks.cache_clear()\nwith {context}:\n    found = guard_blocks.available_blocks()"
        script += "\nprint(*found[1:])"
    environment = {k: v for k, v in os.environ.items() if k != blocks.PORTABLE_VARIABLE} | {"OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False
    )
    assert process.returncode == 0, process.stderr
    here = " ".join(str(value) for value in found[1:])
    assert dict(zip(CONTEXTS, process.stdout.splitlines())) == dict.fromkeys(CONTEXTS, here), process.stderr


def test_docstring_examples():
    failures, attempted = doctest.testmod(blocks)
    assert attempted and not failures
