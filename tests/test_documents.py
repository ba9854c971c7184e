"""Code blocks of the documents run and print what the documents say; links, paths, names and commands exist."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import runpy
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import gradilocks
from gradilocks.cli import app, main

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
NOT_RUN = re.compile(r"\*Not run by the tests: [^*]+\*")
"""The line before a block that is only compiled, with the reason."""
FOLDERS = "benchmarks|docs|examples|src|tests"
MOST_WORDS = 30_000


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    language: str
    text: str
    line: int
    lead: str
    """The last line of text before it."""
    follows: int
    """Number of lines between the previous block and this one."""


def blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    begin, end, indent = None, 0, 0
    for number, line in enumerate(lines):
        if begin is None and line.lstrip().startswith("```"):
            begin, indent = number, len(line) - len(line.lstrip())
        elif begin is not None and line.strip() == "```":
            lead = next((text for text in reversed(lines[:begin]) if text.strip()), "")
            text = "\n".join(line[indent:] for line in lines[begin + 1 : number])
            found.append(Block(lines[begin].strip("` "), text, begin + 2, lead, begin - end))
            begin, end = None, number
    assert begin is None, f"{page.name}:{begin}: the block is not closed"
    return found


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """Headings as the links of GitHub and mkdocs name them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture(params=PAGES, ids=lambda page: page.name)
def page(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_every_python_block_runs_and_prints_the_text_below_it(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])  # The label of a run file.
    monkeypatch.syspath_prepend(str(ROOT))
    torch.manual_seed(0)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    shown = blocks(page)
    for block, below in zip(shown, [*shown, None][1:], strict=True):
        has_output = below is not None and below.language == "text" and below.follows <= 2
        if block.language == "sh" and block.text.startswith("gradilocks explain") and has_output:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                main(shlex.split(block.text)[1:])
            assert printed.getvalue().rstrip() == below.text
        if block.language != "python":
            continue
        code = compile("\n" * (block.line - 1) + block.text, page.name, "exec")
        if NOT_RUN.fullmatch(block.lead):
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, namespace)
        if has_output:
            assert printed.getvalue().rstrip().splitlines() == below.text.splitlines(), f"{page.name}:{block.line}"


def test_every_block_names_its_language(page: Path) -> None:
    known = {"python", "text", "sh", "diff", "json", "toml"}
    assert [block.line for block in blocks(page) if block.language not in known] == []


def test_every_relative_link_exists(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(file), f"{page.name}: {target}"


def test_every_path_and_qualified_name_in_the_text_exists(page: Path) -> None:
    for path in re.findall(rf"`((?:{FOLDERS})/[\w./-]*)`", prose(page)):
        assert (ROOT / path).exists(), f"{page.name}: {path}"
    for name in re.findall(r"`(gradilocks(?:\.\w+)+)", prose(page)):
        assert exists(name), f"{page.name}: {name}"


def exists(name: str) -> bool:
    """True for a module or an attribute of one; integrations need not be installed."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError as error:
            if error.name != ".".join(parts[:count]):
                return True  # A package that the module needs is missing.
            continue
        for part in parts[count:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


def test_every_command_in_the_text_has_the_options_it_is_given(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        pytest.skip("names commands that were removed")
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    in_blocks = [line for block in blocks(page) if block.language == "sh" for line in block.text.splitlines()]
    in_text = re.findall(r"`(gradilocks [^`]+)`", prose(page))
    for line in [*in_blocks, *in_text]:
        match = re.search(r"(?:^|torchrun .* -m )gradilocks (\w+)(.*)", line)
        if match is None:
            continue
        assert match[1] in commands, f"{page.name}: {line}"
        options = {option for param in commands[match[1]].params for option in param.opts}
        given = match[2].partition("#")[0].split()
        if match[1] == "run":  # What follows the script belongs to the script.
            script = next((i for i, word in enumerate(given) if word.endswith(".py")), len(given))
            given = given[:script]
        unknown = [word for word in given if word.startswith("-") and word not in options]
        assert not unknown, f"{page.name}: {line}"


def test_every_public_name_is_documented() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES if page.name != "api.md")
    assert [name for name in gradilocks.__all__ if not re.search(rf"\b{name}\b", text)] == []
    reference = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^::: (\S+)$", reference, flags=re.M)
    assert [name for name in listed if not exists(name)] == []
    named = {name.rpartition(".")[2] for name in listed}
    assert set(gradilocks.__all__) <= named | {"kernels", "optim"}  # Modules.


def test_every_page_begins_with_its_task_and_a_block(page: Path) -> None:
    if page.parent.name != "docs" or page.name == "api.md":
        pytest.skip("not a guide")
    lines = page.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    assert blocks(page)[0].line < 20


def test_documents_are_short() -> None:
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in PAGES)
    assert words <= MOST_WORDS


def test_tables_are_those_of_the_results() -> None:
    tables = runpy.run_path(str(ROOT / "benchmarks" / "tables.py"))
    for page in tables["PAGES"]:
        text = page.read_text(encoding="utf-8")
        assert tables["updated"](text) == text, f"run python benchmarks/tables.py: {page.name}"


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [page.name for page in PAGES if page.parent.name == "docs" and page.name not in navigation] == []
