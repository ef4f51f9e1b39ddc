"""The rules of the layout, checked on the source: who may import whom, and what never appears.

Each rule is a function from source to findings. It runs over the five packages, and over planted
samples that break it, so that a rule which finds nothing by mistake shows.
"""

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

# Package -> the packages it may import besides itself.
BELOW = {
    "configs": set[str](),
    "proto": set[str](),
    "workers": {"configs", "proto"},
    "pools": {"configs", "proto", "workers"},
    "router": {"configs", "proto", "workers", "pools"},
}

# The data path has one module at each end that speaks Generate on the wire: a second one would be a
# second relay, with its own bugs.
SPEAKS_GENERATE = {"workers/channel", "workers/server", "router/front"}

# Absolute paths that mean the same on every machine: shared memory, and gRPC's method paths.
SAME_EVERYWHERE = r"/dev/shm(/|$)|/openengine\.v1\.\w+/"

MODULES = {
    f"{package}/{path.stem}": path
    for package in BELOW
    for path in sorted((REPOSITORY / package).glob("*.py"))
    if not re.search(r"_pb2(_grpc)?$", path.stem)
}


@cache
def parsed(source: str) -> ast.Module:
    """Its tree, which nobody changes: every rule asks for those of all modules."""
    return ast.parse(source)


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Dotted name of everything imported, at any depth; relative ones keep their leading dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def constants(tree: ast.AST) -> Iterator[str]:
    """Every string or bytes literal, docstrings left out."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            if isinstance(node.value, str):
                yield node.value
            elif isinstance(node.value, bytes):
                yield node.value.decode("latin-1")


def names(tree: ast.AST) -> Iterator[str]:
    """Every identifier that is read, written, imported or reached as an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield from node.name.split(".")


# --- the rules -------------------------------------------------------------------------------------


def forbidden_imports(module: str, source: str) -> list[str]:
    """Imports against the direction, from tests, relative, or under a folder's bare name."""
    package = module.split("/")[0]
    allowed = BELOW[package] | {package}
    tree = parsed(source)
    # A dotted name in a string is an import too, by importlib or as a package of resources.
    by_text = [text for text in constants(tree) if re.fullmatch(r"slagate(\.\w+)+", text)]
    findings = []
    for name in [*imported_modules(tree), *by_text]:
        first, *rest = name.split(".")
        if first == "slagate":
            wrong = bool(rest) and rest[0] in BELOW and rest[0] not in allowed
        else:
            wrong = first in {"", "tests", "support", *BELOW}
        if wrong:
            findings.append(name)
    return findings


def code_besides_docstring(module: str, source: str) -> list[str]:
    """What an __init__.py holds after its docstring, or the lack of a docstring."""
    if not module.endswith("/__init__"):
        return []
    tree = parsed(source)
    if ast.get_docstring(tree) is None:
        return ["no docstring"]
    return [ast.unparse(node) for node in tree.body[1:]]


def generate_on_the_wire(module: str, source: str) -> list[str]:
    """Mentions of the Generate path or its generated stub and servicer, outside their modules."""
    if module in SPEAKS_GENERATE:
        return []
    tree = parsed(source)
    generated = {"InferenceStub", "InferenceServicer", "add_InferenceServicer_to_server"}
    findings = [name for name in names(tree) if name in generated]
    return findings + [text for text in constants(tree) if "openengine.v1.Inference/" in text]


def outside_the_repository(module: str, source: str) -> list[str]:
    """Literals with an absolute path of two parts or more, which only one machine has.

    One part, as in an HTTP path, says nothing about a machine. A trailing slash counts as a second
    part: an f-string goes on there.
    """
    del module
    # After a letter, a dot or another slash it is a relative path, a URL or a media type.
    absolute = r"(?<![\w./-])/[\w.-]+/[\w./-]*"
    found = [path for text in constants(parsed(source)) for path in re.findall(absolute, text)]
    foreign = [path for path in found if not re.match(SAME_EVERYWHERE, path)]
    return foreign + re.findall(r"\.\./shared", source)


