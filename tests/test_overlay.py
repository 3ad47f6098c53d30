"""The overlay as its users meet it: each test runs Python in a virtual environment made for it.

The environments borrow torch and all else from the environment that runs the tests, by a folder of links, so that
nothing is downloaded, and have a lightning-thunder of their own, packed from the installed one.
"""

import base64
import csv
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
MODULE = "thunder.transforms.extraction_only_prologue_transform"


class Environment:
    """A virtual environment in which to install distributions and run Python."""

    def __init__(self, path: Path, *, borrowed: Path | None = None):
        venv.create(path, with_pip=False, symlinks=True)
        self.path = path
        self.python = path / "bin" / "python"
        (self.site_packages,) = path.glob("lib/python3*/site-packages")
        self.path_without_site = [str(self.site_packages)]
        if borrowed is not None:
            # Such a folder is searched after site-packages, and its own path files are not run.
            (self.site_packages / "borrowed.pth").write_text(str(borrowed))
            self.path_without_site.append(str(borrowed))

    def run(self, *args, check=True, cwd=None, **env) -> subprocess.CompletedProcess:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "THUNDER_", "COV_"))}
        # Nothing is looked up relative to the checkout: its own thunder/ must not help.
        result = subprocess.run(
            [self.python, *args],
            env=environment | env,
            cwd=cwd or self.path,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert not check or result.returncode == 0, result.stdout + result.stderr
        return result

    def eval(self, expression: str, *options: str, **env):
        code = f"import json, sys, warnings; warnings.simplefilter('ignore'); import thunder; print(json.dumps({expression}))"
        return json.loads(self.run(*options, "-c", code, **env).stdout.splitlines()[-1])

    def pip(self, *args) -> None:
        command = [sys.executable, "-m", "pip", "--python", self.python, *args]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)

    def install(self, *what) -> None:
        self.pip("install", "--no-deps", "--no-index", "--no-build-isolation", *what)

    @property
    def upstream_file(self) -> Path:
        return self.site_packages.joinpath(*MODULE.split(".")).with_suffix(".py")

    def module_file(self, *options, **env) -> Path:
        """The file of the module that ``thunder.transforms`` takes the transform from."""
        cls = "thunder.transforms.ExtractionOnlyPrologueTransform"
        return Path(self.eval(f"sys.modules[{cls}.__module__].__file__", *options, **env))


@pytest.fixture(scope="session")
def wheels(tmp_path_factory) -> tuple[Path, Path]:
    """Wheels of lightning-thunder, packed from the installed files, and of this project."""
    folder = tmp_path_factory.mktemp("wheels")
    distribution = metadata.distribution("lightning-thunder")
    thunder_wheel = folder / f"lightning_thunder-{distribution.version}-py3-none-any.whl"
    generated = {"INSTALLER", "REQUESTED", "direct_url.json"}
    with zipfile.ZipFile(thunder_wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in distribution.files:
            if file.suffix != ".pyc" and file.name not in generated:
                archive.write(file.locate(), str(file))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, PROJECT]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (project_wheel,) = folder.glob("thunder_prologue-*.whl")
    return thunder_wheel, project_wheel


@pytest.fixture(scope="session")
def borrowed(tmp_path_factory) -> Path:
    """A folder that links all installed distributions but Thunder and this project."""
    folder = tmp_path_factory.mktemp("borrowed")
    for site_packages in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(site_packages).iterdir():
            if "thunder" not in entry.name and entry.suffix != ".pth":
                (folder / entry.name).symlink_to(entry)
    return folder


@pytest.fixture
def environment(tmp_path, wheels, borrowed) -> Environment:
    environment = Environment(tmp_path / "venv", borrowed=borrowed)
    environment.install(wheels[0])
    return environment


@pytest.fixture
def bare_environment(tmp_path) -> Environment:
    """An environment that has neither torch nor Thunder."""
    return Environment(tmp_path / "venv")


def hashes_that_differ_from_record(environment: Environment) -> list[str]:
    (record,) = environment.site_packages.glob("lightning_thunder-*.dist-info/RECORD")
    differing = []
    for name, recorded, _ in csv.reader(record.read_text().splitlines()):
        if recorded:
            algorithm, _, value = recorded.partition("=")
            digest = hashlib.new(algorithm, (environment.site_packages / name).read_bytes()).digest()
            if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != value:
                differing.append(name)
    return differing


