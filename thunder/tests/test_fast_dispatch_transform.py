"""FastDispatchTransform call by call: what Thunder's own dispatcher does, the fast one does too."""

import collections
import contextlib
import doctest
import functools
import gc
import itertools
import random
import threading
import time
import warnings
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import thunder
from thunder.core import guard_blocks
from thunder.core.pytree import tree_map
from thunder.core.trace import is_tracing
from thunder.core.transform_common import Transform
from thunder.transforms import ExtractionOnlyPrologueTransform, LORATransform, PrunePrologueChecks
from thunder.transforms import fast_dispatch_transform as fast_dispatch
from thunder.transforms.fast_dispatch_transform import FastDispatchTransform
from thunder.transforms.fused_prologue_transform import FusedPrologueTransform


@pytest.fixture(autouse=True)
def count_calls_of_thunder(monkeypatch):
    """Counts which calls reach Thunder's dispatcher, so that no test compares that with itself."""
    make_dispatcher = fast_dispatch._dispatcher

    def make_and_count(call_thunder, cd, cs):
        cs.calls_of_thunder = 0

        def counted(*args, **kwargs):
            if not is_tracing():
                cs.calls_of_thunder += 1
            return call_thunder(*args, **kwargs)

        return make_dispatcher(counted, cd, cs)

    monkeypatch.setattr(fast_dispatch, "_dispatcher", make_and_count)


def fast_hits(cm):
    return cm._lc_cs.calls - cm._lc_cs.calls_of_thunder


#
# The harness. A scenario is a generator function of what is called (a compiled model or the model itself) and the model.
# It yields after each call what that was given and what it returned, in one tuple.
#


def describe(value, names):
    """All that can be seen of a value. Tensors and storages have names in the order in which they are met."""
    if isinstance(value, torch.Tensor):
        described = {
            "is": names.setdefault(id(value), f"tensor {len(names)}"),
            "type": type(value),
            "metadata": (value.shape, value.dtype, value.device, value.layout),
            "requires_grad": value.requires_grad,
            "is_leaf": value.is_leaf,
            "is_inference": value.is_inference(),
            "grad_fn": type(value.grad_fn).__name__,
            "grad": None if value.grad_fn or value.grad is None else describe(value.grad, names),
        }
        if value.layout is not torch.strided:
            return described | {"values": contents(value.to_dense())}
        # An inference tensor has no version.
        described |= {
            "stride": value.stride(),
            "is_view": value._is_view(),
            "version": None if value.is_inference() else value._version,
        }
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type == "cpu" and value.numel():
            storage = ("storage", value.untyped_storage().data_ptr())
            described |= {
                "storage": names.setdefault(storage, f"storage {len(names)}"),
                "values": contents(value),
            }
        return described
    if isinstance(value, (tuple, list)):
        return type(value), [describe(item, names) for item in value]
    if isinstance(value, dict):
        return type(value), [(key, describe(item, names)) for key, item in value.items()]
    if isinstance(value, Exception):
        return type(value), str(value)
    return type(value), value


def contents(tensor):
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def statistics(cm):
    """What the compile statistics say about the last call, but for its timers."""
    cs = cm._lc_cs

    def number_of(attribute, last):
        return [i for i, entry in enumerate(cs.interpreter_cache) if getattr(entry, attribute) is last]

    return {
        "counters": (cs.calls, thunder.cache_hits(cm), thunder.cache_misses(cm), len(cs.interpreter_cache)),
        "traces": cs.last_traces and number_of("computation_traces", thunder.last_traces(cm)),
        "prologue traces": cs.last_prologue_traces and number_of("prologue_traces", thunder.last_prologue_traces(cm)),
        "backward traces": cs.last_backward_traces is not None
        and number_of("backward_traces", thunder.last_backward_traces(cm)),
        "prologue": number_of("prologue_fn", cs.last_prologue),
        "computation": callable(cs.last_computation),
        "log": (cs.last_interpreter_log is None, cs.last_interpreted_instructions is None),
        "transformation": cs.last_prologue_transformation_start == 0 and cs.last_computation_transformation_stop == 0,
    }


def state(call):
    return dict(sorted([*call.named_parameters(), *call.named_buffers()]))


def grad_mode():
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def run_compiled(make, scenario, transforms, **options):
    """Runs a scenario with a compiled model. Returns what was seen after each call, copies of the values that were seen,
    and the compiled model."""
    torch.manual_seed(0)
    model = make()
    cm = thunder.jit(model, transforms=transforms, **options)
    seen, values = [], []
    with torch.enable_grad():
        for yielded in scenario(cm, model):
            names = {}
            seen.append(
                {
                    "grad mode": grad_mode(),
                    "state": describe(state(cm), names),
                    "values": describe(yielded, names),
                    "statistics": statistics(cm),
                }
            )
            values.append(copied(yielded, cm))
    return seen, values, cm


def run_eager(make, scenario):
    torch.manual_seed(0)
    model = make()
    with torch.enable_grad():
        return [copied(yielded, model) for yielded in scenario(model, model)]


def copied(yielded, call):
    """What assert_close can compare."""

    def copy(value):
        if isinstance(value, torch.Tensor):
            return value.detach().clone()
        return value if isinstance(value, (bool, int, float)) else list(str(value).encode())

    return tree_map(copy, (yielded, state(call)))


@functools.lru_cache(maxsize=1)
def own_path(make, scenario, own=(), **options):
    """What is seen on Thunder's own path. Tests that share it come one after the other."""
    seen, _, _ = run_compiled(make, scenario, [transform() for transform in own], **options)
    return seen


