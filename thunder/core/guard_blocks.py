"""Building blocks that notice a change of module attributes or of tensor metadata without looking at each one.

A *guard* here is a callable that was made for some objects in a state that is found to be right, and says whether they
are still in that state. It may say no when they are, and costs a full check then; it must never say yes when they are
not. There are two kinds, each with a portable form and with faster ones that know of private parts of CPython or torch:

- :class:`Versions`: plain attributes of objects. CPython (3.10 to 3.13) gives each dict a version that changes with every
  change of the dict (PEP 509). :class:`_MemoryGuard` compares the versions of all ``__dict__`` at once. The portable form
  is :func:`poll_attributes`.
- :func:`words_guard` and :func:`tensor_guard`: shape, dtype, device and ``requires_grad`` of tensors. The same class
  compares the words that torch keeps them in; where those are not found, or tensors are few, torch's own
  ``TensorGuards`` does, as for ``torch.compile``.

Nothing private is trusted by a version number. :func:`available_blocks` makes, once in a process, every change that a
block must notice and takes only blocks that notice them all: on CPython 3.13.0, for one, ``obj.attr = value`` does not
change the version of ``obj.__dict__`` (python/cpython issue #125608). ``THUNDER_PROLOGUE_PORTABLE=1`` in the environment
leaves all private blocks off.
"""

from __future__ import annotations

import functools
import gc
import itertools
import keyword
import operator
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = [
    "DENSE_TENSOR_TYPES",
    "Blocks",
    "Versions",
    "are_guardable",
    "available_blocks",
    "describe_blocks",
    "is_plain_attribute",
    "is_versioned",
    "poll_attributes",
    "poll_items",
    "tensor_guard",
    "words_guard",
]

PORTABLE_VARIABLE = "THUNDER_PROLOGUE_PORTABLE"

#: torch's own tensors and parameters, and no subclass, whose Python code may give any answer.
DENSE_TENSOR_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})

_WORD = 8
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that Python code can change
_MANAGED_DICT = 1 << 4  # Py_TPFLAGS_MANAGED_DICT (3.11 and newer): the dict's pointer comes before the object
_WRITTEN_OUT = 32  # attributes in one function
_INLINE_DIMS = 5  # c10::impl::SizesAndStrides keeps so many sizes within the tensor

_dict_of = operator.attrgetter("__dict__")
_implementation_of = operator.attrgetter("_cdata")
_describe = operator.attrgetter("shape", "dtype", "device", "requires_grad")  # as Metadata


class _Memory:
    """This process's memory as an array of 64-bit words, of which only those of living objects may be read."""

    __array_interface__ = {"version": 3, "typestr": "<u8", "shape": (1 << 54,), "data": (_WORD, True)}  # noqa: RUF012


_memory = np.asarray(_Memory())
_memory_view = memoryview(_memory)


def _indices(addresses) -> np.ndarray:
    return np.asarray(addresses, dtype=np.int64) // _WORD - 1


def _read(addresses) -> np.ndarray:
    return _memory.take(_indices(addresses))


def _read_words(address: int, count: int) -> list[int]:
    return _read(np.arange(address, address + count * _WORD, _WORD)).tolist()


def _each(function: Callable[[Any], int], objects: Sequence[Any]) -> np.ndarray:
    return np.fromiter(map(function, objects), np.int64, len(objects))


