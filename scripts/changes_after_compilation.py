"""Says what becomes of a change that is made to a model after it was compiled, by transform.

Each change is made to a model that ``thunder.jit`` has compiled and called. The compiled model is then called once more and
compared with the model itself: values, dtype, shape and ``requires_grad`` of the output, and all gradients::

    python scripts/changes_after_compilation.py                 # prints the table
    python scripts/changes_after_compilation.py --only frozen   # the changes whose description has this text
    python scripts/changes_after_compilation.py --update        # writes it into README.md
    python scripts/changes_after_compilation.py --check         # fails if README.md says anything else
"""

from __future__ import annotations

import argparse
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import thunder
from thunder.core.transform_common import Transform
from thunder.transforms import (
    ExtractionOnlyPrologueTransform,
    FastDispatchTransform,
    FusedPrologueTransform,
    PrunePrologueChecks,
)

if TYPE_CHECKING:
    from rich.console import Console

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN = "<!-- written by scripts/changes_after_compilation.py --update -->"
END = "<!-- end of what scripts/changes_after_compilation.py writes -->"

TRANSFORMS: dict[str, Sequence[type[Transform]]] = {
    "no transform": (),
    "Fused": (FusedPrologueTransform,),
    "FastDispatch": (FastDispatchTransform,),
    "ExtractionOnly": (ExtractionOnlyPrologueTransform,),
    "ExtractionOnly + Fused": (ExtractionOnlyPrologueTransform, FusedPrologueTransform),
    "Prune": (PrunePrologueChecks,),
    "Prune + Fused": (PrunePrologueChecks, FusedPrologueTransform),
}

# The outcomes.
USED = "used"
RECOMPILES = "recompiles"
KEEPS_THE_OLD = "keeps the old"
RECOMPILES_WRONGLY = "recompiles, keeps the old"
ERROR = "error"
ERROR_AS_EAGER = "error, as eagerly"
SILENTLY_WRONG = (KEEPS_THE_OLD, RECOMPILES_WRONGLY)


@dataclass
class Case:
    """A model that was compiled and called, for a change to be made to it and to what it is called with next."""

    model: torch.nn.Module
    compiled: thunder.core.module.ThunderModule
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    undo: ExitStack = field(default_factory=ExitStack)
    """Left after the comparison: the contexts that the call runs in, and what undoes a change that outlives the model."""


@dataclass(frozen=True)
class Change:
    section: str
    description: str
    make: Callable[[Case], None]
    """Makes the change."""
    model: Callable[[], torch.nn.Module]
    args: Callable[[], tuple]
    """What the model is compiled with."""
    frozen: bool


CHANGES: list[Change] = []
SEPARATOR = ";"


def change(
    section: str,
    description: str,
    model: Callable[[], torch.nn.Module],
    args: Callable[[], tuple] = lambda: (torch.randn(2, 4),),
    *,
    frozen: bool = False,
) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    """Adds the decorated function, which makes the change, to ``CHANGES``.

    Args:
        section (str): What kind of change it is.
        description (str): The change, in a few words.
        model (Callable): Makes the model.
        args (Callable): Makes what the model is compiled with.
        frozen (bool): Whether the model is compiled with no parameter that needs a gradient.

    Raises:
        ValueError: If the description has a character that separates descriptions or cells in the README.
    """
    if set(description) & set(f"{SEPARATOR}|"):
        raise ValueError(
            f"the description {description!r} has a {SEPARATOR!r} or '|', which separate descriptions and cells"
        )

    def add(make: Callable[[Case], None]) -> Callable[[Case], None]:
        CHANGES.append(Change(section, description, make, model, args, frozen))
        return make

    return add


#
# Models: as little in each as shows the change, since Thunder takes a tenth of a second for each operation
#


class Weight(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4))

    def forward(self, x):
        return x * self.weight


class CastsToWeight(Weight):
    def forward(self, x):
        return x.to(self.weight.dtype) * self.weight


