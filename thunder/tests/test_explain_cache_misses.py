import contextlib
import doctest
import functools
import gc
import logging
import re
import threading
import weakref

import pytest
import torch

import thunder
from thunder.core import prologue_explanations
from thunder.core.recipe import Plugin, Recipe
from thunder.core.transform_common import Transform
from thunder.transforms import ExtractionOnlyPrologueTransform, LORATransform, PrunePrologueChecks, explain_cache_misses
from thunder.transforms.explain_cache_misses import ExplainCacheMisses
from thunder.transforms.fast_dispatch_transform import FastDispatchTransform
from thunder.transforms.fused_prologue_transform import FusedPrologueTransform

LINE = re.compile(r"(?P<function>.+), called at (?P<site>.+:\d+): (?P<text>.+)")
ENTRY = re.compile(r"cache entry (?P<entry>\d+) (?P<text>.+)")

TRANSFORMS = {
    "none": list,
    "fused": lambda: [FusedPrologueTransform()],
    "extraction only": lambda: [ExtractionOnlyPrologueTransform(keep=["*"])],
    "extraction only, fused": lambda: [ExtractionOnlyPrologueTransform(keep=["*"]), FusedPrologueTransform()],
    "fast dispatch": lambda: [FastDispatchTransform()],
    "fused, extraction only": lambda: [FusedPrologueTransform(), ExtractionOnlyPrologueTransform(keep=["*"])],
}
all_transforms = pytest.mark.parametrize("transforms", TRANSFORMS.values(), ids=TRANSFORMS)
two_transforms = pytest.mark.parametrize(
    "transforms", [TRANSFORMS["none"], TRANSFORMS["fast dispatch"]], ids=["none", "fast dispatch"]
)


class Log(logging.Handler):
    """Collects what is logged."""

    def __init__(self):
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record):
        self.records.append(record)

    def levels(self) -> list[str]:
        return [record.levelname for record in self.records]

    def messages(self, level=logging.NOTSET) -> list[str]:
        return [record.getMessage() for record in self.records if record.levelno >= level]

    def of(self, cm, *args, misses=1, **kwargs) -> list[str]:
        self.records.clear()
        before = thunder.cache_misses(cm)
        cm(*args, **kwargs)
        assert thunder.cache_misses(cm) == before + misses
        return self.messages()

    def entries(self, cm, *args, **kwargs) -> dict[int, str]:
        """What is said of each cache entry."""
        found = {}
        for line in self.of(cm, *args, **kwargs):
            match = ENTRY.fullmatch(LINE.fullmatch(line)["text"])
            found[int(match["entry"])] = match["text"]
        return found

    def why(self, cm, *args, **kwargs) -> str:
        """Why the only entry refused."""
        (text,) = self.entries(cm, *args, **kwargs).values()
        assert text.startswith("refused: ")
        return text.removeprefix("refused: ").partition("; first used at ")[0]


@pytest.fixture
def log():
    logger, handler = logging.getLogger("thunder.prologue"), Log()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.setLevel(logging.NOTSET)
    logger.removeHandler(handler)


class Config:
    scale = 2.0


class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.eps = 1e-5
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.register_buffer("offset", torch.zeros(4))

    def forward(self, x):
        return x * self.weight / (2.0 + self.eps) + self.offset if not self.training else x


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = Norm()
        self.config = Config()
        self.table = {"gain": [1.0, 2.0]}

    def forward(self, x, *more, mask=None, options=None, mode="add", **others):
        x = self.norm(x) * (1.0 if self.config is None else self.config.scale) * self.table["gain"][1]
        for other in (*more, *others.values()):
            x = x + other
        if mask is not None:
            x = x * mask
        if options is not None:
            x = x * options["tensors"][0] * options["factor"]
        return x + 1 if mode == "add" else x * 2


def jit(fn, transforms=(), **kwargs):
    return thunder.jit(fn, transforms=[ExplainCacheMisses(**kwargs), *transforms])


#
# What is said
#

