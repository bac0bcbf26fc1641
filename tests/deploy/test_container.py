"""The image: built from the Dockerfile, run as a stranger without any rights, used, and stopped.

Needs root, buildah and podman; skipped elsewhere with the reason. No container has a network: the client is a process
of this machine that enters the container's network namespace, where the server's ports are.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pellucid_testing.checkpoints import tiny_checkpoint, tiny_config
from pellucid_testing.image import IMAGE, ROOT, CannotBuild, build_image

PODMAN = ("podman", *(("--runtime", "runc") if shutil.which("runc") else ()), "--cgroup-manager", "cgroupfs")
LOCKED_DOWN = (
    *("--read-only", "--read-only-tmpfs=false", "--tmpfs", "/tmp", "--cap-drop", "all"),
    *("--security-opt", "no-new-privileges", "--network", "none", "--no-healthcheck"),
)
STREAM_TOKENS = 3000

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

REQUESTS = """
from pellucid_client import Client
with Client("127.0.0.1:50051") as client:
    for seed in range(50):
        answer = client.generate("今天天气", seed=seed, max_new_tokens=16, ignore_eos=True).result()
        assert answer.usage.output_token_count == 16, answer
print("answered")
"""

# The signal goes out when every stream has begun; each must come to its own end all the same.
STREAMS = f"""
import os, signal, sys, threading
from pellucid_client import Client

begun = threading.Barrier(5)
finished = []

def stream(client):
    chunks = iter(stream := client.generate("天地", max_new_tokens={STREAM_TOKENS}, ignore_eos=True))
    next(chunks)
    begun.wait(60)
    rest = sum(1 for _ in chunks)
    finished.append((rest, stream.result().finish.output_token_count))

with Client("127.0.0.1:50051") as client:
    threads = [threading.Thread(target=stream, args=(client,)) for _ in range(4)]
    [thread.start() for thread in threads]
    begun.wait(60)
    os.kill(int(sys.argv[1]), signal.SIGTERM)
    [thread.join() for thread in threads]
assert len(finished) == 4, finished
assert all(rest > 1 and count == {STREAM_TOKENS} for rest, count in finished), finished
print("streamed")
"""


class Container:
    """A running container of IMAGE."""

    def __init__(self, options: Sequence[str], command: Sequence[str] = ()) -> None:
        self.id = podman("run", "--detach", *options, IMAGE, *command).strip()
        self.pid = int(podman("inspect", "--format", "{{.State.Pid}}", self.id))
        """PID 1 of the container, as this machine numbers it."""

    def client(self, *arguments: str) -> str:
        """What Python here prints with these arguments, in the container's network."""
        enter = ("nsenter", "--target", str(self.pid), "--net")
        return run(*enter, sys.executable, *arguments, timeout=300)

    def until_ready(self) -> None:
        try:
            self.client("-m", "pellucid_client.cli", "health", "--wait", "60")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()}") from None

    def inside(self, *command: str) -> str:
        return podman("exec", self.id, *command)

    def log(self) -> str:
        return run(*PODMAN, "logs", self.id, stderr=subprocess.STDOUT)

    def processes(self) -> list[tuple[str, str]]:
        """Name and state ("S", "Z", ...) of PID 1 and of all that descend from it, zombies included."""
        stats = []
        for entry in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                match = re.match(r"(\d+) \((.*)\) (\w) (\d+)", entry.read_text(), re.DOTALL)
                if match is not None:
                    stats.append((int(match[1]), match[2], match[3], int(match[4])))
        family = {self.pid}
        while more := {pid for pid, _, _, parent in stats if parent in family} - family:
            family |= more
        return [(name, state) for pid, name, state, _ in stats if pid in family]

    def ended(self, send: signal.Signals | None, seconds: float) -> tuple[int, float]:
        """Sends a signal to PID 1, if any; returns the exit code and how long PID 1 went on."""
        try:
            process = os.pidfd_open(self.pid)
        except ProcessLookupError:  # before it could be watched
            assert send is None, self.log()
            return int(podman("wait", self.id)), 0.0
        try:
            start = time.monotonic()
            if send is not None:
                signal.pidfd_send_signal(process, send)
            gone, _, _ = select.select([process], [], [], seconds)
            took = time.monotonic() - start
        finally:
            os.close(process)
        assert gone, f"still running {seconds} s after {send!r}:\n{self.log()}"
        return int(podman("wait", self.id)), took


def run(*command: str, timeout: float = 60, stderr: int = subprocess.PIPE) -> str:
    """Standard output of a command that ends well."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=timeout, cwd=ROOT)
    assert done.returncode == 0, f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def podman(*arguments: str) -> str:
    return run(*PODMAN, *arguments)


@pytest.fixture(scope="module", autouse=True)
def _settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """podman raises limits by default, which is refused where this machine's own are lower."""
    file = tmp_path_factory.mktemp("podman") / "containers.conf"
    file.write_text("[containers]\ndefault_ulimits = []\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_CONF", str(file))
        yield


