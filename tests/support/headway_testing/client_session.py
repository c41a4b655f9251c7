"""Sessions of other people's clients: programs in environments of their own that print what they received as
JSON."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway_testing.daemon import Server

SECONDS = 300


def told_by(program: str | Path, session: Path, *servers: Server) -> Any:
    """Runs the session with the program that reads it, and the servers' URLs as its arguments. Returns what
    it printed."""
    flags = ["-P"] if session.suffix == ".py" else []
    command = [program, *flags, session, *(server.url for server in servers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def said_by(
    command: list[str | Path], script: str, *, folder: Path, environment: Mapping[str, str], code: int = 0
) -> str:
    """Runs a coding agent in the folder, which is its home, with the script as its standard input. Returns
    what it printed.

    code: how it must end. It has no variables but PATH and the given ones.
    """
    variables = {"PATH": os.environ["PATH"], "HOME": str(folder), "LANG": "C.UTF-8", **environment}
    done = subprocess.run(
        command, input=script, cwd=folder, env=variables, capture_output=True, text=True, timeout=SECONDS, check=False
    )  # fmt: skip
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def call_of(name: str, **arguments: object) -> str:
    """Returns the text by which a model in Hermes form calls a tool."""
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"