def check(make, scenario, *, eager=True, slow_hits=0, own=(), fast=None, **options):
    """Demands that a scenario sees the same with the fast dispatcher as with Thunder's own, and that all cache hits but
    ``slow_hits`` are fast. ``own`` are the transforms without FastDispatchTransform, ``fast`` those with it. If ``eager``,
    the values are those of the model itself, too."""
    expected = own_path(make, scenario, own, **options)
    fast = (*own, FastDispatchTransform) if fast is None else fast
    actual, values, cm = run_compiled(make, scenario, [transform() for transform in fast], **options)
    for i, (e, a) in enumerate(zip(expected, actual, strict=True)):
        for key in e:
            assert a[key] == e[key], f"{key} after call {i}"
    assert thunder.cache_hits(cm) > 0
    assert fast_hits(cm) == thunder.cache_hits(cm) - slow_hits
    if eager:
        torch.testing.assert_close(values, run_eager(make, scenario), equal_nan=True)
    return cm


class Small(torch.nn.Module):
    """A parameter and a buffer for the models of the tests."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4))
        self.register_buffer("buffer", torch.randn(4))


def module(forward):
    """Makes a class of modules with this ``forward``."""
    return type(forward.__name__, (Small,), {"forward": forward})


def batches(n, *shape):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape or (3, 4), generator=generator) for _ in range(n)]


def outcome(function, *args, **kwargs):
    """What a call returns or raises."""
    try:
        return function(*args, **kwargs)
    except Exception as e:
        return e


#
# Outputs
#

OUTPUTS = {
    "tensor": lambda self, x: x * self.weight,
    "structure": lambda self, x: (
        {"b": [x * self.weight, (x + 1,)], "a": None},
        [x.sin()],
        (),
        (3, 2.5, True, "text"),
        (x * self.weight)[:0],
    ),
    "dict": lambda self, x: {"b": x * self.weight, "a": x + 1},
    "none": lambda self, x: None,
    "empty tuple": lambda self, x: (),
    "the input": lambda self, x: x,
    "what was given": lambda self, x: (x, x * self.weight, x, self.weight, self.buffer, x.contiguous(), x.float()),
    "views": lambda self, x: (x.reshape(-1), x.transpose(0, 1), x[0], x[1:], self.weight.view(2, 2), x * self.weight),
    "views of a result": lambda self, x: (y := x * self.weight, y.view(-1), y[0], y),
    "without gradient": lambda self, x: (x * self.weight, x.argmax(), x > 0, (x * self.weight).detach()),
    "factory": lambda self, x: (torch.ones(2), (x * self.weight).double().sum()),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs(kind):
    def scenario(call, model):
        for mode, x in itertools.product((torch.enable_grad, torch.inference_mode), batches(3)):
            with mode():
                yield x, call(x)

    cm = check(module(OUTPUTS[kind]), scenario)
    assert fast_hits(cm) == 4


@pytest.mark.parametrize("kind", ["tensor", "views"])
def test_inputs_that_require_grad(kind):
    def scenario(call, model):
        for x, requires_grad in zip(batches(6), (True, True, False, False, True, False)):
            x.requires_grad_(requires_grad)
            outputs = call(x)
            yield x, outputs
            total = sum(y.sum() for y in (outputs if isinstance(outputs, tuple) else (outputs,)))
            if total.requires_grad:
                total.backward()
                yield x, total
                intermediate = x * 2
                yield intermediate, call(intermediate)

    check(module(OUTPUTS[kind]), scenario, eager=False)


#
# Training, and what is written
#


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh(), torch.nn.Linear(4, 4)
        )

    def forward(self, x):
        x = self.net(x)
        return x * 2 if self.training else x


def train(call, model, evaluate=False):
    optimizer = torch.optim.SGD(call.parameters(), lr=0.1, momentum=0.9)
    for x in batches(4):
        y = call(x)
        yield x, y
        y.square().mean().backward()
        yield x, y
        optimizer.step()
        optimizer.zero_grad()
        if evaluate:
            model.eval()
            with torch.no_grad():
                yield x, call(x)
            model.train()


def test_training():
    check(Net, train, own=(FusedPrologueTransform,), fast=[FastDispatchTransform])


def test_training_and_evaluation():
    # Twice the change of mode makes the module guard start anew; then the guard gets used to it.
    check(Net, functools.partial(train, evaluate=True), slow_hits=4)


def test_gradients_are_accumulated_and_retained():
    @module
    def forward(self, x):
        return (x * self.weight).sin(), (x + self.weight).cos()

    def scenario(call, model):
        for x in batches(3):
            x.requires_grad_()
            y, z = call(x)
            (y.sum() + z.sum()).backward(retain_graph=True)
            yield x, y, z
            yield x, outcome(y.sum().backward)
            yield x, torch.autograd.grad(call(x)[0].sum(), [x, call.get_parameter("weight")])
            yield x, call(x)

    check(forward, scenario, eager=False)


def test_freezing():
    def scenario(call, model):
        for i, x in enumerate(batches(8)):
            model.weight.requires_grad_(i // 2 % 2 == 0)
            yield x, call(x)

    # A guard is renewed by the first call after each change.
    check(module(OUTPUTS["tensor"]), scenario, slow_hits=2)


@pytest.mark.parametrize("inference", [False, True])
def test_in_place_updates(inference):
    @module
    def forward(self, x, y):
        y.add_(x)
        self.buffer.mul_(2).add_(1)
        x = x * self.weight
        x.add_(1)
        return x, y, self.buffer

    def scenario(call, model):
        for x, y in zip(batches(4), batches(4)):
            with torch.set_grad_enabled(not inference):
                yield x, y, call(x, y)

    check(forward, scenario, eager=False)


def test_in_place_updates_of_aliases():
    @module
    def forward(self, a, b):
        a.add_(1)
        b.mul_(2)
        return a + b

    def scenario(call, model):
        for x in batches(3):
            yield x, call(x, torch.ones(3, 4))
            yield x, outcome(call, x, x)
            yield x, outcome(call, x[:2], x[1:])
            yield x, outcome(call, x, x.view(3, 4))

    check(forward, scenario, eager=False)


def test_epilogue():
    @module
    def forward(self, x):
        self.buffer = self.buffer + x.sum(0)
        return x * self.weight + self.buffer

    def scenario(call, model):
        # With gradients, Thunder makes the buffer require them.
        with torch.no_grad():
            # The harness compares the buffers after each call, with those of the model without Thunder, too.
            yield from three_calls(call, model)

    # Thunder writes a buffer of the outermost module by a wrong name.
    check(lambda: torch.nn.Sequential(forward()), scenario)


#
# The grad mode, exceptions, hooks
#


def under_no_grad(self, x):
    with torch.no_grad():
        y = x * self.weight
    return y, x * self.weight


def disables_grad(self, x):
    y = x * self.weight
    torch._C._set_grad_enabled(False)
    return y, x * self.weight


def enables_grad(self, x):
    y = x * self.weight
    torch._C._set_grad_enabled(True)
    return y, x * self.weight


@pytest.mark.parametrize("forward", [under_no_grad, disables_grad, enables_grad])
def test_grad_mode(forward):
    def scenario(call, model):
        for enabled, x in zip((True, True, True, False, False, True, False, True), batches(8)):
            torch.set_grad_enabled(enabled)
            yield x, outcome(call, x)
        with torch.inference_mode():
            yield x, outcome(call, x)
            yield x, outcome(call, x)
            with torch.enable_grad():
                yield x, outcome(call, x)
                yield x, outcome(call, x)

    # The guard of tensors does not see them alike in inference mode.
    check(module(forward), scenario, eager=False, slow_hits=2)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("private", [True, False])
def test_exceptions_of_the_computation(grad, private, monkeypatch):
    if not private:
        use_public_parts(monkeypatch)

    @module
    def forward(self, i):
        return torch.nn.functional.embedding(i, self.weight.view(2, 2))

    def scenario(call, model):
        with torch.set_grad_enabled(grad):
            for index in (0, 1, 2, 0, -1, 7, 1):
                i = torch.tensor([index])
                yield i, outcome(call, i)

    cm = check(forward, scenario)
    assert fast_hits(cm) == 6


def test_exceptions_of_hooks_and_arguments():
    @module
    def forward(self, x, n=1):
        return x * self.weight * n

    def scenario(call, model):
        x = torch.randn(3, 4)
        for args, kwargs in [
            ((x,), {}),
            ((x,), {}),
            ((), {}),
            ((x, 1, 2), {}),
            ((x,), {"unknown": 1}),
            ((x,), {"x": x}),
            ((torch.randn(3, 5),), {}),
            ((x,), {}),
        ]:
            result = outcome(call, *args, **kwargs)
            yield x, type(result), result if isinstance(result, torch.Tensor) else None

    check(forward, scenario, eager=False)


def test_hooks():
    def scenario(call, model):
        seen = []
        handles = [
            call.register_forward_pre_hook(lambda m, args: (args[0] * 2,)),
            call.register_forward_pre_hook(lambda m, args, kwargs: seen.append(sorted(kwargs)), with_kwargs=True),
            call.register_forward_hook(lambda m, args, y: seen.append(y.detach().clone()) or y + 1),
            call.register_full_backward_hook(lambda m, inputs, outputs: seen.extend(outputs)),
        ]
        for x in batches(3):
            x.requires_grad_()
            y = call(x)
            y.sum().backward()
            yield x, y, list(seen)
        for handle in handles:
            handle.remove()
        yield x, call(x), list(seen)

    check(module(OUTPUTS["tensor"]), scenario)


def test_hooks_of_torch():
    """Hooks of tensors and of saved tensors, and anomaly detection."""

    def scenario(call, model):
        seen = []
        weight = call.get_parameter("weight")
        weight.register_hook(lambda grad: seen.append(grad.clone()))
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        for x in batches(3):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
                y = call(x)
            y.sum().backward()
            yield x, y, list(seen)
            with torch.autograd.detect_anomaly(check_nan=False):
                call(x).sum().backward()
            yield x, list(seen)

    check(module(OUTPUTS["tensor"]), scenario)


def use_public_parts(monkeypatch):
    monkeypatch.setattr(fast_dispatch, "_set_grad_enabled", torch.set_grad_enabled)
    monkeypatch.setattr(fast_dispatch, "_has_no_default_device", lambda: False)
    monkeypatch.setattr(fast_dispatch, "_may_autocast", lambda: True)


#
# Arguments
#


def with_defaults(self, x, y=None, *, scale=2.0, flag=False):
    x = x * self.weight * scale
    return x if y is None else (x + y, flag)


def with_variable_arguments(self, *args, **kwargs):
    return [x * self.weight for x in args], {name: x * self.weight for name, x in kwargs.items()}


def with_nested_arguments(self, xs, d):
    return xs[0] * self.weight + xs[1][0] + d["a"] * d["b"][0]


def with_other_values(self, x, dtype, device, name):
    return x.to(dtype).to(device) * (2 if name == "two" else 3)


X, Y, Z = batches(3)
ARGUMENTS = {
    "keywords": (
        with_defaults,
        [
            lambda f: f(X, Y, scale=3.0, flag=True),
            lambda f: f(X, flag=True, scale=3.0, y=Y),
            lambda f: f(flag=True, x=X, y=Y, scale=3.0),
            lambda f: f(scale=3.0, y=Y, x=X, flag=True),
            lambda f: f(y=X, x=Y, flag=True, scale=3.0),
            lambda f: f(x=X, y=X, flag=True, scale=3.0),
        ],
    ),
    "values": (
        with_defaults,
        [
            lambda f: f(X),
            lambda f: f(X, scale=2),
            lambda f: f(X, scale=True),
            lambda f: f(X, scale=2.0),
            lambda f: f(X, scale=float("nan")),
            lambda f: f(X, None, scale=-0.0),
            lambda f: f(X, scale=0.0),
            lambda f: f(X, Y, flag=True),
        ],
    ),
    "variable": (
        with_variable_arguments,
        [
            lambda f: f(X),
            lambda f: f(X, Y),
            lambda f: f(a=X, b=Y),
            lambda f: f(b=Y, a=X),
            lambda f: f(X, b=X),
            lambda f: f(X, args=Y, kwargs=Z),
            lambda f: f(),
        ],
    ),
    "nested": (
        with_nested_arguments,
        [
            lambda f: f([X, (Y,)], {"a": Z, "b": [X]}),
            lambda f: f([X, (Y,)], {"b": [X], "a": Z}),
            lambda f: f([X, (Y, Z)], {"a": Z, "b": [Y]}),
            lambda f: f((X, [Y]), {"a": Z, "b": (X,)}),
            lambda f: f([X, (X,)], {"a": X, "b": [X]}),
            lambda f: f(xs=[X, (Y,)], d={"a": Z, "b": [Z], "c": X}),
        ],
    ),
    "others": (
        with_other_values,
        [
            lambda f: f(X, torch.float64, torch.device("cpu"), "two"),
            lambda f: f(X, torch.float32, torch.device("cpu"), "two"),
            lambda f: f(X, torch.float32, "cpu", "two"),
            lambda f: f(X, torch.float32, torch.device("cpu"), "three"),
            lambda f: f(X, torch.float32, torch.device("cpu"), "TWO"),
        ],
    ),
    "tensors": (
        lambda self, x: x * 2,
        [
            lambda f: f(X),
            lambda f: f(X.t()),
            lambda f: f(X[:, :1].expand(3, 4)),
            lambda f: f(X.double()),
            lambda f: f(X[:0]),
            lambda f: f(X.to("meta")),
            lambda f: f(torch.nn.Parameter(X)),
            lambda f: f(torch.nn.Parameter(X, requires_grad=False)),
            lambda f: f(torch.nn.Buffer(X)),
            lambda f: f(X.to_sparse()),
            lambda f: f(X.as_subclass(Subclass)),
            lambda f: f(X.clone().requires_grad_()),
            lambda f: f(X.clone().requires_grad_() * 1),
        ],
    ),
}


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_arguments(kind):
    forward, calls = ARGUMENTS[kind]

    def scenario(call, model):
        for f in (*calls, *calls, *reversed(calls)):
            result = outcome(f, call)
            yield f, str(result)[:60] if isinstance(result, Exception) else result

    expected = own_path(module(forward), scenario)
    actual, _, cm = run_compiled(module(forward), scenario, [FastDispatchTransform()])
    for i, (e, a) in enumerate(zip(expected, actual, strict=True)):
        assert a == e, f"call {i}"
    # Only subclasses of tensors, and tensors without a storage of their own, are left to Thunder.
    assert thunder.cache_hits(cm) > len(calls)
    assert thunder.cache_hits(cm) - fast_hits(cm) == (6 if kind == "tensors" else 0)


def colliding_names(self, values, module, type, len, cpu, check, dense_tensors, input):
    return (values * module, type, len, check * cpu, check + dense_tensors * input)


def colliding_names_of_keywords(self, global_state_is_as_compiled, *args, flat_check, read_and_check_modules, **kwargs):
    return (global_state_is_as_compiled + args[0]) * self.weight, flat_check, read_and_check_modules, kwargs["values"]


def test_names_of_arguments():
    def scenario(call, model):
        for x in batches(3):
            yield x, call(x + 2, x + 3, 4, 5, x + 6, x, x + 2, input=x + 1)

    check(module(colliding_names), scenario)

    def scenario(call, model):
        for x in batches(3):
            yield x, call(x, x + 1, flat_check=2, read_and_check_modules=x + 3, values=x, type=3, kwargs=4)

    check(module(colliding_names_of_keywords), scenario)


#
# Aliasing among arguments
#


@functools.cache
def compiled_sum():
    return thunder.jit(Small())


def alias_tensor_indices(args, kwargs):
    """What Thunder's dispatcher finds, or the exception that it raises."""
    cache_info = {}
    raised = outcome(compiled_sum()._lc_cd.populate_cache_info, cache_info, *args, **kwargs)
    return type(raised) if isinstance(raised, Exception) else cache_info["alias_tensor_indices"]


