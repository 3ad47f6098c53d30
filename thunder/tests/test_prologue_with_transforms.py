import functools

import pytest
import torch

import thunder
from thunder.tests.prologue_variants import VARIANTS, check
from thunder.transforms import ConstantFolding, ExtractionOnlyPrologueTransform, LORATransform, MaterializationTransform
from thunder.transforms.cudagraph import CUDAGraphTransform
from thunder.transforms.fused_prologue_transform import FusedPrologueTransform
from thunder.transforms.quantization import BitsAndBytesLinearQuant4bit, get_bitsandbytes_executor

WIDTH = 64  # one block of the 4 bit quantization


def net():
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH))


def net_on_gpu():
    return net().cuda()


def frozen():
    return net().requires_grad_(False)


def on_meta():
    with torch.device("meta"):
        return frozen()


@functools.cache
def some_weights(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(t.shape, generator=generator) / 8 for name, t in on_meta().state_dict().items()}


def inputs(n):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, WIDTH, generator=generator) for _ in range(n)]


#
# What is done with the models. Eagerly, `call` is the model itself, and does what Thunder's transform stands for.
#


def serve(call, model):
    """Two calls with the first weights and two with others."""
    if call is model and next(model.parameters()).is_meta:
        model.to_empty(device="cpu")
    outputs = []
    for seed in (0, 1):
        if call is model:
            model.load_state_dict(some_weights(seed))
        elif seed or not next(model.parameters()).is_meta:
            call.load_original_state_dict(some_weights(seed))
        outputs += [call(x) for x in inputs(2)]
    return outputs


def serve_quantized(call, model):
    if call is not model:
        return serve(call, model)
    quantization = pytest.importorskip("bitsandbytes").functional
    outputs = []
    for seed in (0, 1):
        weights = some_weights(seed)
        for name in ("0.weight", "2.weight"):
            weights = weights | {name: quantization.dequantize_4bit(*quantize(weights[name]))}
        model.to_empty(device="cpu").load_state_dict(weights)
        outputs += [call(x) for x in inputs(2)]
    return outputs


def serve_with_lora(call, model):
    """A call with what LoRA starts with, which adds nothing, and two with other matrices."""
    outputs = [call(x) for x in inputs(1)]
    for name in ("0.weight", "2.weight"):
        a, b = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH), torch.linspace(0, 1, 2 * WIDTH).view(WIDTH, 2)
        if call is model:
            model.get_parameter(name).add_(b @ a / 2)
        else:
            call.get_parameter(f"{name}.lora_a").copy_(a)
            call.get_parameter(f"{name}.lora_b").copy_(b)
    return outputs + [call(x) for x in inputs(2)]


def train(call, model):
    """Outputs and gradients of two steps."""
    history = []
    optimizer = torch.optim.SGD(call.parameters(), lr=0.1)
    for x in inputs(2):
        output = call(x)
        output.float().square().mean().backward()
        history.append((output.detach(), [p.grad.clone() for p in call.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
    return history


def train_on_gpu(call, model):
    history = []
    for x in inputs(3):
        output = call(x.cuda())
        output.square().mean().backward()
        # A CUDA graph's outputs lie where the next replay's will.
        history.append((output.detach().clone(), [p.grad.clone() for p in call.parameters()]))
        with torch.no_grad():
            for p in call.parameters():
                p.sub_(0.1 * p.grad)
                p.grad = None
    return history


class Autocasting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.net(x)


class Folding(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        return self.net(x) * (torch.tensor([2.0]) * 10 / 5)


def quantize(w):
    return pytest.importorskip("bitsandbytes").functional.quantize_4bit(w.detach(), quant_type="nf4")


class QuantizeOnCPU(BitsAndBytesLinearQuant4bit):
    """Thunder's transform quantizes on a GPU only, bitsandbytes has a build for the CPU too."""

    def quantize_weight(self, w):
        return quantize(torch.zeros_like(w, device="cpu") if w.is_meta else w)


def materialize():
    return MaterializationTransform("cpu", init=MaterializationTransform.init_from_original_state_dict(some_weights(0)))


OTHERS = {
    "LORATransform": (frozen, serve_with_lora, lambda: [LORATransform(r=2)]),
    "MaterializationTransform": (on_meta, serve, lambda: [materialize()]),
    "BitsAndBytesLinearQuant4bit": (frozen, serve_quantized, lambda: [QuantizeOnCPU()]),
    "BitsAndBytesLinearQuant4bit, MaterializationTransform": (
        on_meta,
        serve_quantized,
        lambda: [QuantizeOnCPU(), materialize()],
    ),
    "ConstantFolding": (Folding, train, lambda: [ConstantFolding()]),
    "CUDAGraphTransform": (net_on_gpu, train_on_gpu, lambda: [CUDAGraphTransform()]),
    "autocast in the model": (Autocasting, train, list),
}
PLACES = {
    "first": lambda own, others: [*own, *others],
    "last": lambda own, others: [*others, *own],
    "around": lambda own, others: [own[0], *others, *own[1:]],
}
CASES = [
    (other, variant, place)
    for other in OTHERS
    for variant in VARIANTS
    for place in PLACES
    if (place != "around" or len(VARIANTS[variant]()) > 1) and (place == "first" or OTHERS[other][2] is not list)
]


@functools.cache
def jit_with(make_others, place):
    def jit(model, transforms):
        others = make_others()
        executors = thunder.get_default_executors()
        if any(isinstance(other, BitsAndBytesLinearQuant4bit) for other in others):
            executors = (get_bitsandbytes_executor(), *executors)
        own = transforms or [None]
        arranged = [t for t in PLACES[place](own, others) if t is not None]
        return thunder.jit(model, transforms=arranged, executors=executors)

    return jit


@pytest.mark.parametrize("other, variant, place", CASES)
def test_every_order(other, variant, place):
    if "BitsAndBytes" in other:
        pytest.importorskip("bitsandbytes")
    if "CUDA" in other and not torch.cuda.is_available():
        pytest.skip("CUDA graphs need a GPU")
    make, scenario, make_others = OTHERS[other]
    tolerances = {"rtol": 2e-2, "atol": 2e-2} if other == "autocast in the model" else {"rtol": 1e-4, "atol": 1e-4}
    outcome = check(
        variant, make, scenario, jit_with(make_others, place), unfused_jit=jit_with(make_others, "first"), **tolerances
    )
    assert outcome.misses == 1


def scale(x, w):
    return x * w


@pytest.mark.parametrize("skip_inputs", (False, True))
@pytest.mark.parametrize("order", ("extraction-only, fused", "fused, extraction-only"))
def test_fused_brings_back_no_check_of_an_input(order, skip_inputs):
    own = [ExtractionOnlyPrologueTransform(skip_check_on_input_tensors=skip_inputs), FusedPrologueTransform()]
    cm = thunder.jit(scale, transforms=own if order.startswith("extraction") else own[::-1])
    x, w = torch.randn(3, 4), torch.nn.Parameter(torch.randn(4))
    torch.testing.assert_close(cm(x, w), scale(x, w))
    prologue = str(thunder.last_prologue_traces(cm)[-1])
    assert "check_tensor_metadata(w" not in prologue
    assert ("check_tensor_metadata(x" in prologue) is not skip_inputs
