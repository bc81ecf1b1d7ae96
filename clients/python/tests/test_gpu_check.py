"""The rules of `make gpu-check`, and docker/'s files for NVIDIA GPUs. No GPU is needed."""

from __future__ import annotations

import os
import re
import sys
from types import SimpleNamespace

import pytest
import yaml

from serving import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import gpu_check

DOCKERFILE = (REPOSITORY / "docker/Dockerfile").read_text()


@pytest.mark.parametrize(
    ("status", "output", "outcome"),
    [
        (0, "test result: ok. 3 passed; 0 failed; 0 ignored", gpu_check.PASSED),
        (0, "test result: ok. 0 passed; 0 failed; 0 ignored", gpu_check.FAILED),
        (101, "test result: FAILED. 2 passed; 1 failed; 0 ignored", gpu_check.FAILED),
        (9, "test result: ok. 3 passed; 0 failed; 0 ignored", gpu_check.FAILED),
        (-11, "running 3 tests", gpu_check.FAILED),
        (0, "", gpu_check.FAILED),
    ],
)
def test_outcomes(status, output, outcome):
    assert gpu_check.judge(status, output).outcome == outcome


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("import os; os._exit(7)", "status 7"),
        ("raise SystemExit('CardError: cuCtxSetCurrent gives CUDA_ERROR_ECC')", "CardError: cuCtxSetCurrent gives"),
        ("import time; time.sleep(60)", "did not end in time"),
    ],
)
def test_a_card_that_cannot_be_used_is_said(tmp_path, monkeypatch, program, says):
    (tmp_path / "card.py").write_text(program)
    monkeypatch.setattr(gpu_check, "BENCHES", tmp_path)
    args = SimpleNamespace(emulator=None, step_seconds=3.0)
    found = gpu_check.limits(args, dict(os.environ))
    assert found.outcome == gpu_check.FAILED and found.detail.startswith(says)


def test_a_machine_without_a_card_is_no_failure(monkeypatch, capsys):
    def absent():
        raise gpu_check.NoCardError("no driver")

    def broken():
        raise gpu_check.CardError("cuDevicePrimaryCtxRetain gives CUDA_ERROR_DEVICE_UNAVAILABLE")

    for card, status, says in [(absent, gpu_check.NO_CARD, "skipped"), (broken, 1, "DEVICE_UNAVAILABLE")]:
        monkeypatch.setattr(gpu_check, "Card", card)
        assert gpu_check.has_card() == status
        assert says in capsys.readouterr().out


def test_binaries_are_told_apart_by_package():
    def message(package, name, kind, *, test=True):
        target = {"name": name, "kind": [kind]}
        return {"executable": "/x", "profile": {"test": test}, "target": target, "package_id": package}

    kernels, server = "path+file:///a/kernels#rollout-kernels@0.1.0", "path+file:///a#rollout-server@0.1.0"
    assert gpu_check.name_of(message(kernels, "cuda", "test")) == "equalities"
    assert gpu_check.name_of(message(server, "cuda", "test")) == "engines"
    assert gpu_check.name_of(message(kernels, "rollout_kernels", "lib")) == "kernels"
    assert gpu_check.name_of(message(server, "rollout-server", "bin", test=False)) == "rollout-server"
    assert gpu_check.name_of({"executable": None}) is None
    assert {step.binary for step in gpu_check.STEPS} == set(gpu_check.BINARIES.values())


def test_the_documentation_says_what_a_failure_of_each_step_means():
    section = (REPOSITORY / "docs/cuda.md").read_text().split("## First time on a card")[1]
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", section, re.MULTILINE)
    assert rows == ["step", "the card and its limits", *(step.title for step in gpu_check.STEPS), gpu_check.SPEEDS]


def test_the_images_stages():
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.MULTILINE)
    assert stages[-1] == ("runtime", "cpu"), "what is built where no target is named"
    assert ("runtime", "cuda") in stages
    for base, stage in stages[-2:]:
        lines = DOCKERFILE.split(f"FROM {base} AS {stage}\n")[1].split("\nFROM ")[0].splitlines()
        assert "USER rollout" in lines, stage


def test_compose_puts_server_and_trainer_on_one_device():
    services = yaml.safe_load((REPOSITORY / "docker/compose.cuda.yaml").read_text())["services"]
    server, trainer = services["rollout"], services["trainer"]
    assert server["build"]["target"] == "cuda" and trainer["ipc"] == "service:rollout"
    assert server["deploy"] == trainer["deploy"]
    (device,) = server["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    shared = yaml.safe_load((REPOSITORY / "docker/compose.yaml").read_text())["services"]["rollout"]
    assert shared["ipc"] == "shareable"
