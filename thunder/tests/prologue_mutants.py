"""Ways to break the fused prologue, each of which the fuzzer must notice.

A mutant replaces a piece of the text of one function or method. A piece that is no longer there is an error: the mutant
must be written anew for the code as it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import textwrap
import unittest.mock as mock
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from thunder.core import guard_blocks as blocks
from thunder.transforms import fused_prologue_transform as fused

__all__ = ["MUTANTS", "Mutant", "mutated"]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A piece of a function's text, and what is put in its place."""

    sentence: str
    """What is wrong with it."""
    module: ModuleType
    function: str
    """The qualified name of a function or method of the module."""
    old: str
    new: str
    variant: str = "fused"
    """The variant in which it matters."""


MUTANTS = {
    # Tensors
    "dtype": Mutant(
        "Does not look at the words that hold dtype and device.",
        blocks, "_tensor_words_guard", "*sizes, *layout.kind]", "*sizes]",
    ),
    "shape": Mutant(
        "Does not look at the sizes of tensors.",
        blocks, "_tensor_words_guard", "layout.autograd, *sizes, ", "layout.autograd, ",
    ),
    "requires_grad": Mutant(
        "Does not look at requires_grad of a tensor that had it before.",
        blocks, "_tensor_words_guard", "first() and second() and third()", "first() and second()",
    ),
    "first requires_grad": Mutant(
        "Does not see that a tensor requires a gradient for the first time.",
        blocks, "_tensor_words_guard", "[layout.autograd, *sizes", "[*sizes",
    ),
    "swapped tensors": Mutant(
        "Looks at the implementation that a tensor had, not at the one that it has.",
        blocks, "_tensor_words_guard", "np.concatenate([ids + _WORD, ids + layout.implementation])", "ids + _WORD",
    ),
    "class of a tensor": Mutant(
        "Does not see that a tensor object becomes one of a subclass, which may say anything.",
        blocks, "_tensor_words_guard", "np.concatenate([ids + _WORD, ids + layout.implementation])", "ids + layout.implementation",
    ),
    "tensor subclasses": Mutant(
        "Compares words of a tensor subclass, whose Python code may give other answers.",
        blocks, "are_guardable", "DENSE_TENSOR_TYPES.issuperset(map(type, tensors))", "True",
    ),
    "a buffer": Mutant(
        "Checks parameters only.",
        fused, "_Plan._compares", "return self._checked.setdefault(source, metadata) == metadata",
        "return self._tensors[source][0] not in [h.parameters for h in self._handles.values()] or "
        "self._checked.setdefault(source, metadata) == metadata",
    ),
    "tensors of a dict that changes often": Mutant(
        "Does not check tensors whose dict is no longer compared by version.",
        fused, "_fast_path", "if select_tensors is not None and not tensors_are_unchanged(select_tensors(segments)):", "if False:",
    ),
    "other tensors in a dict that changes often": Mutant(
        "Takes tensors for the same as before where their dict is not compared.",
        fused, "_Plan._lay_out", "if source_of[tensors[i]] in versioned_dicts]", "]",
    ),
    "portable dtype": Mutant(
        "Where only public interfaces are used, does not look at dtype.",
        blocks, "_portable_tensor_guard", '"dtype", ', "", "fused, portable",
    ),
    "dimensions in torch's guards": Mutant(
        "Lets torch's guards accept any size.",
        blocks, "_make_torch_guard", "list(t.shape)", "[None] * t.dim()", "fused, torch tensor guards",
    ),
    # Attributes
    "attributes": Mutant(
        "Does not look at the versions of the objects' dicts.",
        blocks, "Versions.guard", "np.concatenate([self._fixed, dict_ids + 3 * _WORD])", "self._fixed",
    ),
    "another __dict__": Mutant(
        "Does not see that an object gets another __dict__.",
        blocks, "Versions.__init__", "of_classes, self._slots]", "of_classes]",
    ),
    "another __class__": Mutant(
        "Does not see that an object gets another class.",
        blocks, "Versions.__init__", "_mro_offset(), ids + _WORD]", "_mro_offset()]",
    ),
    "class dicts": Mutant(
        "Does not look at the dicts of classes.",
        blocks, "Versions.__init__", "base.__flags__ & _HEAP_TYPE", "False",
    ),
    "base classes": Mutant(
        "Does not see that a class gets other bases.",
        blocks, "Versions.__init__", " _each(id, heap_types) + _mro_offset(),", "",
    ),
    "dicts of overrides": Mutant(
        "Does not look at the versions of the ThunderModule's dicts.",
        blocks, "Versions.__init__", "np.concatenate([dict_versions, of_classes, ", "np.concatenate([of_classes, ",
    ),
    "properties": Mutant(
        "Takes a property for an attribute that lies in a dict.",
        blocks, "is_plain_attribute", 'return name in instance_dict or not hasattr(descriptor, "__get__")', "return True",
    ),
    "data descriptors": Mutant(
        "Takes an attribute that lies in the instance's dict for plain, although a property hides it.",
        blocks, "is_plain_attribute", 'if hasattr(descriptor, "__set__") or hasattr(descriptor, "__delete__"):', "if False:",
    ),
    "__getattribute__": Mutant(
        "Takes what a __getattribute__ returns for what lies in a dict.",
        blocks, "is_plain_attribute", "cls.__getattribute__ is not object.__getattribute__", "False",
    ),
    "== and not type": Mutant(
        "Compares with == where versions are not compared, so that 2 passes for 2.0.",
        blocks, "_attribute_poll", "{read} is v{i}", "{read} == v{i}", "fused, few looked at",
    ),
    "hidden attributes": Mutant(
        "Goes on to compare an attribute by version when a property has come to hide it.",
        fused, "_Plan.after_changes",
        "return plan if all(itertools.starmap(blocks.is_plain_attribute, plan._attributes.values())) else None", "return plan",
    ),
    "items of lists": Mutant(
        "Takes an item of a list for one that never changes.",
        fused, "_Plan._compares", "type(self._held.get(source)) is tuple", "source in self._held",
    ),
    # The ThunderModule
    "identity of the parameters' dict": Mutant(
        "Does not see that the ThunderModule gets another dict of parameters.",
        fused, "_fast_path", 'own["_overrides_parameters"] is not parameters', "False",
    ),
    "identity of the buffers' dict": Mutant(
        "Does not see that the ThunderModule gets another dict of buffers.",
        fused, "_fast_path", 'or own["_overrides_buffers"] is not buffers', "",
    ),
    "identity of the modules' dict": Mutant(
        "Does not see that the ThunderModule gets another dict of modules.",
        fused, "_fast_path", 'or own["_module_cache"] is not submodules', "",
    ),
    "the model": Mutant(
        "Does not see that the ThunderModule gets another model.",
        fused, "_fast_path", 'or own["_modules"]["_model"] is not model', "",
    ),
    "absent attributes": Mutant(
        "Does not see that the ThunderModule gets an attribute of its own that hides its model's.",
        fused, "_fast_path", "or not own.keys().isdisjoint(absent)", "",
    ),
    "class of the ThunderModule": Mutant(
        "Does not see that the ThunderModule gets another class.",
        fused, "_fast_path", "or type(thunder_module) is not ThunderModule", "",
    ),
    "methods of ThunderModule": Mutant(
        "Takes a state although ThunderModule's class does not read as it does.",
        fused, "_Plan.take_versions", "if self._handles and not self._class_guard()():", "if False:",
    ),
    # How a state is taken
    "takes a state without checking": Mutant(
        "When the comparison says no, takes the new state without a full check.",
        fused, "_ModuleGuard._accept", "self._run(roots)",
        "tuple(plan._held.get(proxy.name) for proxy in self._region.reads)",
    ),
    "never renews a plan": Mutant(
        "Goes on with a plan whose objects are no longer those that were read.",
        fused, "_Plan.still_fits", "if new is not value and (", "if False and (",
    ),
    "equal is as good": Mutant(
        "Goes on with a plan where an object is only equal to what it was.",
        fused, "_Plan.still_fits", "name in self._given or type(value) not in _IMMUTABLE or type(new) is not type(value)", "new != value",
    ),
    "no versions": Mutant(
        "Once it has taken a state, it believes in it.",
        fused, "_fast_path", "if not unchanged():", "if False:",
    ),
    "yes on an exception": Mutant(
        "Says yes where one of the checks that are run each time fails.",
        fused, "_fast_path", "return None  # the full check, which comes next, says what is wrong", "segments = read_segments()",
    ),
    "order": Mutant(
        "Returns the values in the wrong order.",
        fused, "_first", "segments[0]", "segments[0][::-1]",
    ),
    # Written-out checks
    "type of a number": Mutant(
        "Compares numbers without their type.",
        fused, "_number_condition", "type({name}) is {type(value).__name__} and ", "",
    ),
    "dtype of an input": Mutant(
        "Does not look at the dtype of inputs.",
        fused, "_tensor_condition", "and {name}.dtype is {dtype} ", "",
    ),
    "requires_grad of an input": Mutant(
        "Does not look at requires_grad of inputs.",
        fused, "_tensor_condition", "and {name}.requires_grad is {requires_grad} ", "",
    ),
    "type of an input": Mutant(
        "Takes a tensor subclass for a tensor.",
        fused, "_tensor_condition", "type({name}) in dense_tensors and ", "hasattr({name}, 'shape') and ",
    ),
}  # fmt: skip


@contextlib.contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """Puts a mutant in the place of the function for a while.

    Raises:
        ValueError: If the function does not have the text that is to be replaced exactly once.
    """
    *classes, name = mutant.function.split(".")
    owner: Any = mutant.module
    for cls in classes:
        owner = getattr(owner, cls)
    function = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(mutant.old) != 1:
        raise ValueError(
            f"{mutant.function} has {mutant.old!r} {source.count(mutant.old)} times, not once: the code has changed, and "
            "the mutant must be written anew"
        )
    # Before a block is trusted it is tried out, which finds out some of the mutants. Here that has been done before.
    blocks.available_blocks()
    names: dict[str, Any] = {}
    code = compile("from __future__ import annotations\n" + source.replace(mutant.old, mutant.new), "<mutant>", "exec")
    exec(code, vars(mutant.module), names)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(owner, name, names[name]))
        for table in vars(mutant.module).values():
            if isinstance(table, dict):
                entries = {key: names[name] for key, value in table.items() if value is function}
                stack.enter_context(mock.patch.dict(table, entries))
        yield
