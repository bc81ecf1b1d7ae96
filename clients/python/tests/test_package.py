"""The wheel, installed where only its dependencies are: what is in it, its command, and what an import brings along."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from serving import REPOSITORY

PROJECT = REPOSITORY / "clients" / "python"
PACKAGE = PROJECT / "src" / "rollout_client"
# What an import of the client must not bring along: too heavy, or not there.
HEAVY = ["torch", "transformers", "peft", "trl", "swift", "verl", "ray", "rich", "aiohttp", "safetensors", "ml_dtypes"]


def run(*command):
    """Standard output of a command, outside the repository and without what points into it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ROLLOUT_"))}
    result = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, cwd="/", env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy so that nothing of an earlier build gets into it."""
    directory = tmp_path_factory.mktemp("wheel")
    shutil.copytree(PROJECT, directory / "source", ignore=shutil.ignore_patterns("build", "*.egg-info", "tests", ".*"))
    run(
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"),
        *("--wheel-dir", directory, directory / "source"),
    )
    (built,) = directory.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The programs of an environment with the wheel and, by a path, the packages of this one: nothing is downloaded."""
    directory = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", directory)
    run(
        *(sys.executable, "-m", "pip", "--python", directory / "bin" / "python", "install", "--quiet"),
        *("--no-deps", "--no-index", wheel),
    )
    (packages,) = directory.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return directory / "bin"


def test_the_wheel_has_every_module_and_what_they_read(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {path.relative_to(PACKAGE.parent).as_posix() for path in PACKAGE.rglob("*.py")}
    assert modules | {"rollout_client/py.typed", "rollout_client/rollout.binpb"} == {
        name for name in names if name.startswith("rollout_client/")
    }
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert all((folder / "__init__.py").is_file() for folder in folders)


def test_the_wheel_is_what_gets_imported(installed):
    origin = run(installed / "python", "-c", "import rollout_client; print(rollout_client.__file__)")
    assert Path(origin).is_relative_to(installed.parent)


def test_version_and_extras_are_those_of_the_project(installed):
    (version,) = re.findall(r'^version = "(.+)"$', (PROJECT / "pyproject.toml").read_text(), re.MULTILINE)
    code = "import importlib.metadata as m, json; print(json.dumps(m.metadata('rollout-client').json))"
    metadata = json.loads(run(installed / "python", "-c", code))
    assert metadata["version"] == version
    assert set(metadata["provides_extra"]) >= {"cli", "ray", "swift", "trl", "verl"}
    assert run(installed / "rollout", "--version") == f"rollout-client {version}\n"


@pytest.mark.parametrize(
    "name", ["rollout_client", "rollout_client.cli", "rollout_client.fleet", "rollout_client.swift"]
)
def test_an_import_brings_nothing_heavy(installed, name):
    code = f"import {name}, sys; print([name for name in {HEAVY} if name in sys.modules])"
    assert run(installed / "python", "-c", code) == "[]\n"


def test_the_command_runs(installed, running):
    assert "push-lora" in run(installed / "rollout", "--help")
    names = [parameter.name for parameter in running.client.parameters()]
    lines = run(installed / "rollout", "checksum", "--address", running.address).splitlines()
    assert [line.split()[1] for line in lines] == names
    assert run(installed / "python", "-m", "rollout_client.cli", "--help") == run(installed / "rollout", "--help")