@pytest.mark.parametrize("seed", range(4))
def test_alias_tensor_indices(seed):
    rng = random.Random(seed)
    base = torch.randn(4, 4)
    tensors = [
        *(base, base, base[1:], base.t(), base.view(2, 8), base.detach(), base[:0], base.view(torch.int32)),
        *(X, Y, X[0], torch.empty(0), torch.empty(0), torch.empty(0, 3), torch.tensor(1.0)),
        *(X.to("meta"), Y.to("meta"), X.to_sparse(), X.as_subclass(Subclass), torch.nn.Parameter(base)),
        *(base.data, X.numpy(), X.unsqueeze(0), Y.requires_grad_(False), Y.clone().requires_grad_()),
    ]
    others = [None, True, 1, 1.5, 1j, "text", torch.float32, torch.device("cpu"), slice(1, 2), range(2), object()]

    def value(depth=0):
        kind = rng.random()
        if depth > 2 or kind < 0.6:
            return rng.choice(tensors)
        if kind < 0.75:
            return rng.choice(others)
        items = [value(depth + 1) for _ in range(rng.randrange(4))]
        names = rng.sample("zyxa", len(items))
        kinds = [tuple, list, lambda i: dict(zip(names, i))]
        kinds += [lambda i: collections.OrderedDict(zip(names, i)), lambda i: Point(*i, *[None] * (3 - len(i)))]
        return rng.choice(kinds)(items)

    seen = collections.Counter()
    for _ in range(500):
        args = tuple(value() for _ in range(rng.randrange(4)))
        kwargs = {name: value() for name in rng.sample(["b", "a", "args", "Z"], rng.randrange(3))}
        expected = alias_tensor_indices(args, kwargs)
        actual = outcome(fast_dispatch._alias_tensor_indices, args, kwargs)
        assert (type(actual) if isinstance(actual, Exception) else actual) == expected, (args, kwargs)
        seen[expected] += 1
    assert len(seen) > 20, seen


