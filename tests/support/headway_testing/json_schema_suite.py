"""The public JSON Schema Test Suite, out of the source distribution of jsonschema on PyPI, kept in the user's
cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RELEASE = "4.26.0"
DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
SECONDS = 120


@dataclass(frozen=True, slots=True)
class Case:
    """A schema of the suite. tests: instances as (JSON value, whether it is valid)."""

    file: str
    description: str
    schema: Any
    tests: tuple[tuple[Any, bool], ...]


def suite_folder() -> Path:
    """Returns the folder of the drafts; fetches it at its first use. Raises OSError where PyPI cannot be
    reached."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "headway-tests"
    folder = cache / f"jsonschema-{RELEASE}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as fresh:
            _fetch(Path(fresh))
            try:
                (Path(fresh) / folder.name).rename(folder)
            except OSError:  # another process was faster
                assert folder.exists(), folder
    return folder / "json/tests"


def _fetch(target: Path) -> None:
    wanted = ["--no-deps", "--no-binary", "jsonschema", f"jsonschema=={RELEASE}"]
    command = [sys.executable, "-m", "pip", "download", "-q", "--dest", str(target), *wanted]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
    except subprocess.SubprocessError as error:
        raise OSError(f"jsonschema {RELEASE} cannot be fetched from PyPI: {error}") from error
    with tarfile.open(next(target.glob("*.tar.gz"))) as archive:
        archive.extractall(target, filter="data")


def cases(draft: str, *, with_draft: bool) -> Iterator[Case]:
    """with_draft: schemas that do not name their draft get its `$schema`."""
    folder = suite_folder() / draft
    for path in sorted(folder.rglob("*.json")):
        for case in json.loads(path.read_text()):
            schema = case["schema"]
            if with_draft and isinstance(schema, dict):
                schema = {"$schema": DRAFTS[draft], **schema}
            tests = tuple((test["data"], test["valid"]) for test in case["tests"])
            yield Case(path.relative_to(folder).as_posix(), case["description"], schema, tests)
