"""The script that runs Thunder's tests with transforms injected notices what it has to."""

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import thunder_tests

    yield thunder_tests
    for name in ("thunder_tests", "injected_transforms"):
        sys.modules.pop(name)


TESTS = """
import os
import pytest

def transforms():
    import thunder, torch
    cfn = thunder.jit(lambda x: x + 1)
    cfn(torch.ones(1))
    return [type(transform).__name__ for transform in thunder.compile_data(cfn).transforms]

def test_differs():
    assert transforms() == []

def test_fails_differently():
    raise {True: KeyError, False: ValueError}[transforms() == []]("a")

def test_passes():
    transforms()

def test_fails_always():
    assert False

@pytest.mark.skip
def test_skipped():
    pass

@pytest.mark.xfail
def test_expected_failure():
    assert False

@pytest.mark.parametrize("i", range(5))
def test_parameter(i):
    pass

@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="kills the process")
def test_dies():
    os._exit(1)
"""


@pytest.fixture
def run(script, tmp_path):
    """Runs TESTS, in a folder like that of Thunder's tests."""
    (tmp_path / "test_part.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text("def pytest_addoption(parser):\n    parser.addoption('--gpu-mem-limit')\n")

    def run(spec, *tests, options=()):
        outcomes = script.Runner(tmp_path, tmp_path, options).run("outcomes", spec, ["test_part.py", *tests])
        return {name.partition("::")[2]: outcome for name, outcome in outcomes.items()}

    return run


def test_outcomes_with_and_without_a_transform(script, run):
    plain = run("")
    injected = run("thunder.transforms:PrunePrologueChecks")
    assert {name: str(outcome) for name, outcome in plain.items()} == {
        "test_differs": "passed",
        "test_fails_differently": "failed, KeyError",
        "test_passes": "passed",
        "test_fails_always": "failed, AssertionError",
        "test_skipped": "skipped",
        "test_dies": "skipped",
        "test_expected_failure": "xfailed",
        **{f"test_parameter[{i}]": "passed" for i in range(5)},
    }
    assert script.differing(plain, injected) == ["test_differs", "test_fails_differently"]
    assert str(injected["test_differs"]) == "failed, AssertionError"
    assert str(injected["test_fails_differently"]) == "failed, ValueError"


def test_every_nth_test_and_a_worker_that_dies(run):
    outcomes = run("", "-k", "parameter or dies", "--every=test_part.py=2", options=["-n", "2"])
    assert {name: outcome.outcome for name, outcome in outcomes.items()} == {
        "test_dies": "failed",
        **{f"test_parameter[{i}]": "passed" for i in (1, 3)},
    }
    assert "crashed" in outcomes["test_dies"].reason


def test_a_file_that_cannot_be_imported_is_an_outcome(run, tmp_path):
    (tmp_path / "test_part.py").write_text("import no_such_module")
    (outcome,) = run("").values()
    assert outcome.outcome == "not collected"
    assert "no_such_module" in outcome.reason


def test_a_failure_of_pytest_itself_is_an_error(run):
    with pytest.raises(RuntimeError, match="there is no 'no_such_module:A'"):
        run("no_such_module:A")


def test_what_does_not_count(script):
    passed, failed = script.Outcome("passed"), script.Outcome("failed", "KeyError: 1")
    plain = dict.fromkeys(["same", "flaky", "text", "text[0]", "new"], passed)
    injected = {**dict.fromkeys(plain, failed), "same": passed}
    again = {"flaky": failed, "new": passed}, {"flaky": failed, "new": failed}
    differences = script.explain(plain, injected, again, {"text": "reads the text"})
    assert {difference.name: difference.explanation for difference in differences} == {
        "flaky": "flaky: the same in a second run",
        "text": "reads the text",
        "text[0]": "reads the text",
        "new": None,
    }


def test_a_test_that_did_not_run_differs(script):
    passed = script.Outcome("passed")
    assert script.differing({"a": passed}, {}) == script.differing({}, {"a": passed}) == ["a"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["test_nothing.py"], "lightning-thunder has no test_nothing.py"),
        (["-n", "0"], "-n must be at least 1, is 0"),
        (["--every", "test_core.py"], "FILE=N with an N of at least 1, got 'test_core.py'"),
        (["--every", "test_core.py=0"], "FILE=N with an N of at least 1, got 'test_core.py=0'"),
        (["--inject", "FusedPrologueTransform"], "transforms are given as MODULE:CLASS"),
        (["--inject", "no_such_module:A"], "there is no 'no_such_module:A'"),
    ],
)
def test_bad_arguments(script, capsys, arguments, message):
    with pytest.raises(SystemExit):
        script.main(arguments)
    assert message in capsys.readouterr().err
