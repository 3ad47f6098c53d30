"""A pytest plugin that adds transforms to every ``thunder.jit``, runs a part of the tests, and records their outcomes.

``scripts/thunder_tests.py`` runs Thunder's own tests with it::

    PYTHONPATH=scripts python -m pytest -p injected_transforms --inject thunder.transforms:FusedPrologueTransform \\
        --every test_ops.py=20 --outcomes outcomes.jsonl
"""

from __future__ import annotations

import functools
import importlib
import json
from collections import defaultdict
from collections.abc import Callable, Sequence

import pytest


def load_transforms(spec: str) -> list[type]:
    """Returns the transform classes that ``spec``, ``MODULE:CLASS[+MODULE:CLASS ...]``, names; none for ``""``.

    Raises:
        ValueError: A part of it is not MODULE:CLASS, or there is no such module or class.
    """
    classes = []
    for part in filter(None, spec.split("+")):
        module, colon, name = part.partition(":")
        if not (module and colon and name):
            raise ValueError(f"transforms are given as MODULE:CLASS[+MODULE:CLASS ...], got {part!r} in {spec!r}")
        try:
            classes.append(getattr(importlib.import_module(module), name))
        except (ImportError, AttributeError) as e:
            raise ValueError(f"there is no {part!r}: {e}") from e
    return classes


def with_transforms(jit: Callable, classes: Sequence[type]) -> Callable:
    """Returns ``thunder.jit`` with new instances of ``classes`` after the transforms that a call names itself."""

    @functools.wraps(jit)
    def jit_with_transforms(fn, /, *args, transforms=None, **kwargs):
        return jit(fn, *args, transforms=[*(transforms or []), *(cls() for cls in classes)], **kwargs)

    return jit_with_transforms


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("injected transforms")
    group.addoption("--inject", default="", metavar="MODULE:CLASS[+...]", help="transforms to add to every thunder.jit")
    group.addoption("--every", action="append", default=[], metavar="FILE=N", help="only every Nth test of a file")
    group.addoption("--outcomes", metavar="FILE", help="where to write a line of JSON for each test")


def pytest_configure(config: pytest.Config) -> None:
    try:
        classes = load_transforms(config.getoption("--inject"))
        every = {file: int(n) for file, _, n in (option.partition("=") for option in config.getoption("--every"))}
    except ValueError as e:
        raise pytest.UsageError(str(e)) from e
    if classes:
        import thunder

        thunder.jit = with_transforms(thunder.jit, classes)
    config.pluginmanager.register(EveryNth(every))
    # With pytest-xdist the reports of all workers come to the controller as well.
    if config.getoption("--outcomes") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(config.getoption("--outcomes")))


class EveryNth:
    """Keeps every Nth test of some files, in the order of their names, so that it is always the same ones."""

    def __init__(self, every: dict[str, int]):
        self.every = every

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        by_file: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            by_file[item.path.name].append(item)
        kept = {
            item
            for file, of_file in by_file.items()
            for item in sorted(of_file, key=lambda item: item.nodeid)[:: self.every.get(file, 1)]
        }
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


class Outcomes:
    """Writes a line of JSON for each test when it is over: its name, its outcome, and what went wrong."""

    def __init__(self, path: str):
        self.file = open(path, "w", buffering=1)
        self.reports: dict[str, list[pytest.TestReport]] = defaultdict(list)

    def write(self, name: str, outcome: str, reason: str) -> None:
        self.file.write(json.dumps({"name": name, "outcome": outcome, "reason": reason}) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reports = self.reports[report.nodeid]
        reports.append(report)
        if report.when in ("setup", "call") and not _crashed(report):
            return
        del self.reports[report.nodeid]
        decisive = min(reports, key=lambda report: ("failed", "skipped", "passed").index(report.outcome))
        outcome = decisive.outcome
        if hasattr(decisive, "wasxfail"):
            outcome = "xfailed" if outcome == "skipped" else "xpassed"
        self.write(report.nodeid, outcome, _reason(decisive))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(report.nodeid, "not collected", _reason(report))

    def pytest_unconfigure(self) -> None:
        self.file.close()


def _crashed(report: pytest.TestReport) -> bool:
    """Whether this is pytest-xdist's report of a worker that died, after which no other report of the test follows."""
    return report.when not in ("setup", "call", "teardown")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The last line of a failure."""
    if not report.failed:
        return ""
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash else str(report.longrepr)).strip()
