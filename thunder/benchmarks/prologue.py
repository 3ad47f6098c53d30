"""Measures what the prologue of a model costs, what transforms would save of it, and explains what it does.

``python -m thunder.benchmarks.prologue --help`` says what can be measured::

    python -m thunder.benchmarks.prologue --layers 2 --explain
    python -m thunder.benchmarks.prologue --sweep 1,2,4,8 --plot prologue.svg
    python -m thunder.benchmarks.prologue --model my_module:make_model --variants none,extraction-only
    python -m thunder.benchmarks.prologue --calls --layers 1
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import inspect
import json
import math
import operator
import os
import platform
import re
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.benchmark import Timer

import thunder
import thunder.transforms
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.symbol import has_tags
from thunder.core.transform_common import Transform
from thunder.transforms import ExtractionOnlyPrologueTransform, PrunePrologueChecks

if TYPE_CHECKING:
    from litgpt.config import Config
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console

    from thunder.core.symbol import BoundSymbol
    from thunder.core.trace import TraceCtx

DESCRIPTION = """\
Measures what Thunder's prologue costs, and what transforms would save of it.

A model compiled by thunder.jit runs a prologue at each call: it reads inputs, parameters
and buffers, and checks that what was compiled still fits. This command compiles one model
under several transforms and times their prologues in turn, hot (called in a loop, so that
all they touch is in the caches) and cold (after 64 MB have been written, as a real model's
computation does), and then calls of the whole model. Thunder takes a few seconds a layer
to compile each variant. With --calls it times whole calls alone, of a module so small that
what is left is the cost of the call, and of the model, beside eager and torch.compile."""
INSTALL_EXTRA = "pip install 'thunder-prologue[demo]'"
TEXTS = ("variant", "error", "of", "for example", "leaves out", "and you vouch for")
KINDS = {"hot": "called in a loop", "cold": "64 MB written between two calls"}
EVICTED_BYTES = 64 * 2**20
ROUNDS = 5
GUARD_CALLS = 200
DEFAULT_LAYERS = 4
# What Thunder takes to compile a layer, until the first variant has shown what it takes here.
SECONDS_A_LAYER = 3.0
CALL_VARIANTS = ("none", "extraction-only", "prune", "fused", "fast-dispatch", "torch.compile")
CALL_VARIANTS += ("extraction-only+fast-dispatch",)


class UsageError(Exception):
    """What the user asked for cannot be done; the message is one line and names the remedy."""


@dataclass(frozen=True)
class Subject:
    """A model and the arguments it is called with; ``layers`` is None for a model that is not LitGPT's.

    ``tokens`` is how many tokens a call decodes, if it does.
    """

    title: str
    model: torch.nn.Module
    args: tuple
    kwargs: dict[str, Any]
    layers: int | None = None
    tokens: int | None = None


def narrow_width(config: Config) -> dict[str, Any]:
    """Returns the overrides that make a LitGPT configuration narrow, with the same modules and parameters per layer."""
    heads = min(4, config.n_head)
    groups = heads if config.n_query_groups == config.n_head else min(2, config.n_query_groups)
    # The part of a head that is rotated must have an even size.
    sizes = (n for n in range(8, config.head_size, 8) if int(config.rotary_percentage * n) in range(2, n + 1, 2))
    size = next(sizes, config.head_size)
    overrides = {"n_head": heads, "n_query_groups": groups, "head_size": size, "n_embd": heads * size}
    overrides |= {"intermediate_size": 64, "vocab_size": 128, "padded_vocab_size": 128}
    if config.moe_intermediate_size:
        overrides["moe_intermediate_size"] = 32
    if config.latent_attention:
        overrides["latent_attention"] = dict.fromkeys(config.latent_attention, 8)
    return overrides


def litgpt_configs(name: str, sizes: Sequence[int], full_width: bool) -> list[Config]:
    """Returns one configuration for each number of layers in ``sizes``.

    Raises:
        UsageError: LitGPT is missing, or has no such configuration, or not with so many layers.
    """
    try:
        from litgpt.config import Config, name_to_config
    except ImportError as e:
        raise UsageError(f"--model {name} needs LitGPT ({_one_line(e)}); run `{INSTALL_EXTRA}`") from e
    try:
        full = Config.from_name(name)
    except ValueError as e:
        near = _nearest(name, name_to_config)
        raise UsageError(
            f"--model: LitGPT has no configuration {name!r}; {near} A model of your own is given as MODULE:CALLABLE"
        ) from e
    try:
        return [Config.from_name(name, n_layer=n, **({} if full_width else narrow_width(full))) for n in sizes]
    except Exception as e:
        raise UsageError(f"--model {name} has {full.n_layer} layers, not {max(sizes)}: {_one_line(e)}") from e


def litgpt_subject(config: Config, options: argparse.Namespace) -> Subject:
    """Builds a LitGPT model with random weights and tokens; frozen and in eval mode unless gradients are wanted.

    Raises:
        UsageError: Its parameters are not likely to fit in memory.
    """
    from litgpt.model import GPT

    dtype = getattr(torch, options.dtype)
    if options.full_width:
        with torch.device("meta"):
            needed = sum(p.numel() for p in GPT(config).parameters()) * dtype.itemsize
        free = _free_memory(options.device)
        if needed > free:
            raise UsageError(
                f"{config.name} with {config.n_layer} layers at full width is not likely to fit: its parameters take "
                f"{needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; take fewer --layers, a smaller --dtype, or no "
                "--full-width (the prologue's cost does not depend on the width)"
            )
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(options.device):
            model = GPT(config).train(options.grad).requires_grad_(options.grad)
            tokens = torch.randint(config.vocab_size, (2, 5))
    finally:
        torch.set_default_dtype(default_dtype)
    full = type(config).from_name(config.name)
    width = "full width" if options.full_width else "narrow (as many modules and parameters a layer as at full width)"
    mode = "train mode, requires_grad" if options.grad else "eval mode, frozen"
    title = f"{config.name} (of {full.n_layer} layers), {width}, {options.dtype} on {options.device}, {mode}"
    return Subject(title, model, (tokens,), {}, config.n_layer)


def decode_subject(config: Config, options: argparse.Namespace) -> Subject:
    """Builds the step that decodes one token of a LitGPT model, with a KV cache; with gradients, there is no such step,
    and it is the model as :func:`litgpt_subject` builds it."""
    subject = litgpt_subject(config, options)
    if options.grad:
        return subject
    subject.model.max_seq_length = min(64, config.block_size)
    subject.model.set_kv_cache(1, device=options.device, dtype=getattr(torch, options.dtype))
    token = torch.zeros(1, 1, dtype=torch.long, device=options.device)
    position = torch.tensor([5], device=options.device)
    title = f"{subject.title}; a decode step: KV cache, one token"
    return Subject(title, subject.model, (token, position), {}, subject.layers, tokens=1)


class _SmallNorm(torch.nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def small_subject(options: argparse.Namespace) -> Subject:
    """Builds an RMSNorm over 64 values, whose call costs more than its computation."""
    with torch.device(options.device):
        model = _SmallNorm(64).train(options.grad).requires_grad_(options.grad)
        x = torch.randn(1, 64)
    return Subject(f"an RMSNorm over 64 values on {options.device}", model, (x,), {})


def own_subject(spec: str) -> Subject:
    """Calls ``module:callable`` for ``(model, args, kwargs)`` and takes the model as it is.

    Raises:
        UsageError: There is no such module or callable, it fails, or it returns something else.
    """
    make = _imported(spec, "--model")
    try:
        made = make()
    except Exception as e:
        raise UsageError(f"--model {spec} failed when it was called: {_one_line(e)}") from e
    wanted = (torch.nn.Module, (tuple, list), dict)
    if not (isinstance(made, tuple) and len(made) == 3 and all(map(isinstance, made, wanted))):
        found = [type(part).__name__ for part in made] if isinstance(made, tuple) else [type(made).__name__]
        wrong = f"must return (model, args, kwargs), a torch.nn.Module, a tuple and a dict, not {', '.join(found)}"
        raise UsageError(f"--model {spec} {wrong}")
    return Subject(f"{spec}, as it is returned", made[0], tuple(made[1]), made[2])


def _imported(spec: str, option: str) -> Any:
    """Returns what ``MODULE:NAME`` names."""
    module_name, _, name = spec.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as e:
        raise UsageError(f"{option} {spec}: cannot import {module_name!r}: {_one_line(e)}") from e
    if not callable(getattr(module, name, None)):
        callables = [key for key, value in vars(module).items() if callable(value)]
        raise UsageError(f"{option} {spec}: {module_name} has no callable {name!r}; {_nearest(name, callables)}")
    return getattr(module, name)


def _free_memory(device: str) -> float:
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    available = _search(r"MemAvailable:\s+(\d+) kB", "/proc/meminfo")
    return int(available) * 1024 if available else math.inf


@dataclass
class Timed:
    """Something that costs time at each call of a model, in microseconds.

    ``fn`` is what is timed, in the context that ``environment`` makes; ``call`` is the whole model. Either may be None.
    """

    fn: Callable | None
    args: tuple
    kwargs: dict[str, Any]
    environment: Callable[[], AbstractContextManager] = nullcontext
    call: Callable | None = None
    traces: Sequence[TraceCtx] = ()

    def hot(self, seconds: float) -> list[float]:
        """Calls ``fn`` in a loop: all that it touches stays in the caches."""
        with self.environment():
            return loop_us(self.fn, self.args, self.kwargs, seconds)

    def cold(self, seconds: float, evict: Callable[[], Any]) -> list[float]:
        """Calls ``evict`` before each call of ``fn``: what it touches comes from memory."""
        times = []
        with self.environment():
            for _ in _repeat(seconds):
                evict()
                start = time.perf_counter()
                self.fn(*self.args, **self.kwargs)
                times.append((time.perf_counter() - start) * 1e6)
        return times


class TimedGuards(Timed):
    """torch.compile's decision that a compiled model still fits, as the profiler reports it."""

    event = "TorchDynamo Cache Lookup"

    def hot(self, seconds: float) -> list[float]:
        return self._lookups(range(GUARD_CALLS), lambda: None)

    def cold(self, seconds: float, evict: Callable[[], Any]) -> list[float]:
        return self._lookups(_repeat(seconds), evict)

    def _lookups(self, repetitions: Iterable[int], before: Callable[[], Any]) -> list[float]:
        calls = 0
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in repetitions:
                before()
                self.fn(*self.args, **self.kwargs)
                calls += 1
        times = [event.time_range.elapsed_us() for event in profiler.events() if event.name == self.event]
        # A model that Dynamo splits into several graphs is looked up once for each.
        graphs = len(times) // calls
        if not graphs:
            raise RuntimeError(f"the profiler of torch {torch.__version__} reports no {self.event!r}")
        return [sum(times[i : i + graphs]) for i in range(0, len(times), graphs)]


