"""What the documents say is true: their Python runs, their commands, links and paths exist.

There is no way to exempt a block. One that cannot run is not Python a reader could use, so it is
either made to run or fenced as something else. Scripts for two ranks are run in tests/ranks, and
blocks whose fence names a framework (`python fastai`) in tests/frameworks, which has them all.
"""

import re
import shlex
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import dropwhile, groupby
from pathlib import Path
from urllib.parse import unquote

import pytest

from gradilocks.cli import main

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
)

# Its scripts need two processes each: tests/ranks/test_ranks_page.py runs every one of them.
RANKS_PAGE = ROOT / "docs" / "ranks.md"

FRAMEWORKS = ("fastai", "ignite", "timm", "torchtitan")
SHELLS = {"bash", "console", "sh", "shell"}
FENCE = re.compile(r"^\s*(?P<marks>`{3,}|~{3,})\s*(?P<info>.*?)\s*$")


@dataclass(frozen=True)
class Block:
    """One fenced block: what its fence says, the line number of its first line, its lines."""

    info: str
    first_line: int
    lines: tuple[str, ...]


def split_document(text: str) -> tuple[list[Block], list[str]]:
    """The fenced blocks of a document, and its lines with those blocks blanked out."""
    blocks: list[Block] = []
    prose: list[str] = []
    opening: re.Match[str] | None = None
    inside: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        fence = FENCE.match(line)
        if opening is None:
            opening = fence
            prose.append("" if fence else line)
            inside = []
            continue
        prose.append("")
        if fence and not fence["info"] and fence["marks"].startswith(opening["marks"]):
            blocks.append(Block(opening["info"], number - len(inside), tuple(inside)))
            opening = None
        else:
            inside.append(line)
    assert opening is None, f"a block opened with {opening} is never closed"
    return blocks, prose


@cache
def read(path: Path) -> tuple[list[Block], list[str]]:
    return split_document(path.read_text(encoding="utf-8"))


def is_python(block: Block, framework: str = "") -> bool:
    """Whether it is Python, and needs no more than `make test` has, or this framework."""
    return block.info == f"python {framework}".rstrip()


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# --- Python ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [path for path in DOCUMENTS if path != RANKS_PAGE and any(map(is_python, read(path)[0]))],
    ids=name_of,
)
def test_the_python_of_a_document_runs_from_top_to_bottom(path, tmp_path, monkeypatch):
    run_python(path, list(filter(is_python, read(path)[0])), tmp_path, monkeypatch)


def run_python(path: Path, blocks: Sequence[Block], folder: Path, monkeypatch) -> None:
    """Runs blocks of a document one after another, in `folder`."""
    # A module rather than a bare dictionary, so that a document may pickle what it defines.
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.chdir(folder)
    for block in blocks:
        indent = min((len(x) - len(x.lstrip()) for x in block.lines if x.strip()), default=0)
        # The empty lines in front make every traceback point at the line in the document.
        source = "\n" * (block.first_line - 1) + "\n".join(x[indent:] for x in block.lines) + "\n"
        try:
            exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
        except Exception as error:
            place = f"{name_of(path)}:{line_of(error, path) or block.first_line}"
            raise AssertionError(f"{place}: {type(error).__name__}: {error}") from error