MODEL_CHANGES = {
    "train": (lambda m: (m, "training", True), "attribute 'training': compiled for False, is True"),
    "train a submodule": (lambda m: (m.norm, "training", True), "attribute 'norm.training': compiled for False, is True"),
    "attribute": (lambda m: (m.norm, "eps", 10.0), "attribute 'norm.eps': compiled for 1e-05, is 10.0"),
    "type": (lambda m: (m.config, "scale", 2), "attribute 'config.scale': compiled for 2.0, is 2"),
    "class attribute": (lambda m: (Config, "scale", 3.0), "attribute 'config.scale': compiled for 2.0, is 3.0"),
    "item": (lambda m: (m, "table", {"gain": [1.0, 7.0]}), "attribute \"table['gain'][1]\": compiled for 2.0, is 7.0"),
    "gone": (lambda m: (m, "config", None), "attribute 'config.scale' cannot be read"),
    "dtype": (lambda m: (m.norm.weight, "data", torch.ones(4).double()), "parameter 'norm.weight': compiled for torch.float32, is torch.float64"),
    "shape": (lambda m: (m.norm.weight, "data", torch.zeros(1)), "parameter 'norm.weight': compiled for shape (4,), is of shape (1,)"),
    "frozen": (lambda m: (m.norm.weight, "requires_grad", False), "parameter 'norm.weight': compiled for requires_grad=True, is requires_grad=False"),
    "buffer": (lambda m: (m.norm.offset, "data", torch.zeros(1)), "buffer 'norm.offset': compiled for shape (4,), is of shape (1,)"),
}  # fmt: skip


class Stop(Exception):
    pass


class StopsCompilation(Transform):
    """Makes a miss cheap: it is explained, and then no new entry is made."""

    is_on = False

    def transform_traces_pre_prologue(self, *traces, **kwargs):
        if self.is_on:
            raise Stop
        return traces


def explained(log, cm, *args, **kwargs) -> str:
    """The line that a miss logs whose compilation is stopped."""
    log.records.clear()
    with pytest.raises(Stop):
        cm(*args, **kwargs)
    (record,) = log.records
    assert record.levelno == logging.INFO and record.name == "thunder.prologue"
    return record.getMessage()


@all_transforms
def test_changes_of_the_model(transforms, log, monkeypatch):
    stops, model = StopsCompilation(), Net().eval()
    cm = thunder.jit(model, transforms=[ExplainCacheMisses(), *transforms(), stops])
    x = torch.randn(3, 4)
    cm(x)
    stops.is_on = True
    for name, (change, expected) in MODEL_CHANGES.items():
        with monkeypatch.context() as patch:
            patch.setattr(*change(model))
            assert explained(log, cm, x).endswith(f": cache entry 0 refused: {expected}"), name
        cm(x)


X, Y = torch.randn(3, 4), torch.randn(3, 4)
GIVEN = {"mask": Y, "options": {"tensors": [torch.randn(3, 4)], "factor": 3}, "mode": "add", "other": torch.randn(4)}
INPUT_CHANGES = {
    "shape": ((X[:1], X), {}, "input 'x': compiled for shape (3, 4), is of shape (1, 4)"),
    "dtype": ((X.double(), X), {}, "input 'x': compiled for torch.float32, is torch.float64"),
    "requires_grad": ((X.clone().requires_grad_(), X), {}, "input 'x': compiled for requires_grad=False, is requires_grad=True"),
    "no tensor": ((1.0, X), {}, "input 'x': compiled for a tensor, is of type float"),
    "the rest": ((X, X[:1]), {}, "input 'more[0]': compiled for shape (3, 4), is of shape (1, 4)"),
    "more arguments": ((X, X, X), {}, "number of positional arguments: compiled for 2, is 3"),
    "fewer arguments": ((X,), {}, "number of positional arguments: compiled for 2, is 1"),
    "more keyword arguments": ((X, X), {"another": Y}, "number of keyword arguments: compiled for 4, is 5"),
    "None": ((X, X), {"mask": None}, "input 'mask': compiled for a tensor, is of type NoneType"),
    "string": ((X, X), {"mode": "mul"}, "input 'mode': compiled for 'add', is 'mul'"),
    "nested tensor": ((X, X), {"options": {"tensors": [Y.double()], "factor": 3}}, "input \"options['tensors'][0]\": compiled for torch.float32, is torch.float64"),
    "nested number": ((X, X), {"options": GIVEN["options"] | {"factor": 4}}, "input \"options['factor']\": compiled for 3, is 4"),
    "type of a number": ((X, X), {"options": GIVEN["options"] | {"factor": 3.0}}, "input \"options['factor']\": compiled for 3, is 3.0"),
    "tensor for a number": ((X, X), {"options": GIVEN["options"] | {"factor": torch.ones(1)}}, "input \"options['factor']\": compiled for 3, is a tensor of shape (1,)"),
    "keyword": ((X, X), {"other": torch.randn(1)}, "input 'other': compiled for shape (4,), is of shape (1,)"),
    "aliases": ((X, Y), {}, "global state 'alias_tensor_indices': compiled for "),
}  # fmt: skip