class _MemoryGuard:
    """Says whether the words at some addresses are what they were when it was made.

    One C call reads them all, none waiting for another, so that the processor fetches many of them at a time: that is
    what counts in a model whose computation evicts the caches between two calls.
    """

    __slots__ = ("_alive", "_expected", "_indices")

    def __init__(self, addresses: np.ndarray, *alive: Any):
        self._indices = _indices(addresses)
        self._expected = self._words()
        self._alive = alive

    def _words(self) -> bytes:
        return _memory.take(self._indices).tobytes()

    def __call__(self) -> bool:
        return _memory.take(self._indices).tobytes() == self._expected

    def in_one_call(self) -> tuple[functools.partial, tuple[int, ...]]:
        """Returns a call that reads the words, more slowly, with no other thread in between (numpy lets one run), and
        what it should return."""
        indices, words = self._indices.tolist(), np.frombuffer(self._expected, np.uint64).tolist()
        if not indices:
            return functools.partial(tuple), ()
        # It returns a tuple only of several.
        return functools.partial(operator.itemgetter(*indices, indices[0]), _memory_view), (*words, words[0])

    def changed(self) -> np.ndarray:
        """Which of the words have changed, as an array of bools."""
        return _memory.take(self._indices) != np.frombuffer(self._expected, np.uint64)


#
# Attributes and dicts
#


def is_plain_attribute(obj: Any, name: str) -> bool:
    """Whether ``getattr(obj, name)`` only reads a dict: the instance's, or that of a class, with no code in between.

    Properties and other descriptors, slots, and what ``__getattr__`` or ``__getattribute__`` make up are not.

    Example::

        >>> is_plain_attribute(torch.nn.ReLU(), "training"), is_plain_attribute(torch.nn.ReLU(), "forward")
        (True, False)
    """
    cls = type(obj)
    if cls.__getattribute__ is not object.__getattribute__:
        return False
    instance_dict = getattr(obj, "__dict__", None)
    if type(instance_dict) is not dict:
        return False
    for base in cls.__mro__:
        if name in base.__dict__:
            descriptor = type(base.__dict__[name])
            if hasattr(descriptor, "__set__") or hasattr(descriptor, "__delete__"):
                return False
            return name in instance_dict or not hasattr(descriptor, "__get__")
    return name in instance_dict


def poll_attributes(attributes: Sequence[tuple[Any, str]], values: Sequence[Any] | None = None) -> Callable[[], bool]:
    """Makes a guard that reads plain attributes and says whether each is the very object in ``values``, or that it is
    now."""
    if values is None:
        values = [getattr(obj, name) for obj, name in attributes]
    polls = []
    for start in range(0, len(attributes), _WRITTEN_OUT):
        objects, names = zip(*attributes[start : start + _WRITTEN_OUT])
        polls.append(functools.partial(_attribute_poll(names), objects, tuple(values[start : start + _WRITTEN_OUT])))
    return polls[0] if len(polls) == 1 else lambda: all(unchanged() for unchanged in polls)


@functools.lru_cache(maxsize=1024)
def _attribute_poll(names: tuple[str, ...]) -> Callable[[tuple, tuple], bool]:
    """Makes a function that compares attributes of objects with values. Written out, one costs less than in a loop."""
    reads = [f"o{i}.{name}" if _is_plain_name(name) else f"getattr(o{i}, {name!r})" for i, name in enumerate(names)]
    text = _ATTRIBUTE_POLL.format(
        objects="".join(f"o{i}, " for i in range(len(names))),
        values="".join(f"v{i}, " for i in range(len(names))),
        condition=" and ".join(f"{read} is v{i}" for i, read in enumerate(reads)),
    )
    namespace: dict[str, Any] = {}
    exec(text, namespace)
    return namespace["are_unchanged"]


def _is_plain_name(name: str) -> bool:
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name)


_ATTRIBUTE_POLL = """
def are_unchanged(objects, values):
    {objects}= objects
    {values}= values
    try:
        return {condition}
    except AttributeError:
        return False
"""


def poll_items(items: Sequence[tuple[dict, Any]], values: Sequence[Any] | None = None) -> Callable[[], bool]:
    """Makes a guard that reads items of dicts and says whether each is the very object in ``values``, or that it is
    now."""
    if values is None:
        values = [d[key] for d, key in items]
    reads = []
    for source in {id(d): d for d, _ in items}.values():
        keys, expected = zip(*[(key, value) for (d, key), value in zip(items, values) if d is source])
        # A C call reads them all; it returns a tuple only of several.
        reads.append((operator.itemgetter(*keys, keys[0]), source, (*expected, expected[0])))

    def unchanged() -> bool:
        try:
            return all(all(map(operator.is_, read(source), expected)) for read, source, expected in reads)
        except KeyError:
            return False

    return unchanged


