import ast
import copy
import doctest
import pickle
import re
from collections import Counter

import pytest
import torch
from torch.fx._lazy_graph_module import _force_skip_lazy_graph_module

import thunder
import thunder.dynamo
from thunder.core import prims
from thunder.core.proxies import ProxyTag
from thunder.core.trace import tracectx
from thunder.core.transform_common import Transform
from thunder.executors import pythonex
from thunder.transforms import ExtractionOnlyPrologueTransform, LORATransform, PrunePrologueChecks
from thunder.transforms import extraction_only_prologue_transform as extraction_only


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class Net(torch.nn.Module):
    """Parameters, a frozen one, a buffer, and behaviour that depends on attributes."""

    def __init__(self):
        super().__init__()
        self.fc1 = torch.nn.Linear(8, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.fc2 = torch.nn.Linear(8, 8)
        self.fc1.bias.requires_grad_(False)
        self.register_buffer("offset", torch.ones(8))
        self.scale = 2.0

    def forward(self, x):
        x = self.norm(self.fc1(x))
        if self.training:
            x = torch.relu(x)
        return self.fc2(x) * self.scale + self.offset


def last_prologue(cm):
    return thunder.last_prologue_traces(cm)[-1]


def checked(cm) -> Counter:
    """How often the prologue that runs checks the metadata of each tensor, by the name of the parameter or buffer, and
    else by its name in the trace."""
    bsyms = last_prologue(cm).bound_symbols
    reads = (prims.PrimIDs.UNPACK_PARAMETER, prims.PrimIDs.UNPACK_BUFFER)
    names = {bsym.output.name: bsym.args[1] for bsym in bsyms if bsym.sym.id in reads}
    return Counter(
        names.get(bsym.args[0].name, bsym.args[0].name)
        for bsym in bsyms
        if bsym.sym.id == pythonex.check_tensor_shape_and_metadata.id
    )


def statements(trace) -> list[str]:
    """What the trace does, a line a statement, without provenance and comments."""
    lines = (line.strip() for line in str(trace).splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def assert_same_as_eager(cm, model, *args):
    """Compares values and the gradients of all parameters."""
    expected, actual = model(*args), cm(*args)
    torch.testing.assert_close(actual, expected)
    assert actual.requires_grad == expected.requires_grad
    if expected.requires_grad:
        parameters = [p for p in model.parameters() if p.requires_grad]
        expected_grads = torch.autograd.grad(expected.sum(), parameters, allow_unused=True)
        actual_grads = torch.autograd.grad(actual.sum(), parameters, allow_unused=True)
        torch.testing.assert_close(actual_grads, expected_grads, rtol=1e-4, atol=1e-4)


def jit(fn, *args, **kwargs):
    return thunder.jit(fn, transforms=[ExtractionOnlyPrologueTransform(*args, **kwargs)])


def test_litgpt():
    litgpt_model = pytest.importorskip("litgpt.model")
    from thunder.tests.litgpt_model import Config

    model = litgpt_model.GPT(Config.from_name("llama1-like", n_layer=1))
    x = torch.randint(model.max_seq_length, (2, 5))
    reference, cm = thunder.jit(model), jit(model)
    reference(x)
    assert_same_as_eager(cm, model, x)

    assert checked(cm) == {"idx": 1}
    names = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
    assert checked(reference) == Counter(["idx", *names])
    gone = Counter(statements(last_prologue(reference))) - Counter(statements(last_prologue(cm)))
    assert len(gone) == len(names) and all(line.startswith("check_tensor_metadata(") for line in gone)


def test_only_checks_go_and_the_rest_keeps_its_order():
    model = Net()
    reference, cm = thunder.jit(model), jit(model)
    x = torch.randn(3, 8)
    reference(x)
    assert_same_as_eager(cm, model, x)

    assert checked(reference).keys() == {
        "x", "fc1.weight", "fc1.bias", "norm.weight", "norm.bias", "fc2.weight", "fc2.bias", "offset",
    }  # fmt: skip
    assert checked(cm) == {"x": 1}
    remaining = [
        line for line in statements(last_prologue(reference)) if not line.startswith("check_tensor_metadata(t_")
    ]
    assert statements(last_prologue(cm)) == remaining


def test_given_traces_are_not_changed():
    model = Net()
    cm = jit(model)
    cm(torch.randn(3, 8))
    given, transformed = thunder.last_prologue_traces(cm)[:2]
    before, computation, epilogue = str(given), thunder.last_traces(cm)[0], cm._lc_cs.last_epilogue_traces[0]
    new_prologue, new_computation, new_epilogue = ExtractionOnlyPrologueTransform().transform_traces_pre_prologue(
        given, computation, epilogue
    )
    assert new_computation is computation and new_epilogue is epilogue
    assert new_prologue is not given and str(given) == before
    assert statements(new_prologue) == statements(transformed)


def test_nothing_to_leave_out_hands_the_prologue_back():
    cm = jit(torch.nn.ReLU())
    cm(torch.randn(3))
    assert checked(cm) == {"input": 1}
    # the trace as acquired and the trace for execution: the transform has added none
    assert len(thunder.last_prologue_traces(cm)) == 2


def test_provenance():
    cm = jit(Net())
    cm(torch.randn(3, 8))
    provenance = str(thunder.last_prologue_traces(cm)[1].get_provenance())
    pattern = r"# Constructed by Extraction only prologue, 7 checks left out \(took \d+ milliseconds\)"
    assert re.fullmatch(pattern, provenance)


def test_prologue_traces_print_and_compile():
    cm = thunder.jit(Net(), transforms=[ExtractionOnlyPrologueTransform(), LORATransform(r=2)])
    cm(torch.randn(3, 8))
    for trace in thunder.last_prologue_traces(cm):
        assert "def prologue(*args, **kwargs):" in str(trace)
        ast.parse(str(trace))


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(8, 4)
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, i):
        return self.head(self.embedding(i))


@pytest.mark.parametrize(
    "keep, expected",
    [((), set()), (["head.weight"], {"embedding.weight", "head.weight"}), (["embedding.*"], {"embedding.weight", "head.weight"})],
)  # fmt: skip
def test_tied_weights(keep, expected):
    model, i = Tied(), torch.tensor([1, 2])
    cm = jit(model, keep=keep)
    assert_same_as_eager(cm, model, i)
    assert checked(cm).keys() - {"i"} == expected


def test_parameter_list():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(4)) for _ in range(2)])

        def forward(self, x):
            return x * self.weights[0] + self.weights[1]

    model, x = Model(), torch.randn(3, 4)
    cm = jit(model)
    assert_same_as_eager(cm, model, x)
    assert checked(cm) == {"x": 1}
    cm = jit(model, keep=["weights.1"])
    assert_same_as_eager(cm, model, x)
    assert sum(checked(cm).values()) == 2