def thunder_prologue(subject: Subject, transforms: list[Transform]) -> Timed:
    """Compiles ``subject`` and returns the prologue that Thunder calls for its arguments.

    Raises:
        LookupError: Thunder would compile at every call.
    """
    model, args, kwargs = thunder.jit(subject.model, transforms=transforms), subject.args, subject.kwargs
    model(*args, **kwargs)
    environment = partial(_prologue_environment, model, args, kwargs)
    # As Thunder does, take the newest entry whose prologue does not raise.
    for entry in reversed(thunder.compile_stats(model).interpreter_cache):
        try:
            with environment():
                entry.prologue_fn(*args, **kwargs)
        except Exception:
            continue
        return Timed(entry.prologue_fn, args, kwargs, environment, model, entry.prologue_traces)
    raise LookupError("the prologue rejects the very arguments it was compiled for, so that every call compiles")


@contextmanager
def _prologue_environment(model: thunder.ThunderModule, args: tuple, kwargs: dict[str, Any]) -> Iterator[None]:
    compile_data, cache_info = thunder.compile_data(model), {}
    token = thunder._cache_info_ctx.set(cache_info)
    try:
        compile_data.populate_cache_info(cache_info, *args, **kwargs)
        with thunder.compile_data_and_stats(compile_data, thunder.compile_stats(model)):
            yield
    finally:
        thunder._cache_info_ctx.reset(token)


