"""What the tests of the prologue transforms where users have them share: the variants, and how one is compared with the
eager model and with the unfused prologue."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import thunder
from thunder.core.transform_common import Transform
from thunder.transforms import ExtractionOnlyPrologueTransform, FastDispatchTransform
from thunder.transforms.fused_prologue_transform import FusedPrologueTransform

VARIANTS: dict[str, Callable[[], list[Transform]]] = {
    "extraction-only": lambda: [ExtractionOnlyPrologueTransform()],
    "fused": lambda: [FusedPrologueTransform()],
    "extraction-only+fused": lambda: [ExtractionOnlyPrologueTransform(), FusedPrologueTransform()],
    "fast-dispatch": lambda: [FastDispatchTransform()],
}
BOTH = "extraction-only+fused"

every_variant = pytest.mark.parametrize("variant", VARIANTS)


def jit(model: Callable, transforms: list[Transform]) -> Callable:
    return thunder.jit(model, transforms=transforms)


class Outcome(NamedTuple):
    values: Any
    hits: int
    misses: int


def run(make: Callable[[], Callable], scenario: Callable, variant: str | None, jit: Callable = jit) -> Outcome:
    """Makes a model, compiles it with ``jit(model, transforms)`` and runs ``scenario(compiled, model)``, which returns
    the tensors to compare. The variant ``None`` is the unfused prologue."""
    torch.manual_seed(0)
    model = make()
    transforms = VARIANTS[variant]() if variant else []
    # The list may grow as Thunder compiles.
    compiled = jit(model, list(transforms))
    values = scenario(compiled, model)
    assert_is_in_place(compiled, transforms)
    return Outcome(values, thunder.cache_hits(compiled), thunder.cache_misses(compiled))


@functools.cache
def run_eager(make: Callable[[], Callable], scenario: Callable) -> Any:
    torch.manual_seed(0)
    model = make()
    return scenario(model, model)


run_unfused = functools.cache(functools.partial(run, variant=None))


def check(
    variant: str,
    make: Callable[[], Callable],
    scenario: Callable,
    jit: Callable = jit,
    *,
    unfused_jit: Callable | None = None,
    **tolerances,
) -> Outcome:
    """Demands that a scenario gives what it gives eagerly, within tolerances, and to the bit and with the same cache hits
    and misses what it gives with the unfused prologue, compiled with ``unfused_jit`` if that is given."""
    outcome, unfused = run(make, scenario, variant, jit), run_unfused(make, scenario, jit=unfused_jit or jit)
    torch.testing.assert_close(outcome.values, run_eager(make, scenario), **tolerances)
    torch.testing.assert_close(outcome.values, unfused.values, rtol=0, atol=0, equal_nan=True)
    assert outcome[1:] == unfused[1:]
    return outcome


def assert_is_in_place(compiled: Callable, transforms: list[Transform]) -> None:
    """Demands that the prologue that runs is what the transforms make, so that nothing is compared with itself."""
    traces = thunder.last_prologue_traces(compiled)
    provenances = " ".join(str(trace.get_provenance()) for trace in traces)
    leaves_out = any(isinstance(transform, ExtractionOnlyPrologueTransform) for transform in transforms)
    assert ("Extraction only prologue" in provenances) is leaves_out
    fuses = any(isinstance(transform, FusedPrologueTransform) for transform in transforms)
    assert any("read_and_check_modules" in bsym.sym.name for bsym in traces[-1].bound_symbols) is fuses