def line_of(error: BaseException, path: Path) -> int | None:
    """The line of the document that an error came from."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno
    line = None
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == str(path):
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_no_python_block_is_exempt_from_running(path):
    for block in read(path)[0]:
        language = re.split(r"[\s,{]", block.info.lower().lstrip("{"))[0]
        if language.startswith("py"):
            assert any(is_python(block, framework) for framework in ("", *FRAMEWORKS)), (
                f"{name_of(path)}:{block.first_line - 1}: the fence must say `python` and no more, "
                f"or a framework of {FRAMEWORKS} after it, got `{block.info}`; make the block run, "
                "or fence it as `text`"
            )


def test_the_readme_has_python_to_run():
    assert any(map(is_python, read(ROOT / "README.md")[0]))


# --- commands ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """One command in a shell block, as words, without prompt and environment variables."""

    document: str
    line: int
    words: tuple[str, ...]

    @property
    def place(self) -> str:
        return f"{self.document}:{self.line}: {' '.join(self.words)}"


def commands_of(path: Path) -> list[Command]:
    return [
        Command(name_of(path), line, words)
        for block in read(path)[0]
        if block.info.split(" ")[0] in SHELLS
        for line, words in commands_in(block)
    ]


def commands_in(block: Block) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Each command of a shell block, with the number of the line that it starts on."""
    # Where there are prompts, the lines without one are what the command printed.
    prompted = any(line.lstrip().startswith("$ ") for line in block.lines)
    numbered = iter(enumerate(block.lines, start=block.first_line))
    for number, line in numbered:
        text = line.strip()
        if prompted and not text.startswith("$ "):
            continue
        while text.endswith("\\"):
            text = text[:-1] + next(numbered, (0, ""))[1].strip()
        lexer = shlex.shlex(text.removeprefix("$ "), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        for between, group in groupby(lexer, key=lambda word: not word.strip("&|;()<>")):
            words = tuple(dropwhile(re.compile(r"\w+=").match, group))
            if words and not between:
                yield number, words


COMMANDS = [command for path in DOCUMENTS for command in commands_of(path)]


def make_targets(words: tuple[str, ...]) -> list[str]:
    """The targets in `make PYTHON=python3.12 test`: neither options nor variables."""
    return [word for word in words[1:] if "=" not in word and not word.startswith("-")]


def gradilocks_arguments(words: tuple[str, ...]) -> tuple[str, ...] | None:
    """What follows `gradilocks` or `python -m gradilocks`, or None where it is another command."""
    if Path(words[0]).name == "gradilocks":
        return words[1:]
    if Path(words[0]).name.startswith("python") and words[1:3] == ("-m", "gradilocks"):
        return words[3:]
    return None


def test_every_make_command_in_a_document_names_a_target():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):(?!=)", makefile, flags=re.MULTILINE))
    assert {"demo", "test"} <= targets
    for command in COMMANDS:
        if Path(command.words[0]).name == "make":
            unknown = set(make_targets(command.words)) - targets
            assert not unknown, f"{command.place}: the Makefile has no target {sorted(unknown)}"


def first_use_of_each_cli_command() -> dict[str, Command]:
    uses: dict[str, Command] = {}
    for command in COMMANDS:
        arguments = gradilocks_arguments(command.words)
        if arguments:
            uses.setdefault(arguments[0], command)
    return uses


CLI_USES = first_use_of_each_cli_command()


@pytest.mark.parametrize(("name", "command"), CLI_USES.items(), ids=list(CLI_USES))
def test_every_gradilocks_command_in_a_document_exists(name, command, capsys):
    status = main([name, "--help"])
    said = capsys.readouterr()
    assert status == 0, f"{command.place}\n{said.out}{said.err}"


# --- links -------------------------------------------------------------------------------------

LINK = re.compile(
    r"\]\(\s*<?(?P<inline>[^)<>\s]+)>?(?:\s+[\"'][^)]*)?\s*\)"
    r"|^\s*\[[^\]]+\]:\s*<?(?P<reference>[^<>\s]+)>?"
    r"|\b(?:href|src|srcset)=\"(?P<html>[^\"]+)\"",
    flags=re.MULTILINE,
)
CODE_SPAN = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")
EXTERNAL = re.compile(r"^[a-z][a-z0-9+.-]*:", flags=re.IGNORECASE)


