"""The wheels of the server and the client, installed as a user does: into an empty environment, without a compiler."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

from serving import FIXTURES, REPOSITORY

# It has a chat template, which the demo's questions need.
MODEL = FIXTURES / "llama"
# A bound for the download: four times the wheel of the day this was written.
MAX_BYTES = 64 << 20
OLDEST_GLIBC = (2, 28)
SERVED = """
import sys
from rollout_client import SamplingParams, ServerProcess
with ServerProcess(model=sys.argv[1], flags=["--kernel", sys.argv[2], "--kv-cache-bytes", "64MiB"]) as server:
    print(server.client.info().kernel, server.client.generate([[1, 2, 3]], sampling=SamplingParams(max_tokens=4)))
"""


@pytest.fixture(scope="module")
def wheels(request):
    return Path(request.config.getoption("--wheels")).absolute()


@pytest.fixture(scope="module")
def wheel(wheels):
    found = list(wheels.glob("rollout_server-*.whl"))
    assert len(found) == 1, f"{found} in {wheels}: run `make wheel`"
    return found[0]


@pytest.fixture(scope="module")
def version():
    command = [sys.executable, REPOSITORY / "scripts/version.py", "--print"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def run(*command):
    """Output of a command that sees no other program, and nothing of the repository."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ROLLOUT_", "CARGO"))}
    environment = kept | {"PATH": "/nowhere", "CC": "/nowhere/cc"}
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, cwd="/", env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(wheel, wheels, tmp_path_factory):
    """The programs of an environment into which pip has put the server; its dependencies come from the index."""
    directory = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", directory)
    programs = directory / "bin"
    start = time.monotonic()
    run(
        *(programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *("--only-binary", ":all:", "--find-links", wheels, wheel),
    )
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, installed in {time.monotonic() - start:.1f} s")
    return programs


def test_the_wheel_is_one_program_for_all_linux_since_2018(wheel, version):
    assert wheel.name == f"rollout_server-{version}-py3-none-manylinux_2_28_x86_64.whl"
    assert wheel.stat().st_size < MAX_BYTES
    content = zipfile.ZipFile(wheel)
    folder = f"rollout_server-{version}"
    program = f"{folder}.data/scripts/rollout-server"
    names = set(content.namelist())
    assert names >= {program, f"{folder}.dist-info/licenses/LICENSE"}
    assert any(re.search(r"\.dist-info/sboms/.*\.cyclonedx\.json$", name) for name in names)
    assert {name for name in names if ".dist-info/" not in name} == {program}
    binary = content.read(program)
    glibc = {tuple(map(int, found)) for found in re.findall(rb"\0GLIBC_(\d+)\.(\d+)", binary)}
    assert glibc and max(glibc) <= OLDEST_GLIBC
    assert b"\0.debug_info\0" not in binary and b"\0.symtab\0" not in binary, "it is stripped"
    metadata = content.read(f"{folder}.dist-info/METADATA").decode()
    assert f"\nVersion: {version}\n" in metadata and f"\nRequires-Dist: rollout-client=={version}\n" in metadata


def test_the_sdists_have_the_sources(wheels, version):
    for name, needed in {
        "rollout_server": ["Cargo.lock", "kernels/Cargo.toml", "proto/rollout/v1/rollout.proto", "src/main.rs"],
        "rollout_client": ["src/rollout_client/demo.py", "src/rollout_client/rollout.binpb"],
    }.items():
        with tarfile.open(wheels / f"{name}-{version}.tar.gz") as content:
            names = set(content.getnames())
        assert names >= {f"{name}-{version}/{part}" for part in [*needed, "LICENSE", "PKG-INFO"]}


def test_the_command_and_the_client_have_the_version(installed, version):
    assert run(installed / "rollout-server", "--version") == f"rollout-server {version}\n"
    assert run(installed / "rollout", "--version") == f"rollout-client {version}\n"
    listed = json.loads(run(installed / "python", "-m", "pip", "list", "--format", "json"))
    names = {package["name"] for package in listed}
    assert names >= {"rollout-server", "rollout-client", "grpcio"} and not names & {"torch", "transformers"}


@pytest.mark.parametrize("kernel", ["auto", "scalar"])
def test_the_client_finds_the_server_which_has_every_instruction_set(installed, kernel):
    printed = run(installed / "python", "-c", SERVED, MODEL, kernel)
    assert kernel == "auto" or printed.startswith("scalar ")


def test_the_demo_runs_from_the_installed_packages(installed):
    start = time.monotonic()
    printed = run(installed / "python", "-m", "rollout_client.demo", "--model", MODEL)
    print(f"demo: {time.monotonic() - start:.1f} s")
    assert f"Starting {installed / 'rollout-server'}" in printed
    assert printed.count("bit for bit") == 2 and printed.endswith("ended with status 0\n")
