"""Starts an unpacked image from its root file system, as a container engine would, and asks it to generate.

For docker/image-check.sh: `image_check.py ROOT IMAGE_JSON PROMETHEUS`, as root, in a network namespace of its own. The
server is process 1 of a process namespace, runs as the image's user with the image's environment and no capability,
and cannot write to the root file system (`docker run --read-only --cap-drop ALL --security-opt no-new-privileges`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import monitoring_check

from rollout_client import RolloutClient, RolloutError, SamplingParams

FIXTURE = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "qwen2"
GRPC, HTTP = "127.0.0.1:50051", "http://127.0.0.1:8000"
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SERVING = b"\x08\x01"
"""The message HealthCheckResponse with SERVING."""
START_SECONDS = 60.0
STOP_SECONDS = 45.0
"""Compose's `stop_grace_period`."""
TOKEN = "0123456789abcdef" * 2

# What an engine mounts into a container, in a mount namespace that ends with it. $1 is the root, $2 what /models is.
MOUNTS = """
mount --bind "$1" "$1" && mount --bind "$2" "$1/models" && mount --rbind /dev "$1/dev" && mount --rbind /sys "$1/sys"
mount -o remount,bind,ro "$1" && mount -t proc proc "$1/proc" && mount -t tmpfs tmpfs "$1/dev/shm"
"""


class Image:
    """A root file system and how it is started."""

    def __init__(self, root: Path, description: Path) -> None:
        """Of the directory `root`; `description` is what `buildah inspect` says of the image."""
        self.root = root
        self.config: dict[str, Any] = json.loads(description.read_text())["Docker"]["config"]

    def command(self, arguments: list[str], variables: dict[str, str]) -> list[str]:
        """A process of the image, by its user and with its environment."""
        names = {"HOME": "/", **dict(entry.split("=", 1) for entry in self.config["Env"]), **variables}
        environment = [f"{name}={value}" for name, value in names.items()]
        user = self.config["User"]
        rights = ["--no-new-privs", "--bounding-set=-all", "--clear-groups", f"--reuid={user}", f"--regid={user}"]
        return ["chroot", str(self.root), "setpriv", *rights, "env", "-i", *environment, *arguments]


class Container:
    """A server that was started as the image says."""

    def __init__(self, image: Image, variables: dict[str, str], models: Path, log: Path) -> None:
        """Starts it, with the directory `models` as /models; what it prints goes to the file `log`."""
        self.image, self.variables, self.log = image, variables, log
        isolate = ["unshare", "--pid", "--mount", "--ipc", "--uts", "--fork", "--kill-child"]
        shell = ["sh", "-ec", f'{MOUNTS}\nshift 2; exec "$@"', "sh", str(image.root), str(models)]
        command = [*isolate, *shell, *image.command(image.config["Entrypoint"], variables)]
        with log.open("wb") as output:
            self.engine = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)

    @property
    def pid(self) -> int:
        """Of the server, outside its namespace."""
        children = Path(f"/proc/{self.engine.pid}/task/{self.engine.pid}/children")
        return int(children.read_text().split()[0])

    def health(self) -> int:
        """Status of the image's own health check."""
        enter = ["nsenter", "--target", str(self.pid), "--mount", "--pid", "--ipc", "--uts"]
        return health(self.image, self.variables, enter)

    def output(self) -> str:
        """What it has printed so far."""
        return self.log.read_text(errors="replace")

    def stop(self) -> tuple[int, float]:
        """Exit status after SIGTERM, and how long it took."""
        assert self.image.config.get("StopSignal", "SIGTERM") in ("SIGTERM", "15"), self.image.config["StopSignal"]
        begin = time.monotonic()
        os.kill(self.pid, signal.SIGTERM)
        return self.engine.wait(STOP_SECONDS), time.monotonic() - begin


def health(image: Image, variables: dict[str, str], enter: list[str]) -> int:
    kind, *command = image.config["Healthcheck"]["Test"]
    assert kind == "CMD", kind
    seconds = image.config["Healthcheck"]["Timeout"] / 1e9
    probe = subprocess.run(
        [*enter, *image.command(command, variables)], check=False, timeout=seconds, capture_output=True
    )
    return probe.returncode


@contextlib.contextmanager
def container(image: Image, models: Path, **variables: str) -> Iterator[Container]:
    running = Container(image, variables, models, models.with_suffix(".log"))
    try:
        yield running
    except BaseException:
        print(running.output(), file=sys.stderr)
        raise
    finally:
        running.engine.kill()
        running.engine.wait()


def grpc_health() -> bytes | None:
    with grpc.insecure_channel(GRPC) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        try:
            return check(b"", timeout=5)
        except grpc.RpcError:
            return None