def is_versioned(obj: Any) -> bool:
    """Whether :class:`Versions` can tell when an attribute of ``obj`` changes."""
    if not available_blocks().instance_versions:
        return False
    offset = _dict_offset(type(obj))
    if offset is None:
        return False
    instance_dict = obj.__dict__  # until it is asked for, there may be none
    return int(_read(id(obj) + offset)) == id(instance_dict)


class Versions:
    """Objects, classes and dicts of which each state has a version.

    Args:
        objects (Sequence[Any]): Objects for which :func:`is_versioned` holds.
        classes (Sequence[type]): More classes than those of the objects.
        dicts (Sequence[dict]): Dicts.

    All are kept alive. Needs ``available_blocks().dict_versions``.
    """

    def __init__(self, objects: Sequence[Any], classes: Sequence[type] = (), dicts: Sequence[dict] = ()):
        self.objects = list(objects)
        self.dicts = list(dicts)
        ids = _each(id, self.objects)
        types = [*classes, *map(type, self.objects)]
        offsets = {cls: _dict_offset(cls) for cls in set(types)}
        self._slots = ids + np.asarray([offsets[type(obj)] for obj in self.objects], dtype=np.int64)
        self._classes = dict.fromkeys(base for cls in dict.fromkeys(types) for base in cls.__mro__)
        heap_types = [base for base in self._classes if base.__flags__ & _HEAP_TYPE]
        # Other bases give a class another tuple of them; the old one is kept, so that none comes in its place.
        self._resolution_orders = [cls.__mro__ for cls in heap_types]
        dict_versions, class_versions = (
            _each(id, some) + 3 * _WORD for some in (self.dicts, list(map(_class_dict, heap_types)))
        )
        of_classes = np.concatenate([class_versions, _each(id, heap_types) + _mro_offset(), ids + _WORD])
        self._fixed = np.concatenate([dict_versions, of_classes, self._slots])
        #: Says whether all objects have the classes that they had, and these are as they were.
        self.classes_are_unchanged = _MemoryGuard(of_classes)

    def guard(self) -> _MemoryGuard | None:
        """Makes a guard that says whether, from now on, no attribute of any object was set, replaced or deleted, no
        object got another ``__dict__`` or class, no class nor a base of it was changed, and no dict was. None if an
        object no longer keeps its ``__dict__`` where it did, or a class has changed: others must be looked at then."""
        instance_dicts = list(map(_dict_of, self.objects))
        dict_ids = _each(id, instance_dicts)
        guard = _MemoryGuard(np.concatenate([self._fixed, dict_ids + 3 * _WORD]), self, instance_dicts)
        is_in_place = (_read(self._slots) == dict_ids.astype(np.uint64)).all() and self.classes_are_unchanged()
        return guard if is_in_place else None

    def changed(self, guard: _MemoryGuard) -> tuple[list[Any], list[dict]]:
        """Returns the objects and the dicts that have changed since ``guard`` was made."""
        words = guard.changed()
        objects = words[len(words) - len(self.objects) :] if self.objects else ()
        return list(itertools.compress(self.objects, objects)), list(itertools.compress(self.dicts, words))


def _dict_offset(cls: type) -> int | None:
    """Where an instance has the pointer to its ``__dict__``."""
    if cls.__flags__ & _MANAGED_DICT:
        return -3 * _WORD
    return cls.__dictoffset__ if cls.__dictoffset__ > 0 else None


@functools.cache
def _mro_offset() -> int:
    """Where a class has the pointer to its ``__mro__``."""

    class Example:
        pass

    return _read_words(id(Example), 50).index(id(Example.__mro__)) * _WORD


