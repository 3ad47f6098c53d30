import pytest
import torch

import thunder
from thunder.plugins import FastPrologue, get_plugin, get_plugin_names
from thunder.recipes.base import BaseRecipe
from thunder.transforms.fast_dispatch_transform import FastDispatchTransform
from thunder.transforms.prune_prologue_checks import PrunePrologueChecks


class Recipe(BaseRecipe):
    """The base recipe, with PrunePrologueChecks and without a fuser."""

    def setup_fuser(self):
        pass


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.scale = 2.0

    def forward(self, x):
        return torch.nn.functional.dropout(self.linear(x), 1.0, self.training) * self.scale


def compiled(model, plugins):
    return thunder.compile(model, recipe=Recipe(), plugins=plugins)


def test_is_registered():
    assert get_plugin("fast-prologue") is FastPrologue
    assert "fast-prologue" in get_plugin_names()


@pytest.mark.parametrize("plugins", ("fast-prologue", [FastPrologue()]), ids=("name", "list"))
def test_notices_what_the_recipe_alone_does_not(plugins):
    model, x = Model().eval(), torch.randn(3, 4)
    pruned, fast = compiled(model, None), compiled(model, plugins)
    for cmodel in (pruned, fast):
        torch.testing.assert_close(cmodel(x), model(x))
    model.train()
    assert torch.equal(model(x), torch.zeros(3, 4))
    assert not torch.equal(pruned(x), model(x))  # why the plugin is there
    torch.testing.assert_close(fast(x), model(x))
    model.eval()
    model.scale = 3.0
    torch.testing.assert_close(fast(x), model(x))
    model.linear.requires_grad_(False)
    assert not fast(x).requires_grad
    assert (thunder.cache_misses(pruned), thunder.cache_misses(fast)) == (1, 4)


def test_swaps_the_transforms():
    model, x = Model(), torch.randn(3, 4)
    fast = compiled(model, "fast-prologue")
    fast(x)
    transforms = thunder.compile_data(fast).transforms
    assert not any(isinstance(transform, PrunePrologueChecks) for transform in transforms)
    assert isinstance(transforms[-1], FastDispatchTransform)
    assert "read_and_check_modules" in str(thunder.last_prologue_traces(fast)[-1])
    # Another compilation with the same list finds nothing more to swap.
    count = len(transforms)
    fast(torch.randn(5, 4))
    assert len(thunder.compile_data(fast).transforms) == count


def test_hits_take_the_fast_path(monkeypatch):
    model, x = Model(), torch.randn(3, 4)
    fast = compiled(model, "fast-prologue")
    fast(x)
    monkeypatch.setattr(thunder, "_get_cache_info", lambda: pytest.fail("Thunder's dispatcher was asked"))
    for _ in range(3):
        torch.testing.assert_close(fast(x), model(x))
    assert (thunder.cache_hits(fast), thunder.cache_misses(fast)) == (3, 1)


def test_extraction_only():
    model, x = Model().eval().requires_grad_(False), torch.randn(3, 4)
    fast = compiled(model, FastPrologue(extraction_only=True, keep=["*.bias"]))
    fast(x)
    model.linear.weight.requires_grad_(True)
    assert not fast(x).requires_grad
    model.linear.bias.requires_grad_(True)
    assert fast(x).requires_grad
    model.train()
    torch.testing.assert_close(fast(x), torch.zeros(3, 4))


@pytest.mark.parametrize(
    "arguments, error, message",
    (
        ({"extraction_only": 1}, TypeError, "extraction_only must be a bool, is 1 of type int"),
        ({"keep": ["*.bias"]}, ValueError, r"keep=\['\*.bias'\] needs extraction_only=True"),
        ({"extraction_only": True, "keep": "a"}, TypeError, "keep must be a sequence of patterns, is the string 'a'"),
        ({"extraction_only": True, "keep": [""]}, ValueError, "keep has an empty pattern"),
    ),
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        FastPrologue(**arguments)


def test_with_thunderfx():
    # Thunder cannot trace the lazy graph modules that torch 2.12 gives it.
    lazy = pytest.importorskip("torch.fx._lazy_graph_module")
    with lazy._force_skip_lazy_graph_module():
        if not dynamo_notices_train():
            pytest.skip(
                "torch.compile itself goes on after model.train() as before, as torch 2.10 does on CPython 3.13.0"
            )
        check_with_thunderfx()


def dynamo_notices_train():
    model, x = Model().eval(), torch.randn(3, 4)
    compiled_model = torch.compile(model, backend="eager")
    compiled_model(x)
    model.train()
    return torch.equal(compiled_model(x), torch.zeros(3, 4))


def check_with_thunderfx():
    model, x = Model().eval(), torch.randn(3, 4)
    recipe = Recipe(interpreter="thunder.fx")
    fast = thunder.compile(model, recipe=recipe, plugins="fast-prologue")
    for _ in range(2):
        torch.testing.assert_close(fast(x), model(x))
    model.train()
    torch.testing.assert_close(fast(x), torch.zeros(3, 4))