def parameter_reads(subject: Subject) -> Timed:
    """Returns one C call that reads all parameters from where Thunder keeps them: no prologue can be faster."""
    parameters = thunder.jit(subject.model)._overrides_parameters
    return Timed(operator.itemgetter(*parameters) if parameters else tuple, (parameters,), {})


def dynamo_guards(subject: Subject) -> Timed:
    """Returns the guards of torch.compile for ``subject``, with a backend that computes nothing."""

    def constant_backend(graph_module: torch.fx.GraphModule, example_inputs: Sequence[torch.Tensor]) -> Callable:
        output = graph_module(*example_inputs)
        return lambda *args: output

    # The profiler's library would log that it finds no GPU.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # What an earlier model left behind would be looked through first.
    torch._dynamo.reset()
    compiled = torch.compile(subject.model, backend=constant_backend, dynamic=False)
    for _ in range(20):
        compiled(*subject.args, **subject.kwargs)
    return TimedGuards(compiled, subject.args, subject.kwargs)


def dynamo_call(subject: Subject) -> Callable:
    """Returns ``subject`` under torch.compile with a backend that runs the operations as they are."""
    torch._dynamo.reset()
    return torch.compile(subject.model, backend="eager", dynamic=False)


def loop_us(fn: Callable, args: tuple, kwargs: dict[str, Any], seconds: float) -> list[float]:
    """Times ``fn`` in a loop for about ``seconds``; each of the returned times is the mean of a block of calls."""
    names = {"fn": fn, "args": args, "kwargs": kwargs}
    timer = Timer("fn(*args, **kwargs)", globals=names, num_threads=torch.get_num_threads())
    timer.timeit(3)
    return [t * 1e6 for t in timer.blocked_autorange(min_run_time=seconds).times]


def _repeat(seconds: float) -> Iterator[int]:
    deadline, count = time.perf_counter() + seconds, 0
    while count < 3 or time.perf_counter() < deadline:
        yield count
        count += 1


@dataclass(frozen=True)
class Variant:
    """A row of the comparison: a prologue under ``transforms``, or something ``other`` to hold it against.

    ``name`` is for ``--variants``, ``label`` for tables and plots; ``vouch`` is what its user vouches for. ``call`` makes
    what ``--calls`` times, where that is not the model compiled with the transforms.
    """

    name: str
    label: str
    vouch: str
    transforms: Callable[[], list[Transform]] | None = None
    other: Callable[[Subject], Timed] | None = None
    call: Callable[[Subject], Callable] | None = None

    def prepare(self, subject: Subject) -> Timed:
        """Compiles ``subject`` and returns what is to be timed."""
        return self.other(subject) if self.transforms is None else thunder_prologue(subject, self.transforms())

    def prepare_call(self, subject: Subject) -> Timed:
        """Compiles ``subject`` and returns its call, to be timed like a prologue."""
        call = self.call(subject) if self.call else thunder.jit(subject.model, transforms=self.transforms())
        for _ in range(3):
            call(*subject.args, **subject.kwargs)
        return Timed(call, subject.args, subject.kwargs)


FUSED = "thunder.transforms.fused_prologue_transform"
FAST_DISPATCH = "thunder.transforms.fast_dispatch_transform"
METADATA = "no parameter or buffer changes its shape, device, dtype or requires_grad after compilation"
MODULE = f"{METADATA}, and no module an attribute: model.train(), too, goes unnoticed"
EAGER = Variant(
    "eager",
    "eager, without Thunder",
    "nothing: there is no prologue",
    other=lambda subject: Timed(None, subject.args, subject.kwargs, call=subject.model),
    call=lambda subject: subject.model,
)


def known_variants() -> dict[str, Variant]:
    """Returns, by name, the variants that can be measured with what is installed."""
    extraction_only, prune = ExtractionOnlyPrologueTransform, PrunePrologueChecks
    variants = [Variant("none", "no transform", "nothing", list)]
    if file := _upstream_file():
        label = "upstream's ExtractionOnlyPrologueTransform"
        variants.append(Variant("upstream", label, METADATA, lambda: [_load(file).ExtractionOnlyPrologueTransform()]))
    variants += [
        Variant("extraction-only", "ExtractionOnlyPrologueTransform", METADATA, lambda: [extraction_only()]),
        Variant("prune", "upstream's PrunePrologueChecks", MODULE, lambda: [prune()]),
    ]
    if importlib.util.find_spec(FUSED):
        fused = lambda: importlib.import_module(FUSED).FusedPrologueTransform()  # noqa: E731
        variants += [
            Variant("fused", "FusedPrologueTransform", "nothing", lambda: [fused()]),
            Variant("extraction-only+fused", "ExtractionOnly + Fused", METADATA, lambda: [extraction_only(), fused()]),
            Variant("prune+fused", "PrunePrologueChecks + Fused", MODULE, lambda: [prune(), fused()]),
        ]
    if importlib.util.find_spec(FAST_DISPATCH):
        dispatch = lambda: importlib.import_module(FAST_DISPATCH).FastDispatchTransform()  # noqa: E731
        label = "ExtractionOnly + FastDispatch"
        variants += [
            Variant("fast-dispatch", "FastDispatchTransform", "nothing", lambda: [dispatch()]),
            Variant("extraction-only+fast-dispatch", label, METADATA, lambda: [extraction_only(), dispatch()]),
        ]
    floor, guards = "not a prologue: it checks nothing", "another system, for comparison: guards in C++"
    variants += [
        Variant("floor", "floor: one C call reads all parameters", floor, other=parameter_reads),
        Variant("torch.compile", "another system: torch.compile", guards, other=dynamo_guards, call=dynamo_call),
    ]
    return {variant.name: variant for variant in variants}