def _class_dict(cls: type) -> dict:
    """The dict behind the read-only ``cls.__dict__``."""
    (mapping,) = (d for d in gc.get_referents(cls.__dict__) if type(d) is dict)
    return mapping


#
# Tensors
#


def are_guardable(tensors: Sequence[Any]) -> bool:
    """Whether :func:`tensor_guard` knows all that decides about the metadata of these: whether they are of
    ``DENSE_TENSOR_TYPES``, and dense."""
    return (
        DENSE_TENSOR_TYPES.issuperset(map(type, tensors))
        and {torch.strided}.issuperset(map(operator.attrgetter("layout"), tensors))
        and not any(map(operator.attrgetter("is_nested"), tensors))
        and not any(map(operator.attrgetter("is_quantized"), tensors))
        and max(map(torch.Tensor.dim, tensors), default=0) <= _INLINE_DIMS
    )


class Metadata(NamedTuple):
    """What a prologue checks of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Metadata:
        """Returns what a tensor is now."""
        return cls(*_describe(tensor))

    @classmethod
    def make(cls, shape: Sequence[Any], device: str, dtype: torch.dtype, requires_grad: bool) -> Metadata | None:
        """Takes the arguments of ``check_tensor_shape_and_metadata``. None if some of them are not constants."""
        if not all(type(size) is int for size in shape):
            return None
        return cls(tuple(shape), dtype, torch.device(device), requires_grad)


def tensor_guard(
    tensors: Sequence[torch.Tensor], metadata: Sequence[Metadata] | None = None
) -> Callable[[Sequence[torch.Tensor]], bool] | None:
    """Makes a guard for the type and metadata of tensors.

    Args:
        tensors (Sequence[torch.Tensor]): Tensors that :func:`are_guardable`. They are not kept alive.
        metadata (Sequence[Metadata] | None): What they must be; None for what they are now.

    Returns:
        A callable that takes tensors in the same order. None if they are not what they must be.
    """
    make_guard = _torch_tensor_guard if available_blocks().tensor_guards else _portable_tensor_guard
    return make_guard(tensors, metadata)


def words_guard(
    tensors: Sequence[torch.Tensor], metadata: Sequence[Metadata] | None = None
) -> Callable[[], bool] | None:
    """Makes a guard like :func:`tensor_guard` for these very tensor objects, which the caller vouches to be alive when it
    is asked. It costs the same for one tensor as for a hundred. Needs ``available_blocks().tensor_words``."""
    return _tensor_words_guard(tensors, available_blocks().layout, metadata)


def _are_at_once(
    tensors: Sequence[torch.Tensor], metadata: Sequence[Metadata] | None, *calls: tuple[functools.partial, Any]
) -> bool:
    """Whether each of the calls returns what stands beside it, and the tensors are of such metadata at that moment. Were
    they asked one after the other, another thread could change a tensor and change it back, and what the calls look at
    would be something else.

    All that runs is C, within one call of it, so that no other thread runs in between. The calls must keep to that.
    """
    described = [Metadata.of(tensor) for tensor in tensors] if metadata is None else [*metadata]
    describe = functools.partial(list, map(_describe, tensors)), described
    types = functools.partial(list, map(type, tensors)), [*map(type, tensors)]
    functions, expected = zip(*calls, describe, types)
    answers = list(map(functools.partial.__call__, functions))
    return answers == list(expected) and DENSE_TENSOR_TYPES.issuperset(types[1])


def _portable_tensor_guard(
    tensors: Sequence[torch.Tensor], metadata: Sequence[Metadata] | None = None
) -> Callable[[Sequence[torch.Tensor]], bool] | None:
    if metadata is None:
        metadata = [Metadata.of(tensor) for tensor in tensors]
    # There is one CPU, and to ask whether a tensor is there costs less than to ask where it is.
    is_cpu = all(m.is_cpu for m in metadata)
    describe = operator.attrgetter("shape", "dtype", "is_cpu" if is_cpu else "device", "requires_grad")
    types, described = list(map(type, tensors)), list(map(describe, metadata))

    def unchanged(tensors) -> bool:
        return list(map(type, tensors)) == types and list(map(describe, tensors)) == described

    return unchanged if DENSE_TENSOR_TYPES.issuperset(types) and unchanged(tensors) else None


def _torch_tensor_guard(
    tensors: Sequence[torch.Tensor], metadata: Sequence[Metadata] | None = None
) -> Callable[[Sequence[torch.Tensor]], bool] | None:
    # TensorGuards accepts no tensor twice, so that a second name of one goes into a second guard.
    rounds: list[list[int]] = []
    seen: dict[int, int] = {}
    for i, tensor in enumerate(tensors):
        times = seen.get(id(tensor), 0)
        seen[id(tensor)] = times + 1
        if times == len(rounds):
            rounds.append([])
        rounds[times].append(i)
    checks = [_make_torch_guard([tensors[i] for i in indices]).check for indices in rounds]
    calls = [(functools.partial(check, *[tensors[i] for i in indices]), True) for check, indices in zip(checks, rounds)]
    if not _are_at_once(tensors, metadata, *calls):
        return None
    if len(rounds) == 1:
        (check,) = checks
        return lambda tensors: check(*tensors)
    return lambda tensors: all(check(*[tensors[i] for i in indices]) for check, indices in zip(checks, rounds))


def _make_torch_guard(tensors: Sequence[torch.Tensor]):
    from torch._C._dynamo.guards import TensorGuards

    return TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(t.shape) for t in tensors],
        dynamic_dims_strides=[[None] * t.dim() for t in tensors],  # any stride is right
    )


class Layout(NamedTuple):
    """Where torch keeps a tensor's metadata, in bytes from the start of the C++ objects, as found by :func:`_find_layout`."""

    implementation: int
    """In the Python object: the pointer to the TensorImpl."""
    autograd: int
    """In the TensorImpl: the pointer to its AutogradMeta."""
    sizes: int
    """In the TensorImpl: the sizes, after their number."""
    kind: tuple[int, ...]
    """In the TensorImpl: dtype, device, dispatch keys."""
    requires_grad: tuple[int, ...]
    """In the AutogradMeta: ``requires_grad``, and what else makes a tensor require a gradient."""