Point = collections.namedtuple("Point", "x y z")


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_tensors_of_function_transforms(transform):
    """Thunder refuses what has no storage of its own."""
    cms = [thunder.jit(module(lambda self, x: x * 2)(), transforms=t) for t in ([], [FastDispatchTransform()])]
    results = []
    for cm in cms:
        cm(X), cm(X)
        with torch.no_grad():
            cm(X), cm(X)
            f = {
                "vmap": lambda cm: torch.func.vmap(cm)(torch.stack([X, Y])),
                "grad": lambda cm: torch.func.grad(lambda x: cm(x).sum())(X),
                "jvp": lambda cm: torch.func.jvp(cm, (X,), (X,)),
            }[transform]
            results.append(outcome(f, cm))
    assert describe(results[1], {}) == describe(results[0], {})
    assert fast_hits(cms[1]) == 2


#
# The cache: several entries, changes of the module, its options
#


def test_entries_that_alternate():
    @module
    def forward(self, x):
        return x.sum() * self.weight * (2 if self.training else 1)

    def scenario(call, model):
        shapes = [(3, 4), (5, 4), (3, 4, 1)]
        for i in range(5):
            for x in batches(1, *shapes[i % 3]):
                for y in (x, x.double(), x.t()) if x.dim() == 2 else (x,):
                    yield y, call(y)

    check(forward, scenario)


