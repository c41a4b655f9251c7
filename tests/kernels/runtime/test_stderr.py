"""What C++ code writes to stderr past Python's warnings is kept from there."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHOICE = """
import os, sys, torch
from headway.kernels.runtime._stderr import without_stderr
from contextlib import nullcontext
def choose(context, file):
    with context():
        torch._C._set_blas_preferred_backend(torch._C._BlasBackend.Ck)
    print("told", file=file, flush=True)
"""
# torch warns once a process, and importing it takes seconds.
BOTH = """
if os.fork() == 0:
    choose(nullcontext, sys.stdout)
    os._exit(0)
assert os.wait()[1] == 0
print("alone", file=sys.stderr, flush=True)
choose(without_stderr, sys.stderr)
"""
ORDERED = "from headway.kernels import keep_sums_whole; keep_sums_whole()"


def stderr_of(source: str) -> str:
    command = [sys.executable, "-P", "-c", source]
    return subprocess.run(command, check=True, capture_output=True, text=True).stderr


def test_a_choice_of_library_is_made_without_a_raw_line() -> None:
    bare, _, kept = stderr_of(CHOICE + BOTH).partition("alone\n")
    assert "is an experimental feature" in bare
    assert kept == "told\n"


def test_a_closed_stderr_is_left_alone() -> None:
    source = CHOICE + "choose(without_stderr, sys.stdout)"
    command = ["sh", "-c", f"exec '{sys.executable}' -P -c \"$1\" 2>&-", "sh", source]
    assert subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout == "told\n"


@pytest.mark.gpu
def test_sums_are_kept_whole_without_a_raw_line() -> None:
    assert stderr_of(ORDERED) == ""