def http(path: str, body: dict[str, Any] | None = None, token: str | None = None) -> tuple[int, bytes]:
    """Status and body of an answer; 0 if nobody answers."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    request = urllib.request.Request(HTTP + path, json.dumps(body).encode() if body else None, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except urllib.error.URLError:
        return 0, b""


def wait(ready: Callable[[], bool], running: Container) -> None:
    end = time.monotonic() + START_SECONDS
    while not ready():
        assert running.engine.poll() is None, f"the server ended with {running.engine.returncode}"
        assert time.monotonic() < end, f"not ready within {START_SECONDS:.0f} s"
        time.sleep(0.05)


def generate(token: str | None = None) -> list[int]:
    """The same sample through both doors."""
    sampling = SamplingParams(max_tokens=8, seed=7, ignore_eos=True)
    with RolloutClient(GRPC, timeout=60, token=token) as client:
        sample = client.generate([PROMPT], sampling=sampling, return_text=False)[0].samples[0]
    body = {"prompt": PROMPT, "max_tokens": 8, "seed": sample.seed, "ignore_eos": True, "return_token_ids": True}
    status, answer = http("/v1/completions", body, token)
    assert status == 200, (status, answer)
    assert json.loads(answer)["choices"][0]["token_ids"] == list(sample.token_ids), (answer, sample)
    return list(sample.token_ids)


def work() -> None:
    """What there is to see in the metrics."""
    generate()
    with RolloutClient(GRPC, timeout=60) as client:
        client.push_directory("model", kind="full")
        client.sleep()
        client.wake()


def step(text: str, begin: float) -> None:
    print(f"==> {text}\n    {time.monotonic() - begin:.1f} s", flush=True)


def refuses_without_tokens(image: Image, models: Path) -> None:
    begin = time.monotonic()
    with container(image, models, ROLLOUT_MODEL="/models/model") as running:
        status = running.engine.wait(START_SECONDS)
        assert status == 1 and "--insecure" in running.output(), (status, running.output())
    step("Without a token file and without ROLLOUT_INSECURE=true it does not start, and says so", begin)


def serves(image: Image, models: Path, prometheus: str) -> None:
    variables = {"ROLLOUT_MODEL": "/models/model", "ROLLOUT_MEM_UTIL": "0.1", "ROLLOUT_INSECURE": "true"}
    variables["ROLLOUT_WEIGHTS_DIR"] = "/models"
    assert health(image, variables, []) != 0, "the health check is content where there is no server"
    begin = time.monotonic()
    with container(image, models, **variables) as running:
        wait(lambda: http("/health")[0] == 200 and grpc_health() == SERVING, running)
        step("Started; health over gRPC and over HTTP", begin)
        begin = time.monotonic()
        assert running.health() == 0
        step("The image's HEALTHCHECK succeeds", begin)
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{running.pid}/status").read_text().splitlines())
        user = status["Uid"].split()[0]
        assert user != "0" and int(status["CapBnd"], 16) == 0 and status["NSpid"].split()[-1] == "1", status
        begin = time.monotonic()
        step(f"Generated {generate()} through both doors, as user {user}", begin)
        begin = time.monotonic()
        step(f"Prometheus and the dashboard: {monitoring_check.check(prometheus, work)}", begin)
        code, seconds = running.stop()
        assert code == 0, (code, running.output())
        assert http("/health")[0] == 0
        step(f"Stopped {seconds:.2f} s after SIGTERM with status 0", time.monotonic() - seconds)


def asks_for_tokens(image: Image, models: Path) -> None:
    begin = time.monotonic()
    variables = {"ROLLOUT_MODEL": "/models/model", "ROLLOUT_MEM_UTIL": "0.1"}
    with container(image, models, ROLLOUT_AUTH_TOKEN_FILE="/models/tokens", **variables) as running:
        wait(lambda: http("/health")[0] == 200, running)
        assert running.health() == 0
        assert http("/v1/models")[0] == 401
        with RolloutClient(GRPC, timeout=60) as client:
            try:
                client.generate([PROMPT])
            except RolloutError as error:
                assert "token" in str(error), error
            else:
                raise AssertionError("generated without a token")
        generate(TOKEN)
        code, _ = running.stop()
        assert code == 0, (code, running.output())
    step("With a token file: nothing without a token, a sample with one, health for all", begin)


def main() -> None:
    image = Image(Path(sys.argv[1]), Path(sys.argv[2]))
    ports = set(image.config["ExposedPorts"])
    assert ports == {"50051/tcp", "8000/tcp"}, ports
    (image.root / "models").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        models = Path(directory, "models")
        models.mkdir()
        subprocess.run(["cp", "-r", str(FIXTURE), str(models / "model")], check=True)
        for of_tests in ("reference", "statistics"):
            (models / "model" / f"{of_tests}.safetensors").unlink()
        (models / "tokens").write_text(f"control {TOKEN}\n")
        subprocess.run(["chmod", "-R", "a+rX", str(models)], check=True)
        refuses_without_tokens(image, models)
        serves(image, models, sys.argv[3])
        asks_for_tokens(image, models)


if __name__ == "__main__":
    main()
