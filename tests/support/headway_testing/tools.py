"""Programs beside Python that tests run; tests/install_tools.sh installs them."""

from __future__ import annotations

import shutil

import pytest

MISSING = "is missing: tests/install_tools.sh has its Debian package"


def installed(name: str) -> str:
    """Returns the path of a program. Skips the test where the program is missing; the run's summary names
    what was skipped."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} {MISSING}")
    return path


def skipped_for_missing_tools(reports: list[pytest.TestReport]) -> list[str]:
    """Returns a line for each test that was skipped because a program is missing: its name and the
    program."""
    lines = []
    for report in reports:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        if reason.endswith(MISSING):
            lines.append(
                f"{report.nodeid}: {reason.removeprefix('Skipped: ').removesuffix(MISSING)}is missing"
            )
    return sorted(lines)