@pytest.mark.parametrize(
    "transforms", [TRANSFORMS["none"], TRANSFORMS["extraction only, fused"]], ids=["none", "fused"]
)
def test_changes_of_inputs(transforms, log):
    stops = StopsCompilation()
    cm = thunder.jit(Net().eval(), transforms=[*transforms(), ExplainCacheMisses(warn_after=1000), stops])
    cm(X, X, **GIVEN)
    stops.is_on = True
    for name, (args, kwargs, expected) in INPUT_CHANGES.items():
        assert f"refused: {expected}" in explained(log, cm, *args, **(GIVEN | kwargs)), name
    renamed = {("masks" if name == "mask" else name): value for name, value in GIVEN.items()}
    assert "refused: input 'mask' is not given" in explained(log, cm, X, X, **renamed)


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@two_transforms
def test_global_state(log, transforms):
    cm, x = jit(torch.nn.ReLU(), transforms()), torch.randn(3)
    cm(x)
    with torch.no_grad():
        assert log.why(cm, x) == "global state 'is_grad_enabled': compiled for True, is False"
    with default_dtype(torch.float64):
        assert set(log.entries(cm, x).values()) == {
            "refused: global state 'default_dtype': compiled for torch.float32, is torch.float64"
        }
    with torch.device("meta"):
        assert log.entries(cm, x)[0] == "refused: global state 'default_device': compiled for cpu, is meta"
    cm = jit(torch.nn.ReLU(), transforms())
    with torch.autocast("cpu"):
        cm(x)
    assert "(autocast is off), compiled for" in log.why(cm, x)
    with torch.autocast("cpu", torch.float16):
        assert "global state 'autocast_cpu_dtype': compiled for " in log.entries(cm, x)[0]
    cm = jit(torch.nn.ReLU(), transforms())
    cm(x)
    with torch.autocast("cpu"):
        assert log.why(cm, x) == "global state 'is_autocast_enabled': compiled for False, is True"


def scaled(x, scale=2.0, /, *rest, power=1):
    return x * scale**power


GAIN = {"gain": 2.0}
gained = torch.nn.Linear(4, 4)


def global_variables(x):
    return gained(x) * GAIN["gain"]


@two_transforms
@torch.no_grad()
def test_functions(log, transforms, monkeypatch):
    cm = jit(scaled, transforms())
    cm(X, 2.0)
    assert log.why(cm, X, 3.0) == "input 'scale': compiled for 2.0, is 3.0"
    assert log.entries(cm, X, 2.0, power=2)[0] == "refused: number of keyword arguments: compiled for 0, is 1"

    model, factor = torch.nn.Linear(4, 4), 2.0

    def closure(x):
        return model(x) * factor

    cm = jit(closure, transforms())
    cm(X)
    model.train(False)
    assert log.why(cm, X) == "attribute 'model.training': compiled for True, is False"
    factor = 3.0
    assert log.entries(cm, X)[1] == "refused: closure variable 'factor': compiled for 2.0, is 3.0"
    model.weight.requires_grad_(False)
    assert "parameter 'model.weight': compiled for requires_grad=True" in log.entries(cm, X)[2]

    cm = jit(global_variables, transforms())
    cm(X)
    monkeypatch.setitem(GAIN, "gain", 3.0)
    assert log.why(cm, X) == "global variable \"GAIN['gain']\": compiled for 2.0, is 3.0"
    monkeypatch.setattr(gained, "training", False)
    assert log.entries(cm, X)[1] == "refused: attribute 'gained.training': compiled for True, is False"


@two_transforms
@torch.no_grad()
def test_thunder_module_in_a_function(log, transforms):
    inner = jit(torch.nn.Linear(4, 4), transforms())

    def fn(x):
        return inner(x) * 2

    cm = jit(fn, transforms())
    cm(X)
    inner._model.train(False)
    assert re.fullmatch(r"attribute 'inner\S*\.training': compiled for True, is False", log.why(cm, X))


