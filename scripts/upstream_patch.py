"""Writes this project as a series of patches against a lightning-thunder source tree, for ``git am``::

    python scripts/upstream_patch.py                              # against the installed lightning-thunder
    python scripts/upstream_patch.py ../lightning-thunder         # a checkout, or an unpacked sdist
    python scripts/upstream_patch.py --test                       # also applies it to a copy and runs the new tests there
    python scripts/upstream_patch.py --test -n 2 -k tensor        # some of them, with options of pytest

The files of ``thunder/`` go to the paths that they have here. Thunder's ``__init__.py`` files, and the lists of its
documentation if the tree has it, get one line for each name that the overlay registers. Nothing of the overlay is in it.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path

import thunder_overlay

PROJECT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Step:
    """One patch: its message, and the patterns of the files of ``thunder/`` that it adds or replaces."""

    subject: str
    body: str
    patterns: tuple[str, ...]


# A file belongs to the first step that has a pattern for it.
SERIES = (
    Step(
        "Let ExtractionOnlyPrologueTransform keep chosen checks, in any order with other transforms",
        "keep= names parameters and buffers whose checks stay. The checks are left out after all other transforms have\n"
        "edited the prologue, so that it may also stand before LORATransform and the quantizations. The signature and\n"
        "the defaults are as they were. thunder/core/prologue_explanations.py words what differs where a check fails.",
        (
            "thunder/core/prologue_explanations*",
            "thunder/transforms/extraction_only_*",
            "thunder/tests/test_extraction_only_*",
        ),
    ),
    Step(
        "Add FusedPrologueTransform: read and check modules in bulk",
        "It accepts exactly what the prologue that it replaces accepts, and costs a small part of it.\n"
        "thunder/core/guard_blocks.py compares the state of all modules, parameters and buffers with a remembered one.",
        (
            "thunder/core/*",
            "thunder/transforms/fused_*",
            "thunder/tests/test_fused_*",
            "thunder/tests/test_guard_blocks*",
        ),
    ),
    Step(
        "Add FastDispatchTransform: a cache hit without the dispatcher",
        "A compiled module tries its cache entries through one flat check each. All else is left to thunder.jit.",
        ("thunder/transforms/fast_dispatch_*", "thunder/tests/test_fast_dispatch_*"),
    ),
    Step(
        "Add ExplainCacheMisses: say why a call was compiled anew",
        "It logs which check of which cache entry refused the call.",
        ("thunder/transforms/explain_*", "thunder/tests/test_explain_*"),
    ),
    Step(
        'Add the plugin "fast-prologue"',
        "With it thunder.compile notices model.train() and all that PrunePrologueChecks leaves out.",
        ("thunder/plugins/*", "thunder/tests/test_fast_prologue_*"),
    ),
    Step(
        "Add a benchmark of prologues",
        "python -m thunder.benchmarks.prologue measures prologues under several transforms and explains what they do.",
        ("thunder/benchmarks/*", "thunder/tests/test_benchmark_*"),
    ),
    Step(
        "Test the prologue transforms in training, with other transforms and on two processes",
        "Each is compared with the eager model and with the prologue that it replaces.",
        ("thunder/tests/*",),
    ),
)

#: The file of a package that registers names, where names are listed in it, and where the documentation lists them.
LISTS = {
    "thunder.transforms": ("__all__", "docs/source/reference/transforms/index.rst"),
    "thunder.plugins": ("names_to_plugins", "docs/source/reference/plugins/index.rst"),
}

#: Runs pytest in a process that is known to import what is to be tested.
CHECKED_TESTS = """
import importlib, sys, pytest
for module, file in {modules}.items():
    imported = importlib.import_module(module).__file__
    if imported != file:
        sys.exit(f"{{module}} is imported from {{imported}}, not from {{file}}")
for package, name in {names}:
    if name not in vars(sys.modules[package]):
        sys.exit(f"{{package}} has no {{name}}")
