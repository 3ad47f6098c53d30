"""Tests of ``python -m thunder.benchmarks.prologue``: what it reports and how it fails, not how long anything takes."""

import inspect
import io
import json
import os
import re
import signal
import struct
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import thunder
from thunder.benchmarks import prologue
from thunder.transforms import ExtractionOnlyPrologueTransform

MODELS = """
import torch

from thunder.core.transform_common import Transform

SCALE = 2.0
not_callable = 3


class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))

    def forward(self, x):
        return super().forward(x) * SCALE


class Unchanged(Transform):
    def transform_traces_pre_prologue(self, prologue_trace, computation_trace, epilogue_trace, **kwargs):
        return prologue_trace, computation_trace, epilogue_trace


class Failing(Transform):
    def transform_traces_pre_prologue(self, *args, **kwargs):
        raise ValueError("it fails [here]\\nand says why")


class Interrupted(Transform):
    def transform_traces_pre_prologue(self, *args, **kwargs):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as e:
            raise RuntimeError("while tracing") from e


def net():
    return Net().eval().requires_grad_(False), (torch.randn(3, 4),), {}


def without_parameters():
    return torch.nn.ReLU(), [torch.randn(3)], {}


def returns_too_little():
    return torch.nn.Linear(2, 2), (torch.randn(2),)


def returns_something_else():
    return "a model", (), {}


def raises():
    raise OSError("no weights\\nanywhere")


def does_not_run():
    return torch.nn.Linear(2, 2), (torch.randn(3, 3),), {}
"""
QUICK = ["--min-run-time", "0.005"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    (folder / "benchmarked.py").write_text(MODELS)
    (folder / "not_importable.py").write_text("1 / 0")
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


def run_command(folder, *arguments, **env):
    command = [sys.executable, "-m", "thunder.benchmarks.prologue", *arguments]
    return subprocess.run(command, cwd=folder, env=os.environ | env, capture_output=True, text=True, timeout=300)


def error_of(capsys, argv):
    """The one line that wrong arguments give."""
    with pytest.raises(SystemExit) as stopped:
        prologue.main([*argv, *QUICK])
    assert stopped.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ") and output.err.count("\n") == 1
    return output.err


def png_size(file):
    data = Path(file).read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", data[16:24])


def rows_by_variant(report, run=0):
    return {row["variant"]: row for row in report["runs"][run]["rows"]}


@pytest.fixture(scope="module")
def measured(folder):
    """One run of all variants of this project and lightning-thunder, what it printed, and its files."""
    json_file, plot = folder / "all.json", folder / "all.png"
    argv = ["--model", "benchmarked:net", "--json", str(json_file), "--plot", str(plot), "--explain", *QUICK]
    settings = torch.get_num_threads(), torch.is_grad_enabled()
    with redirect_stdout(io.StringIO()) as output:
        status = prologue.main(argv)
    assert settings == (torch.get_num_threads(), torch.is_grad_enabled())
    report = json.loads(json_file.read_text())
    return SimpleNamespace(status=status, text=output.getvalue(), report=report, plot=plot)


def test_all_variants_are_measured(measured):
    rows = rows_by_variant(measured.report)
    own = [name for name in prologue.known_variants() if "fast-dispatch" not in name]  # whose prologues are the fused
    assert list(rows) == [*own, "eager"]
    assert measured.status == int(any(row["error"] for row in rows.values()))
    for name in ("none", "extraction-only", "prune", "floor", "torch.compile"):
        assert rows[name]["error"] is None
        for kind in ("hot_us", "cold_us"):
            times = rows[name][kind]
            assert len(times["samples"]) == prologue.ROUNDS and all(times["samples"])
            assert 0 < min(map(min, times["samples"])) <= times["median"] <= max(map(max, times["samples"]))
    for name in ("none", "extraction-only", "prune", "eager"):
        assert rows[name]["call_us"]["median"] > 0
    assert rows["eager"]["hot_us"]["samples"] == rows["floor"]["call_us"]["samples"] == []


def test_report_says_on_what_it_was_measured(measured):
    report = measured.report
    assert report["versions"]["torch"] == torch.__version__
    assert report["versions"]["lightning-thunder"]
    assert report["cpu"] and report["threads"] == 1 and not report["interrupted"]
    assert report["arguments"]["model"] == "benchmarked:net"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d", report["date"])
    run = report["runs"][0]
    assert (run["parameters"], run["buffers"], run["modules"], run["layers"]) == (6, 3, 4, None)


def test_checks_are_counted_by_kind_and_by_what_they_are_of(measured):
    rows = rows_by_variant(measured.report)
    none = rows["none"]
    # The input, six parameters, three buffers.
    assert none["checks"]["tensor"] == 10
    assert none["untransformed"] == none["transformed"]
    groups = none["untransformed"]
    assert list(groups) == ["inputs", "parameters", "buffers", "module attributes", "global state"]
    assert {name: groups[name]["checks"] for name in ("inputs", "parameters", "buffers")} == {
        "inputs": 3,
        "parameters": 6,
        "buffers": 3,
    }
    assert sum(group["checks"] for group in groups.values()) == sum(none["checks"].values())
    assert sum(group["checks"] + group["reads"] for group in groups.values()) == none["symbols"] - 1
    assert "check_tensor_shape_and_metadata(" in groups["parameters"]["example"]
    # cache_info's, and the Python global SCALE.
    assert groups["global state"]["checks"] == 7
    assert rows["extraction-only"]["checks"]["tensor"] == 1
    left = {name: group["checks"] for name, group in rows["extraction-only"]["transformed"].items()}
    assert left == {name: group["checks"] for name, group in groups.items()} | {"parameters": 0, "buffers": 0}


def test_table_and_explanation_on_a_pipe_are_whole(measured):
    assert "\u2026" not in measured.text and "\x1b" not in measured.text
    for row in measured.report["runs"][0]["rows"]:
        assert row["label"] in measured.text
        assert prologue._number(row["hot_us"]["median"]) in measured.text
    assert "6 of 6 checks of parameters, 3 of 3 checks of buffers" in measured.text
    assert prologue.METADATA in measured.text and prologue.MODULE in measured.text


def test_plot_of_one_model(measured):
    width, height = png_size(measured.plot)
    assert width == 1800 and height > 600


@pytest.mark.skipif(not prologue._upstream_file(), reason="there is nothing beneath: no overlay")
def test_upstream_variant_is_lightning_thunders_own():
    (transform,) = prologue.known_variants()["upstream"].transforms()
    assert type(transform) is not ExtractionOnlyPrologueTransform
    assert type(transform).__name__ == ExtractionOnlyPrologueTransform.__name__
    file = type(transform).transform_traces_pre_prologue.__code__.co_filename
    assert Path(file).name == "extraction_only_prologue_transform.py"
    assert not Path(file).samefile(inspect.getfile(ExtractionOnlyPrologueTransform))


def test_litgpt_model_through_the_command_line(folder):
    plot = folder / "one.svg"
    variants = "none,extraction-only,floor"
    ran = run_command(
        folder, "--model", "pythia-14m", "--layers", "1", "--variants", variants, "--plot", str(plot), *QUICK
    )
    assert ran.returncode == 0, ran.stderr
    assert "pythia-14m (of 6 layers), narrow" in ran.stdout
    assert "1 layer: 16 parameters, 2 buffers, 17 modules" in ran.stdout
    assert "ExtractionOnlyPrologueTransform" in ran.stdout
    assert "Compiling:" not in ran.stderr and "Traceback" not in ran.stderr
    assert plot.read_text().lstrip().startswith("<?xml") and "</svg>" in plot.read_text()


def test_sweep_fits_a_slope(folder, capsys):
    json_file, plot = folder / "sweep.json", folder / "sweep.png"
    argv = [
        "--model",
        "pythia-14m",
        "--sweep",
        "2,1",
        "--variants",
        "floor",
        "--json",
        str(json_file),
        "--plot",
        str(plot),
    ]
    assert prologue.main([*argv, *QUICK]) == 0
    report = json.loads(json_file.read_text())
    assert [(run["layers"], run["parameters"]) for run in report["runs"]] == [(1, 16), (2, 28)]
    one, two = (rows_by_variant(report, run)["floor"]["hot_us"]["median"] for run in (0, 1))
    assert report["us_per_parameter"]["floor"]["hot"] == pytest.approx((two - one) / 12, abs=1e-3)
    output = capsys.readouterr().out
    assert "hot, us" in output and "per parameter" in output
    assert png_size(plot) == (2400, 1125)


def test_fitted_line():
    def run(parameters, *medians):
        rows = [prologue.Row(prologue.EAGER, hot=[[us]] if us else []) for us in medians]
        return prologue.Run("", "", parameters, parameters, 0, 0, rows)

    runs = [run(10, 25.0, None), run(20, 45.0, 1.0), run(30, 65.0, None)]
    line = prologue.fitted_line(runs, 0, "hot")
    assert line.slope == pytest.approx(2.0) and line.intercept == pytest.approx(5.0)
    assert prologue.fitted_line(runs, 1, "hot") is None


@pytest.mark.parametrize("end", [[], [None]])
def test_plots_without_a_variant_that_could_be_measured(tmp_path, end):
    rows = [prologue.Row(prologue.EAGER, error="ValueError") for _ in end]
    runs = [prologue.Run("", "", layers, layers, 0, 0, rows) for layers in (1, 2)]
    prologue.plot_sweep(runs, tmp_path / "sweep.png")
    prologue.plot_bars(runs[0], tmp_path / "bars.png")
    assert png_size(tmp_path / "sweep.png") and png_size(tmp_path / "bars.png")


def test_timed_prologue_is_thunders_with_its_cache_info(folder):
    import benchmarked

    model, args, kwargs = benchmarked.net()
    with torch.no_grad():
        timed = prologue.thunder_prologue(prologue.Subject("", model, args, kwargs), [])
        (entry,) = thunder.compile_stats(timed.call).interpreter_cache
        assert timed.fn is entry.prologue_fn and timed.traces is entry.prologue_traces
        with timed.environment():
            inputs, _ = timed.fn(*args)
        assert any(tensor is args[0] for tensor in inputs)
        # Outside of it there is no cache info and no compile data, and with gradients the cache info is another one.
        with pytest.raises((AttributeError, LookupError)):
            timed.fn(*args)
    with torch.enable_grad(), timed.environment(), pytest.raises(RuntimeError):
        timed.fn(*args)


def test_failing_variants_are_rows(folder, capsys):
    json_file = folder / "failing.json"
    variants = "none,benchmarked:Failing,benchmarked:Unchanged+benchmarked:Failing"
    argv = ["--model", "benchmarked:net", "--variants", variants, "--explain", "--json", str(json_file)]
    assert prologue.main([*argv, *QUICK]) == 1
    rows = rows_by_variant(json.loads(json_file.read_text()))
    assert rows["benchmarked:Failing"]["error"] == "ValueError: it fails [here]"
    assert rows["benchmarked:Unchanged+benchmarked:Failing"]["label"] == "Unchanged + Failing"
    assert rows["none"]["error"] is None and rows["none"]["hot_us"]["median"]
    output = capsys.readouterr().out
    assert "ValueError: it fails [here]" in output and "and says why" not in output


def test_newest_prologue_that_accepts_the_arguments_is_timed(folder, monkeypatch):
    import benchmarked

    def rejects(*args):
        raise RuntimeError("another shape")

    fns = [lambda *args: "older", lambda *args: "newer", rejects]
    entries = [SimpleNamespace(prologue_fn=fn, prologue_traces=[]) for fn in fns]
    monkeypatch.setattr(thunder, "compile_stats", lambda model: SimpleNamespace(interpreter_cache=entries))
    subject = prologue.Subject("", *benchmarked.net())
    assert prologue.thunder_prologue(subject, []).fn is fns[1]
    del entries[:2]
    with pytest.raises(LookupError, match="every call compiles"):
        prologue.thunder_prologue(subject, [])


def test_variant_that_fails_while_it_is_timed(folder, capsys, monkeypatch):
    def fail(self, seconds, evict):
        raise RuntimeError("too cold")

    monkeypatch.setattr(prologue.Timed, "cold", fail)
    assert prologue.main(["--model", "benchmarked:net", "--variants", "floor", *QUICK]) == 1
    assert "RuntimeError: too cold" in capsys.readouterr().out


def test_model_without_parameters(folder, capsys):
    assert prologue.main(["--model", "benchmarked:without_parameters", "--variants", "none,floor", *QUICK]) == 0
    assert "0 parameters, 0 buffers, 1 module" in capsys.readouterr().out


def test_checks_that_are_only_marked_as_left_out_are_not_counted(folder):
    import benchmarked

    model, args, kwargs = benchmarked.net()
    transforms = [ExtractionOnlyPrologueTransform(), benchmarked.Unchanged()]
    traces = prologue.thunder_prologue(prologue.Subject("", model, args, kwargs), transforms).traces
    work = prologue.work_by_group(prologue.listed_checks(traces))
    assert work["parameters"].checks == work["buffers"].checks == 0
    assert work["inputs"].checks == 3


def test_checks_of_a_fused_prologue_are_those_before_it_was_fused():
    cmodel = thunder.jit(torch.nn.Linear(4, 2))
    cmodel(torch.randn(3, 4))
    traces = thunder.last_prologue_traces(cmodel)
    fused = SimpleNamespace(bound_symbols=[SimpleNamespace(sym=SimpleNamespace(id="fused"))])
    assert prologue.listed_checks([traces[0], fused, traces[-1]]) is traces[0]


def test_at_stack_depth():
    def depth():
        return len(inspect.stack(0))

    assert prologue.at_stack_depth(7, depth) == prologue.at_stack_depth(0, depth) + 7


@pytest.mark.parametrize("argv", [["--grad"], ["--full-width", "--dtype", "bfloat16"]])
def test_litgpt_options(argv, folder):
    json_file = folder / "options.json"
    arguments = ["--model", "pythia-14m", "--layers", "1", "--variants", "floor", "--json", str(json_file)]
    assert prologue.main([*arguments, *argv, *QUICK]) == 0
    title = json.loads(json_file.read_text())["runs"][0]["title"]
    assert ("requires_grad" if "--grad" in argv else "full width, bfloat16") in title


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA is not available")
def test_cuda():
    variants = "none,extraction-only,floor"
    assert (
        prologue.main(["--model", "pythia-14m", "--layers", "1", "--device", "cuda", "--variants", variants, *QUICK])
        == 0
    )


@pytest.mark.parametrize(
    "name", ["pythia-14m", "Llama-3-8B", "Gemma-2-2b", "Mixtral-8x7B-v0.1", "phi-2", "falcon-7b", "Qwen3-0.6B"]
)
def test_narrow_model_has_the_same_parameters_and_modules(name):
    from litgpt.config import Config
    from litgpt.model import GPT

    full = Config.from_name(name, n_layer=2)
    narrow = GPT(Config.from_name(name, n_layer=2, **prologue.narrow_width(full)))
    with torch.device("meta"):
        wide = GPT(full)
    assert list(dict(narrow.named_parameters())) == list(dict(wide.named_parameters()))
    assert list(dict(narrow.named_modules())) == list(dict(wide.named_modules()))
    assert sum(p.numel() for p in narrow.parameters()) < 1_000_000
    narrow(torch.randint(128, (2, 5)))


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--model", "Llama3-8b"], "no configuration 'Llama3-8b'; did you mean Llama-3-8B"),
        (["--model", "Gemma-2-2b", "--layers", "99"], "--model Gemma-2-2b has 26 layers, not 99"),
        (["--model", "no_such_module:net"], "cannot import 'no_such_module'"),
        (["--model", "not_importable:net"], "cannot import 'not_importable': ZeroDivisionError"),
        (["--model", "benchmarked:nett"], "benchmarked has no callable 'nett'; did you mean net"),
        (["--model", "benchmarked:not_callable"], "has no callable 'not_callable'"),
        (["--model", "benchmarked:returns_too_little"], "must return (model, args, kwargs)"),
        (["--model", "benchmarked:returns_something_else"], "not str, tuple, dict"),
        (["--model", "benchmarked:raises"], "failed when it was called: OSError: no weights"),
        (["--model", "benchmarked:does_not_run"], "fails without Thunder already: RuntimeError"),
        (["--model", "benchmarked:net", "--layers", "2"], "--layers is for LitGPT's configurations"),
        (["--model", "benchmarked:net", "--full-width"], "--full-width is for LitGPT's configurations"),
        (["--variants", "nonne"], "--variants has no 'nonne'; did you mean none"),
        (["--variants", "none,"], "--variants has no ''"),
        (["--variants", "no_such_module:X"], "cannot import 'no_such_module'"),
        (["--variants", "benchmarked:Failin"], "no callable 'Failin'; did you mean Failing"),
        (["--variants", "benchmarked:Net"], "benchmarked:Net is not a subclass of"),
        (["--variants", "benchmarked:Failing+prune"], "--variants has no 'benchmarked:Failing+prune'"),
        (["--layers", "0"], "--layers: must be a whole number, 1 or more, is '0'"),
        (["--layers", "2", "--sweep", "1,2"], "not allowed with"),
        (["--sweep", "3"], "must be two or more numbers of layers"),
        (["--sweep", "1,x"], "must be a whole number, 1 or more, is 'x'"),
        (["--threads", "two"], "must be a whole number"),
        (["--min-run-time", "0"], "must be a number of seconds above 0"),
        (["--min-run-time", "inf"], "must be a number of seconds above 0"),
        (["--min-run-time", "long"], "must be a number of seconds above 0"),
        (["--dtype", "int8"], "--dtype: invalid choice"),
        (["--device", "tpu"], "--device: invalid choice"),
        (["--json", "no_such_folder/x.json"], "--json: there is no folder 'no_such_folder'"),
        (["--json", os.curdir], "--json: cannot write to"),
        (["--plot", "no_such_folder/x.png"], "--plot: there is no folder 'no_such_folder'"),
        (["--plot", "x.pdf"], "--plot: must end in .png or .svg, is 'x.pdf'"),
        (["--no-such-option"], "unrecognized arguments: --no-such-option"),
    ],
)
def test_wrong_arguments(argv, message, folder, capsys, monkeypatch):
    monkeypatch.setattr(prologue, "measure", None)
    assert message in error_of(capsys, argv)


