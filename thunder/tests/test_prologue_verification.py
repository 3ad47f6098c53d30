"""THUNDER_PROLOGUE_VERIFY=1: the checks that ExtractionOnlyPrologueTransform leaves out run after all."""

import pytest
import torch

import thunder
from thunder.core.transform_common import Transform
from thunder.transforms import ExtractionOnlyPrologueTransform as ExtractionOnly
from thunder.transforms import (
    FastDispatchTransform,
    FusedPrologueTransform,
    LORATransform,
    PrologueVerificationError,
    PrunePrologueChecks,
)
from thunder.transforms.extraction_only_prologue_transform import VERIFY_VARIABLE


@pytest.fixture(autouse=True)
def verify(monkeypatch):
    monkeypatch.setenv(VERIFY_VARIABLE, "1")


class Leaf(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.eps = 1e-5
        self.register_buffer("offset", torch.zeros(4))

    def forward(self, x):
        return x * (self.weight + self.eps) + self.offset


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.leaf = Leaf()
        self.gain = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.leaf(x) * self.gain


class EditsNothing(Transform):
    def transform_traces_pre_prologue(self, *traces, **kwargs):
        return traces


TRANSFORMS = {
    "alone": lambda **kw: [ExtractionOnly(**kw)],
    "before fused": lambda **kw: [ExtractionOnly(**kw), FusedPrologueTransform()],
    "after fused": lambda **kw: [FusedPrologueTransform(), ExtractionOnly(**kw)],
    "before another": lambda **kw: [ExtractionOnly(**kw), EditsNothing()],
    "before another and fused": lambda **kw: [ExtractionOnly(**kw), EditsNothing(), FusedPrologueTransform()],
    "before fast dispatch": lambda **kw: [ExtractionOnly(**kw), FastDispatchTransform()],
    "twice": lambda **kw: [ExtractionOnly(**kw), ExtractionOnly()],
}
all_transforms = pytest.mark.parametrize("make", TRANSFORMS.values(), ids=TRANSFORMS)
some_transforms = pytest.mark.parametrize(
    "make", [TRANSFORMS[name] for name in ("alone", "before fast dispatch")], ids=["alone", "before fast dispatch"]
)


def double(tensor):
    tensor.data = tensor.data.double()


CHANGES = {
    "dtype": (lambda m: (m.leaf.weight, "data", torch.ones(4).double()), "parameter 'leaf.weight': compiled for torch.float32, is torch.float64"),
    "shape": (lambda m: (m.leaf.weight, "data", torch.ones(1)), "parameter 'leaf.weight': compiled for shape (4,), is of shape (1,)"),
    "requires_grad": (lambda m: (m.gain, "requires_grad", False), "parameter 'gain': compiled for requires_grad=True, is requires_grad=False"),
    "buffer": (lambda m: (m.leaf.offset, "data", torch.zeros(4).double()), "buffer 'leaf.offset': compiled for torch.float32, is torch.float64"),
}  # fmt: skip


@all_transforms
def test_names_what_has_changed(make, monkeypatch):
    model, x = Net(), torch.randn(3, 4)
    cm = thunder.jit(model, transforms=make())
    expected = model(x)
    torch.testing.assert_close(cm(x), expected)
    for name, (change, message) in CHANGES.items():
        with monkeypatch.context() as patch:
            patch.setattr(*change(model))
            for _ in range(2):
                with pytest.raises(PrologueVerificationError) as raised:
                    cm(x)
                path = message.split("'")[1]
                assert str(raised.value) == (
                    f"{message}; ExtractionOnlyPrologueTransform left this check out: compile again after such a change, "
                    f"or keep the check with keep=['{path}']"
                ), name
        torch.testing.assert_close(cm(x), expected)
    with torch.no_grad():
        model.gain.mul_(2)  # new values are fine
    torch.testing.assert_close(cm(x), model(x))
    assert thunder.cache_misses(cm) == 1


@some_transforms
def test_counts_what_else_has_changed(make):
    model, x = Net(), torch.randn(3, 4)
    cm = thunder.jit(model, transforms=make())
    cm(x)
    model.requires_grad_(False)
    with pytest.raises(PrologueVerificationError, match="left this check out, and 1 more that fails: compile again"):
        cm(x)
    double(model.leaf.offset)
    with pytest.raises(PrologueVerificationError, match="left this check out, and 2 more that fail: compile again"):
        cm(x)


@pytest.mark.parametrize("make", [make for name, make in TRANSFORMS.items() if name != "twice"])
def test_checks_that_are_kept_recompile(make):
    model, x = Leaf(), torch.randn(3, 4)
    cm = thunder.jit(model, transforms=make(keep=["weight"]))
    cm(x)
    model.weight.requires_grad_(False)
    cm(x)
    assert thunder.cache_misses(cm) == 2
    double(model.offset)
    with pytest.raises(PrologueVerificationError, match=r"buffer 'offset'"):
        cm(x)


@some_transforms
@torch.no_grad()
def test_says_nothing_where_another_entry_is_the_right_one(make):
    model, xs = Net(), [torch.randn(n, 4) for n in (3, 2)]
    cm = thunder.jit(model, transforms=make())
    cm(xs[0])
    # What the older entry was compiled for is gone, but it is not the one for this input.
    double(model.gain)
    torch.testing.assert_close(cm(xs[1]), model(xs[1]))
    torch.testing.assert_close(cm(xs[1]), model(xs[1]))
    assert (thunder.cache_misses(cm), thunder.cache_hits(cm)) == (2, 1)
    # The newer one refuses this input by a check that was kept, so that the older one would be used.
    with pytest.raises(PrologueVerificationError, match=r"'gain': compiled for torch.float32, is torch.float64"):
        cm(xs[0])
    model.leaf.eps = 0.1  # now that refuses, too
    torch.testing.assert_close(cm(xs[0]), model(xs[0]))
    model.gain.data = model.gain.data.float()
    with pytest.raises(PrologueVerificationError, match=r"'gain': compiled for torch.float64, is torch.float32"):
        cm(xs[0])
    model.leaf.eps = 1e-5
    torch.testing.assert_close(cm(xs[0]), model(xs[0]))
    assert thunder.cache_misses(cm) == 3


@some_transforms
def test_kept_checks_come_first(make):
    model, x = Net(), torch.randn(3, 4)
    cm = thunder.jit(model, transforms=make())
    cm(x)
    model.gain.requires_grad_(False)
    model.leaf.eps = 0.1
    torch.testing.assert_close(cm(x), model(x))
    with torch.no_grad():
        model.leaf.weight.requires_grad_(False)
        cm(x)  # the grad mode is checked last
    assert thunder.cache_misses(cm) == 3


@some_transforms
def test_inputs(make):
    def fn(x, *more, options):
        return x * more[0] * options["y"]

    cm = thunder.jit(fn, transforms=make(skip_check_on_input_tensors=True))
    x = torch.randn(3, 4)
    given = [x, torch.randn(4)], {"options": {"y": torch.randn(4)}}
    cm(*given[0], **given[1])
    with pytest.raises(PrologueVerificationError) as raised:
        cm(x[:2], given[0][1], **given[1])
    assert str(raised.value) == (
        "input 'x': compiled for shape (3, 4), is of shape (2, 4); ExtractionOnlyPrologueTransform left this check out: "
        "compile again after such a change, or keep the check with skip_check_on_input_tensors=False"
    )
    for args, kwargs, name in (
        ((x, given[0][1].double()), given[1], "more[0]"),
        (given[0], {"options": {"y": torch.randn(1)}}, "options['y']"),
    ):
        with pytest.raises(PrologueVerificationError) as raised:
            cm(*args, **kwargs)
        assert str(raised.value).startswith(f"input {name!r}: compiled for ")
    assert thunder.cache_misses(cm) == 1


@some_transforms
def test_modules_in_functions(make):
    model, x = Leaf(), torch.randn(3, 4)

    def fn(x):
        return model(x) * 2

    cm = thunder.jit(fn, transforms=make())
    torch.testing.assert_close(cm(x), fn(x))
    model.weight.requires_grad_(False)
    with pytest.raises(PrologueVerificationError, match=r"parameter 'model.weight': compiled for requires_grad=True"):
        cm(x)


@pytest.mark.parametrize(
    "order", ["extraction lora", "lora extraction", "extraction lora fused", "fused lora extraction"]
)
def test_with_lora(order):
    make = {"extraction": ExtractionOnly, "lora": lambda: LORATransform(r=2), "fused": FusedPrologueTransform}
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.randn(3, 4)
    cm = thunder.jit(model, transforms=[make[name]() for name in order.split()])
    for n in (3, 2, 3, 2):
        torch.testing.assert_close(cm(x[:n]), model(x[:n]))  # LoRA's second matrix is zero
    assert thunder.cache_misses(cm) == 2
    bias = cm.get_parameter("0.bias")
    bias.requires_grad_(not bias.requires_grad)
    with pytest.raises(PrologueVerificationError, match=r"parameter '0\.bias': compiled for requires_grad="):
        cm(x)


def test_with_prune_prologue_checks():
    model, x = Net(), torch.randn(3, 4)
    cm = thunder.jit(model, transforms=[ExtractionOnly(), PrunePrologueChecks()])
    cm(x)
    model.gain.requires_grad_(False)
    cm(x)  # PrunePrologueChecks leaves it out, too, and is no transform of this project


def test_transforms_that_cannot_be_appended_to():
    model, x = Leaf(), torch.randn(3, 4)
    with pytest.raises(RuntimeError, match="must therefore be a list, are a tuple"):
        thunder.jit(model, transforms=(ExtractionOnly(), EditsNothing()))(x)
    thunder.jit(model, transforms=(ExtractionOnly(),))(x)


def prologue(transforms, x):
    cm = thunder.jit(Leaf(), transforms=transforms)
    cm(x)
    return str(thunder.last_prologue_traces(cm)[-1])


@pytest.mark.parametrize("make", [TRANSFORMS["before another"], TRANSFORMS["after fused"]])
def test_off(make, monkeypatch):
    x = torch.randn(3, 4)
    assert "verify_left_out_checks(args, " in prologue(make(), x)
    for value in ("0", None):
        monkeypatch.delenv(VERIFY_VARIABLE) if value is None else monkeypatch.setenv(VERIFY_VARIABLE, value)
        transforms = make()
        assert "verify" not in prologue(transforms, x)
        assert "_VerifyLeftOutChecks" not in str(transforms)


def test_is_read_when_the_model_is_compiled(monkeypatch):
    model, x = Leaf(), torch.randn(3, 4)
    cm = thunder.jit(model, transforms=[ExtractionOnly()])
    cm(x)
    monkeypatch.delenv(VERIFY_VARIABLE)
    model.weight.requires_grad_(False)
    with pytest.raises(PrologueVerificationError):
        cm(x)
    monkeypatch.setenv(VERIFY_VARIABLE, "0")
    cm = thunder.jit(model, transforms=[ExtractionOnly()])
    cm(x)
    monkeypatch.setenv(VERIFY_VARIABLE, "1")
    model.weight.requires_grad_(True)
    cm(x)


def test_is_no_exception():
    assert not issubclass(PrologueVerificationError, Exception)
