"""Says whether the overlay is active, why not if it is not, and which of Thunder's modules it provides."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import sys
import warnings
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

import thunder_overlay

__all__ = ["OverlayInactive", "inactive_reason", "main", "overlay_modules", "report", "require_active"]

#: The first torch that Thunder cannot be imported with (named tensors are gone; lightning-thunder PR #2829).
FIRST_UNSUPPORTED_TORCH = (2, 13)


class OverlayInactive(RuntimeError):
    """Thunder is not overlaid by this project's files; the message says why, and the remedy."""


def overlay_modules() -> dict[str, Path]:
    """Returns the modules that the overlay holds, by their names in Thunder."""
    root = Path(thunder_overlay.ROOT)
    files = {file.relative_to(root.parent).with_suffix(""): file for file in sorted(root.rglob("*.py"))}
    return {".".join(path.parts): file for path, file in files.items()}


def inactive_reason() -> str | None:
    """Returns why the overlay is not active, with the remedy, or None when it is. Imports ``thunder``.

    Example::

        >>> from thunder_overlay.status import inactive_reason
        >>> inactive_reason() is None
        True
    """
    if os.environ.get("THUNDER_OVERLAY") == "0":
        return "it is switched off by THUNDER_OVERLAY=0 in the environment; unset that to switch it on"
    if thunder_overlay.thunder_was_imported_before:
        return (
            "thunder was imported before thunder_overlay.install() ran; install it first, before any import of thunder"
        )
    if not thunder_overlay.is_installed():
        return (
            "its start-up hook did not run: either Python was started with -S, or thunder-prologue is not installed in "
            f"this environment ({sys.prefix}); run `pip install thunder-prologue`, or `pip install -e .` in a checkout"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("thunder")
    except Exception as e:
        return _why_thunder_fails(e)
    for name, file in overlay_modules().items():
        origin = _origin(name)
        if origin is None or not os.path.samefile(origin, file):
            return f"{name} comes from {origin}, not from the overlay's {file}"
    return None


def require_active() -> None:
    """Raises :class:`OverlayInactive`, naming the remedy, unless Thunder is overlaid by this project's files.

    Example::

        >>> from thunder_overlay.status import require_active
        >>> require_active()
    """
    reason = inactive_reason()
    if reason is not None:
        raise OverlayInactive(f"the thunder overlay is not active: {reason}")


def _why_thunder_fails(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == "thunder":
        return "lightning-thunder is not installed in this environment; run `pip install lightning-thunder`"
    torch = _version("torch")
    if torch is None:
        return "torch is not installed in this environment; run `pip install 'torch>=2.7.1,<2.13'`"
    if tuple(int(part) for part in torch.split(".")[:2]) >= FIRST_UNSUPPORTED_TORCH:
        return (
            f"thunder cannot be imported with torch {torch}: it needs torch < "
            f"{'.'.join(map(str, FIRST_UNSUPPORTED_TORCH))} (lightning-thunder PR #2829); "
            f"run `pip install 'torch>=2.7.1,<2.13'` ({type(error).__name__}: {error})"
        )
    return f"thunder cannot be imported: {type(error).__name__}: {error}"


def _origin(name: str) -> str | None:
    """The file that ``import name`` loads or has loaded, found without running any further module."""
    module = sys.modules.get(name)
    if module is not None:
        return module.__file__
    package, _, _ = name.rpartition(".")
    if package in sys.modules:
        path = sys.modules[package].__path__
    else:
        grandparent, _, _ = package.rpartition(".")
        spec = thunder_overlay._finder.find_spec(package, sys.modules[grandparent].__path__)
        path = spec.submodule_search_locations if spec is not None else []
    spec = PathFinder.find_spec(name, path)
    return spec.origin if spec is not None else None


def _guard_blocks() -> dict[str, str]:
    return importlib.import_module("thunder.core.guard_blocks").describe_blocks()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def report() -> tuple[str, bool]:
    """Returns the status as text to be pasted into a bug report, and whether the overlay is active."""
    reason = inactive_reason()
    lines = [f"Python               {platform.python_version()} ({platform.platform()})"]
    for distribution in ("torch", "lightning-thunder", "thunder-prologue"):
        lines.append(f"{distribution:<20} {_version(distribution) or 'not installed'}")
    thunder = sys.modules.get("thunder")
    if thunder is not None and getattr(thunder, "__file__", None):
        lines.append(f"thunder              {thunder.__file__}")
    lines.append(f"overlay              {thunder_overlay.ROOT}")
    if reason is not None:
        lines.append(f"active               no: {reason}")
    else:
        for what, blocks in _guard_blocks().items():
            lines.append(f"{'guards of ' + what:<20} {blocks}")
        lines.append("active               yes, it provides")
        width = max(map(len, overlay_modules()))
        lines.extend(f"  {name:<{width}}  {file}" for name, file in overlay_modules().items())
    return "\n".join(lines), reason is None


def main() -> int:
    """Prints the status; returns 0 when the overlay is active and 1 when it is not."""
    text, active = report()
    print(text)
    return 0 if active else 1
