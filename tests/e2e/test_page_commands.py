"""The commands of the README and of the pages for users do as printed what they are printed for.

They run in a folder and a network of their own, without the outside: port 8000 is free there, the models that
they name are the embedded one in the Hub's cache, and PATH and MODEL are folders. A command that serves must
take requests, and end by SIGTERM; any other must exit with 0.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from headway_testing.tools import installed
from headway_testing.waiting import wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FOR_USERS = ("models", "clients", "from_other_servers", "exactness", "troubleshooting", "running")
PAGES = ["README", *(f"docs/{name}" for name in FOR_USERS)]
# What needs more than a CPU and this repository: a part of a command, and who runs it instead.
DOCKER = "needs Docker; tests/deploy builds the image with this Dockerfile and runs it"
PACKAGES = "installs from the package index, as make test itself does"
NOT_RUN = {
    "cd headway": "belongs to the next",
    "make chat": "fetches a model from the package index; tests/clients/test_chat_model.py serves it",
    "docker build": DOCKER,
    "docker run": DOCKER,
    "docker compose": f"{DOCKER}; tests/deploy/test_manifests.py reads the compose files",
    "kubectl apply": "needs a cluster; tests/deploy/test_manifests.py validates what it would apply",
    "cp deploy/systemd": "needs systemd as process 1; tests/deploy/test_manifests.py verifies the unit",
    "-m venv /opt/headway": PACKAGES,
    "/opt/headway/bin/headway": "belongs to the one before; the same commands run from .venv",
    "AutoPeftModelForCausalLM": "needs an adapter and peft, whose merged models have no traces of them",
    "\nclaude\n": "tests/clients/test_claude_code.py",
    "aider --model": "tests/clients has its request bodies, edit formats and loop",
    "open-webui serve": "tests/clients/test_open_webui.py",
    "langchain_openai": "tests/clients/test_langchain.py",
    "llama_index": "tests/clients/test_frameworks.py",
    "headway head train": "needs a file that head data writes; tests/engine/training runs both",
    "headway bench exact": "takes minutes; tests/e2e/test_bench.py runs it with fewer requests",
}
NAMED = ["Qwen/Qwen3-0.6B", "meta-llama/Llama-3.1-8B-Instruct", "ORG/NAME"]
SERVES = re.compile(r"\bheadway serve|\bmake serve")


def commands(page: str) -> list[str]:
    """The commands of the blocks in sh, and the programs of those in Python."""
    blocks = re.findall(
        r"^```(sh|python)\n(.*?)^```$", (ROOT / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL
    )
    found = []
    for language, block in blocks:
        if language == "python":
            found.append(f".venv/bin/python - <<'END'\n{block}END")
        elif block.startswith(("export", "ask()")):  # one command needs the other
            found.append(block)
        else:
            found += block.strip().splitlines()
    return [command for command in found if command.strip()]


class Sandbox:
    """A folder, and a network that holds nobody else; its processes share both."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        own_user = [] if os.geteuid() == 0 else ["--map-root-user"]
        script = "ip link set lo up && echo up && exec sleep infinity"
        self._holder = subprocess.Popen(
            [installed("unshare"), *own_user, "--net", "sh", "-c", script], stdout=subprocess.PIPE, text=True
        )
        assert self._holder.stdout is not None
        with self._holder.stdout as told:
            assert told.readline() == "up\n"
        enter = [installed("nsenter"), "--target", str(self._holder.pid), "--net"]
        self._shell = [*enter, *(["--user", "--preserve-credentials"] if own_user else []), "bash", "-c"]
        environment = {
            **os.environ,
            "PATH": f"{folder}/.venv/bin:{os.environ['PATH']}",
            "HF_HUB_CACHE": str(folder / "hub"),
            "HF_HUB_OFFLINE": "1",
        }
        self._options: dict[str, Any] = {"cwd": folder, "env": environment, "stderr": subprocess.STDOUT}

    def run(self, command: str) -> int:
        """Returns its exit status. What asks for input gets a line."""
        line = b"What is the capital of France?\n"
        with self.log.open("w") as log:
            return subprocess.run(
                [*self._shell, command], input=line, stdout=log, timeout=300, check=False, **self._options
            ).returncode

    @contextmanager
    def serving(self, command: str, port: str) -> Iterator[None]:
        """Until the server takes requests; ends it afterwards, which must succeed."""
        # The shell and make wait for the server's own end.
        script = [*self._shell, f"trap '' TERM; {command}"]
        told = self.log.with_name("server-log")
        with told.open("w") as log:
            server = subprocess.Popen(
                script, stdin=subprocess.DEVNULL, stdout=log, start_new_session=True, **self._options
            )
        try:
            ready = f"curl -fs localhost:{port}/ready"
            wait_until(
                lambda: server.poll() is not None or self.run(ready) == 0, 120, f"{command}: not ready"
            )
            yield
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            status = server.wait(60)
        assert status == 0, told.read_text()

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """A clone in which make has installed everything, with the models that the pages name."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "tests"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        (folder / ".venv" / name).symlink_to(Path(sys.prefix) / name)
    (folder / ".venv/.ready-serve").touch()
    model = Path(str(files("headway.engine.demo")))
    for name in ("PATH", "MODEL"):
        (folder / name).symlink_to(model)
    for name in NAMED:
        repository = folder / "hub" / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "snapshots").mkdir()
        (repository / "snapshots" / ("0" * 40)).symlink_to(model)
        for revision in ("main", "COMMIT"):
            (repository / "refs" / revision).write_text("0" * 40)
    sandbox = Sandbox(folder)
    yield sandbox
    sandbox.close()


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_the_page_works(page: str, sandbox: Sandbox) -> None:
    runnable = [command for command in commands(page) if not any(part in command for part in NOT_RUN)]
    serving = [command for command in runnable if SERVES.search(command)]
    for command in serving:
        port = re.search(r"--port (\d+)", command)
        with sandbox.serving(command, port[1] if port else "8000"):
            pass
    others = [command for command in runnable if command not in serving]
    with sandbox.serving("headway serve", "8000") if others else nullcontext():
        for command in others:
            assert sandbox.run(command) == 0, f"{command}\n{sandbox.log.read_text()}"


def test_what_is_not_run_is_still_on_a_page() -> None:
    printed = [command for page in PAGES for command in commands(page)]
    assert len(printed) > 30
    assert [part for part in NOT_RUN if not any(part in command for command in printed)] == []