def test_function_with_a_parameter_argument():
    def scale(x, w):
        return x * w

    cm = jit(scale)
    x, w = torch.randn(3, 4), torch.nn.Parameter(torch.randn(4))
    torch.testing.assert_close(cm(x, w), scale(x, w))
    assert checked(cm) == {"x": 1}
    # What no longer is a Parameter is checked: its proxy is tagged by what it was at compilation.
    torch.testing.assert_close(cm(x.double(), w), scale(x.double(), w))


def test_two_modules_in_one_function():
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def fn(x):
        return second(first(x))

    x = torch.randn(3, 4)
    cm = jit(fn)
    torch.testing.assert_close(cm(x), fn(x))
    assert checked(cm) == {"x": 1}
    # Names are those within each module, so that a pattern speaks of both.
    cm = jit(fn, keep=["weight"])
    torch.testing.assert_close(cm(x), fn(x))
    assert sum(checked(cm).values()) == 3


def test_skip_check_on_input_tensors():
    model, x = Net(), torch.randn(3, 8)
    cm = jit(model, skip_check_on_input_tensors=True)
    assert_same_as_eager(cm, model, x)
    assert not checked(cm)
    cm = jit(model, skip_check_on_input_tensors=True, keep=["offset"])
    assert_same_as_eager(cm, model, x)
    assert checked(cm) == {"offset": 1}


