"""ThunderFX, thunder.compile with its recipes, and the cache options."""

import pytest
import torch
from torch.fx._lazy_graph_module import _force_skip_lazy_graph_module

import thunder
from thunder.dynamo import thunderfx
from thunder.recipes import BaseRecipe
from thunder.tests.prologue_variants import VARIANTS, check, every_variant
from thunder.transforms import PrunePrologueChecks
from thunder.transforms.fused_prologue_transform import FusedPrologueTransform


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.register_buffer("offset", torch.randn(6))

    def forward(self, x):
        x = torch.tanh(self.fc1(x))
        if self.training:
            x = x * 0.5
        return self.fc2(x) + self.offset


class Breaking(Net):
    def forward(self, x):
        x = super().forward(x)
        torch._dynamo.graph_break()
        return self.fc1(x)


def is_fused(variant):
    return any(isinstance(transform, FusedPrologueTransform) for transform in VARIANTS[variant]())


@pytest.fixture(autouse=True)
def without_what_was_compiled():
    torch._dynamo.reset()
    # Thunder 0.2.6 cannot trace the graph modules that torch 2.12 recompiles only when they are called.
    with _force_skip_lazy_graph_module():
        yield


def train_and_evaluate(call, model):
    generator = torch.Generator().manual_seed(1)
    history = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows, is_training in ((3, True), (3, True), (5, True), (3, False)):
        model.train(is_training)
        output = call(torch.randn(rows, 6, generator=generator))
        output.square().mean().backward()
        history.append((output.detach(), [p.grad.clone() for p in model.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
    return history


def compiled_with(variant, make, dynamic):
    """Returns what the scenario gives, and of each function that Thunder compiled the cache misses and the provenances of
    the prologue's traces."""
    torch.manual_seed(0)
    model = make()
    compiled = thunderfx(model, transforms=VARIANTS[variant]() if variant else [], dynamic=dynamic)
    values = train_and_evaluate(compiled, model)
    functions = [fn for info in compiled._backend.subgraph_infos for fn in info.thunder_compiled_fns]
    traces = [" ".join(str(t.get_provenance()) for t in thunder.last_prologue_traces(fn)) for fn in functions]
    return values, [thunder.cache_misses(fn) for fn in functions], traces


@pytest.mark.parametrize("make, dynamic", [(Net, False), (Net, True), (Breaking, False)])
def test_thunderfx(make, dynamic):
    torch.manual_seed(0)
    model = make()
    expected = train_and_evaluate(model, model)
    values, misses, _ = compiled_with(None, make, dynamic)
    torch.testing.assert_close(values, expected)
    for variant in VARIANTS:
        torch._dynamo.reset()
        own, own_misses, traces = compiled_with(variant, make, dynamic)
        torch.testing.assert_close(own, values, rtol=0, atol=0)
        assert own_misses == misses
        # ThunderFX adds an ExtractionOnlyPrologueTransform of its own each time.
        assert all("Extraction only prologue" in trace for trace in traces)
        assert all(("Fused prologue" in trace) is is_fused(variant) for trace in traces)


class WithVariant(BaseRecipe):
    """The base recipe with transforms of a variant added, with Thunder's default executors."""

    def __init__(self, own, *, prune, interpreter="thunder.jit"):
        super().__init__(interpreter=interpreter)
        self.own, self.prune = own, prune

    def setup_transforms(self):
        transforms = super().setup_transforms()
        assert [type(transform) for transform in transforms] == [PrunePrologueChecks]
        return [*(transforms if self.prune else []), *self.own]

    def setup_executors(self):
        return list(thunder.get_default_executors())


def evaluate_and_train(call, model):
    """Outputs and gradients of two calls in each mode."""
    history = []
    for is_training in (False, True):
        model.train(is_training)
        for x in torch.linspace(-1, 1, 36).view(2, 3, 6):
            output = call(x)
            grads = torch.autograd.grad(output.sum(), list(model.parameters()))
            history.append((output.detach(), grads))
    return history


def compile_in_place_of_pruning(model, transforms):
    return thunder.compile(model, recipe=WithVariant(transforms, prune=False))


@every_variant
def test_compile_notices_train_with_a_variant_in_place_of_pruning(variant):
    assert check(variant, Net, evaluate_and_train, compile_in_place_of_pruning).misses == 2


def run_recipe(recipe):
    torch.manual_seed(0)
    model = Net()
    compiled = thunder.compile(model, recipe=recipe)
    return evaluate_and_train(compiled, model), compiled


@every_variant
def test_compile_with_the_checks_pruned(variant):
    """With PrunePrologueChecks nobody notices `train()`, with a variant after it neither."""
    values, reference = run_recipe(WithVariant([], prune=True))
    own, compiled = run_recipe(WithVariant(VARIANTS[variant](), prune=True))
    torch.testing.assert_close(own, values, rtol=0, atol=0)
    torch.testing.assert_close(own[2:], own[:2], rtol=0, atol=0)
    assert thunder.cache_misses(compiled) == thunder.cache_misses(reference) == 1
    assert ("read_and_check_modules" in str(thunder.last_prologue_traces(compiled)[-1])) is is_fused(variant)


@every_variant
def test_compile_with_dynamo(variant):
    torch.manual_seed(0)
    model = Net()
    own, _ = run_recipe(WithVariant(VARIANTS[variant](), prune=True, interpreter="thunder.fx"))
    torch.testing.assert_close(own, evaluate_and_train(model, model))


@every_variant
def test_no_caching(variant):
    # Thunder then checks no metadata, and ExtractionOnlyPrologueTransform finds nothing to leave out.
    model, x = Net(), torch.randn(3, 6)
    compiled = thunder.jit(model, transforms=VARIANTS[variant](), cache="no caching")
    for is_training in (False, True):
        model.train(is_training)
        torch.testing.assert_close(compiled(x), model(x))
    assert (thunder.cache_hits(compiled), thunder.cache_misses(compiled)) == (0, 2)


def scale(x, w):
    return x * w


def scale_shapes(call, model):
    w = torch.nn.Parameter(torch.linspace(0, 1, 6))
    return [call(torch.ones(rows, 6), w).detach() for rows in (3, 5, 5, 3)]


@every_variant
def test_symbolic_values(variant):
    torch.manual_seed(0)
    compiled, unfused = (
        thunder.jit(scale, transforms=transforms, cache="symbolic values") for transforms in (VARIANTS[variant](), [])
    )
    values = scale_shapes(unfused, scale)
    torch.testing.assert_close(scale_shapes(compiled, scale), values, rtol=0, atol=0)
    torch.testing.assert_close(values, scale_shapes(scale, scale))
    assert thunder.cache_misses(compiled) == thunder.cache_misses(unfused)


# Thunder's own limits, so that it is noticed when they are gone.
REFUSED = {
    "symbolic values": "Exception occured unpacking object",
    "same input": "cache option SAME_INPUT is not supported",
}


@pytest.mark.parametrize("cache", REFUSED)
def test_cache_options_that_thunder_refuses_for_modules(cache):
    with pytest.raises(NotImplementedError, match=REFUSED[cache]):
        thunder.jit(Net(), cache=cache)(torch.randn(3, 6))