sys.exit(pytest.main({arguments}))
"""


class PatchError(Exception):
    """The series cannot be made, applied or tested; the message says why, and what was expected."""


def installed_tree() -> Path:
    """Returns the folder that the installed lightning-thunder's ``thunder`` lies in."""
    try:
        return Path(metadata.distribution("lightning-thunder").locate_file(""))
    except metadata.PackageNotFoundError:
        raise PatchError("lightning-thunder is not installed; install it, or give the path of a source tree") from None


def project_files() -> list[str]:
    """Returns the files of this project that have a place in Thunder, as paths relative to the tree."""
    return sorted(file.relative_to(PROJECT).as_posix() for file in (PROJECT / "thunder").rglob("*.py"))


def split(files: Iterable[str]) -> list[tuple[Step, list[str]]]:
    """Returns the steps that have files, with their files.

    Raises:
        PatchError: A file belongs to no step.
    """
    steps: dict[Step, list[str]] = {step: [] for step in SERIES}
    for file in files:
        step = next((step for step in SERIES if any(fnmatch(file, pattern) for pattern in step.patterns)), None)
        if step is None:
            raise PatchError(
                f"{file} is in no patch of the series: add a pattern for it to SERIES in {Path(__file__).name}"
            )
        steps[step].append(file)
    return [(step, files) for step, files in steps.items() if files]


def register(source: str, package: str, registered: Sequence[tuple[str, str]], where: str) -> str:
    """Returns the source of a package's ``__init__.py`` with imports of registered names, and the names in its list.

    Args:
        source (str): The source.
        package (str): The package's name, one of ``LISTS``.
        registered (Sequence[tuple[str, str]]): Modules of the package, and names in them.
        where (str): The file, for messages.

    Raises:
        PatchError: The source does not have the expected shape, or has one of the names already.

    Example::

        >>> source = "from .a import A\\n\\n__all__ = [\\n    'A',\\n]\\n"
        >>> print(register(source, "thunder.transforms", [("b", "B")], "__init__.py"))
        from .a import A
        from .b import B
        <BLANKLINE>
        __all__ = [
            'A',
            "B",
        ]
        <BLANKLINE>
    """
    list_name, _ = LISTS[package]
    lines = source.splitlines()
    tree = ast.parse(source, where)
    imports = [
        n for n in tree.body if isinstance(n, ast.ImportFrom) and (n.level or n.module.startswith(package + "."))
    ]
    if not imports:
        raise PatchError(f"{where} has no `from .MODULE import NAME` of {package}'s own modules to put others after")
    present = {alias.asname or alias.name for node in imports for alias in node.names}
    if again := [name for _, name in registered if name in present]:
        raise PatchError(f"{where} imports {', '.join(again)} already: is the series applied to this tree already?")
    entries = [
        n.value
        for n in tree.body
        if isinstance(n, ast.Assign) and [ast.unparse(target) for target in n.targets] == [list_name]
    ]
    last = None
    if len(entries) == 1 and isinstance(entries[0], (ast.List, ast.Dict)):
        last = (getattr(entries[0], "elts", None) or getattr(entries[0], "values", None) or [None])[-1]
    if last is None or not lines[last.end_lineno - 1].rstrip().endswith(","):
        raise PatchError(f"{where}: expected one list or dict {list_name} with one entry and a comma on each line")

    def entry(name: str) -> str:
        return f'"{thunder_overlay.PLUGIN_NAMES[name]}": {name}' if isinstance(entries[0], ast.Dict) else f'"{name}"'

    prefix = "." if imports[-1].level else package + "."
    indent = lines[last.end_lineno - 1][: -len(lines[last.end_lineno - 1].lstrip())]
    # From the bottom up, so that the numbers of the lines above stay right.
    insertions = [
        (last.end_lineno, [f"{indent}{entry(name)}," for _, name in registered]),
        (imports[-1].end_lineno, [f"from {prefix}{module} import {name}" for module, name in registered]),
    ]
    for number, new in sorted(insertions, reverse=True):
        lines[number:number] = new
    return "\n".join(lines) + "\n"


