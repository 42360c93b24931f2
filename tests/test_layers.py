"""Each folder imports only lower layers, and only the modules that its layer may use."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import nsparq

SOURCE = Path(nsparq.__file__).parent

# What each package or module directly under nsparq may import from the others.
BASE = {
    "private_random",
    "dead_letter",
    "dead_letter_groups",
    "errors",
    "headers",
    "kernel",
    "names",
    "packed",
    "version",
}
DAEMON = {"addresses", "daemon_options", "http", "listening", "logs", "option_table", "process", "tasks"}
MAY_IMPORT = {
    "private_random": set(),
    "dead_letter": set(),
    "dead_letter_groups": set(),
    "json_pointer": set(),
    "errors": set(),
    "headers": {"kernel"},
    "names": set(),
    "kernel": {"_kernel"},
    "packed": set(),
    "version": {"kernel"},
    "busy_poll": set(),
    "flags": set(),
    "delivery_policy": {"flags", "names", "private_random"},
    "addresses": set(),
    "listening": set(),
    "status_server": {"addresses", "errors", "listening", "version"},
    "secret_scope": {"addresses"},
    "tasks": set(),
    "logs": set(),
    "malloc": set(),
    "option_table": {"errors", "flags", "version"},
    "daemon_options": {"option_table"},
    "options": {"daemon_options", "errors", "flags", "option_table"},
    "process": {"errors", "logs", "option_table", "streams"},
    "streams": set(),
    "fetch": {"errors"},
    "http": {"errors", "listening"},
    "transport": {"errors"},
    "client": BASE | {"addresses", "flags", "secret_scope", "transport", "busy_poll", "wire"},
    "integrations": BASE | {"addresses", "client"},
    "wire": BASE,
    "storage": BASE,
    "replication": BASE | {"fetch", "storage"},
    "archive": BASE | {"storage"},
    "broker": BASE | {"delivery_policy", "flags", "json_pointer", "options", "storage", "wire"},
    "server": BASE
    | DAEMON
    | {
        "archive",
        "broker",
        "busy_poll",
        "delivery_policy",
        "fetch",
        "flags",
        "kernel",
        "malloc",
        "options",
        "replication",
        "storage",
        "transport",
        "wire",
    },
    "lookup": BASE | DAEMON | {"wire"},
    # It uses the server's policy file, which has the permissions for both.
    "admin": BASE | DAEMON | {"delivery_policy", "fetch", "flags", "secret_scope", "server", "storage"},
    "testing": BASE
    | {
        "addresses",
        "broker",
        "client",
        "lookup",
        "options",
        "pipeline",
        "process",
        "server",
        "spark",
        "tasks",
    },
    # Runs in Spark's processes: it talks to daemons, and knows the format of the log.
    "spark": BASE
    | {
        "addresses",
        "archive",
        "client",
        "fetch",
        "flags",
        "kernel",
        "malloc",
        "option_table",
        "secret_scope",
        "storage",
        "transport",
        "wire",
    },
    "pipeline": BASE
    | {"addresses", "client", "fetch", "flags", "logs", "option_table", "spark", "status_server", "wire"},
    "tools": BASE
    | {
        "addresses",
        "client",
        "daemon_options",
        "delivery_policy",
        "fetch",
        "flags",
        "http",
        "logs",
        "option_table",
        "pipeline",
        "server",
        "spark",
        "streams",
        "tasks",
    },
    # Starts the others as processes; it reads the pipeline files that it passes on.
    "up": BASE | {"addresses", "fetch", "flags", "listening", "logs", "pipeline", "tasks", "tools"},
    # Uses how `up` ends children with their parent.
    "runner": BASE | {"addresses", "client", "flags", "logs", "status_server", "tools", "up"},
    "demo": BASE | {"addresses", "client", "fetch", "tasks", "up"},
}


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Full dotted names of everything the file imports, wherever in the file."""
    return tuple(imported(path, ast.walk(tree(path))))