def test_thunder_compile(log):
    class Explained(Plugin):
        def setup_transforms(self):
            return [ExplainCacheMisses()]

    cm = thunder.compile(Norm().eval(), recipe=Recipe(plugins=None), plugins=[Explained()])
    with torch.no_grad():
        cm(X)
        assert log.why(cm, X[:2]) == "input 'x': compiled for shape (3, 4), is of shape (2, 4)"


def test_lora(log):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4)).requires_grad_(False)
    lora = LORATransform(r=2, lora_alpha=4, lora_dropout=0.0)
    cm = jit(model, [lora, FusedPrologueTransform()])
    cm(X)
    name = next(name for name in cm._overrides_parameters if "lora" in name)
    log.records.clear()
    cm._overrides_parameters[name].requires_grad_()
    with pytest.raises(AssertionError):  # LORATransform compiles for requires_grad=False, whatever it is
        cm(X)
    (line,) = log.messages()
    assert line.endswith(f"refused: parameter {name!r}: compiled for requires_grad=False, is requires_grad=True")


def test_prune_prologue_checks(log):
    model = Net().eval()
    cm = jit(model, [PrunePrologueChecks()])
    cm(X)
    model.train()
    assert log.of(cm, X, misses=0) == []
    assert log.why(cm, X[:2]).startswith("input 'x': compiled for shape")


USERS_CODE = """\
class Model(torch.nn.Module):
    def forward(self, x, *more):
        for other in more:
            x = x * other
        return x

def serve(cmodel, *args):
    return cmodel(*args)
"""


def test_names_the_function_the_call_and_the_first_use(log, tmp_path):
    file = str(tmp_path / "serving.py")
    users = {"__name__": "serving", "torch": torch}
    exec(compile(USERS_CODE, file, "exec"), users)
    cm = jit(users["Model"]())
    users["serve"](cm, X, Y)
    log.records.clear()
    users["serve"](cm, X, Y[:1])
    assert log.messages() == [
        f"Model, called at {file}:8: cache entry 0 refused: input 'more[0]': compiled for shape (3, 4), is of shape "
        f"(1, 4); first used at {file}:4"
    ]


def test_first_call_and_hits_log_nothing(log):
    cm = jit(torch.nn.ReLU())
    assert log.of(cm, X) == []
    assert log.of(cm, X, misses=0) == []


@two_transforms
@torch.no_grad()
def test_several_entries(log, transforms):
    cm = jit(torch.nn.ReLU(), transforms(), max_entries=2)
    shapes = [(n,) for n in range(1, 6)]
    for shape in shapes[:2]:
        cm(torch.randn(shape))
    refused = "refused: input 'input': compiled for shape {}, is of shape {}"
    assert log.entries(cm, torch.randn(shapes[2])) == {i: refused.format(shapes[i], shapes[2]) for i in (1, 0)}
    *lines, last = log.of(cm, torch.randn(shapes[3]))
    assert [int(ENTRY.search(line)["entry"]) for line in lines] == [2, 1]
    assert last.endswith(": 1 older cache entry refused, too")
    *lines, last = log.of(cm, torch.randn(shapes[4]))
    assert last.endswith(": 2 older cache entries refused, too")


@two_transforms
@torch.no_grad()
def test_recompile_storm(log, transforms):
    explains = ExplainCacheMisses(warn_after=3)
    cms = [thunder.jit(torch.nn.ReLU(), transforms=[explains, *transforms()]) for _ in range(2)]
    for cm in cms:  # each is counted for itself
        cm(torch.randn(1))
        levels = []
        for n in range(2, 8):
            log.of(cm, torch.randn(n))
            levels.append(set(log.levels()))
            if n == 4:
                (warning,) = log.messages(logging.WARNING)
        assert levels == [{"INFO"}, {"INFO"}, {"INFO", "WARNING"}, set(), set(), set()]
        assert warning == (
            "ReLU has been compiled anew 3 times because of input 'input' (compiled for shape (3,), is of shape (4,)), "
            "and that is no longer reported. Each time takes long, and is kept in memory. To avoid it, pad it, or sort "
            "calls into few shapes."
        )
        # Other values still are.
        with default_dtype(torch.float64):
            assert "default_dtype" in " ".join(log.of(cm, torch.randn(7, dtype=torch.float32)))


