"""Runs the tests with other versions of Python, torch and lightning-thunder, each set in an environment that is thrown away::

    python scripts/compat.py                                  # a quick part of the tests with all of PAIRS
    python scripts/compat.py --list
    python scripts/compat.py --only 3.13 --all                # those with 3.13 in them, all tests
    python scripts/compat.py --pair 3.12,2.9.1,0.2.6          # your own: Python, torch, lightning-thunder
    python scripts/compat.py --only 2.7.1 -- -k tensors -x    # options and files for pytest, in place of the quick part

One environment lies on the disk at a time (some 7 GB with torch's CUDA builds). pip's settings hold: with
``PIP_EXTRA_INDEX_URL`` set to an index of torch's CPU builds, those are taken.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

PROJECT = Path(__file__).resolve().parent.parent

QUICK = (
    "thunder/tests/test_guard_blocks.py",
    "thunder/tests/test_fused_prologue_transform.py",
    "thunder/tests/test_fast_prologue_plugin.py",
)

COLUMNS = (
    "Python",
    "torch",
    "lightning-thunder",
    "passed",
    "failed",
    "skipped",
    "seconds",
    "guards in use, or why not",
)


class Pair(NamedTuple):
    python: str
    torch: str
    """A version, which may end with ``.*``."""
    thunder: str
    """A version; one that ends with ``.dev`` stands for the newest pre-release from there."""

    def __str__(self) -> str:
        return ",".join(self)

    @property
    def requirements(self) -> list[str]:
        thunder = f">={self.thunder}0" if self.thunder.endswith(".dev") else f"=={self.thunder}"
        return [f"torch=={self.torch}", f"lightning-thunder{thunder}"]


# The oldest and the newest torch with the oldest and the newest Python, and the newest nightly of lightning-thunder.
PAIRS = (
    Pair("3.10", "2.7.1", "0.2.6"),
    Pair("3.13", "2.7.1", "0.2.6"),
    Pair("3.10", "2.12.*", "0.2.6"),
    Pair("3.13", "2.12.*", "0.2.6"),
    Pair("3.12", "2.10.*", "0.2.7.dev"),
)


@dataclass
class Result:
    """What came of a pair: versions as installed, counts, and what ``python -m thunder_overlay`` says of the guards."""

    pair: Pair
    versions: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    failed_tests: list[str] = field(default_factory=list)
    seconds: float = 0
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.counts.get("passed", 0) > 0 and not self.counts["failed"]

    def row(self) -> list[str]:
        """The cells of ``COLUMNS``."""
        asked = dict(zip(COLUMNS, self.pair))
        counts = [str(self.counts[name]) if self.counts else "" for name in ("passed", "failed", "skipped")]
        seconds = f"{self.seconds:.0f}" if self.counts else ""
        return [*(self.versions.get(name, asked[name]) for name in COLUMNS[:3]), *counts, seconds, self.note]


class Failed(Exception):
    """A pair cannot be tested; the message says why, on one line."""


def find_python(version: str, given: dict[str, str]) -> str:
    """Returns the interpreter of a version like "3.10": the one given, or one on PATH or of pyenv.

    Raises:
        Failed: There is none, or the one that was given is of another version.
    """
    if version in given:
        candidates = [given[version]]
    else:
        candidates = [sys.executable, shutil.which(f"python{version}")]
        if pyenv := shutil.which("pyenv"):
            root = subprocess.run([pyenv, "root"], capture_output=True, text=True).stdout.strip()
            candidates += sorted(map(str, Path(root).glob(f"versions/{version}.*/bin/python")), reverse=True)
    for candidate in filter(None, candidates):
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        try:
            found = subprocess.run([candidate, "-c", code], capture_output=True, text=True).stdout.strip()
        except OSError:
            continue
        if found == version:
            return candidate
    if version in given:
        raise Failed(f"{given[version]} is not Python {version}")
    raise Failed(f"no Python {version} found; name one with --python {version}=PATH")


def test_pair(pair: Pair, python: str, arguments: Sequence[str], log: Path, timeout: float | None) -> Result:
    """Makes an environment for a pair, runs the tests in it and removes it.

    Args:
        pair (Pair): The versions.
        python (str): The interpreter to make the environment with.
        arguments (Sequence[str]): Options and files for pytest.
        log (Path): The file for what pip and pytest print.
        timeout (float | None): How many seconds the tests may take.

    Raises:
        Failed: The environment cannot be made, or pytest ran no test.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "THUNDER_", "PYTEST_"))}
    with tempfile.TemporaryDirectory(prefix="compat-") as temporary, open(log, "w") as output:
        folder = Path(temporary)
        executable = folder / ("Scripts" if os.name == "nt" else "bin") / "python"

        def run(*args: str | os.PathLike, timeout: float | None = None) -> int:
            command = [executable, *args]
            return subprocess.run(
                command, cwd=PROJECT, env=env, stdout=output, stderr=output, timeout=timeout
            ).returncode

        if subprocess.run([python, "-m", "venv", folder], env=env, stdout=output, stderr=output).returncode:
            raise Failed(f"{python} -m venv failed, see {log}")
        if run("-m", "pip", "install", "-q", "-e", f"{PROJECT}[test]", *pair.requirements):
            raise Failed(f"cannot be installed: {_last_error(log)}")
        command = [executable, "-m", "thunder_overlay"]
        status = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        output.write(status.stdout + status.stderr)
        # Lines like "torch                2.12.1"; the names fill the first 20 columns.
        facts = {line[:20].rstrip(): line[21:] for line in status.stdout.splitlines()}
        versions = {name: facts.get(name, "").partition(" ")[0] for name in COLUMNS[:3]}
        if status.returncode:
            raise Failed(f"the overlay is not active: {facts.get('active', '').removeprefix('no: ') or f'see {log}'}")
        result = Result(pair, versions)
        guards = {
            name.removeprefix("guards of "): what for name, what in facts.items() if name.startswith("guards of ")
        }
        result.note = "; ".join(f"{name}: {what}" for name, what in guards.items())
        report = folder / "report.xml"
        start = time.monotonic()
        try:
            run("-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise Failed(f"stopped: the tests took more than {timeout:.0f} seconds") from None
        result.seconds = time.monotonic() - start
        if not report.is_file():
            raise Failed(f"pytest failed, see {log}")
        result.counts, result.failed_tests = read_report(report)
    return result


def read_report(file: Path) -> tuple[dict[str, int], list[str]]:
    """Returns how many tests passed, failed (or had an error) and were skipped, and the names of those that failed."""
    counts, failed = {"passed": 0, "failed": 0, "skipped": 0}, []
    for case in xml.etree.ElementTree.parse(file).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        counts[outcome] += 1
        if outcome == "failed":
            failed.append(f"{case.get('classname')}::{case.get('name')}")
    return counts, failed


def _last_error(log: Path) -> str:
    lines = [line for line in log.read_text().splitlines() if line.startswith("ERROR:")]
    return lines[-1].removeprefix("ERROR: ") if lines else f"see {log}"


def to_markdown(results: Sequence[Result], arguments: Sequence[str]) -> str:
    """Returns the table for README.md, with its date and what was run."""
    lines = [f"`pytest {shlex.join(arguments)}`, {datetime.date.today():%Y-%m-%d}:", ""]
    # Without the seconds, which say more about the machine than about the versions.
    rows = [COLUMNS, ["---"] * len(COLUMNS), *(result.row() for result in results)]
    kept = [i for i, name in enumerate(COLUMNS) if name != "seconds"]
    lines += ["| " + " | ".join(row[i] for i in kept) + " |" for row in rows]
    return "\n".join(lines)


def _table(results: Sequence[Result]) -> Table:
    table = Table()
    for name in COLUMNS:
        table.add_column(name, no_wrap=name != COLUMNS[-1])
    for result in results:
        table.add_row(*result.row(), style=None if result.passed else "red")
    return table


def _pair(text: str) -> Pair:
    parts = text.split(",")
    if len(parts) != len(Pair._fields) or not all(parts):
        raise argparse.ArgumentTypeError(f"expected PYTHON,TORCH,LIGHTNING-THUNDER like {PAIRS[0]}, got {text!r}")
    return Pair(*parts)


def _interpreter(text: str) -> tuple[str, str]:
    version, _, path = text.partition("=")
    if not (re.fullmatch(r"\d+\.\d+", version) and path):
        raise argparse.ArgumentTypeError(f"expected VERSION=PATH like 3.10=/usr/bin/python3.10, got {text!r}")
    return version, path


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 0 if all tests passed with all pairs, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.partition("::\n")[0] + ".")
    parser.add_argument("--list", action="store_true", help="print the pairs and stop")
    parser.add_argument("--only", metavar="TEXT", action="append", help="only pairs that have this version in them")
    parser.add_argument(
        "--pair", type=_pair, action="append", help="PYTHON,TORCH,LIGHTNING-THUNDER in place of the list"
    )
    parser.add_argument("--python", type=_interpreter, action="append", metavar="VERSION=PATH", help="an interpreter")
    parser.add_argument("--all", action="store_true", help="run all tests, not the quick part")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="stop the tests of a pair after that")
    parser.add_argument("--markdown", action="store_true", help="also print the table as README.md has it")
    parser.add_argument("-o", "--output", type=Path, default=Path("compat"), help="where the logs go")
    parser.add_argument("pytest", nargs="*", help="options and files for pytest, after --")
    options = parser.parse_args(argv)
    if options.all and options.pytest:
        parser.error("--all and arguments for pytest exclude each other")
    pairs = options.pair or PAIRS
    pairs = [pair for pair in pairs if not options.only or any(text in pair for text in options.only)]
    if not pairs:
        parser.error(f"no pair has {' or '.join(options.only)} in it; the pairs are {'; '.join(map(str, PAIRS))}")
    if options.list:
        print(*pairs, sep="\n")
        return 0
    arguments = options.pytest or (["-n", "2"] if options.all else ["-n", "2", *QUICK])
    # An environment that is left behind would be several GB.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options.output.mkdir(parents=True, exist_ok=True)
    console, results = Console(), []
    if not console.is_terminal:
        console = Console(width=120)
    for pair in pairs:
        log = options.output / f"{str(pair).replace(',', '-').replace('*', 'x')}.log"
        with console.status(f"{pair} (log: {log})"):
            try:
                python = find_python(pair.python, dict(options.python or ()))
                result = test_pair(pair, python, arguments, log, options.timeout)
            except Failed as error:
                result = Result(pair, note=str(error))
        results.append(result)
        console.print(*result.row(), sep="  ", highlight=False)
        for test in result.failed_tests:
            console.print(f"  failed: {test}", markup=False, highlight=False)
    console.print(_table(results))
    if options.markdown:
        print(to_markdown(results, arguments))
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