class Nested(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Weight()

    def forward(self, x):
        return self.inner(x)


class Buffer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("offset", torch.randn(4))

    def forward(self, x):
        return x + self.offset


class Settings(torch.nn.Module):
    """Forward reads one setting, in a different way in each subclass."""

    shift = 2.0

    def __init__(self):
        super().__init__()
        self.scale = 2.0
        self.residual = True
        self.activation = "relu"
        self.config = types.SimpleNamespace(scale=2.0)
        self.scales = {"first": 2.0}

    @property
    def first_scale(self):
        return self.scales["first"]


class ReadsTraining(Settings):
    def forward(self, x):
        return x + 1 if self.training else x


class ReadsFloat(Settings):
    def forward(self, x):
        return x * self.scale


class ReadsBool(Settings):
    def forward(self, x):
        return x + x if self.residual else x


class ReadsString(Settings):
    def forward(self, x):
        return torch.relu(x) if self.activation == "relu" else torch.tanh(x)


class ReadsConfig(Settings):
    def forward(self, x):
        return x * self.config.scale


class ReadsItem(Settings):
    def forward(self, x):
        return x * self.scales["first"]


class ReadsProperty(Settings):
    def forward(self, x):
        return x * self.first_scale


class ReadsClassAttribute(Settings):
    def forward(self, x):
        return x + self.shift


GLOBAL_SCALE = 2.0


class ReadsGlobal(Settings):
    def forward(self, x):
        return x * GLOBAL_SCALE


class Inputs(torch.nn.Module):
    def forward(self, x, other=None):
        return x if other is None else x + other


class MakesTensor(torch.nn.Module):
    def forward(self, x):
        return x + torch.zeros(4)


def training_part() -> torch.nn.Module:
    return torch.nn.Sequential(ReadsTraining())


def norm() -> torch.nn.Module:
    return torch.nn.LayerNorm(4, elementwise_affine=False)


def linear() -> torch.nn.Module:
    return torch.nn.Linear(4, 4)


def two_tensors() -> tuple:
    return torch.randn(2, 4), torch.randn(2, 4)


def tensor_and_float() -> tuple:
    return torch.randn(2, 4), 2.0


#
# Changes
#

ATTRIBUTES = "Attributes that `forward` reads"


@change(ATTRIBUTES, "`model.train()` after `eval()`", ReadsTraining)
def _(case):
    case.model.train()


@change(ATTRIBUTES, "`train()` of a submodule", training_part)
def _(case):
    case.model[0].train()


@change(ATTRIBUTES, "a float", ReadsFloat)
def _(case):
    case.model.scale = 3.0


@change(ATTRIBUTES, "a bool", ReadsBool)
def _(case):
    case.model.residual = False


@change(ATTRIBUTES, "a string", ReadsString)
def _(case):
    case.model.activation = "tanh"


@change(ATTRIBUTES, "`eps` of a `LayerNorm`", norm)
def _(case):
    case.model.eps = 10.0


@change(ATTRIBUTES, "an int instead of an equal float", ReadsFloat, lambda: (torch.ones(4, dtype=int),))
def _(case):
    case.model.scale = 2


@change(ATTRIBUTES, "an attribute of a config object", ReadsConfig)
def _(case):
    case.model.config.scale = 3.0


@change(ATTRIBUTES, "an item of a dict", ReadsItem)
def _(case):
    case.model.scales["first"] = 3.0


@change(ATTRIBUTES, "the value of a property", ReadsProperty)
def _(case):
    case.model.scales["first"] = 3.0


@change(ATTRIBUTES, "a class attribute", ReadsClassAttribute)
def _(case):
    case.undo.callback(setattr, ReadsClassAttribute, "shift", ReadsClassAttribute.shift)
    ReadsClassAttribute.shift = 3.0


@change(ATTRIBUTES, "an attribute deleted", ReadsFloat)
def _(case):
    del case.model.scale


@change(ATTRIBUTES, "a global variable", ReadsGlobal)
def _(case):
    case.undo.callback(globals().__setitem__, "GLOBAL_SCALE", GLOBAL_SCALE)
    globals()["GLOBAL_SCALE"] = 3.0


TENSORS = "Parameters and buffers, as they are"


@change(TENSORS, "new values in place (an optimizer's step)", Weight)
def _(case):
    case.model.weight.data.mul_(3)


@change(TENSORS, "`load_state_dict`", Weight)
def _(case):
    case.model.load_state_dict({"weight": torch.randn(4)})


@change(TENSORS, "new values of a buffer in place", Buffer)
def _(case):
    case.model.offset.mul_(3)


@change(TENSORS, "`requires_grad_(True)` (unfreezing)", Weight, frozen=True)
def _(case):
    case.model.requires_grad_(True)


@change(TENSORS, "`requires_grad_(False)` (freezing)", Weight)
def _(case):
    case.model.requires_grad_(False)


@change(TENSORS, "freezing one of two parameters", linear)
def _(case):
    case.model.bias.requires_grad_(False)


@change(TENSORS, "`double()` (with a double input)", Weight)
def _(case):
    case.model.double()
    case.args = (case.args[0].double(),)


@change(TENSORS, "`.data` of a parameter in bfloat16", CastsToWeight)
def _(case):
    case.model.weight.data = case.model.weight.data.bfloat16()


@change(TENSORS, "`.data` of a parameter in another shape", Weight)
def _(case):
    case.model.weight.data = torch.randn(2, 4)


COMPILED = "Put into the compiled model with `load_state_dict(..., assign=True)`"


def assign(case: Case, values: torch.Tensor) -> None:
    state = {"weight": torch.nn.Parameter(values)}
    case.compiled.load_state_dict(state, assign=True)
    case.model.load_state_dict(state, assign=True)


@change(COMPILED, "another `Parameter`", Weight)
def _(case):
    assign(case, torch.randn(4))


@change(COMPILED, "another `Parameter` in bfloat16", CastsToWeight)
def _(case):
    assign(case, torch.randn(4, dtype=torch.bfloat16))


ORIGINAL = "Put into the original model"


@change(ORIGINAL, "another `Parameter`", Weight)
def _(case):
    case.model.weight = torch.nn.Parameter(torch.randn(4))


@change(ORIGINAL, "another buffer", Buffer)
def _(case):
    case.model.offset = torch.randn(4)


@change(ORIGINAL, "another module", Nested)
def _(case):
    case.model.inner = torch.nn.Tanh()


@change(ORIGINAL, "a forward hook", Weight)
def _(case):
    case.model.register_forward_hook(lambda module, args, output: output * 3)


@change(ORIGINAL, "another `forward`", Weight)
def _(case):
    case.model.forward = torch.tanh


INPUTS = "Inputs"


@change(INPUTS, "another shape", Weight)
def _(case):
    case.args = (torch.randn(3, 4),)


@change(INPUTS, "another dtype", Weight)
def _(case):
    case.args = (case.args[0].double(),)


@change(INPUTS, "`requires_grad`", Weight, frozen=True)
def _(case):
    case.args[0].requires_grad_(True)


@change(INPUTS, "other strides", Weight)
def _(case):
    case.args = (torch.randn(4, 2).T,)


@change(INPUTS, "one more", Inputs)
def _(case):
    case.args = two_tensors()


@change(INPUTS, "one by keyword", Inputs, two_tensors)
def _(case):
    case.args, case.kwargs = case.args[:1], {"other": case.args[1]}


@change(INPUTS, "the same tensor twice", Inputs, two_tensors)
def _(case):
    case.args = case.args[:1] * 2


@change(INPUTS, "another number", Inputs, tensor_and_float)
def _(case):
    case.args = (case.args[0], 3.0)


@change(INPUTS, "an int instead of an equal float", Inputs, lambda: (torch.ones(4, dtype=int), 2.0))
def _(case):
    case.args = (case.args[0], 2)


SURROUNDINGS = "Around the call"


@change(SURROUNDINGS, "`torch.no_grad()`", Weight)
def _(case):
    case.undo.enter_context(torch.no_grad())


@change(SURROUNDINGS, "`torch.inference_mode()`", Weight)
def _(case):
    case.undo.enter_context(torch.inference_mode())


@change(SURROUNDINGS, "`torch.autocast`", linear)
def _(case):
    case.undo.enter_context(torch.autocast("cpu", torch.bfloat16))


@change(SURROUNDINGS, "`torch.set_default_dtype`", MakesTensor)
def _(case):
    case.undo.callback(torch.set_default_dtype, torch.get_default_dtype())
    torch.set_default_dtype(torch.float64)


#
# Outcomes
#


@dataclass(frozen=True)
class Answer:
    output: torch.Tensor
    gradients: dict[str, torch.Tensor]


def answer(call: Callable, case: Case) -> Answer | Exception:
    """Calls the model or the compiled model, and computes the gradients of parameters and inputs where there are any."""
    leaves = dict(case.model.named_parameters()) | {f"args[{i}]": arg for i, arg in enumerate(case.args)}
    leaves = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    for leaf in leaves.values():
        leaf.grad = None
    try:
        output = call(*case.args, **case.kwargs)
        if output.requires_grad:
            output.square().sum().backward()
    except Exception as e:
        return e
    return Answer(output, {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None})


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return (
        actual.dtype == expected.dtype
        and actual.shape == expected.shape
        and actual.requires_grad == expected.requires_grad
        and torch.allclose(actual, expected, atol=1e-5)
    )


def agree(actual: Answer, expected: Answer) -> bool:
    return (
        same(actual.output, expected.output)
        and actual.gradients.keys() == expected.gradients.keys()
        and all(same(actual.gradients[name], gradient) for name, gradient in expected.gradients.items())
    )


def outcome(change: Change, transforms: Iterable[type[Transform]]) -> str:
    """Compiles a model, changes it, and says what becomes of the next call.

    Raises:
        RuntimeError: The compiled model differs from the original one before anything was changed.
    """
    torch.manual_seed(0)
    model = change.model().eval().requires_grad_(not change.frozen)
    compiled = thunder.jit(model, transforms=[transform() for transform in transforms])
    case = Case(model, compiled, change.args())
    # The second call is a hit, and leaves whatever state hits keep.
    for _ in range(2):
        expected, actual = answer(model, case), answer(compiled, case)
        if isinstance(expected, Exception) or isinstance(actual, Exception) or not agree(actual, expected):
            raise RuntimeError(f"{change.description}: before the change, {actual} is not {expected}")
    misses = thunder.cache_misses(compiled)
    if misses != 1:
        raise RuntimeError(f"{change.description}: before the change, there were {misses} cache misses instead of 1")

    with case.undo:
        change.make(case)
        expected, actual = answer(model, case), answer(compiled, case)
    recompiled = thunder.cache_misses(compiled) > misses
    if isinstance(actual, Exception):
        return ERROR_AS_EAGER if isinstance(expected, Exception) else ERROR
    if isinstance(expected, Exception) or not agree(actual, expected):
        return RECOMPILES_WRONGLY if recompiled else KEEPS_THE_OLD
    return RECOMPILES if recompiled else USED


#
# The table
#

Table = dict[tuple[str, str], dict[str, str]]
"""The outcomes by transform, of each change by its section and description."""


def to_markdown(table: Table) -> str:
    """Returns the table for the README. Transforms with the same outcomes share a column, and changes of a section with
    the same outcomes a row.

    Args:
        table (dict): What :func:`outcome` says of all changes and transforms.
    """
    names = next(iter(table.values()))
    columns: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        columns.setdefault(tuple(outcomes[name] for outcomes in table.values()), []).append(name)
    rows: dict[tuple[str, ...], list[str]] = {}
    for (section, description), *outcomes in zip(table, *columns):
        rows.setdefault((section, *outcomes), []).append(description)

    lines = [
        ["what changes", "", *(", ".join(names) for names in columns.values())],
        ["---"] * (len(columns) + 2),
    ]
    sections = set()
    for (section, *outcomes), descriptions in rows.items():
        first = "" if section in sections else section
        sections.add(section)
        bold = (f"**{outcome}**" if outcome in SILENTLY_WRONG else outcome for outcome in outcomes)
        lines.append([first, f"{SEPARATOR} ".join(descriptions), *bold])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def from_markdown(text: str) -> Table:
    """Reads what :func:`to_markdown` wrote, in the order of ``CHANGES`` and ``TRANSFORMS``.

    Args:
        text (str): The lines of the table.

    Raises:
        KeyError: A change or a transform is not in the text.
    """
    (_, _, *columns), _, *lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines())
    found: Table = {}
    section = ""
    for first, descriptions, *outcomes in lines:
        section = first or section
        for description in descriptions.split(f"{SEPARATOR} "):
            found[section, description] = {
                name: outcome.strip("*") for names, outcome in zip(columns, outcomes) for name in names.split(", ")
            }
    return {
        (change.section, change.description): {
            name: found[change.section, change.description][name] for name in TRANSFORMS
        }
        for change in CHANGES
    }