def list_in_docs(text: str, names: Sequence[str], where: str) -> str:
    """Returns a page of Thunder's documentation with more names at the end of its ``autosummary``.

    Raises:
        PatchError: The page has not one ``autosummary`` with names.
    """
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if line.strip() == ".. autosummary::"]
    if len(starts) == 1:
        start = end = starts[0] + 1
        while end < len(lines) and (not lines[end].strip() or lines[end][0].isspace()):
            end += 1
        listed = [i for i in range(start, end) if lines[i].strip() and not lines[i].strip().startswith(":")]
        if listed:
            indent = lines[listed[-1]][: -len(lines[listed[-1]].lstrip())]
            lines[listed[-1] + 1 : listed[-1] + 1] = [indent + name for name in names]
            return "\n".join(lines) + "\n"
    raise PatchError(f"{where}: expected one `.. autosummary::` that lists names")


def check_tree(tree: Path) -> None:
    """Raises :class:`PatchError` if a folder is not a lightning-thunder source tree."""
    expected = ["thunder/__init__.py", *(package.replace(".", "/") + "/__init__.py" for package in LISTS)]
    if missing := [file for file in expected if not (tree / file).is_file()]:
        raise PatchError(
            f"{tree} is not a lightning-thunder source tree: expected {', '.join(expected)} in it, and there is no "
            + " and no ".join(missing)
        )


def git(folder: Path, *args: str | os.PathLike) -> str:
    """Runs git in a folder and returns what it printed.

    Raises:
        PatchError: git failed.
    """
    # No hook, signature or line ending of the user's belongs in a repository that is thrown away.
    settings = ["core.hooksPath=" + os.devnull, "commit.gpgSign=false", "core.autocrlf=false"]
    command = ["git", *(part for setting in settings for part in ("-c", setting)), *args]
    # Within a hook of git, these say that the repository is another one.
    elsewhere = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
    env = {name: value for name, value in os.environ.items() if name not in elsewhere}
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if result.returncode:
        raise PatchError(f"`git {' '.join(map(str, args))}` failed: {(result.stderr or result.stdout).strip()}")
    return result.stdout


def write_series(tree: Path, output: Path) -> list[Path]:
    """Writes the patches against a lightning-thunder source tree and returns their files, in order.

    Args:
        tree (Path): The folder that ``thunder`` lies in. It is only read.
        output (Path): The folder for the patches. It is made if it is missing.

    Raises:
        PatchError: The tree is not a lightning-thunder tree of the expected shape, or ``output`` holds patches already.
    """
    check_tree(tree)
    steps = split(project_files())
    same = [f for _, files in steps for f in files if (tree / f).is_file() and _text(tree / f) == _text(PROJECT / f)]
    if same:
        raise PatchError(f"{tree} has {same[0]} as it is here: is the series applied to this tree already?")
    if old := sorted(output.glob("*.patch")) if output.is_dir() else []:
        raise PatchError(f"{output} holds patches already ({old[0].name}, ...): remove them, or choose another folder")
    with tempfile.TemporaryDirectory() as temporary:
        repository = Path(temporary)
        git(repository, "init", "-q")
        # What the series changes is all that git needs to know of the tree.
        touched = [file for _, files in steps for file in files]
        for package, (_, docs) in LISTS.items():
            touched += [package.replace(".", "/") + "/__init__.py", docs]
        for file in touched:
            if (tree / file).is_file():
                _copy(tree / file, repository / file)
        _commit(repository, "lightning-thunder")
        base = git(repository, "rev-parse", "HEAD").strip()
        for step, files in steps:
            for file in files:
                _copy(PROJECT / file, repository / file)
            _register_modules(repository, files)
            _commit(repository, f"{step.subject}\n\n{step.body}")
        output.mkdir(parents=True, exist_ok=True)
        git(repository, "format-patch", "-q", "--no-signature", "-o", output.resolve(), base)
    return sorted(output.glob("*.patch"))


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def _copy(source: Path, destination: Path) -> None:
    destination.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, destination)


def _commit(repository: Path, message: str) -> None:
    # The author is the one that git knows for this project.
    author = git(PROJECT, "var", "GIT_AUTHOR_IDENT").rsplit(" ", 2)[0]
    name, _, email = author.removesuffix(">").rpartition(" <")
    git(repository, "add", "-A")
    git(repository, "-c", f"user.name={name}", "-c", f"user.email={email}", "commit", "-q", "-m", message)


