import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import thunder
from thunder.tests.prologue_variants import VARIANTS, check, every_variant, run, run_eager
from thunder.transforms import ExtractionOnlyPrologueTransform


def has_extraction_only(variant):
    return any(isinstance(transform, ExtractionOnlyPrologueTransform) for transform in VARIANTS[variant]())


class Net(torch.nn.Module):
    """A body and a head, a buffer, a frozen parameter in the body, and a mode that changes what is computed."""

    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.register_buffer("offset", torch.randn(6))
        self.body.bias.requires_grad_(False)

    def forward(self, x):
        x = self.run_body(x)
        if self.training:
            x = x * 0.5
        return self.head(x) + self.offset

    def run_body(self, x):
        return torch.tanh(self.body(x))


def batches(n, rows=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 6, generator=generator) for _ in range(n)]


def state(model):
    """Copies of all parameters, buffers and gradients."""
    tensors = {name: tensor.detach().clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    grads = {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return tensors | grads


def backward(output):
    output.float().square().mean().backward()


def train(call, model, *, optimizer=torch.optim.SGD, accumulate=1, **options):
    """Returns the output of each batch and the state after its backward, and the state in the end."""
    optimizer = optimizer(call.parameters(), lr=0.1, **options)
    history = []
    for i, x in enumerate(batches(3 * accumulate)):
        output = call(x)
        backward(output)
        history.append((output.detach(), state(call)))
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return [*history, state(call)]


SCHEDULES = {
    "SGD with momentum": functools.partial(train, momentum=0.9),
    "AdamW, gradients accumulated": functools.partial(train, optimizer=torch.optim.AdamW, accumulate=2),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@every_variant
def test_optimizer_steps(schedule, variant):
    outcome = check(variant, Net, SCHEDULES[schedule])
    assert outcome.misses == 1 and outcome.hits == len(outcome.values) - 2


def evaluate_between(call, model):
    """Two epochs of training, each with an evaluation under ``no_grad`` after it, and one of new weights in the end."""
    history = []

    def evaluate():
        model.eval()
        with torch.no_grad():
            history.append([call(x) for x in batches(2, rows=2)])
        model.train()

    for _ in range(2):
        history.append(train(call, model))
        evaluate()
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})
    evaluate()
    return history


@every_variant
def test_evaluation_between_epochs(variant):
    assert check(variant, Net, evaluate_between).misses == 2


BODY_IS_TRAINED = (False, False, True, True, False, True)


def frozen_body():
    model = Net()
    model.body.requires_grad_(False)
    return model


def train_gradually(call, model):
    history = []
    optimizer = torch.optim.SGD(call.parameters(), lr=0.1)
    for is_trained, x in zip(BODY_IS_TRAINED, batches(6)):
        model.body.weight.requires_grad_(is_trained)
        backward(call(x))
        history.append(state(call))
        optimizer.step()
        optimizer.zero_grad()
    return history


@every_variant
def test_gradual_unfreezing(variant):
    if not has_extraction_only(variant):
        outcome = check(variant, frozen_body, train_gradually)
        assert (outcome.hits, outcome.misses) == (4, 2)
        return
    # As documented: what was frozen at compilation silently trains nothing.
    outcome, eager = run(frozen_body, train_gradually, variant), run_eager(frozen_body, train_gradually)
    assert (outcome.hits, outcome.misses) == (5, 1)
    torch.testing.assert_close(outcome.values[:2], eager[:2])
    assert all(("body.weight.grad" in step) is is_trained for step, is_trained in zip(eager, BODY_IS_TRAINED))
    assert not any("body.weight.grad" in step for step in outcome.values)
    torch.testing.assert_close(outcome.values[-1]["body.weight"], outcome.values[0]["body.weight"], rtol=0, atol=0)


def keeping_the_body(model, transforms):
    """Compiles with the checks of what will be unfrozen kept."""
    return thunder.jit(
        model,
        transforms=[
            ExtractionOnlyPrologueTransform(keep=["body.*"]) if isinstance(t, ExtractionOnlyPrologueTransform) else t
            for t in transforms
        ],
    )


@pytest.mark.parametrize("variant", filter(has_extraction_only, VARIANTS))
def test_gradual_unfreezing_of_what_is_kept(variant):
    outcome = check(variant, frozen_body, train_gradually, keeping_the_body)
    assert (outcome.hits, outcome.misses) == (4, 2)


class Checkpointed(Net):
    def run_body(self, x):
        return checkpoint(super().run_body, x, use_reentrant=False)


@every_variant
def test_checkpoint(variant):
    outcome = check(variant, Checkpointed, train)
    assert (outcome.hits, outcome.misses) == (2, 1)


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm = torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6, momentum=0.3)

    def forward(self, x):
        return self.norm(self.fc(x))


@every_variant
def test_batch_norm(variant):
    outcome = check(variant, Normed, evaluate_between)
    assert outcome.misses == 2
    assert outcome.values[0][-1]["norm.num_batches_tracked"] == 3


class Counting(torch.nn.Module):
    """Puts new tensors in the places of its buffers, which the epilogue does for a compiled module."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(6), persistent=False)

    def forward(self, x):
        self.calls = self.calls + 1
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return (x - self.mean) / self.calls


def with_counting():
    # Thunder does not update the buffers of the outermost module itself: its epilogue sets one of the name '.calls'.
    return torch.nn.Sequential(torch.nn.Linear(6, 6), Counting())


def call_thrice(call, model):
    # Under `no_grad`: else Thunder makes all outputs of a computation require grad, what the epilogue sets included.
    with torch.no_grad():
        return [(call(x), state(call)) for x in batches(3)]


@every_variant
def test_buffers_set_by_the_epilogue(variant):
    outcome = check(variant, with_counting, call_thrice)
    assert outcome.values[-1][1]["1.calls"] == 3
    assert (outcome.hits, outcome.misses) == (2, 1)


def autocast(call, model):
    history = []
    # Thunder compiles for autocast ever after, without too, once it has: its stack of autocasts is only pushed to.
    for x, enabled in zip(batches(4), (False, True, False, True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            output = call(x)
        assert output.dtype is (torch.bfloat16 if enabled else torch.float32)
        backward(output)
        history.append((output.detach(), state(call)))
    return history


@every_variant
def test_autocast(variant):
    outcome = check(variant, two_layers, autocast, rtol=2e-2, atol=2e-2)
    assert (outcome.hits, outcome.misses) == (2, 2)


def two_layers():
    return torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.ReLU(), torch.nn.Linear(6, 6))


def tied():
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6, bias=False))
    model[2].weight = model[0].weight
    return model


@every_variant
def test_tied_weights(variant):
    outcome = check(variant, tied, train)
    assert (outcome.hits, outcome.misses) == (2, 1)