SCALE = [2]


def change_harmlessly(model):
    model.unrelated = object()
    model.weight.data.add_(1)
    model.weight.data = model.weight.data * 2


CHANGES = {
    "train": lambda model: model.train(not model.training),
    "number": lambda model: setattr(model, "scale", 5 - model.scale),
    "freezing": lambda model: model.weight.requires_grad_(not model.weight.requires_grad),
    "dtype": lambda model: setattr(
        model.weight,
        "data",
        model.weight.data.to(torch.float64 if model.weight.dtype is torch.float32 else torch.float32),
    ),
    "config": lambda model: setattr(model.config, "scale", 5 - model.config.scale),
    "item": lambda model: model.items.update(scale=5 - model.items["scale"]),
    "class": lambda model: setattr(Changing, "of_class", 5 - Changing.of_class),
    "global": lambda model: SCALE.__setitem__(0, 5 - SCALE[0]),
    "property": lambda model: model.items.update(of_property=5 - model.items["of_property"]),
    "harmless": change_harmlessly,
}


class Config:
    pass


class Changing(Small):
    of_class = 2

    def __init__(self):
        super().__init__()
        self.scale, self.config, self.items = 2, Config(), {"scale": 2, "of_property": 2}
        self.config.scale = 2

    @property
    def of_property(self):
        return self.items["of_property"]

    def forward(self, x):
        y = x * self.weight * self.scale * self.config.scale * self.items["scale"]
        y = y * self.of_class * self.of_property * SCALE[0]
        return y + 1 if self.training else y


def after_changes(change, call, model):
    for times in (2, 2, 1, 1, 3):
        for x in batches(times):
            yield x, call(x)
        CHANGES[change](model)
    CHANGES[change](model)


scenarios_of_changes = {change: functools.partial(after_changes, change) for change in CHANGES}


@pytest.mark.parametrize(
    ("change", "way"),
    [(change, "private") for change in CHANGES]
    + [(change, "portable") for change in ("train", "freezing", "property", "harmless")],
)
def test_module_changes(change, way, monkeypatch):
    if way == "portable":
        monkeypatch.setattr(guard_blocks, "available_blocks", lambda: guard_blocks.Blocks())
        use_public_parts(monkeypatch)
    scenario = scenarios_of_changes[change]
    actual, values, cm = run_compiled(Changing, scenario, [FastDispatchTransform()])
    assert actual == own_path(Changing, scenario)
    assert fast_hits(cm) >= 2
    torch.testing.assert_close(values, run_eager(Changing, scenario))