def unsafe_decoding(module: str, source: str) -> list[str]:
    """Calls and modules that run or rebuild whatever the bytes they are given say."""
    del module
    tree = parsed(source)
    modules = r"pickle|cPickle|cloudpickle|dill|marshal|shelve|joblib|multiprocessing\.connection"
    findings = [n for n in imported_modules(tree) if re.match(rf"({modules})(\.|$)", n)]
    findings += [n for n in imported_modules(tree) if re.match(r"yaml\.(\w+_)?load(_all)?$", n)]
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            findings.append("allow_pickle")
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if re.fullmatch(
                r"(builtins\.)?(eval|exec|compile|__import__)|yaml\.\w*load\w*|torch\.load"
                r"|.*\.(recv|send)_pyobj|.*\.read_pickle",
                called,
            ):
                findings.append(called)
    return [name for name in findings if not re.match(r"yaml\.safe_load(_all)?$", name)]


def engine_imported(module: str, source: str) -> list[str]:
    """Imports of the HTTP/2 engine, which is alpha: one module is to change when it does."""
    if module == "workers/h2_engine":
        return []
    return [n for n in imported_modules(parsed(source)) if n.split(".")[0] == "ngh2"]


Rule = Callable[[str, str], list[str]]
RULES: dict[str, Rule] = {
    "imports go down only": forbidden_imports,
    "__init__ is a docstring": code_besides_docstring,
    "Generate has one module at each end": generate_on_the_wire,
    "one module knows the HTTP/2 engine": engine_imported,
    "nothing outside the repository": outside_the_repository,
    "SECMM-03: no decoding that runs code": unsafe_decoding,
}


@pytest.mark.parametrize("rule", RULES)
def test_every_module_keeps_the_rule(rule: str) -> None:
    found = {name: RULES[rule](name, path.read_text()) for name, path in MODULES.items()}
    assert {name: findings for name, findings in found.items() if findings} == {}


BROKEN = [
    (forbidden_imports, "workers/codec", "from slagate.pools.grid import Grid"),
    (forbidden_imports, "workers/codec", "import slagate.router.policy as policy"),
    (forbidden_imports, "pools/grid", "from slagate import router"),
    (forbidden_imports, "pools/grid", "def f():\n    from slagate.router import policy"),
    (forbidden_imports, "pools/grid", "import_module('slagate.router.policy')"),
    (forbidden_imports, "configs/__init__", "import slagate.proto.openengine_pb2"),
    (forbidden_imports, "router/app", "from . import policy"),
    (forbidden_imports, "router/app", "from .policy import choose"),
    (forbidden_imports, "router/app", "from pools import grid"),
    (forbidden_imports, "router/app", "from support.builders import member"),
    (code_besides_docstring, "pools/__init__", "'''Doc.'''\nfrom slagate.pools.grid import Grid"),
    (code_besides_docstring, "pools/__init__", ""),
    (generate_on_the_wire, "router/loadgen", "from slagate.proto.x import InferenceStub"),
    (generate_on_the_wire, "router/service", "grpc_module.add_InferenceServicer_to_server(a, b)"),
    (generate_on_the_wire, "router/splice", "PATH = b'/openengine.v1.Inference/Generate'"),
    (generate_on_the_wire, "router/splice", "path = f'/openengine.v1.Inference/{name}'"),
    (outside_the_repository, "router/app", "open('../shared/traces.jsonl')  # read"),
    (outside_the_repository, "router/app", "# see ../shared/notes"),
    (outside_the_repository, "router/app", "Path('/home/me/traces.jsonl')"),
    (outside_the_repository, "router/app", "path = f'/srv/{name}'"),
    (outside_the_repository, "router/app", "open('~/models/x')"),
    (outside_the_repository, "router/app", "ROOT = b'/srv/models'"),
    (outside_the_repository, "router/app", "help = 'traces, as in /srv/traces/a.jsonl'"),
    (outside_the_repository, "workers/load", "Path('/dev/shmem/kv')"),
    (engine_imported, "workers/rpc", "import ngh2"),
    (engine_imported, "router/front", "from ngh2.events import DataReceived"),
    (unsafe_decoding, "workers/load", "import pickle"),
    (unsafe_decoding, "workers/load", "from marshal import loads"),
    (unsafe_decoding, "workers/load", "from multiprocessing.connection import Client"),
    (unsafe_decoding, "workers/load", "eval(text)"),
    (unsafe_decoding, "workers/load", "exec(text)"),
    (unsafe_decoding, "workers/load", "yaml.load(text, Loader=loader)"),
    (unsafe_decoding, "workers/load", "from yaml import unsafe_load"),
    (unsafe_decoding, "workers/load", "socket.recv_pyobj()"),
    (unsafe_decoding, "workers/load", "np.load(path, allow_pickle=True)"),
]


