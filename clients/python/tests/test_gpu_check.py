"""The rules of `make gpu-check`, and docker/'s files for NVIDIA GPUs. No GPU is needed."""

from __future__ import annotations

import json
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
    args = SimpleNamespace(emulator=None, step_seconds=3.0, logs=tmp_path)
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
    assert rows == ["step", gpu_check.LIMITS, *(step.title for step in gpu_check.STEPS), gpu_check.SPEEDS]


CARD = {"name": "a fake card", "devices": 1, "copy_gb_per_s": 3000.0, "bf16_tflops": 800.0}
PASSES = """
print("successes:\\n\\n---- bits stdout ----\\nprompts from seed 3\\n")
print("---- calls stdout ----\\nleft out: calls of the driver fail; only the emulator does that\\n")
print("test result: ok. 2 passed; 0 failed; 0 ignored")
"""
FAILS = "print('x' * 20000)\nprint('test result: FAILED. 1 passed; 1 failed; 0 ignored')\nraise SystemExit(101)"
LEFT_OUT = """
print("---- calls stdout ----\\nleft out: it needs 2 GPUs\\n")
print("test result: ok. 1 passed; 0 failed; 0 ignored")
"""


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """Runs the check with fake binaries on a fake card: `check({"engines::": FAILS}, *flags)` gives status and output.

    Steps pass whose first filter is not given. Each binary writes its arguments and environment to NAME.json.
    """
    benches = tmp_path / "benches"
    benches.mkdir()
    (benches / "card.py").write_text(f"print({json.dumps(json.dumps(CARD))})")
    (benches / "gpu.py").write_text("import sys\nprint('| decode | 75 % |') if '--help' not in sys.argv else None")
    monkeypatch.setattr(gpu_check, "BENCHES", benches)
    monkeypatch.setattr(gpu_check, "Card", lambda: SimpleNamespace(close=lambda: None))

    def run(programs, *flags):
        for name in gpu_check.BINARIES.values():
            seen = tmp_path / f"{name}.json"
            notes = f"import json, os, sys\njson.dump([sys.argv[1:], dict(os.environ)], open({str(seen)!r}, 'w'))"
            body = f"exec({programs!r}.get(sys.argv[1], {PASSES!r}))"
            (tmp_path / name).write_text(f"#!{sys.executable}\n{notes}\n{body}\n")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", "run", str(tmp_path), *flags])
        return gpu_check.main(), capsys.readouterr().out

    return run


def row(output, title):
    """Outcome and detail of a step in the table."""
    (found,) = re.findall(rf"^\| {re.escape(title)} \| ([^|]+) \| \d+ \| (.*) \|$", output, re.MULTILINE)
    return found


def test_tests_that_are_left_out_are_named_and_do_not_count_as_passed(check):
    status, output = check({"failures::": LEFT_OUT}, "--only", "engines$|fail|several cards")
    assert status == 0
    named = "calls (calls of the driver fail; only the emulator does that)"
    assert row(output, "whole engines") == (gpu_check.PASSED, f"1 tests; left out: {named}")
    assert row(output, "calls that fail") == (gpu_check.ABSENT, "0 tests; left out: calls (it needs 2 GPUs)")
    assert row(output, "ranks on several cards") == (gpu_check.ABSENT, "wants 4 cards, here are 1")


def test_each_step_leaves_its_whole_output_in_a_file(check, tmp_path):
    status, output = check({"engines::": FAILS}, "--logs", str(tmp_path / "kept"))
    assert status == 1 and row(output, "whole engines")[0] == gpu_check.FAILED
    logs = {path.name: path.read_text() for path in (tmp_path / "kept").iterdir()}
    titles = [gpu_check.LIMITS, *(step.title for step in gpu_check.STEPS), gpu_check.SPEEDS]
    absent = {title for title in titles if row(output, title)[1].startswith(("wants", "no compute-sanitizer"))}
    assert len(logs) == len(titles) - len(absent)
    engines = logs[gpu_check.log_of(SimpleNamespace(logs=tmp_path), "whole engines").name]
    assert "x" * 20000 in engines and "x" * 20000 not in output
    assert "| decode | 75 % |" in output and "| decode | 75 % |" in logs[sorted(logs)[-1]]


def test_a_step_that_hangs_leaves_what_it_has_said(tmp_path, monkeypatch):
    def hangs(command, *, stdout, timeout, **_):
        stdout.write(b"running 3 tests\n")
        raise gpu_check.subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(gpu_check.subprocess, "run", hangs)
    (tmp_path / "engines").touch()
    args = SimpleNamespace(devices=1, directory=tmp_path, logs=tmp_path, emulator=None)
    (step,) = (step for step in gpu_check.STEPS if step.title == "whole engines")
    outcome = gpu_check.run_step(step, args, {}, 3.0)
    assert (outcome.outcome, outcome.detail) == (gpu_check.FAILED, "did not end in time")
    assert gpu_check.log_of(args, step.title).read_text() == "running 3 tests\n"


