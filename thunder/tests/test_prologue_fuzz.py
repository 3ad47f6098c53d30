import importlib.util
import io

import pytest
import torch
from rich.console import Console

from thunder.core import guard_blocks
from thunder.tests import prologue_fuzz
from thunder.tests.prologue_fuzz import (
    FEATURES,
    VARIANTS,
    Assign,
    ChangeTensor,
    Coverage,
    Delete,
    Divergence,
    Inputs,
    Node,
    Session,
    Tree,
    Undo,
    make_trees,
    program_of,
    save,
    search,
)
from thunder.tests.prologue_mutants import MUTANTS, mutated

private = pytest.mark.skipif(
    not guard_blocks.available_blocks().instance_versions, reason="dict versions are not to be trusted here"
)


@pytest.mark.parametrize("variant", ["fused", "fused, portable"])
def test_a_short_search_finds_no_difference(variant):
    coverage = Coverage()
    failure = search(variant, 0, steps=300, trees=3, calls=0, shrink=False, coverage=coverage)
    assert failure is None, prologue_fuzz.as_test(failure)
    assert coverage.made >= 300
    assert {"accepted on the fast path", "accepted after a full check"} <= coverage.verdicts.keys()
    assert any(verdict.startswith("refused") for verdict in coverage.verdicts)


def test_models_have_every_feature():
    def features(node):
        return {*node.features}.union(*map(features, node.children))

    assert set().union(*(features(tree.root) for tree in make_trees(3, 2))) == FEATURES.keys()
    assert make_trees(3, 2) == make_trees(3, 2) != make_trees(4, 2)


TREE = Tree(Node(("number", "weight"), (Node(("items", "buffer")),), "list"))


def test_steps_and_what_undoes_them():
    session = Session("fused", program_of(TREE))
    steps = [
        (Assign("model.number", "float(str(old))"), True),
        (Assign("model.number", "7.0"), False),
        (Delete("model.children_[0].items[0]"), False),
        (Delete("model.children_[0].items[0]"), False),
        (Assign("model.children_[0].training", "not old"), False),
        (Assign("cm._overrides_parameters['weight']", "Parameter(old.detach().double())"), False),
        (ChangeTensor("children_.0.buffer", "t.data = t.data.t()"), True),
        (ChangeTensor("children_.0.buffer", "t.requires_grad_(True)"), False),
        (Assign("type(model).__bases__", "(OtherBase,)"), True),
    ]
    for step, accepted in steps:
        assert session.step(step) and session.is_accepted is accepted, step
        assert session.step(Undo()) and session.is_accepted, step
    for step, _ in steps:
        session.step(step)
    assert session.step(Inputs("(torch.ones(5, 4),)")) and not session.is_accepted
    assert not session.step(Delete("model.nowhere"))
    session.close()
    session = Session("fused", program_of(TREE))
    assert session.is_accepted and session.coverage.compiled == 0
    session.close()


@private
def test_a_failure_is_saved_as_a_test(tmp_path, monkeypatch):
    monkeypatch.setattr(prologue_fuzz, "make_trees", lambda seed, count: [TREE])
    mutant = MUTANTS["attributes"]
    with mutated(mutant):
        failure = search(mutant.variant, 0, steps=2000, trees=1, calls=0)
        file = save(failure, tmp_path)
        assert len(failure.steps) <= 3
        spec = importlib.util.spec_from_file_location("saved", file)
        saved = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(saved)
        with pytest.raises(Divergence):
            saved.test_failure()
    saved.test_failure()


@private
def test_a_mutant_whose_text_is_gone_is_an_error():
    mutant = MUTANTS["dtype"]
    with pytest.raises(ValueError, match="_tensor_words_guard has 'nowhere' 0 times"):
        with mutated(mutant.__class__("", mutant.module, mutant.function, "nowhere", "")):
            pass


# `make fuzz` runs them all.
SOME_MUTANTS = (
    "shape", "requires_grad", "a buffer", "class dicts",
    "identity of the parameters' dict", "absent attributes", "takes a state without checking", "yes on an exception",
    "order",
)  # fmt: skip


@private
@pytest.mark.parametrize("name", SOME_MUTANTS)
def test_a_mutant_is_noticed(name):
    with mutated(MUTANTS[name]):
        failure = search(MUTANTS[name].variant, 0, steps=10_000, trees=3, calls=0, shrink=False)
    assert failure is not None and failure.is_unsound


def test_all_mutants_apply():
    for mutant in MUTANTS.values():
        assert mutant.variant in VARIANTS
        with mutated(mutant):
            pass


def test_coverage_is_printed():
    coverage, file = Coverage(), io.StringIO()
    session = Session("fused", program_of(TREE), coverage)
    session.step(Assign("model.number", "7.0"))
    session.close()
    prologue_fuzz.print_coverage(coverage, Console(file=file, width=100))
    assert "Assign attribute" in file.getvalue() and "refused: RuntimeError" in file.getvalue()


#
# What Thunder's own prologue does not see. FusedPrologueTransform accepts exactly the same.
#

KNOWN_FAULTS = {
    "None gets a value": ("nothing", "model.nothing", "1.0"),
    "another dtype in an attribute": ("dtype", "model.dtype", "torch.float64"),
    "another list length": ("items", "model.items", "[*old, 3.0]"),
    "another buffer in place of None": ("no_buffer", "model.no_buffer", "torch.ones(4)"),
}


@pytest.mark.parametrize("name", KNOWN_FAULTS)
@pytest.mark.xfail(
    strict=True, reason="Thunder's prologue does not check it, and the call keeps the old value silently"
)
def test_known_faults_of_thunder(name):
    import thunder

    feature, place, value = KNOWN_FAULTS[name]
    session = Session("fused", program_of(Tree(Node((feature,)))))
    model = session.names["model"]
    cm, x = thunder.jit(model), torch.ones(3, 4)
    torch.testing.assert_close(cm(x), model(x))
    session.step(Assign(place, value))
    try:
        torch.testing.assert_close(cm(x), model(x))
    finally:
        session.close()