def _tensor_words_guard(
    tensors: Sequence[torch.Tensor], layout: Layout, metadata: Sequence[Metadata] | None = None
) -> Callable[..., bool] | None:
    ids, implementations = _each(id, tensors), _each(_implementation_of, tensors)
    dims = _each(torch.Tensor.dim, tensors)
    parts = []
    for dim in set(dims.tolist()):
        sizes = range(layout.sizes - _WORD, layout.sizes + dim * _WORD, _WORD)
        offsets = np.asarray([layout.autograd, *sizes, *layout.kind])
        parts.append((implementations[dims == dim][:, None] + offsets).ravel())
    metas = _read(implementations + layout.autograd).astype(np.int64)
    # In this order: each is read only after the one before has shown that it belongs to the same object still.
    guards = (
        _MemoryGuard(np.concatenate([ids + _WORD, ids + layout.implementation])),
        _MemoryGuard(np.concatenate(parts)),
        _MemoryGuard((metas[metas != 0][:, None] + np.asarray(layout.requires_grad)).ravel()),
    )

    def unchanged(tensors=None, first=guards[0], second=guards[1], third=guards[2]) -> bool:
        return first() and second() and third()

    is_right = unchanged() and _are_at_once(tensors, metadata, *[guard.in_one_call() for guard in guards])
    return unchanged if is_right else None


_OBJECT_WORDS = 26  # as many are looked at; a TensorImpl or AutogradMeta may be a little shorter
_SAMPLES = 24