def test_cache_is_cleared():
    def scenario(call, model):
        for x in batches(2):
            yield x, call(x)
        if call is not model:
            call._lc_cs.interpreter_cache.clear()
        for x in batches(2):
            yield x, call(x)
        if call is not model:
            call._lc_cs.interpreter_cache.clear()
            # This does not go through the dispatcher.
            call._lc_cd.get_computation_and_inputs(X)
            del call._lc_cs.interpreter_cache[:]
            call._lc_cd.get_computation_and_inputs(X)
        yield X, call(X)
        if call is not model:
            call._lc_cs.interpreter_cache = []
        for x in batches(2):
            yield x, call(x)

    check(module(OUTPUTS["tensor"]), scenario)


def test_cache_is_replaced():
    """By one of as many entries."""
    cm = thunder.jit(module(OUTPUTS["tensor"])(), transforms=[FastDispatchTransform()])
    cm(X), cm(X)
    old = weakref.ref(cm._lc_cs.interpreter_cache[0].computation_fn)
    cm._lc_cs.interpreter_cache.clear()
    cm._lc_cd.get_computation_and_inputs(X)
    (entry,) = cm._lc_cs.interpreter_cache
    cm(X)
    assert thunder.last_traces(cm) is entry.computation_traces
    assert cm._lc_cs.last_prologue is entry.prologue_fn
    cm(X)
    gc.collect()
    assert old() is None


@pytest.mark.parametrize("cache", ["no caching", "symbolic values"])
def test_cache_options(cache):
    cms = [
        thunder.jit(module(lambda self, x: x * 2)(), transforms=t, cache=cache) for t in ([], [FastDispatchTransform()])
    ]
    for x in batches(3):
        expected, actual = (outcome(cm, x) for cm in cms)
        assert describe(actual, {}) == describe(expected, {})
        assert statistics(cms[1]) == statistics(cms[0])
    assert not hasattr(cms[1]._lc_cs, "calls_of_thunder")


#
# The global state
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


@contextlib.contextmanager
def unchanged():
    with default(set_default_device, "cpu", None), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        with default(torch.use_deterministic_algorithms, True, False):
            yield


STATES = {
    "default dtype": lambda: default(torch.set_default_dtype, torch.float64, torch.float32),
    "default device": lambda: default(set_default_device, "meta", None),
    "device context": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "unchanged": unchanged,
}


MakesTensors = module(lambda self, x: (torch.ones(2), torch.nn.functional.linear(x, self.weight.view(1, 4)), x + 1.5))


def in_states(state, call, model):
    yield X, call(X)
    for x in batches(2):
        with STATES[state]():
            y = call(x)
            z = call(x)
        yield x, y, z, call(x)


scenarios_of_states = {state: functools.partial(in_states, state) for state in STATES}


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize("state", STATES)
def test_global_state(state, private, monkeypatch):
    if not private:
        use_public_parts(monkeypatch)
    # With autocast on, all hits are left to Thunder, and the guard of tensors notices when it is off again.
    slow_hits = 4 if state == "autocast" else 0
    check(MakesTensors, scenarios_of_states[state], eager=False, slow_hits=slow_hits)


@pytest.mark.parametrize("grad", [True, False])
def test_dispatch_modes(grad):
    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            log.append(str(func))
            return func(*args, **kwargs or {})

    def scenario(call, model):
        with torch.set_grad_enabled(grad):
            for x in batches(3):
                yield x, call(x)
            with Log():
                for x in batches(3):
                    log.clear()
                    y = call(x)
                    yield tuple(log), y

    log = []
    # The guard of tensors notices the mode once.
    check(module(OUTPUTS["tensor"]), scenario, eager=False, slow_hits=1)


def test_function_modes():
    class Double(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **kwargs or {})
            return result * 2 if func is torch.mul else result

    def scenario(call, model):
        for x in batches(3):
            yield x, call(x)
            with Double():
                yield x, call(x)

    check(module(OUTPUTS["tensor"]), scenario, eager=False)


def test_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    def scenario(call, model):
        for x in batches(2):
            yield x, call(x)
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                y = outcome(call, mode.from_tensor(x))
                z = outcome(call, x)
            yield x, str(type(y)), str(type(z))

    # Nor does it see tensors alike in this mode.
    check(module(OUTPUTS["tensor"]), scenario, eager=False, slow_hits=2)


#
# Where it stands: other transforms, recursion, threads, functions
#

OTHERS = {
    "fused": FusedPrologueTransform,
    "extraction only": ExtractionOnlyPrologueTransform,
    "prune": PrunePrologueChecks,
    "lora": functools.partial(LORATransform, r=2),
}


class TwoLinears(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.requires_grad_(False)

    def forward(self, x):
        return self.b(self.a(x).relu())


def three_calls(call, model):
    for x in batches(3):
        yield x, call(x)


@pytest.mark.parametrize("order", ["before", "after", "on both sides of"])
@pytest.mark.parametrize("other", OTHERS)
def test_other_transforms(other, order):
    own = (OTHERS[other],)
    fast = [*own, FastDispatchTransform] if order == "after" else [FastDispatchTransform, *own]
    fast += [FastDispatchTransform] if order == "on both sides of" else []
    cm = check(TwoLinears, three_calls, own=own, fast=fast, eager=other != "lora")
    assert fast_hits(cm) == 2


OPTIONS = [
    {"skip_inplace_alias_updates": True},
    {"thunderfx_disable_split_autograd": True},
    {"thunderfx_disable_split_autograd": True, "is_differentiable_outputs": (True, False)},
    {"disable_torch_autograd": True},
]
TwoOutputs = module(lambda self, x, y: (x * self.weight, y * 2))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ", ".join(options))
def test_compile_options(options):
    def scenario(call, model):
        for x in batches(3):
            y, z = call(x, X)
            yield x, y, z
            yield x, call(x, x), outcome(y.sum().backward)

    check(TwoOutputs, scenario, eager=False, **options)


