"""The data parallelism of Thunder and of torch, and DTensors, on two processes.

Each test runs this file under torchrun, and the function of its own name below in both processes."""

import functools
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

import thunder
from thunder.tests.prologue_variants import VARIANTS, check
from thunder.transforms import ExtractionOnlyPrologueTransform

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch was built without torch.distributed or gloo", allow_module_level=True)

from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh


def net():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())


def batches(n):
    """Other batches for each process."""
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    return [torch.randn(3, 4, generator=generator) for _ in range(n)]


def whole_grads(module):
    """The gradients of whole parameters, also where each process has a shard of them only."""
    grads = []
    for (_, p), whole in zip(module.named_parameters(), net().parameters()):
        grad = p.grad.clone()
        if grad.shape != whole.shape:
            shards = [torch.empty_like(grad) for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather(shards, grad)
            grad = torch.cat(shards)
        grads.append(grad)
    return grads


def train(call, model, *, no_sync=True):
    """Three steps, the second with gradients that are accumulated without being synchronized at first."""
    module = DistributedDataParallel(model) if call is model else call
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    history = []
    for i, x in enumerate(batches(3)):
        if no_sync and i == 1:
            with module.no_sync():
                module(2 * x).square().mean().backward()
        output = module(x)
        output.square().mean().backward()
        history.append((output.detach(), whole_grads(module)))
        optimizer.step()
        optimizer.zero_grad()
    return history


def thunder_ddp(model, transforms):
    return thunder.distributed.ddp(thunder.jit(model, transforms=transforms))


def thunder_fsdp(model, transforms):
    return thunder.distributed.fsdp(thunder.jit(model, transforms=transforms), device=torch.device("cpu"))


class TorchDDP(DistributedDataParallel):
    """torch's wrapper around the compiled module, which the cache's counters are those of."""

    def __init__(self, model, transforms):
        super().__init__(thunder.jit(model, transforms=transforms))

    def __getattr__(self, name):
        return getattr(self.module, name) if name.startswith("_lc_") else super().__getattr__(name)


def ddp():
    for variant in VARIANTS:
        # Thunder compiles without the synchronization too.
        assert check(variant, net, train, thunder_ddp).misses == 2


def fsdp():
    # Thunder's `no_sync` gives other gradients than torch's here.
    scenario = functools.partial(train, no_sync=False)
    for variant in VARIANTS:
        assert check(variant, net, scenario, thunder_fsdp).misses == 1


def torch_ddp():
    for variant in VARIANTS:
        assert check(variant, net, train, TorchDDP).misses == 1
    with pytest.raises(NotImplementedError, match="DistributedDataParallel modules is not supported"):
        thunder.jit(DistributedDataParallel(net()))(*batches(1))


class Sharded(torch.nn.Module):
    def __init__(self):
        super().__init__()
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        self.weight = torch.nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]))
        self.register_buffer("gain", distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]))

    def forward(self, x):
        return x * self.weight * self.gain


def sharded_input(model, *placements):
    torch.manual_seed(1)
    return distribute_tensor(torch.randn(4, 4), model.weight.device_mesh, placements)


def train_sharded(call, model):
    history = []
    for _ in range(3):
        output = call(sharded_input(model, Shard(0)))
        (grad,) = torch.autograd.grad(output, model.weight, torch.ones_like(output))
        history.append((output.to_local().detach(), grad.to_local()))
        with torch.no_grad():
            model.weight.sub_(grad)
    return history


def change_placements(call, model):
    outputs = []
    with torch.no_grad():
        for placement in (Shard(0), Shard(0), Replicate(), Replicate()):
            if placement == Replicate():
                weight = model.weight.redistribute(placements=[placement])
                model.weight = torch.nn.Parameter(weight)
                if call is not model:
                    call._overrides_parameters["weight"] = model.weight
            outputs.append(call(sharded_input(model, placement)).full_tensor())
    return outputs


def dtensors():
    for variant in VARIANTS:
        assert check(variant, Sharded, train_sharded).misses == 1
        if not any(isinstance(transform, ExtractionOnlyPrologueTransform) for transform in VARIANTS[variant]()):
            assert check(variant, Sharded, change_placements).misses == 2


def checks(transforms):
    model = Sharded()
    compiled = thunder.jit(model, transforms=transforms)
    compiled(sharded_input(model, Shard(0)))
    prologue = str(thunder.last_prologue_traces(compiled)[-1])
    lines = [line.strip() for line in prologue.splitlines()]
    return [line for line in lines if line.startswith(("check_tensor_metadata", "check_python_repr"))], prologue


def checks_of_dtensors():
    """Three checks of a DTensor: of its spec, its local tensor and itself."""
    every, _ = checks([])
    of_input, prologue = checks([ExtractionOnlyPrologueTransform()])
    assert len(every) == 9 and of_input == every[:3]
    assert prologue.count("._spec") == prologue.count("._local_tensor") == 1
    assert checks([ExtractionOnlyPrologueTransform(skip_check_on_input_tensors=True)])[0] == []
    assert len(checks([ExtractionOnlyPrologueTransform(keep=["gain"])])[0]) == 6


WAYS = [ddp, fsdp, torch_ddp, dtensors, checks_of_dtensors]


@pytest.mark.parametrize("name", [way.__name__ for way in WAYS])
def test_two_processes(name):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__, name]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.parametrize("wrap", [thunder.distributed.ddp, thunder.distributed.fsdp])
def test_thunder_wraps_compiled_modules_only(wrap):
    # so `thunder.jit(thunder.distributed.ddp(model))` is not possible
    with pytest.raises(TypeError, match="ThunderModule"):
        wrap(net())


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    {way.__name__: way for way in WAYS}[sys.argv[1]]()
    torch.distributed.destroy_process_group()