def _find_layout() -> Layout | None:
    """Finds where torch keeps a tensor's metadata by looking at what changes with it; None if that is not clear."""

    def implementation(t: torch.Tensor) -> list[int]:
        return _read_words(t._cdata, _OBJECT_WORDS)

    def what_changes(read: Callable, change: Callable, new: Callable = lambda: torch.ones(2)) -> set[int]:
        """The words that change in every one of several tensors, and so not only in what lies behind one in memory."""
        changed = set(range(_OBJECT_WORDS))
        for tensor in [new() for _ in range(_SAMPLES)]:
            before = read(tensor)
            change(tensor)
            changed &= {i for i, (a, b) in enumerate(zip(before, read(tensor))) if a != b}
        return changed

    tensor = torch.empty(2, 3, 5, 7, 11)
    header, start = _read_words(id(tensor), 6), implementation(tensor)
    sizes = [i for i in range(1, _OBJECT_WORDS - 5) if start[i - 1 : i + 5] == [5, 2, 3, 5, 7, 11]]
    autograd = what_changes(implementation, lambda t: t.requires_grad_())
    if header.count(tensor._cdata) != 1 or len(sizes) != 1 or len(autograd) != 1:
        return None
    (size,), (autograd,) = sizes, autograd
    kind = _words_of_kind(implementation, range(size + 2 * _INLINE_DIMS, _OBJECT_WORDS))

    def meta(t: torch.Tensor) -> list[int]:
        return _read_words(implementation(t)[autograd], _OBJECT_WORDS)

    def leaf() -> torch.Tensor:
        return torch.ones(2, requires_grad=True)

    with torch.enable_grad():
        flag = what_changes(meta, lambda t: t.requires_grad_(False), leaf)
        training = what_changes(meta, lambda t: (setattr(t, "grad", torch.ones(2)), t * 2), leaf)
        history = what_changes(meta, lambda t: t.mul_(leaf()), lambda: leaf().requires_grad_(False)) - training
    if not kind or not history or len(flag) != 1 or flag & training:
        return None
    return Layout(
        implementation=header.index(tensor._cdata) * _WORD,
        autograd=autograd * _WORD,
        sizes=size * _WORD,
        kind=tuple(i * _WORD for i in sorted(kind)),
        requires_grad=tuple(i * _WORD for i in sorted({*flag, min(history)})),
    )


def _words_of_kind(read: Callable[[torch.Tensor], list[int]], candidates: Sequence[int]) -> set[int]:
    """Finds the words that have bits which are the same in all tensors of one dtype and device, and others in those of
    another. (Other bits of such a word may never have been written.)"""
    made = []

    def common_bits(**kind) -> list[tuple[int, int]]:
        tensors = [torch.zeros(2, **kind) for _ in range(_SAMPLES)]
        made.extend((tensor, read(tensor)) for tensor in tensors)
        columns = zip(*map(read, tensors))
        return [(functools.reduce(operator.and_, c), functools.reduce(operator.or_, c)) for c in columns]

    usual = common_bits(dtype=torch.float32)
    found = set()
    for kind in ({"dtype": torch.float64}, {"dtype": torch.bfloat16}, {"dtype": torch.int64}, {"device": "meta"}):
        for i, ((all_a, any_a), (all_b, any_b)) in enumerate(zip(usual, common_bits(**kind))):
            same_within_each = ~(all_a ^ any_a) & ~(all_b ^ any_b)
            if i in candidates and (all_a ^ all_b) & same_within_each:
                found.add(i)
    # What has changed by now, with many tensors made and gone, is not a part of these.
    churn = [torch.zeros(n) for n in range(200)]
    del churn[::2]
    for tensor, before in made:
        found -= {i for i, (a, b) in enumerate(zip(before, read(tensor))) if a != b}
    return found


#
# Which blocks can be trusted here
#


class Blocks(NamedTuple):
    """The private building blocks that were found to notice every change that they must."""

    layout: Layout | None = None
    dict_versions: bool = False
    instance_versions: bool = False
    tensor_words: bool = False
    tensor_guards: bool = False


def _is_portable() -> bool:
    return os.environ.get(PORTABLE_VARIABLE, "0") != "0"


