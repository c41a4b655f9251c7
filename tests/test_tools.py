"""Programs beside Python: what is missing is installed or named, and its tests are skipped by name and
counted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SCRIPT = TESTS / "install_tools.sh"
NEEDS_A_PROGRAM = "tests/deploy/test_manifests.py::test_systemd_accepts_the_unit"


def run_script(
    folder: Path, group: str, *, user_id: int, **programs: str
) -> subprocess.CompletedProcess[str]:
    """Runs the script where only `programs` (their shell code by name) are installed."""
    for name, code in ({"id": f"echo {user_id}"} | programs).items():
        (folder / name).write_text(f"#!/bin/sh\n{code}\n")
        (folder / name).chmod(0o755)
    environment = {"PATH": str(folder), "PY": "nothing-of-this-name"}
    return subprocess.run(
        ["/bin/sh", SCRIPT, group], env=environment, capture_output=True, text=True, check=False
    )


def test_root_on_debian_installs_what_is_missing_and_nothing_else(tmp_path: Path) -> None:
    done = run_script(
        tmp_path, "test", user_id=0, chromium="", curl="", **{"apt-get": f'echo "$@" >>{tmp_path}/log'}
    )
    assert done.returncode == 0
    asked = (tmp_path / "log").read_text().splitlines()
    assert asked[0] == "update -q"
    packages = set(asked[1].removeprefix("install -y -q --no-install-recommends ").split())
    assert packages - {"libatomic1"} == {"prometheus", "kubernetes-client", "systemd"}


@pytest.mark.parametrize("user_id", [0, 1000], ids=["root-without-apt", "user"])
def test_elsewhere_the_missing_packages_are_named(tmp_path: Path, user_id: int) -> None:
    programs = {"apt-get": "exit 7"} if user_id else {}
    done = run_script(tmp_path, "test", user_id=user_id, promtool="", chromium="", curl="", **programs)
    assert done.returncode == 0, "the tests run without them"
    assert "apt-get install --no-install-recommends kubernetes-client systemd" in done.stderr


@pytest.mark.parametrize(("group", "status"), [("test", 0), ("venv", 1), ("clients", 1)])
def test_only_tests_can_do_without(tmp_path: Path, group: str, status: int) -> None:
    done = run_script(tmp_path, group, user_id=0, **{"apt-get": "exit 100"})
    assert done.returncode == status
    assert "apt-get could not install" in done.stderr


def test_the_script_knows_every_program_that_tests_run() -> None:
    names = {
        name
        for file in TESTS.rglob("*.py")
        for name in re.findall(r'\binstalled\("([\w-]+)"\)', file.read_text())
    }
    assert names >= {"chromium", "prometheus", "promtool"}
    for name in names - {
        "prometheus",
        "bash",
        "nsenter",
        "unshare",
    }:  # of promtool's package, and of every Debian
        assert f"command -v {name}\n" in SCRIPT.read_text()


@pytest.mark.parametrize(
    ("flags", "status"),
    [pytest.param([], 0, marks=pytest.mark.long), (["--require-tools"], 1)],
    ids=["user", "ci"],
)
def test_a_test_without_its_program_is_skipped_by_name_and_counted(
    tmp_path: Path, flags: list[str], status: int
) -> None:
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *flags, NEEDS_A_PROGRAM]
    environment = os.environ | {"PATH": str(tmp_path)}
    done = subprocess.run(
        command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stdout
    assert f"{NEEDS_A_PROGRAM}: systemd-analyze is missing\nskipped: 1;" in done.stdout
