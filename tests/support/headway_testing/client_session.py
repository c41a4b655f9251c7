"""Sessions of other people's clients: programs of their own environment that print what came as JSON."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from headway_testing.daemon import Server

SECONDS = 300


def told_by(program: str | Path, session: Path, *servers: Server) -> Any:
    """Runs the session with the program that reads it, and the servers' URLs as its arguments. Returns what it printed."""
    flags = ["-P"] if session.suffix == ".py" else []
    command = [program, *flags, session, *(server.url for server in servers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