ADVICE = {
    "input dtype": (lambda cm: cm(X.double(), 2.0), "give it the same dtype"),
    "input number": (lambda cm: cm(X, 3.0), "pass the number as a tensor"),
    "count": (lambda cm: cm(X, 2.0, 3.0), "pass the same arguments each time"),
    "grad mode": (lambda cm: torch.no_grad()(cm)(X, 2.0), "make all calls under the same grad mode"),
}


@pytest.mark.parametrize("name", ADVICE)
def test_advice(log, name):
    call, advice = ADVICE[name]
    cm = jit(scaled, warn_after=1)
    cm(X, 2.0)
    call(cm)
    (warning,) = log.messages(logging.WARNING)
    assert advice in warning


def test_advice_for_models(log):
    model = Net().eval()
    cm = jit(model, warn_after=1)
    cm(X)
    model.norm.eps = 0.1
    cm(X)
    assert "make it a tensor" in log.messages(logging.WARNING)[-1]
    model.norm.weight.requires_grad_(False)
    cm(X)
    assert "keep the parameter as it is and change only its values" in log.messages(logging.WARNING)[-1]


#
# When it says nothing
#


def test_logger_off(log, monkeypatch):
    def no(*args):
        raise AssertionError("was asked")

    monkeypatch.setattr(explain_cache_misses, "_find_call", no)
    logging.getLogger("thunder.prologue").setLevel(logging.ERROR)
    cm = jit(torch.nn.ReLU())
    for n in (1, 2, 3):
        cm(torch.randn(n))
    assert not log.records


def test_at_level_warning_only_the_warning(log):
    logging.getLogger("thunder.prologue").setLevel(logging.WARNING)
    cm = jit(torch.nn.ReLU(), warn_after=2)
    for n in (1, 2, 3, 4):
        cm(torch.randn(n))
    assert log.levels() == ["WARNING"]


def prologue_texts(transforms) -> list[str]:
    cm = thunder.jit(Norm().eval(), transforms=transforms)
    cm(X)
    return [re.sub(r"took \d+", "", str(trace)) for trace in thunder.last_prologue_traces(cm)]


def test_traces_are_those_without():
    expected = prologue_texts([ExtractionOnlyPrologueTransform(), FusedPrologueTransform()])
    for position in range(3):
        transforms = [ExtractionOnlyPrologueTransform(), FusedPrologueTransform()]
        transforms.insert(position, ExplainCacheMisses())
        assert prologue_texts(transforms) == expected
        assert len(transforms) == 3  # FusedPrologueTransform has not added itself once more


def test_after_fused_in_a_tuple():
    assert "read_and_check_modules" in prologue_texts((FusedPrologueTransform(), ExplainCacheMisses()))[-1]


#
# When it cannot say
#


def test_entry_that_accepts_now(log):
    model = Norm().eval()

    class Undoes(Transform):
        def transform_traces_pre_prologue(self, *traces, **kwargs):
            model.eps = 1e-5
            return traces

    cm = thunder.jit(model, transforms=[Undoes(), ExplainCacheMisses()])
    cm(X)
    model.eps = 10.0
    with pytest.raises(RuntimeError):  # the new prologue, too, is for what it was
        cm(X)
    (line,) = log.messages()
    assert "cache entry 0 accepts it now: what it refused has changed meanwhile" in line


def test_call_that_cannot_be_found(log, monkeypatch):
    monkeypatch.setattr(explain_cache_misses, "_find_call", lambda: None)
    cm = jit(torch.nn.ReLU())
    for n in (1, 2, 3):
        cm(torch.randn(n))
    assert thunder.cache_misses(cm) == 3
    (warning,) = log.messages(logging.WARNING)
    assert "cannot say why calls are compiled anew" in warning and len(log.records) == 1


def test_this_thunder_has_what_is_looked_for():
    found = []

    class Looks(Transform):
        def transform_traces_pre_prologue(self, *traces, **kwargs):
            found.append(explain_cache_misses._find_call())
            return traces

    cm = thunder.jit(scaled, transforms=[Looks()])
    cm(X, 2.0, power=2)
    (call,) = found
    assert call.stats is thunder.compile_stats(cm)
    assert call.args[0] is X and call.args[1:] == (2.0,) and call.kwargs == {"power": 2}
    assert call.site.startswith(__file__)
    assert explain_cache_misses._find_call() is None