@pytest.mark.parametrize(("rule", "module", "source"), BROKEN)
def test_a_rule_finds_what_it_forbids(rule: Rule, module: str, source: str) -> None:
    assert rule(module, source)


KEPT = [
    (forbidden_imports, "router/app", "from slagate.pools.grid import Grid\nimport asyncio"),
    (forbidden_imports, "workers/sim_timing", "files('slagate.configs')"),
    (code_besides_docstring, "pools/__init__", "'''What it owns.'''\n"),
    (generate_on_the_wire, "router/generate", "'''/openengine.v1.Inference/Generate.'''"),
    (generate_on_the_wire, "workers/channel", "PATH = '/openengine.v1.Inference/Generate'"),
    (engine_imported, "workers/h2_engine", "import ngh2\nfrom ngh2 import DataReceived"),
    (outside_the_repository, "workers/load", "Path('/dev/shm')\nPath('/dev/shm/kv')"),
    (outside_the_repository, "workers/load", "PATH = b'/openengine.v1.Inference/Generate'"),
    (outside_the_repository, "router/app", "'try /metrics, /healthz, /readyz'"),
    (outside_the_repository, "router/app", "'configs/grids/a.json', 'http://h/a/b', 'text/plain'"),
    (outside_the_repository, "router/app", "'''As in /srv/traces.'''"),
    (unsafe_decoding, "pools/grid", "yaml.safe_load(text)\nre.compile('x')\njson.loads(text)"),
]


@pytest.mark.parametrize(("rule", "module", "source"), KEPT)
def test_a_rule_lets_pass_what_it_allows(rule: Rule, module: str, source: str) -> None:
    assert rule(module, source) == []


# --- the tree --------------------------------------------------------------------------------------


def test_packages_are_flat() -> None:
    """pyproject.toml lists the packages by hand: a sub-package would be missing from the wheel."""
    nested = [
        str(path.relative_to(REPOSITORY))
        for package in BELOW
        for path in (REPOSITORY / package).rglob("*.py")
        if path.parent != REPOSITORY / package
    ]
    assert nested == []


def test_each_package_has_one_init_except_proto() -> None:
    """With an __init__.py, `import proto` in the repository root would hide another distribution."""
    owners = {package for package in BELOW if (REPOSITORY / package / "__init__.py").exists()}
    assert owners == set(BELOW) - {"proto"}


def named_modules(text: str) -> set[str]:
    """Modules a page names: as `pools/grid.py`, or as `grid` in a line that starts with `pools/`."""
    named = {f"{p}/{m}" for p, m in re.findall(r"\b(\w+)/(\w+)\.py\b", text)}
    for line in text.splitlines():
        start = re.match(r"[\s|*-]*`(\w+)/`(.*)", line)
        if start:
            named |= {f"{start[1]}/{word}" for word in re.findall(r"`(\w+)`", start[2])}
    return named


def test_named_modules_reads_both_spellings() -> None:
    page = "see `pools/grid.py`\n| `workers/` | `codec` and `load` |\n- `router/`: `app`, not this"
    assert named_modules(page) == {"pools/grid", "workers/codec", "workers/load", "router/app"}


def test_the_architecture_page_names_every_module() -> None:
    named = named_modules((REPOSITORY / "ARCHITECTURE.md").read_text())
    modules = {name for name in MODULES if not name.endswith("/__init__")}
    assert modules - named == set(), "modules that ARCHITECTURE.md does not name"


def test_the_architecture_page_names_no_module_that_is_gone() -> None:
    text = (REPOSITORY / "ARCHITECTURE.md").read_text()
    named = {(p, m) for p, m in re.findall(r"\b(\w+)/(\w+)\.py\b", text) if p in BELOW}
    gone = {f"{p}/{m}.py" for p, m in named if not (REPOSITORY / p / f"{m}.py").is_file()}
    assert gone == set()
