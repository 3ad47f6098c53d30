"""The patches that ``scripts/upstream_patch.py`` writes apply to lightning-thunder, and are complete without the overlay."""

import ast
import doctest
import importlib.util
import sys
from pathlib import Path

import pytest

import thunder_overlay

PROJECT = Path(__file__).resolve().parent.parent
SCRIPT = PROJECT / "scripts" / "upstream_patch.py"

TRANSFORMS_INIT = """\
from .first import First
from .second import Second

__all__ = [
    "First",
    "Second",
]
"""
PLUGINS_INIT = """\
from thunder.plugins.first import First, Other
import os

names = {}
names_to_plugins = {
    "first": First,
}
"""
PAGE = """\
thunder.transforms
==================

.. autosummary::
    :toctree: generated/

    First

What follows.
"""


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[SCRIPT.stem] = module  # dataclasses look it up
    yield spec.loader.exec_module(module) or module
    del sys.modules[SCRIPT.stem]


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "A. Author")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "author@example.com")


@pytest.fixture
def tree(tmp_path):
    """A source tree that has of Thunder only what the series changes, and documentation."""
    files = {
        "thunder/__init__.py": "",
        "thunder/transforms/__init__.py": TRANSFORMS_INIT,
        "thunder/plugins/__init__.py": PLUGINS_INIT,
        "docs/source/reference/transforms/index.rst": PAGE,
        "docs/source/reference/plugins/index.rst": PAGE,
    }
    for name, text in files.items():
        file = tmp_path / "tree" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "tree"


def test_new_tests_pass_in_a_patched_copy_without_the_overlay(script, tmp_path, capfd):
    # A quick part of them; `scripts/upstream_patch.py --test` runs all.
    chosen = [
        "thunder/tests/test_extraction_only_prologue_transform.py::test_docstring_example",
        "thunder/tests/test_fused_prologue_transform.py::test_docstring_example",
        "thunder/tests/test_fused_prologue_transform.py::test_prints_short",
        "thunder/tests/test_guard_blocks.py::test_docstring_examples",
        "thunder/tests/test_fast_prologue_plugin.py::test_is_registered",
        "thunder/tests/test_fast_prologue_plugin.py::test_hits_take_the_fast_path",
    ]
    assert script.main(["-o", str(tmp_path / "patches"), "--test", "-q", *chosen]) == 0, capfd.readouterr()
    assert " passed" in capfd.readouterr().out.splitlines()[-1]


def test_patches_hold_the_project_and_what_it_registers(script, tree, tmp_path):
    patches = script.write_series(tree, tmp_path / "patches")
    copy = tmp_path / "copy"
    script.apply(patches, tree, copy)
    changed = set(script.git(copy, "diff", "--name-only", "HEAD~" + str(len(patches))).split())
    packages = [package.replace(".", "/") for package in thunder_overlay.REGISTERED]
    pages = [page for package, (_, page) in script.LISTS.items() if package in thunder_overlay.REGISTERED]
    assert changed == {*script.project_files(), *(f"{package}/__init__.py" for package in packages), *pages}
    for file in script.project_files():
        assert (copy / file).read_bytes() == (PROJECT / file).read_bytes()
    for package, registered in thunder_overlay.REGISTERED.items():
        init = (copy / package.replace(".", "/") / "__init__.py").read_text()
        page = (copy / script.LISTS[package][1]).read_text()
        for module, name in registered:
            assert f"{module} import {name}\n" in init
            assert f"    {name}\n" in page
    authors = script.git(copy, "log", "--format=%an <%ae>", f"-{len(patches)}").splitlines()
    assert set(authors) == {"A. Author <author@example.com>"}


def test_each_patch_registers_only_what_is_there_by_then(script, tree, tmp_path):
    patches = script.write_series(tree, tmp_path / "patches")
    for n in range(1, len(patches) + 1):
        copy = tmp_path / str(n)
        script.apply(patches[:n], tree, copy)
        for package, registered in thunder_overlay.REGISTERED.items():
            folder = copy / package.replace(".", "/")
            init = (folder / "__init__.py").read_text()
            for module, name in registered:
                assert (f"import {name}\n" in init) is (folder / f"{module}.py").is_file()