def anchors_of(path: Path) -> set[str]:
    """The anchors that a rendered document has: one a heading, and those written out in HTML."""
    anchors: set[str] = set()
    prose = read(path)[1]
    for line in prose:
        heading = re.match(r"^ {0,3}#{1,6}\s+(.*?)\s*#*\s*$", line)
        if heading:
            words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading[1])
            slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
            repeats = 0
            while (anchor := f"{slug}-{repeats}" if repeats else slug) in anchors:
                repeats += 1
            anchors.add(anchor)
    return anchors | set(re.findall(r"\b(?:id|name)=\"([^\"]+)\"", "\n".join(prose)))


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_every_relative_link_leads_to_a_file_and_an_anchor_that_exist(path):
    prose = "\n".join(CODE_SPAN.sub("", line) for line in read(path)[1])
    for link in LINK.finditer(prose):
        target = link["inline"] or link["reference"] or link["html"]
        if EXTERNAL.match(target):
            continue
        place = f"{name_of(path)}:{prose.count(chr(10), 0, link.start()) + 1}: {target}"
        file, _, anchor = target.partition("#")
        assert not file.startswith("/"), f"{place}: write the link relative to the document"
        destination = (path.parent / unquote(file)).resolve() if file else path
        assert destination.is_relative_to(ROOT), f"{place}: leads out of the project"
        assert destination.exists(), f"{place}: no such file"
        if anchor and destination.suffix == ".md":
            assert unquote(anchor) in anchors_of(destination), f"{place}: no such heading"


# --- paths -------------------------------------------------------------------------------------

SOURCE = ROOT / "src" / "gradilocks"
PATH = re.compile(r"[\w.*-]+(?:/[\w.*-]+)*/?")
SUFFIXES = (".css", ".html", ".js", ".json", ".jsonl", ".md", ".py", ".svg", ".toml", ".txt")


def paths_named(blocks: list[Block], prose: list[str]) -> Iterator[str]:
    """The files and folders that a document names: in code spans, and scripts in its commands."""
    for span in re.findall(r"`([^`\n]+)`", "\n".join(prose)):
        if PATH.fullmatch(span) and ("/" in span or span.endswith(SUFFIXES)):
            yield span
    for block in blocks:
        if block.info in SHELLS:
            for _, words in commands_in(block):
                yield from (word for word in words[1:] if word.endswith(".py"))


def is_there(path: str) -> bool:
    """Whether a path exists in the project or, as `step/table.py` is written, in its source."""
    found = [each for root in (ROOT, SOURCE) for each in root.glob(path)]
    return any(each.is_dir() or not path.endswith("/") for each in found)


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md", "docs/how-it-works.md"])
def test_every_path_that_a_guide_names_exists(name):
    named = sorted(set(paths_named(*read(ROOT / name))))
    assert named
    assert not [path for path in named if not is_there(path)], name


def tree_of_source(lines: Sequence[str]) -> tuple[set[str], set[str]]:
    """The files and folders, relative to the source, that the tree in ARCHITECTURE.md lists.

    A name stands in the folder that its line begins with, else in the room that the last line
    without an indent began with.
    """
    files: set[str] = set()
    folders: set[str] = set()
    room = ""
    for line in lines:
        words = re.findall(r"(?<![\w/.])\w+(?:\.py\b|/(?![\w]))", line)
        if not line.startswith(" "):
            room = words[0] if line.split()[0].endswith("/") else ""
            folder = room
        else:
            folder = room + words[0] if line.split()[0].endswith("/") else room
        for word in words:
            if word.endswith(".py"):
                files.add(folder + word)
            else:
                folders.add(folder if folder.endswith(word) else folder + word)
    return files, folders


