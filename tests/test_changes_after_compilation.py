"""The README's table of what becomes of changes after compilation is what ``scripts/changes_after_compilation.py`` finds."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "changes_after_compilation.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[SCRIPT.stem] = module  # dataclasses look it up
    yield spec.loader.exec_module(module) or module
    del sys.modules[SCRIPT.stem]


@pytest.fixture
def readme_table(script):
    return script.from_markdown(script.split_readme()[1])


# By name, so that the tests of all transforms can run at the same time.
TRANSFORMS = (
    "no transform",
    "Fused",
    "FastDispatch",
    "ExtractionOnly",
    "ExtractionOnly + Fused",
    "Prune",
    "Prune + Fused",
)


def test_every_transform_is_tested(script):
    assert tuple(script.TRANSFORMS) == TRANSFORMS


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_readme_says_what_happens(script, readme_table, transform):
    # Every third change, other ones with each transform: a change costs Thunder up to a second. `--check` tries all.
    changes = script.CHANGES[TRANSFORMS.index(transform) % 3 :: 3]
    found = {change.description: script.outcome(change, script.TRANSFORMS[transform]) for change in changes}
    written = {change.description: readme_table[change.section, change.description][transform] for change in changes}
    assert found == written, f"run `python {SCRIPT.parent.name}/{SCRIPT.name} --update`"


def test_readme_has_the_table_as_the_script_writes_it(script, readme_table):
    assert script.to_markdown(readme_table).strip() == script.split_readme()[1]


def test_wrong_gradients_are_not_taken_for_right_ones(script):
    output, gradient = torch.ones(2), torch.ones(2)
    answer = script.Answer(output, {"weight": gradient})
    assert script.agree(answer, script.Answer(output, {"weight": gradient.clone()}))
    assert not script.agree(answer, script.Answer(output, {"weight": gradient * 2}))
    assert not script.agree(answer, script.Answer(output, {"weight": gradient.double()}))
    assert not script.agree(answer, script.Answer(output, {}))
    assert not script.agree(answer, script.Answer(output.double(), {"weight": gradient}))
    assert not script.agree(answer, script.Answer(output.clone().requires_grad_(), {"weight": gradient}))


def test_a_description_that_would_break_the_table_is_refused(script):
    with pytest.raises(ValueError, match="'a; b'"):
        script.change("section", "a; b", torch.nn.ReLU)


def test_a_table_is_read_as_it_was_written(script):
    outcomes = (script.RECOMPILES, script.USED, script.KEEPS_THE_OLD, script.ERROR)
    table = {
        (change.section, change.description): {name: outcomes[(i * j) % 4] for j, name in enumerate(script.TRANSFORMS)}
        for i, change in enumerate(script.CHANGES)
    }
    assert script.from_markdown(script.to_markdown(table)) == table


def test_only_needs_a_description_that_exists(script, capsys):
    with pytest.raises(SystemExit):
        script.main(["--only", "no such change"])
    assert "no change's description has 'no such change'" in capsys.readouterr().err
