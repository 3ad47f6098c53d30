"""Lays this project's files over an installed lightning-thunder, without changing any of its files.

The overlay is a folder named ``thunder`` that has no ``__init__.py`` and holds modules at the paths they would have in
Thunder (``thunder/transforms/...``). :func:`install` puts a finder on ``sys.meta_path`` that lets the other finders
look up ``thunder`` and its packages and then puts the overlay's folder of the same name first in the package's search
path. A module of the overlay thereby takes the place of Thunder's module of that name; every other module is Thunder's.

``thunder_overlay.pth`` calls :func:`install` when the interpreter starts, as setuptools does for distutils. This module
runs in every Python process of the environment, so it imports nothing that the interpreter has not imported already.

``THUNDER_OVERLAY=0`` in the environment switches the overlay off. ``python -m thunder_overlay`` prints its status.
"""

import os
import sys

__all__ = ["ROOT", "install"]


def _find_root() -> str:
    here = os.path.dirname(os.path.abspath(__file__))
    installed = os.path.join(here, "thunder")
    if os.path.isdir(installed):
        return installed
    # A checkout (editable install): src/thunder_overlay/__init__.py, with thunder/ beside src/.
    return os.path.join(os.path.dirname(os.path.dirname(here)), "thunder")


#: The overlay's ``thunder`` folder.
ROOT: str = _find_root()

#: What a package of Thunder also gets, as if its ``__init__.py`` imported it from a module of the overlay.
REGISTERED: dict[str, tuple[tuple[str, str], ...]] = {
    "thunder.transforms": (
        ("explain_cache_misses", "ExplainCacheMisses"),
        ("extraction_only_prologue_transform", "PrologueVerificationError"),
        ("fast_dispatch_transform", "FastDispatchTransform"),
        ("fused_prologue_transform", "FusedPrologueTransform"),
    ),
    "thunder.plugins": (("fast_prologue", "FastPrologue"),),
}

#: The names under which ``thunder.compile(..., plugins=...)`` knows the registered plugins.
PLUGIN_NAMES: dict[str, str] = {"FastPrologue": "fast-prologue"}

#: Set by :func:`install` when it came too late to lay anything over Thunder.
thunder_was_imported_before: bool = False


class _RegisteringLoader:
    """Runs a package's own loader, and then adds what is registered for the package."""

    def __init__(self, loader, registered):
        self._loader = loader
        self._registered = registered

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def exec_module(self, module):
        self._loader.exec_module(module)
        for submodule, name in self._registered:
            qualified = module.__name__ + "." + submodule
            __import__(qualified)
            registered = getattr(sys.modules[qualified], name)
            setattr(module, name, registered)
            if hasattr(module, "__all__"):
                module.__all__.append(name)
            if name in PLUGIN_NAMES:
                module.register_plugin(PLUGIN_NAMES[name], registered)


class _OverlayFinder:
    """Finds packages of Thunder that the overlay has a folder for, with that folder first in their search path."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != "thunder" and not fullname.startswith("thunder."):
            return None
        folder = os.path.join(ROOT, *fullname.split(".")[1:])
        if not os.path.isdir(folder):
            return None
        spec = self._find_beneath(fullname, path, target)
        # A namespace package here is only a folder of that name on sys.path (a checkout of this project, say): it is
        # not Thunder, and the overlay without Thunder is nothing.
        if spec is not None and spec.loader is not None and spec.submodule_search_locations is not None:
            spec.submodule_search_locations = [folder, *spec.submodule_search_locations]
            if fullname in REGISTERED:
                spec.loader = _RegisteringLoader(spec.loader, REGISTERED[fullname])
        return spec

    def _find_beneath(self, fullname, path, target):
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)
            if finder is self or find_spec is None:
                continue
            spec = find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None


_finder = _OverlayFinder()


def is_installed() -> bool:
    """Whether the finder is on ``sys.meta_path``."""
    return _finder in sys.meta_path


def install() -> None:
    """Lays the overlay over Thunder for the rest of this process.

    It must run before ``thunder`` is imported, and does nothing when it does not: half an overlay would be worse than
    none. Calling it again changes nothing.

    Example::

        >>> import thunder_overlay
        >>> thunder_overlay.install()
    """
    global thunder_was_imported_before
    if is_installed():
        return
    if "thunder" in sys.modules:
        thunder_was_imported_before = True
        return
    sys.meta_path.insert(0, _finder)