@functools.cache
def available_blocks() -> Blocks:
    """Returns the private building blocks that can be trusted in this process; it finds out once, in milliseconds.

    Example::

        >>> from thunder.core.guard_blocks import available_blocks
        >>> available_blocks() is available_blocks()
        True
    """
    if _is_portable():
        return Blocks()
    found = [Blocks()]

    def probe() -> None:
        layout = _find_layout()
        dict_versions = _probe_dicts()
        found.append(
            Blocks(
                layout=layout,
                dict_versions=dict_versions,
                instance_versions=dict_versions and _probe_instances(),
                tensor_words=layout is not None
                and _probe_tensors(functools.partial(_tensor_words_guard, layout=layout)),
                tensor_guards=_probe_tensors(_torch_tensor_guard),
            )
        )

    def run() -> None:
        try:
            probe()
        except Exception as e:
            warnings.warn(
                f"prologue guards use no private building blocks, since probing them failed: {e!r}", stacklevel=2
            )

    # In a thread of its own no grad mode, autocast, default device or other mode of the caller is on. It must not run a
    # backward: an interpreter whose first backward ran in a thread that has ended can abort at exit (seen with torch
    # 2.12.1).
    thread = threading.Thread(target=run, name="thunder-prologue-probe")
    thread.start()
    thread.join()
    return found[-1]


def describe_blocks() -> dict[str, str]:
    """Returns what the guards of this process are made of, for a status report."""
    blocks = available_blocks()
    if _is_portable():
        reason = f"portable ({PORTABLE_VARIABLE} is set)"
        return {"attributes": reason, "tensors": reason}
    attributes = "dict versions" if blocks.instance_versions else "portable (dict versions miss a change here)"
    if blocks.tensor_words and blocks.dict_versions:
        tensors = "words of TensorImpl"
    elif blocks.tensor_guards:
        tensors = "torch's TensorGuards"
    else:
        tensors = "portable (neither TensorImpl's words nor TensorGuards are as expected here)"
    return {"attributes": attributes, "tensors": tensors}


def _notices(make: Callable[[], tuple[Callable[[], bool], Callable[[], None]]]) -> bool:
    """Whether a guard says yes before a change and no after it."""
    guard, change = make()
    if not (guard() and guard()):
        return False
    change()
    return not guard()


def _probe_dicts() -> bool:
    changes = (
        lambda d: d.__setitem__("a", object()),
        lambda d: d.__setitem__("new", 1),
        lambda d: d.__delitem__("a"),
        lambda d: d.pop("b"),
        lambda d: d.popitem(),
        lambda d: d.clear(),
        lambda d: d.update(a=object()),
        lambda d: d.setdefault("new", 1),
        lambda d: d.__ior__({"a": object()}),
    )

    def make(change):
        d = {"a": object(), "b": object()}
        return Versions((), (), [d]).guard(), lambda: change(d)

    return all(_notices(functools.partial(make, change)) for change in changes)