def test_keep():
    model, x = Net(), torch.randn(3, 8)
    cm = jit(model, keep=["fc?.bias", "offset"])
    assert_same_as_eager(cm, model, x)
    assert checked(cm) == {"x": 1, "fc1.bias": 1, "fc2.bias": 1, "offset": 1}
    model.fc1.bias.requires_grad_(True)
    assert_same_as_eager(cm, model, x)
    assert thunder.cache_misses(cm) == 2


def test_keep_may_name_what_is_not_used():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.used(x)

    cm = jit(Model(), keep=["unused.*"])
    cm(torch.randn(3, 4))
    assert checked(cm) == {"x": 1}


@pytest.mark.parametrize(
    "fn, pattern, message",
    [
        (Net(), "fc3.weight", r"keep pattern 'fc3.weight' matches no parameter and no buffer of Net; the nearest names are 'fc\d.weight'"),
        (Net(), "FC1.*", "keep pattern 'FC1.*' matches no parameter"),
        (torch.nn.ReLU(), "weight", "matches no parameter and no buffer of ReLU; it has none"),
    ],
)  # fmt: skip
def test_keep_that_matches_nothing_raises_at_compilation(fn, pattern, message):
    cm = jit(fn, keep=["*" if isinstance(fn, Net) else pattern, pattern])
    with pytest.raises(ValueError, match=message):
        cm(torch.randn(3, 8))


def test_symbolic_values():
    # A function, since Thunder 0.2.6 cannot compile a module that has parameters with this cache option.
    def scale(x, w):
        return x * w

    cm = thunder.jit(scale, cache="symbolic values", transforms=[ExtractionOnlyPrologueTransform()])
    w = torch.nn.Parameter(torch.randn(8))
    for x in (torch.randn(3, 8), torch.randn(5, 8), torch.randn(2, 3, 8)):
        torch.testing.assert_close(cm(x, w), scale(x, w))
    assert checked(cm) == {"x": 1}


def test_reads_that_only_fed_a_check_go_too():
    def fn(x, w):
        return x.sum() * w.sum()

    x, w = torch.randn(3, 4), torch.nn.Parameter(torch.randn(5))
    reference = thunder.jit(fn, cache="symbolic values")
    reference(x, w)
    acquired = thunder.last_prologue_traces(reference)[0]
    (check,) = (
        bsym
        for bsym in acquired.bound_symbols
        if bsym.sym.id is prims.PrimIDs.CHECK_TENSOR_SHAPE_AND_METADATA
        and ProxyTag.STATIC_MEMORY_LOCATION in bsym.args[0].tags
    )
    fed = {size.name for size in check.args[1] if isinstance(size, thunder.Proxy)}
    new, _, _ = ExtractionOnlyPrologueTransform().transform_traces_pre_prologue(acquired, None, None)
    read = {proxy.name for bsym in new.bound_symbols for proxy in bsym.flat_proxy_outs}
    returned = {proxy.name for proxy in new.bound_symbols[-1].flat_proxy_args}
    assert fed and (fed - returned).isdisjoint(read)
    assert returned <= read


def test_tensors_that_are_added_to_the_return_in_place_stay():
    # as BitsAndBytesLinearQuant4bit adds them
    cm = thunder.jit(Net())
    cm(torch.randn(3, 8))
    trace = thunder.last_prologue_traces(cm)[0]
    assert trace.bound_symbols[-1].flat_proxy_args  # has been looked at, and so is cached
    check, read = thunder.transforms.utils.get_checks(trace)["fc1.weight"]
    with tracectx(trace):
        added = read.output.replace(name="added")
    new_read = read.from_bsym(args=(read.args[0], "added"), output=added)
    new_check = check.from_bsym(args=(added, *check.args[1:]))
    trace.bound_symbols[-1:-1] = [new_read, new_check]
    thunder.transforms.utils.add_trace_output(trace, added, subindex=0)
    new, _, _ = ExtractionOnlyPrologueTransform().transform_traces_pre_prologue(trace, None, None)
    assert new_read in new.bound_symbols and new_check not in new.bound_symbols


def test_unused_parameter_read_for_its_metadata_only_goes():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4))

        def forward(self, x):
            return x * self.weight.shape[0]

    model, x = Model(), torch.randn(3)
    cm = jit(model)
    torch.testing.assert_close(cm(x), model(x))
    assert "get_parameter" not in str(thunder.last_prologue_traces(cm)[1])