def test_the_tree_of_files_is_that_of_the_source():
    (tree,) = [block for block in read(ROOT / "ARCHITECTURE.md")[0] if block.info == "text"]
    files, folders = tree_of_source(tree.lines)
    modules = {path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py")}
    rooms = {path.removesuffix("__init__.py") for path in modules if path.endswith("/__init__.py")}
    there = {path for path in modules if not path.endswith("/__init__.py")}
    assert sorted(files - there) == [], "listed, but not there"
    assert sorted(there - files) == [], "there, but not listed"
    assert sorted(rooms - folders) == [], "rooms that are not listed"
    assert all((SOURCE / folder).is_dir() for folder in folders), sorted(folders)


def test_the_picture_of_a_step_names_files_that_exist():
    picture = (ROOT / "docs" / "images" / "step.svg").read_text(encoding="utf-8")
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", picture)
    named = [path for text in texts for path in re.findall(r"\w+(?:/\w+)*(?:\.py|/)", text)]
    assert len(named) >= 10
    assert not [path for path in named if not is_there(path)]


def files_linked_from(path: Path) -> set[Path]:
    links = [link["inline"] or "" for link in LINK.finditer("\n".join(read(path)[1]))]
    return {(path.parent / unquote(link).partition("#")[0]).resolve() for link in links}


def test_the_index_leads_to_every_document():
    index = ROOT / "docs" / "index.md"
    documents = set((ROOT / "docs").glob("**/*.md")) - {index}
    assert not documents - files_linked_from(index)
    assert index in files_linked_from(ROOT / "README.md")


def test_what_make_quick_runs_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    (quick,) = re.findall(r"^QUICK := (.*)$", makefile, flags=re.MULTILINE)
    for path, _, function in (chosen.partition("::") for chosen in quick.split()):
        assert (ROOT / path).exists(), path
        assert not function or f"\ndef {function}(" in (ROOT / path).read_text(encoding="utf-8")
    assert "$(QUICK)" in makefile


# --- the tools above ---------------------------------------------------------------------------


def test_a_path_that_no_longer_exists_is_found_out():
    text = "Write it in `src/gradilocks/scale.py` or `step/table.py`."
    blocks, prose = split_document(f"{text}\n```bash\npython no/such.py\n```\n")
    named = list(paths_named(blocks, prose))
    assert named == ["src/gradilocks/scale.py", "step/table.py", "no/such.py"]
    assert [is_there(path) for path in named] == [False, True, False]
    assert not is_there("scale/nothing_*.py")
    assert is_there("scale/*_policy.py")
    assert not is_there("control.py/")


def test_a_tree_is_read_room_by_room():
    lines = (
        "a.py b.py   two",
        "room/  c.py: what c does",
        "  d.py  its step/x.py",
        "  inner/  e.py",
    )
    assert tree_of_source(lines) == (
        {"a.py", "b.py", "room/c.py", "room/d.py", "room/inner/e.py"},
        {"room/", "room/inner/"},
    )


def test_a_block_knows_its_fence_and_its_first_line():
    blocks, prose = split_document(
        "text\n\n```python\na = 1\n\nb = 2\n```\n  ~~~~ bash\nmake x\n~~~\n  ~~~~\nend"
    )
    assert blocks == [
        Block("python", 4, ("a = 1", "", "b = 2")),
        Block("bash", 9, ("make x", "~~~")),
    ]
    assert [line for line in prose if line] == ["text", "end"]


def test_a_heading_gets_the_anchor_that_it_is_rendered_with(tmp_path):
    document = tmp_path / "page.md"
    document.write_text("# What `unscale_` does, and why\n## Again\n## Again\n```\n# no\n```\n")
    assert anchors_of(document) == {"what-unscale_-does-and-why", "again", "again-1"}


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (("gradilocks", "demo"), ("demo",)),
        ((".venv/bin/python", "-m", "gradilocks", "run", "train.py"), ("run", "train.py")),
        (("python", "train.py"), None),
    ],
)
def test_a_gradilocks_command_is_recognised_however_it_is_started(words, arguments):
    assert gradilocks_arguments(words) == arguments


def test_a_shell_block_yields_its_commands_without_prompts_comments_and_output():
    lines = (
        "$ A=1 make test ARGS='-k clip;norm' && gradilocks report \\",
        "    run.jsonl | head  # look",
        "make: printed, not typed",
        "$ cd x; make demo",
    )
    assert list(commands_in(Block("console", 7, lines))) == [
        (7, ("make", "test", "ARGS=-k clip;norm")),
        (7, ("gradilocks", "report", "run.jsonl")),
        (7, ("head",)),
        (10, ("cd", "x")),
        (10, ("make", "demo")),
    ]
