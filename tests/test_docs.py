"""What README.md and docs/ say exists: flags, variables, metrics, paths, links, commands, messages.

Three tables in docs/operations.md are made from the code. `python -m tests.test_docs` writes them anew.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import trainer_client
from proxy.cli import app
from proxy.config import CHOICES, RANGES, Options, build, read_toml
from proxy.fleet import Fleet
from proxy.metrics import Metrics
from proxy.routing.router import Router
from proxy.simulator.process import parser as simulator_parser
from proxy.web.app import ROUTED, TO_ANY, App

ROOT = Path(__file__).parent.parent
OPERATIONS = ROOT / "docs" / "operations.md"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]

VLLM_FLAGS = {
    "--enable-lora",
    "--max-loras",
    "--max-lora-rank",
    "--enable-prompt-tokens-details",
    "--logprobs-mode",
    "--api-key",
    "--data-parallel-size",
}
JOBS_FLAGS = {"--network-group", "--network-alias"}
OUR_OTHER_VARIABLES = {
    "LORAFLEET_REPLICAS": "proxy/replica_settings.py",
    "LORAFLEET_API_KEY": "trainer_client/client.py",
    "LORAFLEET_REAL_HOME": "tests/vllm/provision.sh",
    "LORAFLEET_REAL_PYTHON": "tests/vllm/realenv.py",
}


# -- what exists -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Flag:
    """One option of one command, as `--help` shows it."""

    name: str
    variable: str
    default: str
    help: str


@cache
def commands() -> dict[str, list[Flag]]:
    """Flags by command; a command of a group is "group command"."""
    found: dict[str, list[Flag]] = {}

    def add(command: Any, name: str) -> None:
        if hasattr(command, "commands"):
            for inner, below in command.commands.items():
                add(below, f"{name} {inner}".strip())
        else:
            found[name] = [_flag(param) for param in command.params if param.opts[0].startswith("--")]

    add(typer.main.get_command(app), "")
    return found


def _flag(param: Any) -> Flag:
    text = re.sub(r"\\\[", "[", param.help or "")
    stated = re.search(r"\s*\[default: ([^\]]*)\]", text)
    text = re.sub(r"\s*\[default: [^\]]*\]", "", text)
    if stated:
        default = stated[1]
    elif param.required:
        default = "required"
    elif isinstance(param.default, bool) or param.opts[0].removeprefix("--").replace("-", "_") in SWITCHES:
        default = "off"
    else:
        default = "none" if param.default is None else str(param.default)
    return Flag(param.opts[0], str(param.envvar), default, text)


SWITCHES = frozenset(f.name for f in fields(Options) if "bool" in str(f.type))


def metrics() -> dict[str, tuple[str, str]]:
    """Name on the page -> (type, help) of every family of lorafleet's own, the process's figures left out."""
    page = Metrics(Fleet([], Router("prefix"))).render().decode()
    helps = dict(re.findall(r"^# HELP (\S+) (.*)$", page, re.MULTILINE))
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))
    return {name: (types[name], said) for name, said in helps.items() if not name.startswith("lorafleet_process_")}


def paths(state_dir: Path) -> set[str]:
    """Every path that the proxy answers otherwise than by handing a GET on."""
    made = App(build(["http://127.0.0.1:9"], Options(state_dir=str(state_dir)), environment={}))
    own = {path for _, path in made._fleet_api.routes}
    return set(ROUTED | TO_ANY) | set(made._control.routes) | own


@cache
def strings_in_code() -> str:
    """Every string constant of the two packages, one a line."""
    files = [path for package in ("proxy", "trainer_client") for path in (ROOT / package).rglob("*.py")]
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text())))
    return "\n".join(n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str))


# -- the tables that are made ------------------------------------------------------------------------------------------


def serve_table() -> str:
    rows = ["| flag | variable | default | allowed | meaning |", "|---|---|---|---|---|"]
    for flag in commands()["serve"]:
        key = flag.name.removeprefix("--").replace("-", "_")
        allowed = ", ".join(CHOICES.get(key, ()))
        if key in RANGES:
            allowed = "{:g} to {:g}".format(*RANGES[key]) if RANGES[key][1] < 1e6 else f"{RANGES[key][0]:g} or more"
        rows.append(f"| `{flag.name}` | `{flag.variable}` | {flag.default} | {allowed} | {flag.help} |")
    return "\n".join(rows)


def commands_table() -> str:
    """The other commands: equal flags in one row."""
    users: dict[Flag, list[str]] = {}
    for command, flags in commands().items():
        for flag in flags:
            if command != "serve":
                users.setdefault(flag, []).append(command)
    rows = ["| flag | variable | default | of | meaning |", "|---|---|---|---|---|"]
    for flag, of in users.items():
        shown = ", ".join(dict.fromkeys("replicas ..." if name.startswith("replicas ") else name for name in of))
        rows.append(f"| `{flag.name}` | `{flag.variable}` | {flag.default} | {shown} | {flag.help} |")
    return "\n".join(rows)


def metrics_table() -> str:
    rows = ["| metric | type | meaning |", "|---|---|---|"]
    rows += [f"| `{name}` | {kind} | {said} |" for name, (kind, said) in metrics().items()]
    return "\n".join(rows)


TABLES = {"serve flags": serve_table, "other flags": commands_table, "metrics": metrics_table}


def between(text: str, mark: str) -> str:
    begin, end = f"<!-- {mark} -->\n", f"\n<!-- /{mark} -->"
    assert text.count(begin) == text.count(end) == 1, f"one pair of markers {mark!r}"
    return text.partition(begin)[2].partition(end)[0]


def write_tables() -> None:
    text = OPERATIONS.read_text()
    for mark, make in TABLES.items():
        text = text.replace(f"<!-- {mark} -->\n{between(text, mark)}", f"<!-- {mark} -->\n{make()}")
    OPERATIONS.write_text(text)


@pytest.mark.parametrize("mark", TABLES)
def test_table_is_what_the_code_says(mark: str) -> None:
    assert between(OPERATIONS.read_text(), mark) == TABLES[mark](), "run: python -m tests.test_docs"


# -- what the pages name -----------------------------------------------------------------------------------------------


def blocks(page: Path, language: str) -> Iterator[str]:
    """The fenced blocks of one language."""
    for match in re.finditer(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        yield match[1]


each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@each_page
def test_flags_exist(page: Path) -> None:
    ours = {flag.name for flags in commands().values() for flag in flags} | {"--help"}
    simulator = {option for action in simulator_parser()._actions for option in action.option_strings}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page.read_text()))
    assert named <= ours | simulator | VLLM_FLAGS | JOBS_FLAGS


@each_page
def test_variables_exist(page: Path) -> None:
    known = {flag.variable for flags in commands().values() for flag in flags} | set(OUR_OTHER_VARIABLES)
    assert set(re.findall(r"\bLORAFLEET_[A-Z_]+[A-Z]\b", page.read_text())) <= known
    for variable, source in OUR_OTHER_VARIABLES.items():
        assert variable in (ROOT / source).read_text()


@each_page
def test_metrics_exist(page: Path) -> None:
    known = set(metrics()) | {"lorafleet_process_resident_memory_bytes", "lorafleet_process_open_fds"}
    known |= {name + end for name, (kind, _) in metrics().items() for end in ("_bucket", "_sum", "_count")}
    assert set(re.findall(r"\blorafleet_[a-z_]+[a-z]\b", page.read_text())) <= known


@each_page
def test_commands_in_shell_blocks_exist(page: Path) -> None:
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = re.sub(r"^(\$ )?([A-Z_]+=\S+ )*", "", line).split()
            if words[:1] == ["make"]:
                assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
            if words[:1] != ["lorafleet"]:
                continue
            name = " ".join(words[1:3]) if words[1] == "replicas" else words[1]
            assert name in commands(), line
            given = {word.partition("=")[0] for word in words if word.startswith("--")}
            assert given <= {flag.name for flag in commands()[name]}, line


@each_page
def test_relative_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, target


@each_page
def test_files_in_the_text_exist(page: Path) -> None:
    for name in re.findall(r"`((?:proxy|trainer_client|tests|benchmarks|docs)/[\w/.-]+)`", page.read_text()):
        assert (ROOT / name).exists(), name


@each_page
def test_python_blocks_compile_and_import_what_exists(page: Path) -> None:
    for block in blocks(page, "python"):
        tree = ast.parse(block)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "trainer_client":
                for alias in node.names:
                    assert alias.name in {*trainer_client._HOME, "errors"}, alias.name


@each_page
def test_keywords_in_python_blocks_exist(page: Path) -> None:
    known = {"AdapterPublisher": "publisher", "FleetClient": "client", "PublishCallback": "callback"}
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known:
                source = (ROOT / "trainer_client" / f"{known[node.func.id]}.py").read_text()
                assert {str(k.arg) for k in node.keywords} <= _parameters(source, node.func.id)


def _parameters(source: str, name: str) -> set[str]:
    """Of the class's __init__, read without importing it: one of them needs transformers."""
    made = next(n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ClassDef) and n.name == name)
    init = next(n for n in made.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    return {a.arg for a in (*init.args.args, *init.args.kwonlyargs)}


@each_page
def test_toml_blocks_are_settings(page: Path, tmp_path: Path) -> None:
    for number, block in enumerate(blocks(page, "toml")):
        file = tmp_path / f"{number}.toml"
        file.write_text(block)
        for table in read_toml(str(file)).get("replica", []):
            assert set(table) <= {"url", "token_env", "token_file"}
        tomllib.loads(block)


def test_help_shows_each_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    shown = CliRunner().invoke(app, ["serve", "--help"], terminal_width=400).output
    stated = [flag.default for flag in commands()["serve"] if flag.default not in ("none", "off")]
    assert [default for default in stated if f"[default: {default}]" not in shown] == []
    assert "[[replica]]" in shown


def test_every_path_is_documented(tmp_path: Path) -> None:
    text = OPERATIONS.read_text()
    assert {path for path in paths(tmp_path) if f"`{path}`" not in text} == set()


def test_messages_in_the_table_of_errors_exist() -> None:
    rows = re.findall(r"^\| [\d, -]*\| `([^`]+)`", between(OPERATIONS.read_text(), "errors"), re.MULTILINE)
    assert len(rows) > 20
    for row in rows:
        for piece in row.split(" ... "):
            assert piece in strings_in_code(), piece


def test_the_figures_have_their_place() -> None:
    between((ROOT / "README.md").read_text(), "figures")


if __name__ == "__main__":
    write_tables()
    sys.exit(0)
