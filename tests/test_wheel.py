"""The wheel holds every module and the embedded model: setuptools leaves things out in silence."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("server", "engine", "kernels")
PACKAGED = ("src", *PACKAGES, "docs", "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that no build folder is left in the checkout."""
    copy, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("wheel")
    for name in PACKAGED:
        source = ROOT / name
        if source.is_dir():
            leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(source, copy / name, symlinks=True, ignore=leave)
        else:
            shutil.copy(source, copy / name)
    command = [
        sys.executable,
        "-P",
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(out),
        str(copy),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (built,) = out.glob("*.whl")
    return built


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_every_module_is_in_the_wheel(wheel: Path) -> None:
    modules = {f"headway/{p.relative_to(ROOT)}" for name in PACKAGES for p in (ROOT / name).rglob("*.py")}
    modules |= {"headway/__init__.py", "headway/__main__.py"}
    assert modules - names_in(wheel) == set()
    assert len(modules) > 40


def test_what_is_not_code_is_in_the_wheel_too(wheel: Path) -> None:
    demo = ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors", "README.md")
    wanted = {f"headway/engine/demo/{name}" for name in demo}
    wanted |= {f"headway/engine/bench/shapes/{name}/config.json" for name in ("mimo-7b", "mimo-0.5b")}
    wanted |= {"headway/engine/chat_model/tools.jinja"}
    sources = ("linear/integer_cpu_linear.c", "attention/cpu_attention.c", "runtime/cpu_library.h")
    wanted |= {f"headway/kernels/{name}" for name in sources}
    wanted |= {f"headway/{name}py.typed" for name in ("", "server/", "engine/", "kernels/")}
    page = [path for path in (ROOT / "server/dashboard").iterdir() if path.is_file()]
    wanted |= {f"headway/server/dashboard/{path.name}" for path in page}
    docs = [path for path in (ROOT / "docs").iterdir() if path.suffix in (".md", ".png", ".svg")]
    wanted |= {"headway/README.md", "headway/CHANGELOG.md", *(f"headway/docs/{path.name}" for path in docs)}
    assert len(page) > 8
    assert len(docs) > 20
    assert wanted - names_in(wheel) == set()


def test_the_wheel_runs_where_there_is_no_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = "import headway.server.cli as c, headway; print(headway.__file__); c.main(['--version'])"
    environment = {"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert str(tmp_path / "site") in done.stdout, done.stderr
    assert "0.1.0" in done.stdout + done.stderr