def test_new_input_shape_recompiles():
    model = Net()
    cm = jit(model)
    for misses, shape in ((1, (3, 8)), (2, (5, 8)), (2, (3, 8)), (3, (2, 3, 8))):
        assert_same_as_eager(cm, model, torch.randn(shape))
        assert thunder.cache_misses(cm) == misses


def test_train_and_attributes_recompile():
    model, x = Net().eval(), torch.randn(3, 8)
    cm = jit(model)
    assert_same_as_eager(cm, model, x)
    model.train()
    assert_same_as_eager(cm, model, x)
    model.scale = 3.0
    assert_same_as_eager(cm, model, x)
    model.norm.eps = 1.0
    assert_same_as_eager(cm, model, x)
    assert thunder.cache_misses(cm) == 4


def test_global_state_recompiles():
    model, x = Net(), torch.randn(3, 8)
    cm = jit(model)
    assert_same_as_eager(cm, model, x)
    with torch.no_grad():
        assert_same_as_eager(cm, model, x)
    assert thunder.cache_misses(cm) == 2


def test_weights_updated_in_place_are_used():
    model, x = Net(), torch.randn(3, 8)
    cm = jit(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        assert_same_as_eager(cm, model, x)
        cm(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.load_state_dict(Net().state_dict())
    assert_same_as_eager(cm, model, x)
    assert thunder.cache_misses(cm) == 1


def test_unfreezing_silently_trains_nothing():
    model, x = Net().eval().requires_grad_(False), torch.randn(3, 8)
    cm, reference = jit(model), thunder.jit(model)
    cm(x), reference(x)
    model.requires_grad_(True)
    assert reference(x).requires_grad
    assert not cm(x).requires_grad
    assert thunder.cache_misses(cm) == 1


def test_changed_dtype_is_not_noticed():
    model, x = torch.nn.Embedding(4, 2), torch.tensor([1])
    cm, reference = jit(model), thunder.jit(model)
    cm(x), reference(x)
    model.weight.data = model.weight.data.double()
    reference(x), cm(x)
    assert thunder.cache_misses(reference) == 2
    assert thunder.cache_misses(cm) == 1


@pytest.mark.parametrize("lora_first", (False, True))
@pytest.mark.parametrize("keep", ((), ("*.lora_a",)))
def test_either_order_with_lora(lora_first, keep):
    torch.manual_seed(0)
    model, x = Net(), torch.randn(3, 8)
    transforms = [ExtractionOnlyPrologueTransform(keep=keep), LORATransform(r=2)]
    if lora_first:
        transforms.reverse()
    cm = thunder.jit(model, transforms=transforms)
    for tensor in (cm.get_parameter(f"{name}.weight.lora_b") for name in ("fc1", "fc2")):
        torch.nn.init.ones_(tensor)
    reference = thunder.jit(model, transforms=[LORATransform(r=2)])
    reference._overrides_parameters.update(cm._overrides_parameters)
    torch.testing.assert_close(cm(x), reference(x))
    # LoRA's own matrices are no parameters of the model: their proxies have no tag, and they stay checked.
    lora = {f"{name}.weight.lora_{matrix}" for name in ("fc1", "fc2") for matrix in "ab"}
    assert checked(cm).keys() == {"x"} | lora


class EditsChecks(Transform):
    """Stands for transforms such as the quantizations, which look up the one check of each parameter and edit it."""

    def transform_traces_pre_prologue(self, prologue_trace, computation_trace, epilogue_trace, **kwargs):
        checks = thunder.transforms.utils.get_checks(prologue_trace)
        self.edited = set(checks)
        return prologue_trace, computation_trace, epilogue_trace


def test_transforms_that_come_after_find_the_checks():
    model, x = Net(), torch.randn(3, 8)
    editing = EditsChecks()
    transforms = (ExtractionOnlyPrologueTransform(), editing, ExtractionOnlyPrologueTransform())
    cm = thunder.jit(model, transforms=transforms)
    assert_same_as_eager(cm, model, x)
    assert editing.edited == {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    assert checked(cm) == {"x": 1}
    assert str(thunder.last_prologue_traces(cm)[1]).count("# left out: check_tensor_shape_and_metadata(t_") == 7


def test_with_prune_prologue_checks_in_either_order():
    model, x = Net(), torch.randn(3, 8)
    alone = thunder.jit(model, transforms=[PrunePrologueChecks()])
    alone(x)
    for transforms in (
        [ExtractionOnlyPrologueTransform(), PrunePrologueChecks()],
        [PrunePrologueChecks(), ExtractionOnlyPrologueTransform()],
    ):
        cm = thunder.jit(model, transforms=transforms)
        assert_same_as_eager(cm, model, x)
        assert statements(last_prologue(cm)) == statements(last_prologue(alone))


@pytest.mark.parametrize("dynamic", (False, True))
def test_thunderfx(dynamic):
    from thunder.dynamo import thunderfx

    model, x = Net(), torch.randn(3, 8)
    torch._dynamo.reset()
    cm = thunderfx(model, dynamic=dynamic)
    # Thunder 0.2.6 cannot trace the graph modules that torch 2.12 recompiles only when they are called.
    with _force_skip_lazy_graph_module():
        assert_same_as_eager(cm, model, x)
    (fn,) = cm._backend.subgraph_infos[0].thunder_compiled_fns
    (transform,) = thunder.list_transforms(fn)
    assert type(transform) is ExtractionOnlyPrologueTransform
    assert transform.skip_check_on_input_tensors == (not dynamic)
    # With dynamic shapes TorchDynamo passes buffers as plain inputs, whose checks stay as those of all inputs do.
    assert bool(checked(fn)) == dynamic
    assert not any("parameters" in name for name in checked(fn))


def test_is_what_thunder_uses():
    assert thunder.transforms.ExtractionOnlyPrologueTransform is extraction_only.ExtractionOnlyPrologueTransform
    assert thunder.dynamo.compiler.ExtractionOnlyPrologueTransform is extraction_only.ExtractionOnlyPrologueTransform


def test_repr_shows_what_differs_from_the_defaults():
    name = "thunder.transforms.extraction_only_prologue_transform.ExtractionOnlyPrologueTransform"
    assert repr(ExtractionOnlyPrologueTransform()) == f"{name}()"
    assert repr(ExtractionOnlyPrologueTransform(True)) == f"{name}(skip_check_on_input_tensors=True)"
    transform = ExtractionOnlyPrologueTransform(keep=("*.bias",))
    assert repr(transform) == f"{name}(keep=['*.bias'])"
    again = eval(repr(transform), {"thunder": thunder})
    assert again.keep == transform.keep


@pytest.mark.parametrize("copies", (copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))), ids=("deepcopy", "pickle"))
def test_copies(copies):
    model, x = Net(), torch.randn(3, 8)
    transform = ExtractionOnlyPrologueTransform(keep=["offset"])
    thunder.jit(model, transforms=[transform])(x)
    duplicate = copies(transform)
    assert repr(duplicate) == repr(transform)
    cm = thunder.jit(model, transforms=[duplicate])
    assert_same_as_eager(cm, model, x)
    assert checked(cm) == {"x": 1, "offset": 1}


@pytest.mark.parametrize(
    "error, message, args, kwargs",
    [
        (TypeError, "skip_check_on_input_tensors must be a bool, is 1 of type int", (1,), {}),
        (TypeError, "skip_check_on_input_tensors must be a bool, is None", (None,), {}),
        (TypeError, r"keep must be a sequence of patterns, is the string '\*.bias'", (), {"keep": "*.bias"}),
        (TypeError, "keep must be a sequence of patterns, is {'a'} of type set", (), {"keep": {"a"}}),
        (TypeError, "keep must hold strings, has 3 of type int", (), {"keep": ["a", 3]}),
        (ValueError, "keep has an empty pattern", (), {"keep": ["a", ""]}),
        (TypeError, "positional argument", (False, ["a"]), {}),
    ],
)
def test_wrong_arguments_raise_at_construction(error, message, args, kwargs):
    with pytest.raises(error, match=message):
        ExtractionOnlyPrologueTransform(*args, **kwargs)


def test_docstring_example():
    failures, attempted = doctest.testmod(extraction_only)
    assert attempted and not failures