def imported(path: Path, nodes: Iterable[ast.AST]) -> Iterator[str]:
    package = path.relative_to(SOURCE.parent).parts[:-1]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            # `from nsparq import broker` names a layer too.
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def layer(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def roots(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(path)}


def offenders(folder: str, forbidden: set[str]) -> dict[str, set[str]]:
    found = {path.name: roots(path) & forbidden for path in (SOURCE / folder).rglob("*.py")}
    return {name: names for name, names in found.items() if names}


def test_imports_point_down_only() -> None:
    for path in modules():
        used = {name for name in imports(path) if name.startswith("nsparq.")}
        if path == SOURCE / "__init__.py":
            assert used == {"nsparq.version.__version__"}
            continue
        assert layer(path) in MAY_IMPORT, f"say in MAY_IMPORT what {layer(path)} may know"
        assert {name.split(".")[1] for name in used} <= MAY_IMPORT[layer(path)] | {layer(path)}, path


def test_the_wire_layer_does_no_io() -> None:
    assert not offenders(
        "wire",
        {
            "asyncio",
            "io",
            "logging",
            "os",
            "select",
            "socket",
            "ssl",
            "subprocess",
            "threading",
            "time",
            "uvloop",
        },
    )


def test_the_broker_layer_knows_no_sockets_and_no_event_loop() -> None:
    assert not offenders("broker", {"asyncio", "select", "socket", "ssl", "subprocess", "uvloop"})


def test_storage_touches_the_disk_through_its_files_module_only() -> None:
    modules = {"fcntl", "glob", "io", "mmap", "os", "shutil", "tempfile"}
    of_paths = {"is_dir", "is_file", "iterdir", "mkdir", "read_bytes", "read_text", "rmdir", "touch"}
    of_paths |= {"write_bytes", "write_text"}
    for path in (SOURCE / "storage").rglob("*.py"):
        if path.name == "files.py":
            continue
        assert not roots(path) & modules, path
        for node in ast.walk(tree(path)):
            opens = isinstance(node, ast.Name) and node.id == "open"
            asks_path = isinstance(node, ast.Attribute) and node.attr in of_paths
            assert not opens and not asks_path, f"{path}:{node.lineno}"  # type: ignore[attr-defined]


def test_only_the_connector_and_what_builds_on_it_know_spark() -> None:
    # `tools` and `testing` import it for annotations; their tests check that they work without.
    spark = {"pandas", "py4j", "pyarrow", "pyspark"}
    users = {layer(path) for path in modules() if roots(path) & spark}
    # The demo reads its own result.
    assert users <= {"spark", "pipeline", "testing", "tools", "demo"}


def run_by_import(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a module that run on import: not functions, TYPE_CHECKING and __main__
    blocks."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    skipped = isinstance(node, ast.If) and ast.unparse(node.test) in (
        "TYPE_CHECKING",
        "__name__ == '__main__'",
    )
    yield node
    for child in node.orelse if skipped else ast.iter_child_nodes(node):  # type: ignore[attr-defined]
        yield from run_by_import(child)


def parents(name: str) -> set[str]:
    """The packages of a module, which are imported first."""
    parts = name.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts))}


def test_imports_form_no_cycle() -> None:
    """Every module can be imported alone."""
    paths = {module_name(path): path for path in modules()}
    known = {*paths, "nsparq._kernel"}
    needs: dict[str, set[str]] = {}
    for module, path in paths.items():
        names = imported(path, run_by_import(tree(path)))
        targets = {name if name in known else name.rpartition(".")[0] for name in names} & known
        packages = {package for target in targets for package in parents(target)}
        # A package's __init__ may import its modules, if they import nothing from it.
        needs[module] = targets | (packages - parents(module) - {module})
    TopologicalSorter(needs).prepare()


def test_every_module_can_be_imported() -> None:
    names = [module_name(path) for path in modules() if path.name != "__main__.py"]
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *names], capture_output=True, text=True
    )
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


def test_the_command_line_needs_no_package_of_an_extra() -> None:
    extras = ("OpenSSL", "cramjam", "crc32c", "cryptography", "httptools", "isal", "jinja2", "numpy", "re2")
    extras += ("rich", "uvloop")
    block = f"import sys; sys.modules.update(dict.fromkeys({extras}))"
    for package, program in (("server", "nsqd"), ("lookup", "nsqlookupd"), ("admin", "nsqadmin")):
        code = f"{block}; from nsparq.{package}.main import main; sys.exit(main(['--version']))"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.startswith(f"{program} v")


def test_random_choices_are_drawn_from_our_own_source() -> None:
    users = {module_name(path) for path in modules() if "random" in roots(path)}
    assert users <= {"nsparq.private_random", "nsparq.demo.events"}
