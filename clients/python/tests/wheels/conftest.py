"""The option that says which wheels are tested."""

from __future__ import annotations

from serving import REPOSITORY


def pytest_addoption(parser):
    parser.addoption("--wheels", default=str(REPOSITORY / "target/wheels"), help="the folder that `make wheel` fills")