def _register_modules(repository: Path, files: Sequence[str]) -> None:
    for package, registered in thunder_overlay.REGISTERED.items():
        folder = package.replace(".", "/")
        here = [(module, name) for module, name in registered if f"{folder}/{module}.py" in files]
        if not here:
            continue
        init = repository / folder / "__init__.py"
        init.write_text(register(_text(init), package, here, f"{folder}/__init__.py"))
        _, docs = LISTS[package]
        if (repository / docs).is_file():
            page = repository / docs
            page.write_text(list_in_docs(_text(page), [name for _, name in here], docs))


def apply(patches: Sequence[Path], tree: Path, destination: Path) -> None:
    """Copies a lightning-thunder source tree and applies patches to the copy with ``git am``.

    Args:
        patches (Sequence[Path]): The patches.
        tree (Path): The tree.
        destination (Path): An empty folder for the copy of its ``thunder`` and ``docs``.

    Raises:
        PatchError: A patch does not apply.
    """
    check_tree(tree)
    for folder in ("thunder", "docs/source"):
        if (tree / folder).is_dir():
            shutil.copytree(tree / folder, destination / folder, ignore=shutil.ignore_patterns("__pycache__"))
    git(destination, "init", "-q")
    _commit(destination, "lightning-thunder")
    # Thunder has its own idea of white space at the ends of lines.
    git(
        destination,
        *("-c", "user.name=nobody", "-c", "user.email=nobody@localhost"),
        *("am", "-q", "--whitespace=nowarn", *(patch.resolve() for patch in patches)),
    )


def run_tests(tree: Path, options: Sequence[str]) -> int:
    """Runs this project's tests as they are in a patched tree, without the overlay.

    Args:
        tree (Path): The tree.
        options (Sequence[str]): Options for pytest. Test files and node IDs among them are run instead of all tests.

    Returns:
        int: The exit status: that of pytest, or 1, with what is wrong on stderr, if Python does not import the tree's files.
    """
    files = project_files()
    tests = [file for file in files if fnmatch(file, "thunder/tests/test_*.py")]
    if any(option.partition("::")[0] in tests for option in options):
        tests = []
    # Neither this project's configuration nor Thunder's conftest.py, which needs pytest-benchmark.
    arguments = ["-c", os.devnull, f"--rootdir={tree}", "--noconftest", "-p", "no:cacheprovider"]
    arguments += ["-W", "ignore::UserWarning", "-W", "ignore::DeprecationWarning", *options, *tests]
    modules = {file.removesuffix(".py").replace("/", "."): str(tree / file) for file in files if "/tests/" not in file}
    names = [(package, name) for package, pairs in thunder_overlay.REGISTERED.items() for _, name in pairs]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "THUNDER_", "PYTEST_"))}
    env |= {"THUNDER_OVERLAY": "0", "PYTHONPATH": str(tree)}
    code = CHECKED_TESTS.format(modules=modules, names=names, arguments=arguments)
    return subprocess.run([sys.executable, "-c", code], cwd=tree, env=env).returncode


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: that of pytest with ``--test``, and 2 for an error."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0].rstrip(":"))
    parser.add_argument(
        "tree", nargs="?", type=Path, help="the source tree; the installed lightning-thunder without it"
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("upstream-patch"), help="where the patches go")
    parser.add_argument(
        "--test",
        nargs=argparse.REMAINDER,
        metavar="OPTION",
        help="apply them to a copy of the tree and run the new tests there, with the pytest options that follow",
    )
    arguments = parser.parse_args(argv)
    try:
        tree = arguments.tree or installed_tree()
        patches = write_series(tree, arguments.output)
        for patch in patches:
            print(patch)
        if not any((tree / docs).is_file() for _, docs in LISTS.values()):
            print(f"{tree} has no documentation: the entries in its lists of transforms and plugins are left out")
        if arguments.test is None:
            return 0
        with tempfile.TemporaryDirectory() as temporary:
            copy = Path(temporary).resolve()
            apply(patches, tree, copy)
            return run_tests(copy, arguments.test)
    except PatchError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