def choose_variants(text: str | None, calls: bool = False) -> list[Variant]:
    """Returns the variants that a comma separated ``text`` names, or all that differ in their prologues, or in their
    ``calls``, and eager calls.

    Raises:
        UsageError: A name is unknown, or ``MODULE:CLASS`` is not a Transform.
    """
    known = known_variants()
    # FastDispatchTransform's prologue is FusedPrologueTransform's.
    differ = [name for name in known if (name in CALL_VARIANTS if calls else "fast-dispatch" not in name)]
    names = differ if text is None else list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if calls and name in known and not (known[name].transforms or known[name].call):
            raise UsageError(f"--calls cannot time {name!r}, which is no way to call a model; leave it out")
    return [known[name] if name in known else _own_variant(name, known) for name in names] + [EAGER]


def _own_variant(spec: str, known: Iterable[str]) -> Variant:
    parts = spec.split("+")
    if not all(":" in part for part in parts):
        raise UsageError(f"--variants has no {spec!r}; {_nearest(spec, known)} (or your own, as MODULE:CLASS)")
    classes = [_imported(part, "--variants") for part in parts]
    for part, cls in zip(parts, classes):
        if not (isinstance(cls, type) and issubclass(cls, Transform)):
            raise UsageError(f"--variants {part} is not a subclass of thunder.core.transform_common.Transform")
    label = " + ".join(cls.__name__ for cls in classes)
    return Variant(spec, label, f"see the documentation of {label}", lambda: [cls() for cls in classes])


def _upstream_file() -> Path | None:
    """The file of lightning-thunder that this project's transform lies over; None without an overlay."""
    used = Path(inspect.getfile(ExtractionOnlyPrologueTransform))
    files = [Path(folder) / used.name for folder in thunder.transforms.__path__]
    return next((file for file in files if file.is_file() and not file.samefile(used)), None)


