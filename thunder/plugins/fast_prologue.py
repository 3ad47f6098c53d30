from __future__ import annotations

from collections.abc import Sequence

from thunder.core.compile_data import get_compile_data
from thunder.core.recipe import Plugin
from thunder.core.transform_common import Transform
from thunder.transforms.extraction_only_prologue_transform import (
    ExtractionOnlyPrologueTransform,
    transforms_that_follow,
)
from thunder.transforms.fast_dispatch_transform import FastDispatchTransform
from thunder.transforms.prune_prologue_checks import PrunePrologueChecks

__all__ = ["FastPrologue"]


class FastPrologue(Plugin):
    """
    Plugin for calls that check everything and still cost less than calls that check nothing about the model.

    Thunder's recipes put in :class:`~thunder.transforms.prune_prologue_checks.PrunePrologueChecks`, with which a compiled
    model silently goes on as before after ``model.train()``, a changed attribute or an unfrozen parameter. This plugin
    takes it out and puts in :class:`~thunder.transforms.fast_dispatch_transform.FastDispatchTransform`, which notices all
    of these. It is safe to use always. In a jitted graph of ThunderFX, TorchDynamo's own guards have decided before.

    Args:
        extraction_only (bool): Leave out the metadata checks of parameters and buffers, as
            :class:`~thunder.transforms.extraction_only_prologue_transform.ExtractionOnlyPrologueTransform` does. You then
            vouch that none of them changes its shape, dtype, device or ``requires_grad``.
        keep (Sequence[str]): With ``extraction_only``, patterns of the names whose checks stay.

    Raises:
        TypeError: If ``extraction_only`` is not a bool or ``keep`` is not a sequence of strings.
        ValueError: If ``keep`` has an empty pattern, or is given without ``extraction_only``.

    Example::

        >>> import torch, thunder
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout()).eval()
        >>> cmodel = thunder.compile(model, recipe=thunder.Recipe(None), plugins="fast-prologue")
        >>> cmodel(torch.randn(3, 4)).shape
        torch.Size([3, 4])
        >>> _ = model.train(), cmodel(torch.randn(3, 4))
        >>> thunder.cache_misses(cmodel)
        2
    """

    def __init__(self, *, extraction_only: bool = False, keep: Sequence[str] = ()):
        if not isinstance(extraction_only, bool):
            raise TypeError(
                f"extraction_only must be a bool, is {extraction_only!r} of type {type(extraction_only).__name__}"
            )
        if keep and not extraction_only:
            raise ValueError(f"keep={keep!r} needs extraction_only=True: without it the checks of all parameters stay")
        self.extraction_only = extraction_only
        self.keep = keep
        self.setup_transforms()  # says what is wrong with `keep` now

    def setup_transforms(self) -> list[Transform]:
        """
        Makes the transforms.

        Returns:
            list[Transform]: To be put before those of the recipe; the last adds itself to the end of the list again.
        """
        leave_out = [ExtractionOnlyPrologueTransform(keep=self.keep)] if self.extraction_only else []
        return [_KeepPrologueChecks(), *leave_out, FastDispatchTransform()]


class _KeepPrologueChecks(Transform):
    """Takes every PrunePrologueChecks that comes after it out of the transforms of the compilation that is going on."""

    def transform_traces_pre_prologue(self, prologue_trace, computation_trace, epilogue_trace, **kwargs):
        for transform in transforms_that_follow(self):
            if isinstance(transform, PrunePrologueChecks):
                get_compile_data().transforms.remove(transform)
        return prologue_trace, computation_trace, epilogue_trace