def test_tests_are_told_where_fixtures_and_server_are(check, tmp_path):
    check({}, "--only", "^whole engines$")
    arguments, environment = json.loads((tmp_path / "engines.json").read_text())
    assert arguments == ["engines::", "--show-output"], "without it no test that passes can say that it was left out"
    assert environment["ROLLOUT_FIXTURES"] == str(REPOSITORY / "tests/fixtures")
    assert environment["ROLLOUT_SERVER_BINARY"] == str(tmp_path / "rollout-server")


def test_figures_are_left_out_only_if_they_need_not_be_measured(check, tmp_path):
    (tmp_path / "benches/gpu.py").write_text("import hpack_of_another_name")
    status, output = check({}, "--only", "whole engines$|speed")
    assert status == 0 and row(output, gpu_check.SPEEDS)[0] == gpu_check.ABSENT
    assert "No module named 'hpack_of_another_name'" in row(output, gpu_check.SPEEDS)[1]
    (tmp_path / "engines.json").unlink()
    status, output = check({}, "--only", "whole engines$|speed", "--must-measure")
    assert status == 1 and "No module named 'hpack_of_another_name'" in output
    assert not (tmp_path / "engines.json").exists(), "it fails before anything runs"


def test_figures_that_fail_are_a_failure(check, tmp_path):
    (tmp_path / "benches/gpu.py").write_text("import sys\nsys.exit(0 if '--help' in sys.argv else 77)")
    status, output = check({}, "--only", "speed", "--must-measure")
    assert (status, row(output, gpu_check.SPEEDS)) == (1, (gpu_check.FAILED, "status 77"))


def test_without_a_card_the_status_is_77(check, monkeypatch):
    def absent():
        raise gpu_check.NoCardError("no driver")

    monkeypatch.setattr(gpu_check, "Card", absent)
    status, output = check({})
    assert (status, gpu_check.NO_CARD) == (77, 77) and "skipped, as there is no card here: no driver" in output


def test_make_runs_every_test_for_gpus_and_fails_without_a_card():
    script = (REPOSITORY / "scripts/cuda.sh").read_text()
    tests = re.search(r"^tests=\((.*)\)$", script, re.MULTILINE)[1].split()[1::2]
    assert script.count('"${tests[@]}"') == 3, "built and run on the emulator, and built for a card"
    files = {path.stem for folder in ("tests", "kernels/tests") for path in (REPOSITORY / folder).glob("cuda*")}
    assert set(tests) == files | {"devices"}
    assert set(tests) == {name for *_, name, kind in gpu_check.BINARIES if kind == "test"}
    recipe = (REPOSITORY / "Makefile").read_text().split("\ngpu-check:")[1].split("\n\n")[0]
    assert re.search(r"gpu_check\.py card$", recipe, re.MULTILINE)
    assert "gpu_check.py run target/gpu-check --must-measure" in script


def test_what_tests_print_is_what_is_read():
    source = (REPOSITORY / "kernels/src/cpu/testing/require.rs").read_text()
    printed = re.search(r'println!\("(left out: )\{', source)[1]
    assert gpu_check.LEFT_OUT.search(f"{printed}it needs 2 GPUs")[1] == "it needs 2 GPUs"
    # Neither an early return without a word nor another word.
    for path in (REPOSITORY / "tests").rglob("*.rs"):
        silent = re.search(r"if !(emulator::)?is_there\(\)|println!\(\"skipped", path.read_text())
        assert silent is None, f"{path}: {silent[0]}"


def test_every_test_for_gpus_is_in_a_step():
    def filters(binary):
        return [f for step in gpu_check.STEPS if step.binary == binary and not step.tool for f in step.filters]

    def has_tests(folder, module):
        sources = [*folder.glob(f"{module}.rs"), *folder.glob(f"{module}/*.rs")]
        return any("#[test]" in path.read_text() for path in sources)

    sources = REPOSITORY / "kernels/src"
    modules = {
        "::".join(path.relative_to(sources).with_suffix("").parts)
        for path in (sources / "cuda").rglob("*.rs")
        if "#[test]" in path.read_text()
    }
    assert modules and [m for m in modules if not any(f in f"{m}::" for f in filters("kernels"))] == []
    for folder, binary in [("kernels/tests/cuda", "equalities"), ("tests/cuda", "engines")]:
        main = (REPOSITORY / folder / "main.rs").read_text()
        groups = {g for g in re.findall(r"^mod (\w+);$", main, re.MULTILINE) if has_tests(REPOSITORY / folder, g)}
        assert groups and sorted(g for g in groups if f"{g}::" not in filters(binary)) == [], binary


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