def split_readme() -> tuple[str, str, str]:
    """Returns the README before the table, the table, and the README after it.

    Raises:
        ValueError: The README lacks the comments that mark the table.
    """
    before, begin, rest = README.read_text().partition(BEGIN)
    text, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{README} has no table between the lines {BEGIN!r} and {END!r}")
    return before + begin, text.strip(), end + after


def print_table(table: Table, console: Console) -> None:
    from rich import box
    from rich.table import Table as RichTable

    names = next(iter(table.values()))
    printed = RichTable("what changes", *names, box=box.SIMPLE_HEAD)
    previous = None
    for (section, description), outcomes in table.items():
        if section != previous:
            printed.add_section()
            printed.add_row(f"[bold]{section}[/bold]")
            previous = section
        cells = (f"[bold red]{outcome}[/]" if outcome in SILENTLY_WRONG else outcome for outcome in outcomes.values())
        printed.add_row(f"  {description}", *cells)
    console.print(printed)


def main(argv: Sequence[str] | None = None) -> int:
    from rich.console import Console
    from rich.progress import track

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", default="", help="only changes whose description has this text")
    actions = parser.add_mutually_exclusive_group()
    actions.add_argument("--markdown", action="store_true", help="print the README's table")
    actions.add_argument("--update", action="store_true", help="write the table into README.md")
    actions.add_argument("--check", action="store_true", help="exit with 1 if README.md has another table")
    options = parser.parse_args(argv)
    changes = [change for change in CHANGES if options.only in change.description]
    if not changes:
        parser.error(f"--only: no change's description has {options.only!r}")
    if options.only and (options.update or options.check):
        parser.error("the README has all changes; leave --only out")
    before, written, after = split_readme()

    table: Table = {}
    for change in track(changes, "compiling", console=Console(stderr=True), transient=True):
        table[change.section, change.description] = {name: outcome(change, TRANSFORMS[name]) for name in TRANSFORMS}

    if options.update:
        README.write_text(f"{before}\n\n{to_markdown(table)}\n{after}")
    elif options.check:
        if to_markdown(table).strip() != written:
            print(f"{README.name} has another table; run with --update", file=sys.stderr)
            return 1
    elif options.markdown:
        print(to_markdown(table), end="")
    else:
        print_table(table, Console())
    return 0


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning, module="thunder")
    sys.exit(main())