def test_faults_of_its_own_are_told(log, monkeypatch):
    def fail(*args):
        raise ZeroDivisionError("a fault")

    logging.getLogger("thunder.prologue").setLevel(logging.DEBUG)
    monkeypatch.setattr(explain_cache_misses, "_run_again", fail)
    cm = jit(torch.nn.ReLU())
    cm(torch.randn(1))
    assert cm(torch.ones(2)).sum() == 2
    warning, debug = log.records
    assert warning.levelno == logging.WARNING and "ZeroDivisionError: a fault" in warning.getMessage()
    assert debug.levelno == logging.DEBUG and "Traceback" in debug.getMessage()
    assert debug.exc_info is None


def test_statement_that_cannot_be_told(log, monkeypatch):
    monkeypatch.setattr(prologue_explanations.linecache, "getline", lambda *args: "")
    cm = jit(torch.nn.ReLU())
    cm(torch.randn(1))
    assert log.why(cm, torch.randn(2)).startswith("AssertionError: expected tensor with (1,), cpu")


#
# Lifetimes and threads
#


@two_transforms
@pytest.mark.parametrize("has_fault", [False, True])
def test_keeps_nothing_alive(log, transforms, has_fault, monkeypatch):
    if has_fault:
        logging.getLogger("thunder.prologue").setLevel(logging.DEBUG)
        monkeypatch.setattr(explain_cache_misses, "_describe_verdict", lambda *args: 1 / 0)
    explains = ExplainCacheMisses(warn_after=2)
    model = Norm().eval()
    cm = thunder.jit(model, transforms=[explains, *transforms()])
    with torch.no_grad():
        cm(torch.randn(2, 4))
    gc.collect()
    gc.disable()
    try:
        for n in (3, 4, 5):
            x = torch.randn(n, 4)
            reference = weakref.ref(x)
            with torch.no_grad():
                cm(x)
            del x
            gc.collect()  # compiling leaves cycles behind
            assert reference() is None
        references = [weakref.ref(o) for o in (model, cm, thunder.compile_stats(cm))]
        del model, cm
        gc.collect()
        assert [reference() for reference in references] == [None] * 3
        assert not explains._times_refused
    finally:
        gc.enable()
    assert len(log.records) > 1


def test_counts_in_threads(log):
    explains = ExplainCacheMisses(warn_after=1000)
    cm = jit(torch.nn.ReLU())
    cm(torch.randn(1))
    call = explain_cache_misses._Call(thunder.compile_stats(cm), (torch.randn(2),), {}, "here")
    refusal = explain_cache_misses._run_again(call.stats.interpreter_cache[0], call)
    barrier = threading.Barrier(8)

    def count():
        barrier.wait()
        with thunder.core.compile_data.compile_data_and_stats(cm._lc_cd, cm._lc_cs):
            for _ in range(200):
                explains._count(call, {refusal.value: refusal})

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert explains._times_refused[call.stats][refusal.value] == 1600
    assert log.levels() == ["WARNING"]


#
# Arguments
#


@pytest.mark.parametrize("name", ("warn_after", "max_entries"))
def test_bad_arguments(name):
    for value in (0, -1):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, is {value}"):
            ExplainCacheMisses(**{name: value})
    for value in (None, 1.0, "3", True):
        with pytest.raises(TypeError, match=f"{name} must be an int, is {value!r} of type {type(value).__name__}"):
            ExplainCacheMisses(**{name: value})
    with pytest.raises(TypeError):
        ExplainCacheMisses(3)


def test_repr():
    assert repr(ExplainCacheMisses(warn_after=2)).endswith("ExplainCacheMisses(warn_after=2, max_entries=3)")


def test_is_in_thunder_transforms():
    assert thunder.transforms.ExplainCacheMisses is ExplainCacheMisses
    assert "ExplainCacheMisses" in thunder.transforms.__all__


@pytest.mark.parametrize("module", [explain_cache_misses, prologue_explanations])
def test_docstring_examples(module, monkeypatch):
    monkeypatch.setattr(logging, "basicConfig", functools.partial(lambda **kwargs: None))
    failures, attempted = doctest.testmod(module)
    assert attempted and not failures
