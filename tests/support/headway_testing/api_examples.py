"""The curl commands of docs/api.md."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[3] / "docs/api.md"


def examples() -> list[tuple[str, dict[str, Any]]]:
    """Returns (path, body) of each."""
    commands = re.findall(r"^curl localhost:8000(\S+) -d '([^']+)'$", PAGE.read_text(), re.MULTILINE)
    return [(path, json.loads(body)) for path, body in commands]
