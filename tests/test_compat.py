"""The script that tests other versions reports what happened, and what could not happen."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "compat.py"
HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"

REPORT = """\
<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_passes"/>
<testcase classname="tests.test_a" name="test_passes_too"/>
<testcase classname="tests.test_a" name="test_fails"><failure>assert 1 == 2</failure></testcase>
<testcase classname="tests.test_b" name="test_setup"><error>no fixture</error></testcase>
<testcase classname="tests.test_b" name="test_skipped"><skipped>needs a GPU</skipped></testcase>
</testsuite></testsuites>
"""


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[SCRIPT.stem] = module  # dataclasses look it up
    yield spec.loader.exec_module(module) or module
    del sys.modules[SCRIPT.stem]


def test_counts_of_a_report(script, tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    counts, failed = script.read_report(tmp_path / "report.xml")
    assert counts == {"passed": 2, "failed": 2, "skipped": 1}
    assert failed == ["tests.test_a::test_fails", "tests.test_b::test_setup"]


def test_table(script):
    versions = {"Python": "3.13.0", "torch": "2.12.1", "lightning-thunder": "0.2.6"}
    counts = {"passed": 7, "failed": 0, "skipped": 1}
    ran = script.Result(script.PAIRS[0], versions, counts, seconds=12.3, note="tensors: words of TensorImpl")
    failed = script.Result(script.Pair("3.10", "2.7.1", "0.2.6"), note="cannot be installed: no such version")
    assert ran.passed and not failed.passed
    assert not script.Result(script.PAIRS[0], versions, counts | {"failed": 1}).passed
    assert not script.Result(script.PAIRS[0], versions, counts | {"passed": 0}).passed
    lines = script.to_markdown([ran, failed], ["-k", "not guard"]).splitlines()
    assert lines[0].startswith("`pytest -k 'not guard'`, 2")
    assert lines[-2] == "| 3.13.0 | 2.12.1 | 0.2.6 | 7 | 0 | 1 | tensors: words of TensorImpl |"
    assert lines[-1] == "| 3.10 | 2.7.1 | 0.2.6 |  |  |  | cannot be installed: no such version |"
    assert len({line.count("|") for line in lines[2:]}) == 1


def test_requirements(script):
    assert script.Pair("3.10", "2.12.*", "0.2.6").requirements == ["torch==2.12.*", "lightning-thunder==0.2.6"]
    assert script.Pair("3.10", "2.10.*", "0.2.7.dev").requirements[1] == "lightning-thunder>=0.2.7.dev0"


def test_an_interpreter_is_what_it_says(script, tmp_path):
    assert script.find_python(HERE, {}) == sys.executable
    with pytest.raises(script.Failed, match=r"is not Python 2\.0"):
        script.find_python("2.0", {"2.0": sys.executable})
    with pytest.raises(script.Failed, match=r"nothing is not Python 2\.0"):
        script.find_python("2.0", {"2.0": str(tmp_path / "nothing")})


def test_what_cannot_be_tested_is_a_row(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(script.tempfile, "tempdir", None)
    pairs = ["--pair", "2.0,1,1", "--pair", f"{HERE},0.0.1,0.0.2"]
    assert script.main([*pairs, "--markdown", "-o", str(tmp_path / "logs")]) == 1
    *_, no_python, not_installed = capsys.readouterr().out.splitlines()
    assert no_python == "| 2.0 | 1 | 1 |  |  |  | no Python 2.0 found; name one with --python 2.0=PATH |"
    assert f"| {HERE} | 0.0.1 | 0.0.2 |" in not_installed and "cannot be installed: " in not_installed
    assert [path.name for path in tmp_path.iterdir()] == ["logs"], "the environment was not removed"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pair", "3.10,2.7.1"], "expected PYTHON,TORCH,LIGHTNING-THUNDER like 3.10,2.7.1,0.2.6, got '3.10,2.7.1'"),
        (["--python", "3.10"], "expected VERSION=PATH"),
        (["--only", "9.9"], "no pair has 9.9 in it; the pairs are 3.10,"),
        (["--all", "--", "-x"], "--all and arguments for pytest exclude each other"),
    ],
)
def test_bad_arguments(script, capsys, arguments, message):
    with pytest.raises(SystemExit):
        script.main(arguments)
    assert message in capsys.readouterr().err


def test_every_file_of_the_quick_part_is_there(script):
    assert all((script.PROJECT / file).is_file() for file in script.QUICK)
