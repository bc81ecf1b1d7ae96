"""The rules on the package's shape that no lint can state: layers, circles between modules, lengths of files."""

from __future__ import annotations

import ast
import graphlib
import os
import subprocess
import sys
from pathlib import Path

from serving import REPOSITORY

PACKAGE = REPOSITORY / "clients/python/src/rollout_client"
MAX_FILE_LINES = 500
# Modules and packages from the top layer down. Each may import only from layers further down, and its own package.
LAYERS = [
    ["cli", "demo", "ray", "swift", "trl", "verl"],
    ["fleet", "replay"],
    ["__init__"],
    ["process"],
    ["aio"],
    ["_async_weights", "_async_stream"],
    ["_async_pusher"],
    ["_async_connection", "client"],
    ["_weights", "_stream"],
    ["_delta_store", "_pusher"],
    ["_connection", "_cuda_ipc", "_parts", "_session"],
    ["_senders", "_channel"],
    ["_convert", "_http2", "_timeline", "_wire"],
    ["_convert_images", "_convert_returns", "_convert_routing", "_convert_sampling", "_convert_weights", "_tls_socket"],
    ["_fields", "_proto", "_tls", "options"],
    ["_adapter_directory", "_delta", "_lora", "_progress", "_seeds", "_segment"],
    ["_model", "_ratios", "_served_names", "_tensors", "status"],
    ["types", "_driver", "_token", "_die_with_parent"],
    ["images", "returns", "routing"],
    ["errors"],
]


def modules(package):
    """Every module of a package: its name below the package, such as `fleet._loop`, and its file."""
    return {
        ".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(package.rglob("*.py"))
    }


def imported_at_import(tree):
    """The import statements that run when a module is imported."""
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.Try):
            yield from imported_at_import(node)


def imports(package):
    """What each module of a package imports of the package when it is imported itself."""
    known = modules(package)
    found = {name: set() for name in known}
    for name, path in known.items():
        where = [*name.split("."), ""] if path.name == "__init__.py" and name != "__init__" else name.split(".")
        for node in imported_at_import(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            base = [*where[: len(where) - node.level], *(node.module or "").split(".")]
            base = ".".join(part for part in base if part)
            for alias in node.names:
                submodule = f"{base}.{alias.name}".lstrip(".")
                found[name].add(submodule if submodule in known else base or "__init__")
    return found


def circle(graph):
    """The modules of an import circle, if there is one."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_modules_import_each_other_in_a_circle():
    assert circle(imports(PACKAGE)) == []


def test_a_circle_is_found(tmp_path):
    (tmp_path / "fleet").mkdir()
    for name, text in {
        "__init__": "from .a import x",
        "a": "try:\n    from .fleet import _b\nexcept ImportError:\n    pass",
        "fleet/__init__": "",
        "fleet/_b": "from typing import Any\nfrom ..c import y",
        "c": "import a\ndef y():\n    from .a import x",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert circle(imports(tmp_path)) == []
    (tmp_path / "c.py").write_text("from . import a")
    assert set(circle(imports(tmp_path))) == {"a", "fleet._b", "c"}


def test_modules_import_only_from_layers_below():
    layers = {name: number for number, row in enumerate(LAYERS) for name in row}
    tops = {name.partition(".")[0] for name in modules(PACKAGE)}
    assert tops == layers.keys(), "LAYERS is not the list of modules"
    for name, used in imports(PACKAGE).items():
        top = name.partition(".")[0]
        for other in {other.partition(".")[0] for other in used} - {top}:
            assert layers[top] < layers[other], f"{name} imports {other}, which is not below it"


def test_files_are_short():
    lengths = {name: path.read_text().count("\n") for name, path in modules(PACKAGE).items()}
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_shell_scripts_can_be_executed():
    scripts = [
        path for folder in (".ci", "docker", "emulator", "scripts") for path in REPOSITORY.glob(f"{folder}/*.sh")
    ]
    assert scripts and [str(path) for path in scripts if not os.access(path, os.X_OK)] == []


def test_the_blocking_client_is_generated_from_the_asyncio_one():
    command = [sys.executable, REPOSITORY / "scripts/blocking_client.py", "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_a_change_of_the_asyncio_text_is_a_change_of_the_blocking_one():
    sys.path.insert(0, str(REPOSITORY / "scripts"))
    try:
        import blocking_client
    finally:
        sys.path.pop(0)
    source = "async def f():\n    # asyncio only: a task\n    if x:\n        g()\n    await asyncio.to_thread(a.b, 1)\n"
    expected = "# Generated from x.py by scripts/blocking_client.py: change that file, and run the script.\n"
    assert blocking_client.blocking(source, "x.py") == expected + "def f():\n    a.b(1)\n"
    for source, target in blocking_client.MODULES.items():
        text = (Path(blocking_client.PACKAGE) / target).read_text()
        assert text.startswith(f"# Generated from {source} ") and "await" not in text.split('"""', 2)[2]
