"""The pages of the API: every public name is described, and `make docs` makes them without a warning."""

from __future__ import annotations

import importlib
import re

import pdoc
import pytest

from serving import REPOSITORY

(LIST,) = re.findall(r"^API_MODULES := (.+)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
MODULES = LIST.split()
# Before Python 3.12 a TypedDict does not know its bases.
pytestmark = pytest.mark.filterwarnings("ignore:Cannot determine where .* is taken from:UserWarning")


def test_every_public_name_has_a_docstring():
    """As ruff has it for functions and classes; an alias is described where it is defined."""
    pages = [pdoc.doc.Module(importlib.import_module(name)) for name in MODULES]
    described = {member.name for page in pages for member in page.members.values() if member.docstring}
    public = {name for page in pages for name in getattr(page.obj, "__all__", ())}
    assert all(page.docstring for page in pages)
    assert public - described == set()


def test_the_pages_are_made_without_a_warning(tmp_path):
    pdoc.pdoc(*MODULES, output_directory=tmp_path)
    for name in MODULES:
        page = (tmp_path / f"{name.replace('.', '/')}.html").read_text()
        assert all(f'id="{public}"' in page for public in getattr(importlib.import_module(name), "__all__", ()))
