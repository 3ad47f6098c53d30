"""Runs the tests that ship with lightning-thunder, and again with transforms added to every ``thunder.jit``.

Compares the outcomes test by test, and fails on a difference that is not expected::

    python scripts/thunder_tests.py                                   # all of it, hours on two cores
    python scripts/thunder_tests.py test_core.py -k cache             # a part of it
    python scripts/thunder_tests.py --inject my_module:MyTransform    # other transforms, joined by +

What each run printed, and each test's outcome, is left in a folder (``--output``).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from injected_transforms import load_transforms

if TYPE_CHECKING:
    from rich.console import Console

TRANSFORMS = (
    "thunder.transforms:FusedPrologueTransform",
    "thunder.transforms:ExtractionOnlyPrologueTransform",
    "thunder.transforms:FastDispatchTransform",
)

NEED_A_GPU = re.compile(r"test_(apex|cudnn|fa3|nvfuser|transformer_engine|triton)\w*\.py")

# Files that try every operation with every dtype. They say little about prologues, and would take hours.
EVERY = {"test_auto_register_torchops.py": 40, "test_grad.py": 8, "test_ops.py": 40}

# Neither this repository's configuration nor its conftest.py are Thunder's. `append`, since the default puts site-packages
# first in the search path.
PYTEST_OPTIONS = (
    *f"-c {os.devnull} --rootdir=. --confcutdir=. --import-mode=append -p no:cacheprovider -p injected_transforms".split(),
    *"--gpu-mem-limit 0 --continue-on-collection-errors -q --no-header --tb=short -W ignore --durations=20".split(),
)

# Why a test's outcome is another one when a transform is added, by the transform's class.
EXPECTED: dict[str, dict[str, str]] = {
    "FusedPrologueTransform": {
        "test_transforms.py::test_prune_prologue_checks": "counts the checks in the text of the prologue",
    },
    "ExtractionOnlyPrologueTransform": {
        "test_transforms.py::test_prune_prologue_checks": "counts the checks in the text of the prologue",
    },
    "FastDispatchTransform": {
        "test_transforms.py::test_prune_prologue_checks": "counts the checks in the text of the prologue",
    },
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    outcome: str
    reason: str = ""
    """The message of a failure."""

    def __str__(self) -> str:
        """What is compared: two failures differ when their exceptions have different types."""
        if not self.reason:
            return self.outcome
        exception = re.match(r"[\w.]+(?=:)", self.reason)
        return f"{self.outcome}, {exception[0].rpartition('.')[2] if exception else 'AssertionError'}"


Outcomes = dict[str, Outcome]
"""By the name of the test."""


@dataclasses.dataclass(frozen=True)
class Difference:
    name: str
    plain: Outcome | None
    injected: Outcome | None
    """None where the test did not run."""
    explanation: str | None
    """Why it does not count; None for a difference that is not expected."""


def differing(plain: Outcomes, injected: Outcomes) -> list[str]:
    """Returns the names of the tests whose outcomes are not the same."""
    return [name for name in plain | injected if str(plain.get(name)) != str(injected.get(name))]


def expected_reason(name: str, expected: dict[str, str]) -> str | None:
    """Returns the reason of an expected difference, which is listed by the name of the test with or without parameters."""
    return expected.get(name) or expected.get(name.partition("[")[0])


def explain(
    plain: Outcomes, injected: Outcomes, again: tuple[Outcomes, Outcomes], expected: dict[str, str]
) -> list[Difference]:
    """Returns all differences, each with why it does not count, if it does not.

    Args:
        plain (dict): The outcomes of the tests as they are.
        injected (dict): The outcomes with transforms.
        again (tuple): Both for a second run of the tests that differed and were not expected to, by which those that
            also differ from themselves are known.
        expected (dict): The reasons of expected differences, see :func:`expected_reason`.
    """
    still = set(differing(*again))
    differences = []
    for name in differing(plain, injected):
        explanation = expected_reason(name, expected)
        if explanation is None and name not in still:
            explanation = "flaky: the same in a second run"
        differences.append(Difference(name, plain.get(name), injected.get(name), explanation))
    return differences


class Runner:
    """Runs tests with some transforms and returns their outcomes.

    Args:
        folder (Path): Where the tests are.
        output (Path): The folder for what pytest prints and for the outcomes.
        options (Sequence[str]): More options for pytest.
    """

    def __init__(self, folder: Path, output: Path, options: Sequence[str] = ()):
        self.folder = folder
        self.output = output.resolve()
        self.options = options

    def run(self, title: str, spec: str, tests: Iterable[str]) -> Outcomes:
        """Runs tests.

        Args:
            title (str): What the files with the output and the outcomes are called.
            spec (str): The transforms as MODULE:CLASS[+...].
            tests (Iterable[str]): Names of files or tests, and options of pytest that select among them.

        Raises:
            RuntimeError: pytest itself failed.
        """
        outcomes_file, log_file = self.output / f"{title}.jsonl", self.output / f"{title}.log"
        command = [sys.executable, "-m", "pytest", *PYTEST_OPTIONS, *self.options]
        command += ["--inject", spec, "--outcomes", str(outcomes_file), *tests]
        paths = [str(Path(__file__).resolve().parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        # The runs have workers of their own, and are none of a pytest that runs this.
        own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST_")}
        env = {"OMP_NUM_THREADS": "1", **own, "PYTHONPATH": os.pathsep.join(paths)}
        with log_file.open("w") as log:
            process = subprocess.run(command, cwd=self.folder, env=env, stdout=log, stderr=subprocess.STDOUT)
        # 1: tests failed, 5: none was collected.
        if process.returncode not in (0, 1, 5) or not outcomes_file.exists():
            last_lines = "".join(log_file.read_text().splitlines(keepends=True)[-20:])
            raise RuntimeError(f"pytest failed with status {process.returncode}; {log_file} ends with\n{last_lines}")
        lines = map(json.loads, outcomes_file.read_text().splitlines())
        return {line["name"]: Outcome(line["outcome"], line["reason"]) for line in lines}


def print_differences(title: str, differences: Sequence[Difference], injected: Outcomes, console: Console) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Column, Table

    unexpected = sum(difference.explanation is None for difference in differences)
    color = "bold red" if unexpected else "green"
    console.print(f"[bold]{title}[/]: {summary(injected)}; [{color}]{unexpected} unexpected differences[/]")
    if not differences:
        return
    table = Table(
        Column("test", overflow="fold", ratio=3),
        "as it is",
        "with the transform",
        Column("why", overflow="fold", ratio=3),
        box=box.SIMPLE_HEAD,
    )
    for difference in differences:
        why = difference.explanation
        if why is None:
            failed = next(
                (outcome for outcome in (difference.injected, difference.plain) if outcome and outcome.reason), ""
            )
            why = f"[bold red]not expected[/] {escape(failed.reason.splitlines()[0][:200]) if failed else ''}"
        table.add_row(escape(difference.name), str(difference.plain), str(difference.injected), why)
    console.print(table)


def summary(outcomes: Outcomes) -> str:
    counts = Counter(outcome.outcome for outcome in outcomes.values())
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())


def parse(argv: Sequence[str] | None, folder: Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="files in thunder/tests (default: all that run on the CPU)",
    )
    parser.add_argument("-k", metavar="EXPRESSION", help="only tests that match, as pytest's -k")
    parser.add_argument("-n", type=int, default=2, metavar="N", help="how many worker processes (default: 2)")
    parser.add_argument("--timeout", type=int, default=300, metavar="S", help="seconds for each test (default: 300)")
    parser.add_argument(
        "--every",
        action="append",
        default=[],
        metavar="FILE=N",
        help="only every Nth test of a file; FILE=1 for all (default: "
        + ", ".join(f"{file}={n}" for file, n in EVERY.items())
        + ")",
    )
    parser.add_argument(
        "--inject",
        action="append",
        metavar="MODULE:CLASS[+...]",
        help=f"transforms of a run; can be given several times (default: {' and '.join(TRANSFORMS)})",
    )
    parser.add_argument("--output", type=Path, default=Path("thunder-tests"), help="folder (default: thunder-tests)")
    options = parser.parse_args(argv)

    if options.n < 1:
        parser.error(f"-n must be at least 1, is {options.n}")
    for file in options.files:
        if not (folder / file.partition("::")[0]).is_file():
            parser.error(f"lightning-thunder has no {file} in {folder}")
    options.files = options.files or sorted(
        path.name for path in folder.glob("test_*.py") if not NEED_A_GPU.fullmatch(path.name)
    )
    every = dict(EVERY)
    for option in options.every:
        file, _, n = option.partition("=")
        if not n.isdecimal() or int(n) < 1:
            parser.error(f"--every: FILE=N with an N of at least 1, got {option!r}")
        every[file] = int(n)
    options.every = every
    options.inject = options.inject or TRANSFORMS
    for spec in options.inject:
        try:
            load_transforms(spec)
        except ValueError as e:
            parser.error(f"--inject: {e}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    from rich.console import Console

    console = Console()
    folder = Path(metadata.distribution("lightning-thunder").locate_file("thunder/tests"))
    options = parse(argv, folder)
    options.output.mkdir(parents=True, exist_ok=True)

    runner = Runner(folder, options.output, ["-n", str(options.n), "--timeout", str(options.timeout)])
    selected = [*options.files, *(f"--every={file}={n}" for file, n in options.every.items())]
    if options.k:
        selected += ["-k", options.k]

    def run(title: str, spec: str, tests: Sequence[str]) -> Outcomes:
        start = time.monotonic()
        with console.status(f"{title}; follow it in {options.output / f'{title}.log'}"):
            outcomes = runner.run(title, spec, tests)
        console.print(f"{title}: {len(outcomes)} tests in {(time.monotonic() - start) / 60:.1f} minutes")
        return outcomes

    plain = run("plain", "", selected)
    if not plain:
        console.print("no test was selected", style="bold red")
        return 1
    console.print(f"[bold]plain[/]: {summary(plain)}")
    unexpected = 0
    for spec in options.inject:
        classes = [part.rpartition(":")[2] for part in spec.split("+")]
        title = "+".join(classes)
        injected = run(title, spec, selected)
        expected = {name: reason for cls in classes for name, reason in EXPECTED.get(cls, {}).items()}
        again: tuple[Outcomes, Outcomes] = {}, {}
        if names := [name for name in differing(plain, injected) if expected_reason(name, expected) is None]:
            again = run(f"{title}-plain-again", "", names), run(f"{title}-again", spec, names)
        differences = explain(plain, injected, again, expected)
        print_differences(title, differences, injected, console)
        unexpected += sum(difference.explanation is None for difference in differences)
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