def test_cuda_without_cuda(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch finds no CUDA device" in error_of(capsys, ["--device", "cuda"])


def test_full_width_that_does_not_fit_is_not_built(capsys, monkeypatch):
    monkeypatch.setattr(prologue, "_free_memory", lambda device: 10e9)
    message = error_of(capsys, ["--full-width", "--layers", "32"])
    assert "not likely to fit" in message and "32.1 GB, 10.0 GB are free" in message


@pytest.mark.parametrize(
    "modules, argv",
    [(["litgpt", "litgpt.config"], []), (["rich"], []), (["matplotlib"], ["--plot", "x.png"])],
    ids=["litgpt", "rich", "matplotlib"],
)
def test_missing_extra(modules, argv, capsys, monkeypatch):
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    message = error_of(capsys, argv)
    assert modules[0] in message.lower() and "pip install 'thunder-prologue[demo]'" in message


def test_help_needs_no_extra(capsys, monkeypatch):
    for module in ("litgpt", "rich", "matplotlib"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit) as stopped:
        prologue.main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert all(variant in text for variant in prologue.known_variants())


def test_transform_of_another_tree_stops_it(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(prologue, "__file__", str(tmp_path / "benchmarks" / "prologue.py"))
    message = error_of(capsys, [])
    assert "`pip install thunder-prologue`" in message and "`python -m thunder_overlay`" in message


@pytest.mark.skipif(not prologue._upstream_file(), reason="there is nothing to switch off: no overlay")
def test_overlay_that_is_switched_off_stops_it(tmp_path):
    env = os.environ | {"THUNDER_OVERLAY": "0"}
    ran = subprocess.run([sys.executable, prologue.__file__], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ran.returncode == 2
    assert "the overlay is not active" in ran.stderr.splitlines()[-1] and "Traceback" not in ran.stderr


def test_interrupt_while_timing_keeps_the_rows_so_far(folder, capsys, monkeypatch):
    loop_us, calls = prologue.loop_us, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return loop_us(*args)

    monkeypatch.setattr(prologue, "loop_us", interrupted)
    json_file, plot = folder / "interrupted.json", folder / "interrupted.png"
    argv = ["--model", "benchmarked:net", "--variants", "none,floor", "--json", str(json_file), "--plot", str(plot)]
    assert prologue.main([*argv, *QUICK]) == 130
    output = capsys.readouterr()
    assert output.err.startswith("interrupted") and "no transform" in output.out
    report = json.loads(json_file.read_text())
    assert report["interrupted"] and not plot.exists()
    assert len(rows_by_variant(report)["none"]["hot_us"]["samples"]) == 1
    assert torch.is_grad_enabled()


def test_interrupt_that_thunder_wraps(folder, capsys):
    argv = ["--model", "benchmarked:net", "--variants", "floor,benchmarked:Interrupted,none"]
    assert prologue.main([*argv, *QUICK]) == 130
    assert "floor" in capsys.readouterr().out


def test_interrupt_before_anything_is_measured(folder, capsys, monkeypatch):
    def interrupted(spec):
        raise KeyboardInterrupt

    monkeypatch.setattr(prologue, "own_subject", interrupted)
    assert prologue.main(["--model", "benchmarked:net", *QUICK]) == 130
    assert capsys.readouterr().err == "interrupted; measured until then: nothing\n"


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT cannot be sent to one process there")
def test_ctrl_c(folder):
    command = [sys.executable, "-u", "-m", "thunder.benchmarks.prologue", "--model", "benchmarked:net"]
    with subprocess.Popen(
        [*command, "--variants", "none", "--min-run-time", "100"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell has its background jobs ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        for line in process.stdout:
            if "6 parameters" in line:
                break
        process.send_signal(signal.SIGINT)
        try:
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "interrupted" in errors and "Traceback" not in errors


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_narrow_terminal_cuts_nothing_off(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    row = prologue.Row(prologue.known_variants()["torch.compile"], 1234567, {"tensor": 7654321})
    row.hot, row.cold, row.call = [[11111.0]], [[22222.0]], [[33333.0]]
    with redirect_stdout(Terminal()) as output:
        prologue.print_costs(prologue.Run("", "", None, 0, 0, 0, [row]))
    text = output.getvalue()
    assert "\u2026" not in text
    for cell in (row.variant.label, "1234567", "7654321", "11111", "22222", "33333"):
        assert cell in text
    assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in text.splitlines()) <= 80


def test_progress_is_shown_on_a_terminal_only(folder, monkeypatch, capsys):
    argv = ["--model", "benchmarked:net", "--variants", "none,floor", *QUICK]
    assert prologue.main(argv) == 0
    assert capsys.readouterr().err == ""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert prologue.main(argv) == 0
    assert "Compiling: no transform (about" in terminal.getvalue()
    assert "Timing, round 5 of 5: floor" in terminal.getvalue()


def test_calls(capsys, tmp_path):
    file = tmp_path / "calls.json"
    variants = "none,fast-dispatch,torch.compile"
    assert prologue.main(["--calls", "--layers", "1", "--variants", variants, "--json", str(file), *QUICK]) == 0
    output = capsys.readouterr().out
    small, decode = output.split("RMSNorm over 64 values")[1].split("a decode step: KV cache, one token")
    for table in (small, decode):
        for label in (
            "no transform",
            "FastDispatchTransform",
            "another system: torch.compile",
            "eager, without Thunder",
        ):
            assert table.count(label) == 1
    assert "a second" in decode and "a second" not in small
    runs = json.loads(file.read_text())["runs"]
    assert [run["tokens"] for run in runs] == [None, 1]
    for run in runs:
        assert [row["variant"] for row in run["rows"]] == ["none", "fast-dispatch", "torch.compile", "eager"]
        for row in run["rows"]:
            assert row["hot_us"]["median"] > 0 and row["cold_us"]["median"] > 0


def test_calls_of_an_own_model(capsys, folder):
    variants = "none,benchmarked:Failing,fast-dispatch"
    assert prologue.main(["--calls", "--grad", "--model", "benchmarked:net", "--variants", variants, *QUICK]) == 1
    table = capsys.readouterr().out.split("benchmarked:net")[1]
    assert "ValueError: it fails [here]" in table and "a second" not in table


def test_the_decode_step_decodes():
    options = SimpleNamespace(device="cpu", dtype="float32", full_width=False, grad=False)
    (config,) = prologue.litgpt_configs("Llama-3-8B", [1], False)
    subject = prologue.decode_subject(config, options)
    logits = subject.model(*subject.args)
    assert logits.shape == (1, 1, config.padded_vocab_size)
    (keys,) = [block.attn.kv_cache.k for block in subject.model.transformer.h]
    assert keys[:, :, 5].any() and not keys[:, :, 6:].any()


@pytest.mark.parametrize(
    "arguments, message",
    (
        (["--plot", "x.png"], "--plot shows prologues, --calls whole calls"),
        (["--sweep", "1,2"], "--sweep shows prologues"),
        (["--explain"], "--explain shows prologues"),
        (["--variants", "none,floor"], "--calls cannot time 'floor'"),
    ),
)
def test_what_calls_cannot_show(capsys, arguments, message):
    assert message in error_of(capsys, ["--calls", *arguments])