def _load(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"upstream_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def require_own_transform() -> None:
    """Raises :class:`UsageError` unless Thunder uses the transform that lies in the same tree as this file."""
    own = Path(__file__).resolve().parent.parent / "transforms" / "extraction_only_prologue_transform.py"
    used = Path(inspect.getfile(ExtractionOnlyPrologueTransform))
    if not (own.is_file() and own.samefile(used)):
        raise UsageError(
            f"Thunder uses {used}, but this benchmark is of {own}: the overlay is not active; run "
            "`pip install thunder-prologue`, or `python -m thunder_overlay`, which says why"
        )


GROUPS = ("inputs", "parameters", "buffers", "module attributes", "global state")
_ROOTS = {
    PrimIDs.UNPACK_TRIVIAL: "inputs",
    PrimIDs.UNPACK_PARAMETER: "parameters",
    PrimIDs.UNPACK_BUFFER: "buffers",
    PrimIDs.UNPACK_FUNCTION_OBJ: "module attributes",
    PrimIDs.UNPACK_CACHE_INFO: "global state",
}


@dataclass
class Work:
    """How many statements of a prologue read something, how many check it, and an example."""

    reads: int = 0
    checks: int = 0
    example: str = ""


def work_by_group(trace: TraceCtx) -> dict[str, Work]:
    """Counts the reads and checks of a prologue by what they are about, following values to where they come from."""
    work = {group: Work() for group in GROUPS}
    source: dict[str, tuple[str, BoundSymbol]] = {}
    for bsym in trace.bound_symbols:
        sources = [source[proxy.name] for proxy in bsym.flat_proxy_args if proxy.name in source]
        group, read = sources[0] if sources else ("module attributes", None)
        group = _ROOTS.get(bsym.sym.id, group)
        if bsym.sym.id is PrimIDs.UNPACK_ATTR and bsym.args[1] == "__globals__":
            group = "global state"
        if check_kind(bsym):
            work[group].checks += 1
            work[group].example = "\n".join(_statement(b) for b in (read, bsym) if b)
        elif bsym.sym.id is not PrimIDs.RETURN and bsym.flat_proxy_outs:
            work[group].reads += 1
            source |= {proxy.name: (group, bsym) for proxy in bsym.flat_proxy_outs}
    return work


def check_kind(bsym: BoundSymbol) -> str | None:
    """Returns what kind of check ``bsym`` is, in the words of Thunder's primitives (tensor, number, string, len, ...).

    None if it is no check, or one that dead code elimination will take away: it is only marked as left out.
    """
    is_check = isinstance(bsym.sym.id, PrimIDs) and bsym.sym.id.name.startswith("CHECK_")
    return bsym.sym.id.name.split("_")[1].lower() if is_check and has_tags(bsym, {OpTags.DONT_DCE}) else None


def listed_checks(traces: Sequence[TraceCtx]) -> TraceCtx:
    """Returns the last of a prologue's traces that lists its checks one by one.

    It is the last that has nothing but Thunder's primitives: a fused prologue makes its checks in a symbol of its own.
    """
    return [t for t in traces if all(isinstance(b.sym.id, PrimIDs) for b in t.bound_symbols)][-1]


def _statement(bsym: BoundSymbol) -> str:
    return bsym.python(0)[0].removeprefix("prims.").removeprefix("# ")


@dataclass
class Row:
    """What was found out about one variant; its times are lists of microseconds, one list a round."""

    variant: Variant
    symbols: int | None = None
    checks: dict[str, int] | None = None
    untransformed: dict[str, Work] | None = None
    transformed: dict[str, Work] | None = None
    compile_s: float | None = None
    hot: list[list[float]] = field(default_factory=list)
    cold: list[list[float]] = field(default_factory=list)
    call: list[list[float]] = field(default_factory=list)
    error: str | None = None

    def median(self, kind: str) -> float | None:
        """Returns the median over all rounds, in microseconds; ``kind`` is hot, cold or call."""
        times = list(chain(*getattr(self, kind)))
        return statistics.median(times) if times and not self.error else None

    def iqr(self, kind: str) -> float | None:
        """Returns the interquartile range over all rounds, in microseconds."""
        times = list(chain(*getattr(self, kind)))
        if len(times) < 2 or self.error:
            return None
        low, _, high = statistics.quantiles(times, n=4)
        return high - low

    @property
    def is_fused(self) -> bool:
        """Whether the prologue makes its checks in fewer symbols than it has checks."""
        return self.checks is not None and self.symbols < sum(self.checks.values())

    def as_json(self) -> dict[str, Any]:
        """Returns all of it as JSON can hold it."""
        plain = asdict(self) | {"variant": self.variant.name, "label": self.variant.label, "vouch": self.variant.vouch}
        for kind in ("hot", "cold", "call"):
            samples = [[round(t, 3) for t in times] for times in plain.pop(kind)]
            plain[f"{kind}_us"] = {"median": self.median(kind), "iqr": self.iqr(kind), "samples": samples}
        return plain


@dataclass
class Run:
    """The rows of one model, and what it and the machine were; it does not keep the model in memory."""

    title: str
    machine: str
    layers: int | None
    parameters: int
    buffers: int
    modules: int
    rows: list[Row] = field(default_factory=list)
    tokens: int | None = None

    @property
    def size(self) -> str:
        """What the cost of the prologue depends on."""
        parts = ", ".join(_many(getattr(self, f"{what}s"), what) for what in ("parameter", "buffer", "module"))
        return f"{_many(self.layers, 'layer')}: {parts}" if self.layers else parts

    def ratio(self, row: Row, kind: str, to: str = "none") -> float | None:
        """Returns how many times the median of ``row`` goes into that of the variant ``to``."""
        base = next((other.median(kind) for other in self.rows if other.variant.name == to), None)
        return base / row.median(kind) if base and row.median(kind) else None

    def as_json(self) -> dict[str, Any]:
        """Returns all of it as JSON can hold it."""
        return {**vars(self), "rows": [row.as_json() for row in self.rows]}


class Progress:
    """Shows on a terminal what is being done and how long the rest is likely to take; shows nothing elsewhere."""

    def __init__(self, layers: int, seconds: float):
        self._layers, self._seconds, self._seconds_a_layer = layers, seconds, SECONDS_A_LAYER

    @property
    def left(self) -> str:
        """How long the rest is likely to take."""
        seconds = self._layers * self._seconds_a_layer + self._seconds
        return f"about {seconds:.0f} s" if seconds < 100 else f"about {seconds / 60:.0f} min"

    @contextmanager
    def step(self, what: str, layers: int = 0, seconds: float = 0.0) -> Iterator[None]:
        """Shows ``what`` while ``layers`` are compiled, or while something is timed for about ``seconds``."""
        text, start = f"{what} ({self.left} left in all)", time.perf_counter()
        self._layers -= layers
        self._seconds -= seconds
        # Drawing while something is timed would be timed with it.
        shown = _console(sys.stderr).status(text, refresh_per_second=8 if layers else 0.01)
        with shown if sys.stderr.isatty() else nullcontext():
            yield
        if layers:
            self._seconds_a_layer = (time.perf_counter() - start) / layers


def measure(
    subject: Subject,
    variants: Sequence[Variant],
    seconds: float,
    rows: list[Row],
    progress: Progress,
    prepare: Callable[[Variant, Subject], Timed] = Variant.prepare,
) -> None:
    """Compiles ``subject`` under each variant, then times what ``prepare`` makes in turn, filling in ``rows``.

    A variant that fails becomes a row with its error.
    """
    prepared: list[tuple[Row, Timed]] = []
    for variant in variants:
        row = Row(variant)
        layers = (subject.layers or 1) if variant.transforms else 0
        with _recorded_error(row), progress.step(f"Compiling: {variant.label}", layers):
            start = time.perf_counter()
            timed = prepare(variant, subject)
            row.compile_s = time.perf_counter() - start
            if timed.traces:
                listed = listed_checks(timed.traces)
                row.symbols = len(timed.traces[-1].bound_symbols)
                row.checks = dict(Counter(filter(None, map(check_kind, listed.bound_symbols))))
                row.untransformed, row.transformed = work_by_group(timed.traces[0]), work_by_group(listed)
            prepared.append((row, timed))
        rows.append(row)
    scratch = torch.ones(EVICTED_BYTES // 4, dtype=torch.float32, device="cpu")
    evict = partial(scratch.add_, 1.0)
    seconds /= ROUNDS
    for number in range(1, ROUNDS + 1):
        for row, timed in prepared:
            step = progress.step(f"Timing, round {number} of {ROUNDS}: {row.variant.label}", seconds=3 * seconds)
            with _recorded_error(row), step:
                if not row.error:
                    at_stack_depth(10 * number, _time, row, timed, seconds, evict)


def _time(row: Row, timed: Timed, seconds: float, evict: Callable[[], Any]) -> None:
    if timed.fn is not None:
        row.hot.append(timed.hot(seconds))
        row.cold.append(timed.cold(seconds, evict))
    if timed.call is not None:
        row.call.append(loop_us(timed.call, timed.args, timed.kwargs, seconds))


def at_stack_depth(depth: int, fn: Callable, *args: Any) -> Any:
    """Calls ``fn(*args)`` from ``depth`` frames further down the stack.

    CPython (3.11 and newer) keeps its frames in chunks of 16 KB or more. Where the large frame of an unfused prologue
    just fits into one, each function that it calls needs a new chunk, mapped and unmapped by the operating system: a
    prologue of 32 layers then takes over 10 ms instead of 0.8 ms. At how many frames that happens depends on the
    prologue's size; a median over rounds at different depths does not hit upon it.
    """
    return at_stack_depth(depth - 1, fn, *args) if depth else fn(*args)


@contextmanager
def _recorded_error(row: Row) -> Iterator[None]:
    try:
        yield
    except Exception as e:
        # Thunder and TorchDynamo wrap whatever is raised while they trace, Ctrl-C too.
        cause: BaseException | None = e
        while cause is not None:
            if isinstance(cause, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            cause = cause.__cause__ or cause.__context__
        row.error = _one_line(e)


def fitted_line(runs: Sequence[Run], index: int, kind: str) -> statistics.LinearRegression | None:
    """Fits the cost of the ``index``-th variant by number of parameters, by least squares.

    Returns:
        Microseconds per parameter and microseconds without any, or None where fewer than two runs have measured it.
    """
    points = [(run.parameters, run.rows[index].median(kind)) for run in runs if index < len(run.rows)]
    points = [point for point in points if point[1] is not None]
    return statistics.linear_regression(*zip(*points)) if len(points) > 1 else None


def print_costs(run: Run) -> None:
    """Prints the table of one model: a row a variant, the last one eager calls."""
    kinds = ("tensor", "number", "string")
    headers = ["variant", "prologue\nsymbols", *(f"{kind}\nchecks" for kind in kinds), "other\nchecks"]
    headers += [f"{kind}\n{what}" for kind in KINDS for what in ("us", "ratio, x", "IQR, us")]
    headers += ["call\nus", "call over\neager, x", "error"]
    lines = []
    for row in run.rows:
        cells = [row.variant.label, *[""] * 5]
        if row.checks is not None:
            by_kind = [row.checks.get(kind, 0) for kind in kinds]
            cells[1:] = map(str, (row.symbols, *by_kind, sum(row.checks.values()) - sum(by_kind)))
        for kind in KINDS:
            cells += [_number(row.median(kind)), _number(run.ratio(row, kind)), _number(row.iqr(kind))]
        eager = run.ratio(row, "call", to="eager")
        lines.append([*cells, _number(row.median("call")), _number(1 / eager if eager else None), row.error or ""])
    if not any(row.error for row in run.rows):
        headers, lines = headers[:-1], [line[:-1] for line in lines]
    _print_table(headers, lines)


def print_calls(run: Run) -> None:
    """Prints the table of one model's calls: a row a variant, the last one eager calls."""
    headers = ["variant", *(f"{kind}\n{what}" for kind in KINDS for what in ("us", "over eager, us", "IQR, us"))]
    decodes = run.tokens is not None
    lines = []
    for row in run.rows:
        cells = [row.variant.label]
        for kind in KINDS:
            over = None if row.median(kind) is None else row.median(kind) - (run.rows[-1].median(kind) or math.nan)
            cells += map(_number, (row.median(kind), over, row.iqr(kind)))
        if decodes:
            hot = row.median("hot")
            cells.append(_number(run.tokens / hot * 1e6 if hot else None))
        lines.append([*cells, row.error or ""])
    headers += ["tokens\na second"] if decodes else []
    if any(row.error for row in run.rows):
        headers.append("error")
    else:
        lines = [line[:-1] for line in lines]
    _print_table(headers, lines)


def print_sweep(runs: Sequence[Run]) -> None:
    """Prints the cost of each variant by number of layers, and per parameter; not that of eager calls, the last row."""
    headers, lines = ["variant"], [[row.variant.label] for row in runs[0].rows[:-1]]
    for kind in KINDS:
        headers += [f"{kind}, us\n{_many(run.layers, 'layer')}" for run in runs] + [f"{kind}, us\nper parameter"]
        for index, line in enumerate(lines):
            fit = fitted_line(runs, index, kind)
            line += [_number(run.rows[index].median(kind)) for run in runs] + [f"{fit.slope:.3f}" if fit else ""]
    _print_table(headers, lines)


def print_explanation(run: Run) -> None:
    """Prints what the prologue does, what each transform leaves out of that, and what a user vouches for by it."""
    rows = [row for row in run.rows if row.untransformed]
    if rows:
        work = rows[0].untransformed
        reads, checks = (sum(getattr(w, what) for w in work.values()) for what in ("reads", "checks"))
        _console().print(f"\nWhat the prologue does at each call, without a transform: {reads} reads, {checks} checks")
        lines = [[group, str(w.reads), str(w.checks), w.example] for group, w in work.items()]
        _print_table(["of", "reads", "checks", "for example"], lines)
    lines = [
        [row.variant.label, _left_out(row) if row in rows else "", row.error or row.variant.vouch] for row in run.rows
    ]
    _print_table(["variant", "leaves out", "and you vouch for"], lines)


def _left_out(row: Row) -> str:
    parts = []
    for group, before in row.untransformed.items():
        for what in ("checks", "reads"):
            count, kept = getattr(before, what), getattr(row.transformed[group], what)
            if kept < count:
                parts.append(f"{count - kept} of {count} {what} of {group}")
    fused = f"; the rest is fused into {row.symbols} symbols" if row.is_fused else ""
    return (", ".join(parts) or "nothing") + fused


def _print_table(headers: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.measure import Measurement
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for header in headers:
        table.add_column(header, justify="left" if header in TEXTS else "right", overflow="fold")
    for line in lines:
        table.add_row(*line)
    console = _console()
    width = Measurement.get(console, console.options.update(width=10_000), table).maximum
    if width <= console.width or len(headers) <= 4:
        console.print(table)
        return
    # On a narrow terminal, two tables below one another are better to read than wrapped cells.
    half = (len(headers) + 1) // 2
    _print_table(headers[:half], [line[:half] for line in lines])
    _print_table([headers[0], *headers[half:]], [[line[0], *line[half:]] for line in lines])


def _console(file: TextIO | None = None) -> Console:
    from rich.console import Console

    file = file or sys.stdout
    return Console(file=file, markup=False, highlight=False, width=None if file.isatty() else 10_000)


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:.2f}" if x < 10 else f"{x:.1f}" if x < 1000 else f"{x:.0f}"


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _nearest(name: str, names: Iterable[str]) -> str:
    by_lower = {known.lower(): known for known in names}
    near = difflib.get_close_matches(name.lower(), by_lower, n=5, cutoff=0.4)
    some = ", ".join(by_lower[lower] for lower in near or list(by_lower)[:9])
    return f"did you mean {some}?" if near else f"it has {some or 'none'}"


def _search(pattern: str, file: str) -> str | None:
    try:
        found = re.search(pattern, Path(file).read_text())
    except OSError:
        return None
    return found[1] if found else None


# Okabe and Ito's colours, which stay distinct for the colour-blind.
COLOURS = ("#000000", "#e69f00", "#0072b2", "#d55e00", "#009e73", "#56b4e9", "#cc79a7", "#777777", "#8c6d1f")
COST = "microseconds at each call of the model (median)"


def plot_bars(run: Run, file: Path) -> None:
    """Draws the cost of each variant for one model, hot and cold."""
    rows = [row for row in run.rows if row.median("hot")]
    figure, (axes,) = _figure(
        f"What the prologue costs with {run.size}", run, columns=1, width=12, height=1.8 + 0.6 * len(rows)
    )
    for index, (row, colour) in enumerate(zip(rows, COLOURS * len(rows))):
        for kind, offset, alpha in (("hot", -0.2, 1.0), ("cold", 0.2, 0.4)):
            us, ratio = row.median(kind), run.ratio(row, kind)
            axes.barh(index + offset, us, height=0.38, color=colour, alpha=alpha)
            faster = f", {ratio:.1f} times faster" if ratio and row.variant.name != "none" else ""
            at = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
            axes.annotate(f"{kind}: {_number(us)} us{faster}", (us, index + offset), **at)
    axes.set_yticks(range(len(rows)), [row.variant.label for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * axes.get_xlim()[1])
    axes.set_xlabel("\n".join([COST, "; ".join(f"{kind}: {how}" for kind, how in KINDS.items())]))
    figure.savefig(file, dpi=150)


def plot_sweep(runs: Sequence[Run], file: Path) -> None:
    """Draws the cost of each variant by number of layers, hot and cold."""
    from matplotlib.ticker import LogLocator

    figure, both = _figure("What the prologue costs, by number of layers", runs[-1], columns=2, width=16, height=7.5)
    layers = [run.layers for run in runs]
    for axes, (kind, how) in zip(both, KINDS.items()):
        ends = []
        for index, (row, colour) in enumerate(zip(runs[0].rows, COLOURS * len(runs[0].rows))):
            us = [run.rows[index].median(kind) for run in runs]
            if None not in us:
                axes.plot(layers, us, color=colour, marker="o", markersize=4)
                slope = fitted_line(runs, index, kind).slope
                ends.append((us[-1], f"{row.variant.label}\n{slope:.3g} us per parameter", colour))
        axes.set(xticks=layers, xlabel="layers", ylabel=f"{COST}, log scale", yscale="log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_title(f"{kind}: {how}", loc="left", fontsize=10)
        _label_ends(axes, layers[-1], sorted(ends))
    figure.savefig(file, dpi=150)


def _figure(title: str, run: Run, columns: int, width: float, height: float) -> tuple[Figure, Sequence[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{title}\n{run.title}\n{run.machine}", x=0.01, ha="left", fontsize=10)
    return figure, axes


def _label_ends(axes: Axes, x: float, ends: Sequence[tuple[float, str, str]]) -> None:
    """Writes a text beside the end of each line, from the lowest to the highest, moved apart as far as they need."""
    axes.figure.draw_without_rendering()
    in_points = 72 / axes.figure.dpi
    ys = [axes.transData.transform((x, end))[1] * in_points for end, _, _ in ends]
    gap, placed, ceiling = 25.0, [], axes.get_window_extent().y1 * in_points
    for y in ys:
        placed.append(max(y, placed[-1] + gap) if placed else y)
    for index in reversed(range(len(placed))):
        ceiling = placed[index] = min(placed[index], ceiling)
        ceiling -= gap
    for (end, text, colour), y, at in zip(ends, ys, placed):
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.7, "relpos": (0, 0.5), "shrinkA": 0}
        look = {"va": "center", "fontsize": 8.5, "color": colour, "arrowprops": line}
        axes.annotate(text, (x, end), (22, at - y), textcoords="offset points", **look)


def versions() -> dict[str, str | None]:
    """Returns the versions of what is measured, None for what is not installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for distribution in ("lightning-thunder", "thunder-prologue", "litgpt"):
        try:
            found[distribution] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            found[distribution] = None
    return found


def cpu_model() -> str:
    """Returns what the CPU calls itself."""
    return _search(r"model name\s*:\s*(.+)", "/proc/cpuinfo") or platform.processor() or platform.machine()


def machine() -> str:
    """Returns in a line on what is measured, as it is now."""
    installed = ", ".join(f"{name} {version}" for name, version in versions().items() if version)
    return f"{installed}; {cpu_model()}, {_many(torch.get_num_threads(), 'thread')}; {datetime.now():%Y-%m-%d}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        self.exit(2, f"error: {message}\n")


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    lines = [f"  {variant.name:<24}{variant.label}" for variant in known_variants().values()]
    lines += ["  MODULE:CLASS[+MODULE:CLASS]", " " * 26 + "transforms of your own, made without arguments"]
    parser = _Parser(
        prog="python -m thunder.benchmarks.prologue",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=DESCRIPTION,
        epilog="\n".join(["variants:", *lines, "", "examples:", *__doc__.split("::\n\n")[1].splitlines()]),
    )
    add = parser.add_argument
    model = "a LitGPT configuration (default: %(default)s), or MODULE:CALLABLE that returns (model, args, kwargs)"
    add("--model", default="Llama-3-8B", metavar="NAME", help=model)
    size = parser.add_mutually_exclusive_group()
    layers = f"build the configuration with N layers (default: {DEFAULT_LAYERS})"
    size.add_argument("--layers", type=_count, metavar="N", help=layers)
    sweep = "build it with each number of layers, and fit the cost of a parameter"
    size.add_argument("--sweep", type=_sweep, metavar="N,N,...", help=sweep)
    width = "the configuration's real width, not a narrow one with the same modules and parameters a layer"
    add("--full-width", action="store_true", help=width)
    add("--device", choices=("cpu", "cuda"), help="where the model is (default: cpu)")
    add("--dtype", choices=("float32", "bfloat16", "float16", "float64"), help="of parameters (default: float32)")
    add("--grad", action="store_true", help="enable gradients; LitGPT's parameters then require them")
    add("--variants", metavar="NAME,NAME,...", help="what to compare (default: all that are listed below)")
    seconds = "seconds to time each variant for, hot, cold and in calls of the model each (default: %(default)s)"
    add("--min-run-time", type=_seconds, default=1.0, metavar="S", help=seconds)
    add("--threads", type=_count, default=1, metavar="N", help="threads for torch to use (default: %(default)s)")
    add("--json", type=_output_file, metavar="FILE", help="write everything there: versions, CPU, every sample")
    add("--plot", type=_plot_file, metavar="FILE", help="draw the costs there; FILE ends in .png or .svg")
    add("--explain", action="store_true", help="say what the prologue does, and what each variant leaves out")
    calls = "time whole calls: of a small module, and of a decode step of the model (with --grad: of its forward)"
    add("--calls", action="store_true", help=calls)
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more, is {text!r}")
    return int(text)


def _sweep(text: str) -> list[int]:
    sizes = sorted({_count(part.strip()) for part in text.split(",")})
    if len(sizes) < 2:
        raise argparse.ArgumentTypeError(f"must be two or more numbers of layers, is {text!r}")
    return sizes


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, is {text!r}")
    return seconds


def _output_file(text: str) -> Path:
    file = Path(text)
    if not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(file.parent)!r} for {text!r}")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write to {text!r}")
    return file


def _plot_file(text: str) -> Path:
    if Path(text).suffix.lower() not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"must end in .png or .svg, is {text!r}")
    return _output_file(text)


def check_options(options: argparse.Namespace) -> None:
    """Fills in the defaults of ``options``.

    Raises:
        UsageError: Something that they need is missing, or they exclude each other.
    """
    require_own_transform()
    for package, wanted in (("rich", True), ("matplotlib", options.plot)):
        if wanted and importlib.util.find_spec(package) is None:
            raise UsageError(f"{package} is missing; run `{INSTALL_EXTRA}`")
    if ":" in options.model:
        for name in ("layers", "sweep", "full_width", "device", "dtype"):
            if getattr(options, name):
                option = f"--{name.replace('_', '-')}"
                raise UsageError(f"{option} is for LitGPT's configurations: {options.model} returns its model ready")
    for name in ("sweep", "plot", "explain"):
        if options.calls and getattr(options, name):
            raise UsageError(f"--{name} shows prologues, --calls whole calls; give one of them")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device here; leave it out to measure on the CPU")
    options.device, options.dtype = options.device or "cpu", options.dtype or "float32"
    options.sizes = options.sweep or [1 if ":" in options.model else options.layers or DEFAULT_LAYERS]


def run_benchmark(options: argparse.Namespace, runs: list[Run]) -> None:
    """Measures and prints what ``options`` ask for; what is measured goes to ``runs`` at once, and survives Ctrl-C.

    Raises:
        UsageError: What they ask for cannot be built, or does not run without Thunder either.
    """
    variants = choose_variants(options.variants, options.calls)
    if ":" in options.model:
        makers = [partial(own_subject, options.model)]
    else:
        make_subject = decode_subject if options.calls else litgpt_subject
        configs = litgpt_configs(options.model, options.sizes, options.full_width)
        makers = [partial(make_subject, config, options) for config in configs]
    if options.calls:
        makers.insert(0, partial(small_subject, options))
    prepare, print_run = (Variant.prepare_call, print_calls) if options.calls else (Variant.prepare, print_costs)
    compiled = sum(1 for variant in variants if variant.transforms)
    progress = Progress(compiled * sum(options.sizes), 3 * options.min_run_time * len(variants) * len(makers))
    console = _console()
    for make in makers:
        subject = make()
        try:
            subject.model(*subject.args, **subject.kwargs)
        except Exception as e:
            raise UsageError(f"--model {options.model} fails without Thunder already: {_one_line(e)}") from e
        parts = (subject.model.parameters, subject.model.buffers, subject.model.modules)
        run = Run(
            subject.title, machine(), subject.layers, *(len(list(each())) for each in parts), tokens=subject.tokens
        )
        if not runs:
            console.print(f"{run.machine}\nCompiling and timing is likely to take {progress.left}.")
        if not runs or options.calls:
            console.print(run.title)
        console.print(run.size)
        runs.append(run)
        measure(subject, variants, options.min_run_time, run.rows, progress, prepare)
        print_run(run)
    if options.sweep:
        print_sweep(runs)
    how = "; ".join(f"{kind}: {how}" for kind, how in KINDS.items())
    if options.calls:
        console.print(f"{how}; medians and interquartile ranges (IQR) of {ROUNDS} rounds in turn")
        return
    ratio = "" if any(variant.name == "none" for variant in variants) else ", which --variants leaves out"
    console.print(
        f"{how}; ratio: to no transform{ratio}; medians and interquartile ranges (IQR) of {ROUNDS} rounds in turn"
    )
    if options.explain:
        print_explanation(runs[-1])


@contextmanager
def _settings(options: argparse.Namespace) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        with torch.set_grad_enabled(options.grad), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)


def report(options: argparse.Namespace, runs: Sequence[Run], interrupted: bool) -> dict[str, Any]:
    """Returns everything that was measured, and where, as JSON can hold it."""
    labels = [row.variant.name for row in runs[0].rows] if len(runs) > 1 else []
    fits = {name: {k: fitted_line(runs, i, k) for k in KINDS} for i, name in enumerate(labels)}
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "versions": versions(),
        "cpu": cpu_model(),
        "threads": options.threads,
        "arguments": {k: str(value) if isinstance(value, Path) else value for k, value in vars(options).items()},
        "interrupted": interrupted,
        "runs": [run.as_json() for run in runs],
        "us_per_parameter": {n: {k: f and f.slope for k, f in fit.items()} for n, fit in fits.items()},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: The arguments, those of the process by default.

    Returns:
        The exit status: 0, 1 when a variant failed, or 130 after Ctrl-C. Wrong arguments exit with 2.
    """
    parser = make_parser()
    options = parser.parse_args(argv)
    runs: list[Run] = []
    interrupted = False
    try:
        check_options(options)
        with _settings(options):
            run_benchmark(options, runs)
    except UsageError as e:
        parser.error(str(e))
    except KeyboardInterrupt:
        interrupted = True
        print(f"interrupted; measured until then: {'' if runs else 'nothing'}", file=sys.stderr)
        if runs:
            print_calls(runs[-1]) if options.calls else print_costs(runs[-1])
    if options.json:
        options.json.write_text(json.dumps(report(options, runs, interrupted), indent=1))
    if options.plot and not interrupted:
        plot_sweep(runs, options.plot) if options.sweep else plot_bars(runs[0], options.plot)
    return 130 if interrupted else int(any(row.error for run in runs for row in run.rows))


if __name__ == "__main__":
    sys.exit(main())
