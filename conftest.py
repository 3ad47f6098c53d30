"""Stops a test run that would test Thunder's own modules of the same names instead of this project's."""

import pytest


def pytest_configure(config):
    try:
        from thunder_overlay.status import inactive_reason
    except ModuleNotFoundError:
        reason = "thunder-prologue is not installed in this environment; run `pip install -e '.[demo,test]'`"
    else:
        reason = inactive_reason()
    if reason is not None:
        pytest.exit(f"the thunder overlay is not active: {reason}", returncode=pytest.ExitCode.USAGE_ERROR)