def test_random_numbers_and_autocast_in_the_forward():
    @module
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = torch.nn.functional.linear(x, self.weight.view(1, 4))
        return y, torch.nn.functional.dropout(x * self.weight, 0.5, training=True)

    def scenario(call, model):
        for i, x in enumerate(batches(3)):
            torch.manual_seed(i)
            y, z = call(x)
            (y.sum() + z.sum()).backward()
            yield x, y, z, torch.rand(2)

    # Thunder's dropout draws other numbers than torch's.
    check(forward, scenario, eager=False)


def test_one_transform_of_two_models():
    transform = FastDispatchTransform()
    makes = [module(OUTPUTS["tensor"]), Net]
    cms = [thunder.jit(make(), transforms=[transform]) for make in makes]
    for x in batches(3):
        for cm in cms:
            torch.testing.assert_close(cm(x), cm._model(x))
    assert [fast_hits(cm) for cm in cms] == [2, 2]


class Wrapping(Transform):
    """Puts a function of its own before the compiled module's."""

    def transform_module(self, model):
        call = model._forward_fn
        model._forward_fn = functools.wraps(call)(lambda *args: call(*args) + 1)


@pytest.mark.parametrize("position", [0, 1])
def test_transforms_that_wrap_the_call(position):
    transforms = [FastDispatchTransform()]
    transforms.insert(position, Wrapping())
    model = module(OUTPUTS["tensor"])()
    cm = thunder.jit(model, transforms=transforms)
    for x in batches(3):
        torch.testing.assert_close(cm(x), model(x) + 1)


def test_add_transform():
    model = TwoLinears()
    cm = thunder.jit(model, transforms=[FastDispatchTransform()])
    cm(X)
    new = thunder.core.transforms.add_transform(cm, transform=ExtractionOnlyPrologueTransform())
    for x in batches(3):
        torch.testing.assert_close(new(x), model(x))
        torch.testing.assert_close(cm(x), model(x))
    assert (fast_hits(new), fast_hits(cm)) == (2, 3)


def recursions():
    """Compiles a function or module around what it is given, a compiled module."""

    class Outer(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x) + 1

    return {
        "function": lambda inner: thunder.jit(lambda x: inner(x) + 1),
        "module": lambda inner: thunder.jit(Outer(inner)),
        "fast module": lambda inner: thunder.jit(Outer(inner), transforms=[FastDispatchTransform()]),
        "the same": lambda inner: thunder.jit(inner),
    }


@pytest.mark.parametrize("kind", recursions())
def test_recursion(kind):
    is_compiled = kind != "module"

    def run(transforms):
        torch.manual_seed(0)
        inner = thunder.jit(module(OUTPUTS["tensor"])(), transforms=transforms)
        if is_compiled:
            inner(X), inner(X)
        outer = recursions()[kind](inner)
        results = [outcome(f, x) for x in batches(2) for f in (outer, outer, inner)]
        results = [str(result)[:60] if isinstance(result, Exception) else result for result in results]
        return (
            describe(results, {}),
            [(thunder.cache_hits(cm), thunder.cache_misses(cm)) for cm in (inner, outer)],
            inner,
        )

    *expected, _ = run([])
    *actual, inner = run([FastDispatchTransform()])
    assert actual == expected
    assert fast_hits(inner) == thunder.cache_hits(inner) > 0


def test_threads():
    model = module(lambda self, x: x * self.weight * (2 if self.training else 3))()
    cm = thunder.jit(model, transforms=[FastDispatchTransform()])
    xs = batches(4)
    for training in (True, False):
        model.train(training)
        cm(X), cm(X)
    right = [[x * model.weight * factor for factor in (2, 3)] for x in xs]
    wrong = []

    def call(seed):
        rng = random.Random(seed)
        while not stop.is_set():
            i = rng.randrange(4)
            y = outcome(cm, xs[i])
            if not isinstance(y, torch.Tensor) or not any(torch.equal(y, expected) for expected in right[i]):
                wrong.append(y)

    stop = threading.Event()
    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        for i in range(30):
            model.training = bool(i % 2)
            time.sleep(1e-3)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    # The two cache entries are tried one after the other, so that a toggle in between may be seen by none. Thunder then
    # compiles, and cannot do so in several threads.
    assert not [y for y in wrong if isinstance(y, torch.Tensor)]
    assert fast_hits(cm) > 10


def test_generators():
    """A generator of batches that calls the compiled module itself."""
    model = TwoLinears()
    cm = thunder.jit(model, transforms=[FastDispatchTransform()])

    def generate():
        for x in batches(3):
            with torch.no_grad():
                yield cm(x)

    for x, y in zip(batches(3), (cm(y) for y in generate())):
        torch.testing.assert_close(y, model(model(x)))
    assert fast_hits(cm) == thunder.cache_hits(cm) == 5