def _probe_instances() -> bool:
    def new_classes() -> tuple[type, type]:
        class Base:
            pass

        class Plain(Base):
            def __init__(self):
                self.training, self.b = True, 2.0

        class Module(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.b = 2.0
                self.child = torch.nn.Identity()

        return Plain, Module

    def store(obj):
        obj.training = False

    # The interpreter specializes a store that is repeated, and 3.13.0 misses to change the version in more ways then.
    for cls in new_classes():
        for _ in range(100):
            obj = cls()
            vars(obj)
            store(obj)

    changes = (
        store,
        lambda obj: obj.train(False) if isinstance(obj, torch.nn.Module) else store(obj),
        lambda obj: setattr(obj, "training", False),
        lambda obj: setattr(obj, "new", 1),
        lambda obj: delattr(obj, "b"),
        lambda obj: object.__setattr__(obj, "training", False),
        lambda obj: object.__delattr__(obj, "training"),
        lambda obj: vars(obj).__setitem__("training", False),
        lambda obj: vars(obj).update(training=False),
        lambda obj: vars(obj).pop("b"),
        lambda obj: setattr(obj, "__dict__", dict(vars(obj))),
        lambda obj: setattr(obj, "__class__", type(obj).__mro__[1] if isinstance(obj, torch.nn.Module) else new_classes()[0]),
        lambda obj: setattr(type(obj), "training", property(lambda self: False)),
        lambda obj: setattr(type(obj), "__bases__", (new_classes()[i],) if (i := isinstance(obj, torch.nn.Module)) else (new_classes()[0].__mro__[1],)),
        lambda obj: setattr(type(obj).__mro__[0 if isinstance(obj, torch.nn.Module) else 1], "b", property(lambda self: 3.0)),
    )  # fmt: skip

    def make(i, change):
        obj = new_classes()[i]()
        return Versions([obj]).guard() or (lambda: False), lambda: change(obj)

    return all(_notices(functools.partial(make, i, change)) for i in range(2) for change in changes)


def _probe_tensors(make_guard: Callable) -> bool:
    def data(*args, **kwargs):
        return lambda t: setattr(t, "data", torch.zeros(*args, **kwargs))

    def becomes_part_of_a_graph(t):
        with torch.enable_grad():
            t.requires_grad_(False).mul_(torch.ones((), requires_grad=True))

    changes = [
        lambda t: t.requires_grad_(not t.requires_grad),
        lambda t: setattr(t, "requires_grad", not t.requires_grad),
        *(data(size) for size in itertools.chain(*(_grown((3, 4, 5, 6, 7)[:dims]) for dims in range(1, 6)))),
        data(()),
        data((3, 4), dtype=torch.float64),
        data((3, 4), dtype=torch.bfloat16),
        data((3, 4), dtype=torch.complex64),
        lambda t: torch.utils.swap_tensors(t, torch.nn.Parameter(torch.zeros(3, 4, device="meta"))),
        lambda t: torch.utils.swap_tensors(t, torch.zeros(3, 4, dtype=torch.float64)),
        lambda t: t.detach().resize_(1) if t.requires_grad else t.resize_(5, 4),
        lambda t: t.requires_grad_(False).set_(torch.zeros(4, 3)),
        lambda t: t.requires_grad_(False).t_(),
        lambda t: t.requires_grad_(False).unsqueeze_(0),
        lambda t: setattr(t, "__class__", torch.nn.Parameter if type(t) is torch.Tensor else _ParameterSubclass),
    ]

    def make(tensor, change):
        first = torch.zeros(2)
        guard = make_guard([first, tensor])
        return (lambda: guard is not None and guard([first, tensor])), lambda: change(tensor)

    def tensors():
        for requires_grad in (False, True):
            yield torch.zeros(3, 4).requires_grad_(requires_grad)
            yield torch.nn.Parameter(torch.zeros(3, 4), requires_grad=requires_grad)
        yield torch.zeros(3, 4)

    def all_noticed() -> bool:
        for change in changes:
            for tensor in tensors():
                before = type(tensor), _describe(tensor)
                guard, apply = make(tensor, change)
                if not guard():
                    return False
                try:
                    apply()
                except (RuntimeError, TypeError):
                    continue  # torch does not allow this change
                if (type(tensor), _describe(tensor)) != before and guard():
                    return False
        for tensor in (torch.zeros(3, 4), torch.zeros(3, 4).requires_grad_().requires_grad_(False)):
            guard, apply = make(tensor, becomes_part_of_a_graph)
            if not guard():
                return False
            apply()
            if guard():
                return False
        return True

    with torch.no_grad():
        if not all_noticed():
            return False
    return all_noticed()


def _grown(size: tuple[int, ...]) -> list[tuple[int, ...]]:
    """``size`` with one dimension larger, once for each."""
    return [tuple(n + (i == j) for j, n in enumerate(size)) for i in range(len(size))]


class _ParameterSubclass(torch.nn.Parameter):
    pass