def test_wheel_lies_over_thunder_and_leaves_it_as_it_was(environment, wheels):
    thunder_wheel, project_wheel = wheels
    upstream = environment.upstream_file
    environment.install(project_wheel)
    overlay = environment.site_packages / "thunder_overlay" / "thunder"
    # As one, since each `import thunder` takes seconds.
    file, in_thunder, in_dynamo, fused, exported, origins = environment.eval(
        f"[sys.modules[{MODULE!r}].__file__, thunder.transforms.ExtractionOnlyPrologueTransform.__module__,"
        " __import__('thunder.dynamo.compiler').dynamo.compiler.ExtractionOnlyPrologueTransform.__module__,"
        " thunder.transforms.FusedPrologueTransform.__module__, thunder.transforms.__all__,"
        " [m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'thunder']]"
    )
    assert Path(file) == overlay / "transforms" / upstream.name and {in_thunder, in_dynamo} == {MODULE}
    assert fused == "thunder.transforms.fused_prologue_transform" and "FusedPrologueTransform" in exported
    assert hashes_that_differ_from_record(environment) == []

    # Everything else is Thunder's own.
    provided = {str(file.relative_to(overlay)) for file in overlay.rglob("*.py")}
    assert str(environment.site_packages / "thunder" / "__init__.py") in origins
    for origin in map(Path, origins):
        if origin.is_relative_to(overlay):
            assert str(origin.relative_to(overlay)) in provided
        else:
            assert str(origin.relative_to(environment.site_packages / "thunder")) not in provided
    assert environment.run("-m", "thunder.benchmarks.prologue", "--help").stdout.startswith("usage:")

    environment.install("--force-reinstall", thunder_wheel)
    assert environment.module_file() == overlay / "transforms" / upstream.name

    environment.pip("uninstall", "--yes", "thunder-prologue")
    assert environment.module_file() == upstream
    assert hashes_that_differ_from_record(environment) == []
    assert not overlay.parent.exists() and not list(environment.site_packages.glob("*overlay*"))


def test_editable_install(environment):
    environment.install("--editable", PROJECT)
    file, thunder_file = map(Path, environment.eval(f"[sys.modules[{MODULE!r}].__file__, thunder.__file__]"))
    assert file == PROJECT.joinpath(*MODULE.split(".")).with_suffix(".py")
    assert thunder_file == environment.site_packages / "thunder" / "__init__.py"
    assert environment.run("-m", "thunder.benchmarks.prologue", "--help").stdout.startswith("usage:")
    assert hashes_that_differ_from_record(environment) == []

    environment.pip("uninstall", "--yes", "thunder-prologue")
    assert environment.module_file() == environment.upstream_file


def test_switched_off(environment, wheels):
    environment.install(wheels[1])
    assert environment.module_file(THUNDER_OVERLAY="0") == environment.upstream_file
    # -S also leaves site-packages out of the path
    paths = os.pathsep.join(environment.path_without_site)
    assert environment.module_file("-S", PYTHONPATH=paths) == environment.upstream_file

    status = environment.run("-m", "thunder_overlay", check=False, THUNDER_OVERLAY="0")
    assert status.returncode == 1 and "no: it is switched off by THUNDER_OVERLAY=0" in status.stdout
    status = environment.run("-S", "-m", "thunder_overlay", check=False, PYTHONPATH=paths)
    assert status.returncode == 1 and "its start-up hook did not run" in status.stdout


def test_thunder_from_a_source_checkout(environment, wheels, tmp_path):
    """Thunder found by another finder on sys.meta_path, as setuptools' editable installs have it."""
    environment.install(wheels[1])
    source = tmp_path / "source"
    environment.site_packages.joinpath("thunder").rename(source)
    environment.site_packages.joinpath("zz_editable.pth").write_text("import zz_editable_finder")
    environment.site_packages.joinpath("zz_editable_finder.py").write_text(
        "import sys, importlib.util\n"
        "class Finder:\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'thunder':\n"
        f"            return importlib.util.spec_from_file_location(name, {str(source / '__init__.py')!r})\n"
        "sys.meta_path.append(Finder)\n"
    )
    file, thunder_file = map(Path, environment.eval(f"[sys.modules[{MODULE!r}].__file__, thunder.__file__]"))
    assert file.is_relative_to(environment.site_packages / "thunder_overlay")
    assert thunder_file == source / "__init__.py"


def test_thunder_imported_before_the_overlay(environment, wheels):
    environment.install(wheels[1])
    code = (
        "import thunder, thunder_overlay; from thunder_overlay.status import inactive_reason; thunder_overlay.install();"
        "from thunder.transforms import extraction_only_prologue_transform as m; print(m.__file__, inactive_reason())"
    )
    paths = os.pathsep.join(environment.path_without_site)
    file, _, reason = environment.run("-S", "-c", code, PYTHONPATH=paths).stdout.splitlines()[-1].partition(" ")
    assert Path(file) == environment.upstream_file
    assert "thunder was imported before thunder_overlay.install() ran" in reason