def test_functions():
    weight = torch.randn(4)

    def f(x, scale=2):
        return x * weight * scale

    cms = [thunder.jit(f, transforms=[t]) for t in (FusedPrologueTransform(), FastDispatchTransform())]
    for x in batches(3):
        expected, actual = (cm(x, scale=3) for cm in cms)
        torch.testing.assert_close(actual, expected)
    assert [thunder.cache_hits(cm) for cm in cms] == [2, 2]
    traces = [str(thunder.last_prologue_traces(cm)[-1]) for cm in cms]
    assert traces[0].splitlines()[1:] == traces[1].splitlines()[1:]


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_data_parallelism(wrap, tmp_path):
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("torch was built without torch.distributed or gloo")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    options = {"device": torch.device("cpu")} if wrap == "fsdp" else {}

    def run(transforms):
        torch.manual_seed(0)
        cm = thunder.jit(torch.nn.Linear(4, 4), transforms=transforms)
        cm(X)
        cm = getattr(thunder.distributed, wrap)(cm, **options)
        seen = []
        for x in batches(4):
            with cm.no_sync() if len(seen) in (1, 3) else contextlib.nullcontext():
                y = cm(x)
                y.sum().backward()
            grads = [p.grad.clone() for p in cm.parameters() if p.grad is not None]
            seen.append((describe([y, grads], {}), statistics(cm)))
        return seen, cm

    try:
        expected, _ = run([])
        actual, cm = run([FastDispatchTransform()])
        assert actual == expected
        assert fast_hits(cm) == thunder.cache_hits(cm) > 0
    finally:
        torch.distributed.destroy_process_group()


class Delegating(torch.nn.Module):
    """Has what the module within has."""

    def __init__(self):
        super().__init__()
        self.inner = module(OUTPUTS["tensor"])()

    def forward(self, x):
        return self.inner(x)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


@pytest.mark.parametrize("make", [module(OUTPUTS["tensor"]), Delegating], ids=["own", "delegated"])
def test_gradients_that_are_not_synchronized(make):
    """Of a module that becomes one of data parallelism after it was compiled."""

    def scenario(call, model):
        for _ in range(2):
            yield X, call(X)
        getattr(model, "inner", model).use_fsdp = True
        for skip in (False, True, True, False):
            token = thunder.distributed.set_skip_data_parallel_grad_sync(skip)
            try:
                y = call(X)
            finally:
                thunder.distributed.reset_skip_data_parallel_grad_sync(token)
            y.sum().backward()
            yield X, y

    cm = check(make, scenario, eager=False)
    assert thunder.cache_misses(cm) == 2


#
# What is left behind: references and warnings
#


@pytest.mark.parametrize("grad", [True, False])
def test_nothing_is_kept_alive(grad):
    def alive(transforms):
        model = module(OUTPUTS["tensor"])()
        cm = thunder.jit(model, transforms=transforms)
        x = torch.randn(3, 4)
        for _ in range(4):
            with torch.set_grad_enabled(grad):
                y = cm(x)
            if grad:
                y.sum().backward()
        references = {
            "output": weakref.ref(y),
            "input": weakref.ref(x),
            "compiled": weakref.ref(cm),
            "stats": weakref.ref(cm._lc_cs),
            "data": weakref.ref(cm._lc_cd),
            "model": weakref.ref(model),
            "weight": weakref.ref(model.weight),
        }
        entry = weakref.ref(cm._lc_cs.interpreter_cache[0].computation_fn)
        seen = []
        for name in ("x", "y", "cm", "model"):
            if name == "x":
                del x
            elif name == "y":
                del y
            elif name == "cm":
                del cm
            else:
                del model
            seen.append({name: reference() is not None for name, reference in references.items()})
        gc.collect()
        seen.append([reference() is not None for reference in (*references.values(), entry)])
        return seen

    gc.collect()
    gc.disable()
    try:
        expected, actual = alive([]), alive([FastDispatchTransform()])
    finally:
        gc.enable()
    assert actual == expected
    assert not any(actual[-1])


def test_warnings():
    def scenario(call, model):
        for x in batches(4):
            yield x, call(x)
            with torch.no_grad():
                yield x, call(x)

    def warned(transforms):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run_compiled(module(OUTPUTS["the input"]), scenario, transforms)
        # Thunder asks for autocast by a name that torch has deprecated.
        texts = [(w.category, str(w.message)) for w in caught if "is_autocast_cpu_enabled" not in str(w.message)]
        return collections.Counter(texts)

    assert warned([FastDispatchTransform()]) == warned([])


#
# Private parts of torch
#


def test_private_parts(monkeypatch):
    assert fast_dispatch._find_set_grad_enabled() is not torch.set_grad_enabled
    assert fast_dispatch._find_has_no_default_device()() is True
    with monkeypatch.context() as patches:
        patches.setattr(torch._C, "_set_grad_enabled", lambda enabled: None)
        assert fast_dispatch._find_set_grad_enabled() is torch.set_grad_enabled
    with monkeypatch.context() as patches:
        patches.delattr(torch._C, "_len_torch_function_stack")
        assert fast_dispatch._find_has_no_default_device()() is False
    with monkeypatch.context() as patches:
        patches.delattr(torch, "_GLOBAL_DEVICE_CONTEXT")
        assert fast_dispatch._find_has_no_default_device()() is False
    with monkeypatch.context() as patches:
        patches.setattr(torch._C, "_len_torch_function_stack", lambda: 0)
        assert fast_dispatch._find_has_no_default_device()() is False


def test_docstring_example_runs():
    tests = doctest.DocTestFinder().find(FastDispatchTransform, globs={})
    assert sum(len(test.examples) for test in tests) > 3
    assert not any(doctest.DocTestRunner().run(test).failed for test in tests)