def test_each_patch_imports_only_what_is_there_by_then(script):
    modules = {file.removesuffix(".py").replace("/", "."): file for file in script.project_files()}
    for package, registered in thunder_overlay.REGISTERED.items():
        modules |= {f"{package}.{name}": modules[f"{package}.{module}"] for module, name in registered}
    present = set()
    for _, files in script.split(script.project_files()):
        present.update(files)
        for file in files:
            for node in ast.walk(ast.parse((PROJECT / file).read_text())):
                imported = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
                if isinstance(node, ast.ImportFrom):
                    imported = [node.module, *(f"{node.module}.{name}" for name in imported)]
                missing = {modules[name] for name in imported if name in modules} - present
                assert not missing, f"{file} imports what is in a later patch of the series: {missing}"


def test_names_are_registered_as_the_file_has_it(script, monkeypatch):
    monkeypatch.setattr(thunder_overlay, "PLUGIN_NAMES", {"Third": "third"}, raising=False)
    registered = [("third", "Third")]
    assert script.register(TRANSFORMS_INIT, "thunder.transforms", registered, "") == TRANSFORMS_INIT.replace(
        "import Second\n", "import Second\nfrom .third import Third\n"
    ).replace('    "Second",\n', '    "Second",\n    "Third",\n')
    assert script.register(PLUGINS_INIT, "thunder.plugins", registered, "") == PLUGINS_INIT.replace(
        "Other\n", "Other\nfrom thunder.plugins.third import Third\n"
    ).replace('"first": First,\n', '"first": First,\n    "third": Third,\n')


def test_docstring_example(script):
    assert doctest.testmod(script).attempted > 0
    assert doctest.testmod(script).failed == 0


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("__all__ = []\n", "has no `from .MODULE import NAME`"),
        (TRANSFORMS_INIT.replace("__all__", "_all"), "expected one list or dict __all__"),
        (TRANSFORMS_INIT.replace('"Second",', '"Second"'), "a comma on each line"),
        ('from .first import First\n__all__ = ["First"]\n', "a comma on each line"),
        ("from .first import First\n__all__ = []\n", "expected one list or dict __all__"),
        (TRANSFORMS_INIT + "from .third import Third\n", "imports Third already: is the series applied"),
    ],
)
def test_init_of_another_shape(script, source, message):
    with pytest.raises(script.PatchError, match="^init.py.*" + message):
        script.register(source, "thunder.transforms", [("third", "Third")], "init.py")


def test_documentation_lists_the_names(script):
    assert script.list_in_docs(PAGE, ["A", "B"], "") == PAGE.replace("    First\n", "    First\n    A\n    B\n")
    for page in (PAGE.replace("autosummary", "toctree"), PAGE.replace("    First\n", ""), PAGE + PAGE):
        with pytest.raises(script.PatchError, match=r"index\.rst: expected one"):
            script.list_in_docs(page, ["A"], "index.rst")


def test_a_file_that_has_no_place_in_the_series(script):
    with pytest.raises(script.PatchError, match=r"thunder/new/module\.py is in no patch of the series"):
        script.split(["thunder/core/guard_blocks.py", "thunder/new/module.py"])


def test_a_tree_that_is_not_thunder(script, tmp_path, capsys):
    assert script.main([str(tmp_path), "-o", str(tmp_path / "patches")]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path} is not a lightning-thunder source tree" in error
    assert "no thunder/__init__.py and no thunder/transforms/__init__.py" in error
    assert not (tmp_path / "patches").exists()


def test_a_patched_tree_is_not_patched_again(script, tree, tmp_path):
    script.apply(script.write_series(tree, tmp_path / "patches"), tree, tmp_path / "copy")
    with pytest.raises(script.PatchError, match=r"\.py as it is here: is the series applied"):
        script.write_series(tmp_path / "copy", tmp_path / "again")


def test_patches_of_another_run_are_not_mixed_in(script, tree, tmp_path):
    script.write_series(tree, tmp_path / "patches")
    with pytest.raises(script.PatchError, match=r"holds patches already \(0001-"):
        script.write_series(tree, tmp_path / "patches")


def test_what_is_tested_is_the_patched_tree(script, monkeypatch, tmp_path, capfd):
    # The tree is empty, and Python finds the installed Thunder's module.
    file = "thunder/transforms/extraction_only_prologue_transform.py"
    monkeypatch.setattr(script, "project_files", lambda: [file])
    assert script.run_tests(tmp_path, []) == 1
    assert f"not from {tmp_path / file}" in capfd.readouterr().err