def imported_at_start(environment: Environment) -> set[str]:
    lines = environment.run("-X", "importtime", "-c", "pass").stderr.splitlines()
    return {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}


def test_without_thunder_python_starts_as_before(bare_environment, wheels):
    before = imported_at_start(bare_environment)
    bare_environment.install(wheels[1])
    assert imported_at_start(bare_environment) - before == {"thunder_overlay"}
    assert bare_environment.run("-c", "import json, decimal").stderr == ""
    spec = "import importlib.util as u; print(u.find_spec('thunder'), u.find_spec('thunder_x'))"
    assert bare_environment.run("-c", spec).stdout == "None None\n"
    failed = bare_environment.run("-c", "import thunder.transforms", check=False)
    assert failed.stderr.endswith("ModuleNotFoundError: No module named 'thunder'\n")

    status = bare_environment.run("-m", "thunder_overlay", check=False)
    assert status.returncode == 1
    assert "no: lightning-thunder is not installed in this environment; run `pip install" in status.stdout


def test_a_start_up_hook_left_without_its_package_is_silent(bare_environment, wheels):
    """As when the checkout of an editable install was deleted."""
    bare_environment.install(wheels[1])
    shutil.rmtree(bare_environment.site_packages / "thunder_overlay")
    result = bare_environment.run("-c", "print('hello')")
    assert (result.stdout, result.stderr) == ("hello\n", "")


def test_status(environment, wheels):
    environment.install(wheels[1])
    status = environment.run("-m", "thunder_overlay").stdout
    for distribution in ("torch", "lightning-thunder", "thunder-prologue"):
        assert re.search(rf"^{distribution} +{re.escape(metadata.version(distribution))}$", status, re.MULTILINE)
    assert re.search(r"^Python +3\.", status, re.MULTILINE)
    assert "active               yes" in status
    assert re.search(r"^guards of attributes \w+", status, re.MULTILINE)
    assert re.search(r"^guards of tensors    \w+", status, re.MULTILINE)
    overlay = environment.site_packages / "thunder_overlay" / "thunder"
    for file in overlay.rglob("*.py"):
        name = ".".join(file.relative_to(overlay.parent).with_suffix("").parts)
        assert re.search(rf"^  {re.escape(name)} +{re.escape(str(file))}$", status, re.MULTILINE)


def stub(environment: Environment, distribution: str, package: str, version: str, source: str) -> None:
    folder = environment.site_packages / package
    folder.mkdir()
    (folder / "__init__.py").write_text(source)
    info = environment.site_packages / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")


@pytest.mark.parametrize(
    "torch_version, cause",
    [
        ("2.13.0", "thunder cannot be imported with torch 2.13.0: it needs torch < 2.13"),
        ("3.0.0a0+git1", "thunder cannot be imported with torch 3.0.0a0+git1: it needs torch < 2.13"),
        ("2.12.1", "thunder cannot be imported: AttributeError: no named tensors"),
    ],
)
def test_status_names_a_torch_that_is_too_new(bare_environment, wheels, torch_version, cause):
    stub(bare_environment, "torch", "torch", torch_version, "")
    stub(bare_environment, "lightning-thunder", "thunder", "0.2.6", "raise AttributeError('no named tensors')")
    bare_environment.install(wheels[1])
    status = bare_environment.run("-m", "thunder_overlay", check=False)
    assert status.returncode == 1 and f"active               no: {cause}" in status.stdout
    assert ("pip install 'torch>=2.7.1,<2.13'" in status.stdout) == ("2.12" not in torch_version)


def test_a_module_that_is_not_the_overlays_is_named(environment, wheels):
    environment.install(wheels[1])
    code = f"import sys, thunder, runpy; sys.modules[{MODULE!r}].__file__ = thunder.__file__; runpy.run_module('thunder_overlay')"
    status = environment.run("-c", code, check=False)
    assert status.returncode == 1 and f"no: {MODULE} comes from " in status.stdout


@pytest.mark.parametrize("installed", (False, True), ids=("not installed", "switched off"))
def test_pytest_stops_when_the_overlay_is_not_active(environment, installed):
    if installed:
        environment.install("--editable", PROJECT)
    run = environment.run("-m", "pytest", "-q", PROJECT, check=False, cwd=PROJECT, THUNDER_OVERLAY="0")
    remedy = "switched off by THUNDER_OVERLAY=0" if installed else "run `pip install -e '.[demo,test]'`"
    assert run.returncode != 0 and remedy in run.stdout + run.stderr
    assert "passed" not in run.stdout