@pytest.fixture(scope="module", autouse=True)
def image(_settings: None) -> None:
    try:
        build_image()
    except CannotBuild as error:
        pytest.skip(str(error))


@contextlib.contextmanager
def container(*options: str, command: Sequence[str] = ()) -> Iterator[Container]:
    running = Container(options, command)
    try:
        yield running
    finally:
        podman("rm", "--force", "--volumes", running.id)


def snapshot(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Size, mode and change time of everything in a folder and of itself. A file made and removed again shows too."""
    return {
        str(path): ((status := path.stat()).st_size, status.st_mode, status.st_ctime_ns)
        for path in [folder, *folder.rglob("*")]
    }


def test_a_stranger_without_rights_or_network_serves_the_demo_and_stops_at_once() -> None:
    with container(*LOCKED_DOWN, "--user", "12345:12345") as server:
        server.until_ready()
        server.inside("sh", "-c", "(sleep 4 &) ; exit 0")
        assert [name for name, _ in server.processes()].count("sleep") == 1, "PID 1 has not taken the orphan over"
        assert server.inside("id", "-u").strip() == "12345"
        with pytest.raises(AssertionError, match="Read-only file system"):
            server.inside("touch", "/opt/pellucid/file")
        assert server.client("-c", REQUESTS) == "answered\n"
        # The image's own health check, run as Docker and Kubernetes would.
        check = json.loads(podman("image", "inspect", IMAGE))[0]["Healthcheck"]["Test"]
        assert check[0] == "CMD"
        assert server.inside(*check[1:]).strip() == "ready"
        get = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9464/metrics').read().decode())"
        metrics = server.client("-c", get)
        assert re.search(r"^pellucid_requests_finished_total.*max_new_tokens.* 50\.0$", metrics, re.MULTILINE)
        assert re.search(r'^pellucid_build_info.*commit="tested"', metrics, re.MULTILINE)
        info = json.loads(server.client("-m", "pellucid_client.cli", "info", "--json"))
        assert info["server"]["batch_invariant"], "the image runs without its compiled kernels"

        end = time.monotonic() + 30
        while len(processes := server.processes()) > 3 and time.monotonic() < end:
            time.sleep(0.05)
        assert len(processes) == 3, processes
        assert "Z" not in [state for _, state in processes], processes

        code, took = server.ended(signal.SIGTERM, 60)
        assert code == 0, server.log()
        assert took < 4, f"stopping took {took:.2f} s"


def test_streams_come_to_their_end_on_sigterm_and_the_model_folder_is_left_alone(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "models" / "tiny", tiny_config(context_length=4096))
    for path in [folder.parent, *folder.parent.rglob("*")]:
        path.chmod(0o777)
    before = snapshot(folder.parent)
    with container(*LOCKED_DOWN, "--volume", f"{folder.parent}:/models", command=("serve", "/models/tiny")) as server:
        server.until_ready()
        assert server.inside("id", "-u").strip() == "10001"
        server.inside("test", "-w", "/models/tiny")
        assert server.client("-c", STREAMS, str(server.pid)) == "streamed\n"
        code, _ = server.ended(None, 60)
        assert code == 0, server.log()
    assert snapshot(folder.parent) == before


def test_the_model_folder_may_be_read_only(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny")
    tmp_path.chmod(0o755)
    with container(*LOCKED_DOWN, "--volume", f"{folder}:/models/tiny:ro", command=("serve", "/models/tiny")) as server:
        server.until_ready()
        with pytest.raises(AssertionError, match="exit 1"):
            server.inside("test", "-w", "/models/tiny")


def test_a_bad_command_line_ends_the_container_with_its_code_and_one_line() -> None:
    with container(*LOCKED_DOWN, command=("serve", "--max-running", "0")) as server:
        assert podman("wait", server.id).strip() == "2"
        assert server.log().startswith("pellucid serve: command line --max-running: max-running = '0' is not accepted")


def test_there_is_no_compiler_and_no_installer_in_it() -> None:
    look = "for tool in cc gcc g++ c++ clang ld pip pip3; do command -v $tool; done; python -m pip --version"
    done = subprocess.run(
        [*PODMAN, "run", "--rm", "--network", "none", "--no-healthcheck", "--entrypoint", "sh", IMAGE, "-c", look],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == ""
    assert "No module named pip" in done.stderr


def test_what_it_says_about_itself() -> None:
    image = json.loads(podman("image", "inspect", IMAGE))[0]
    config = image["Config"]
    assert config["User"] == "10001"
    assert set(config["ExposedPorts"]) == {"50051/tcp", "9464/tcp"}
    assert set(config["Volumes"]) == {"/models"}
    assert config["Entrypoint"] == ["tini", "--", "pellucid"]
    assert config["Cmd"] == ["serve"]
    labels = {name.removeprefix("org.opencontainers.image."): value for name, value in config["Labels"].items()}
    assert {"title", "description", "licenses"} <= set(labels)
    assert (labels["version"], labels["revision"]) == ("0.0.0", "tested")
