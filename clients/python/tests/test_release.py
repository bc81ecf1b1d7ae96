"""What a release needs: one version and one license everywhere, and workflows of the hosted CI that are well-formed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest
import yaml

from serving import REPOSITORY

SCRIPT = "scripts/version.py"
REPEATED = ["Cargo.toml", "Cargo.lock", "README.md", "clients/python/pyproject.toml", "packaging/server/pyproject.toml"]
WORKFLOWS = sorted((REPOSITORY / ".github/workflows").glob("*.yml"))
# A version, or a commit.
PINNED = re.compile(r"[\w.-]+(/[\w.-]+)+@((release/)?v\d[\w.]*|[0-9a-f]{40})")


def script(root, *arguments):
    """The exit status and the output of scripts/version.py in a tree."""
    command = [sys.executable, root / SCRIPT, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not run.stderr, run.stderr
    return run.returncode, run.stdout


def steps(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_all_versions_are_that_of_cargo_toml():
    assert script(REPOSITORY, "--check") == (0, "")


def test_a_new_version_is_written_everywhere_and_a_missing_one_is_named(tmp_path):
    for name in [*REPEATED, SCRIPT, "CHANGELOG.md"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    manifest = tmp_path / "Cargo.toml"
    _, old = script(REPOSITORY, "--print")
    manifest.write_text(manifest.read_text().replace(f'version = "{old.strip()}"', 'version = "7.8.9-rc.1"', 1))
    status, printed = script(tmp_path, "--check", "v7.8.8")
    places = [*REPEATED, "CHANGELOG.md, its newest heading", "the tag"]
    assert status == 1 and [line.split(":")[0] for line in printed.splitlines()] == places
    assert script(tmp_path) == (0, "")
    status, printed = script(tmp_path, "--check", "v7.8.9-rc.1")
    assert status == 1 and printed.startswith("CHANGELOG.md") and printed.count("\n") == 1
    changes = tmp_path / "CHANGELOG.md"
    changes.write_text(changes.read_text().replace("## Unreleased", "## Unreleased\n\n## 7.8.9-rc.1 - 2030-01-01"))
    assert script(tmp_path, "--check", "v7.8.9-rc.1") == (0, "")
    (tmp_path / "README.md").write_text("")
    assert script(tmp_path, "--check") == (1, "README.md: no version, but Cargo.toml has 7.8.9-rc.1\n")


@pytest.mark.parametrize("project", ["clients/python", "packaging/server"])
def test_each_package_has_the_license(project):
    # A copy: a link would be a file with a path in it wherever links are not kept.
    assert (REPOSITORY / project / "LICENSE").read_bytes() == (REPOSITORY / "LICENSE").read_bytes()


def test_the_workflows_are_valid():
    checked = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS],
        capture_output=True,
        text=True,
        check=False,
    )
    assert WORKFLOWS and checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_says_its_rights_its_limits_and_the_versions_that_it_uses(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}, "a job that needs more says so itself"
    assert all(0 < job["timeout-minutes"] <= 180 for job in workflow["jobs"].values())
    assert all(needed in workflow["jobs"] for job in workflow["jobs"].values() for needed in job.get("needs", []))
    assert all(("run" in step) != ("uses" in step) for step in steps(workflow))
    used = {step["uses"] for step in steps(workflow) if "uses" in step}
    assert [name for name in used if not PINNED.fullmatch(name)] == []
    targets = set(re.findall(r"\bmake ([a-z-]+)", path.read_text()))
    rules = (REPOSITORY / "Makefile").read_text()
    assert [name for name in targets if f"\n{name}:" not in rules] == []
    files = set(re.findall(r"(?:^|\s)((?:scripts|\.ci|docker)/[\w./-]+)(?=\s|$)", path.read_text()))
    assert files and [name for name in files if not (REPOSITORY / name).is_file()] == []


def test_a_release_has_its_parts():
    workflow = yaml.safe_load((REPOSITORY / ".github/workflows/release.yml").read_text())
    text = "\n".join(str(step.get("run") or step["uses"]) for step in steps(workflow))
    for part in (
        *("scripts/version.py --check", "make test-wheel", "cargo publish --workspace --dry-run --locked"),
        *("docker/build-push-action@", "anchore/sbom-action@", "sha256sum", "actions/attest-build-provenance@"),
        *("gh release create", "pypa/gh-action-pypi-publish@"),
    ):
        assert part in text, part
    assert set(workflow["jobs"]["release"]["needs"]) == {"packages", "image"}
