"""docs/ranks.md: every script on it runs on two ranks, and every error text on it is the library's.

A block of Python is a whole script, as a reader saves it. Two processes run it as torchrun would
start them, and rank 0 prints what the block of text after it says. The blocks check themselves
against one process.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scripts import ScriptServer, serving
from tests.test_documents import RANKS_PAGE, SOURCE, Block, is_python, read

# What torch and the scripts would import again and again.
_IMPORTED_ONCE = (
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel.distributed",
    "gradilocks.control",
)


def scripts_on(page: Path) -> list[tuple[Block, str]]:
    """The scripts of a page, each with what it says that rank 0 prints."""
    blocks, _ = read(page)
    found = []
    for block, after in zip(blocks, [*blocks[1:], Block("", 0, ())], strict=True):
        if is_python(block):
            assert after.info == "text", (
                f"{page.name}:{block.first_line}: what does it print? Say so in a text block."
            )
            found.append((block, "\n".join(after.lines)))
    return found


SCRIPTS = scripts_on(RANKS_PAGE)


def title(script: tuple[Block, str]) -> str:
    """The heading that a script stands under."""
    lines = RANKS_PAGE.read_text(encoding="utf-8").splitlines()[: script[0].first_line - 1]
    return [line.lstrip("# ") for line in lines if line.startswith("## ")][-1]


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptServer]:
    with serving(*_IMPORTED_ONCE) as server:
        yield server


@pytest.mark.parametrize("script", SCRIPTS, ids=title)
def test_a_script_runs_on_two_ranks_and_prints_what_the_page_says(
    script: tuple[Block, str], server: ScriptServer, tmp_path: Path
) -> None:
    block, printed = script
    path = tmp_path / "train.py"
    path.write_text("\n" * (block.first_line - 1) + "\n".join(block.lines), encoding="utf-8")
    done = server.run(path, cwd=tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == printed


FORGOTTEN = {
    "Pipeline parallel": (', distinct="pp")', "is not on the rank that counts for it"),
    "Tensor parallel": (", mesh=world)", "and other parameters lie on ranks"),
    "FSDP1": (", model.process_group)", "belongs to FullyShardedDataParallel (FSDP1)"),
}


@pytest.mark.parametrize("way", FORGOTTEN)
def test_what_the_page_says_to_write_is_asked_for_if_it_is_forgotten(
    way: str, server: ScriptServer, tmp_path: Path
) -> None:
    (block,) = [block for block, text in SCRIPTS if title((block, text)) == way]
    words, error = FORGOTTEN[way]
    source = "\n".join(block.lines)
    assert words in source
    path = tmp_path / "train.py"
    path.write_text(source.replace(words, ")"), encoding="utf-8")
    done = server.run(path, cwd=tmp_path, ranks=2)
    assert done.returncode != 0
    assert error in done.stderr


def test_the_page_has_a_script_for_every_way_to_spread_a_model() -> None:
    titles = set(map(title, SCRIPTS))
    wanted = {"DDP", "FSDP2", "HSDP", "FSDP1", "ZeRO", "Checkpoints"}
    assert wanted | {f"{way} parallel" for way in ("Tensor", "Pipeline", "Expert")} <= titles


# --- error texts -------------------------------------------------------------------------------


def texts_in(source: Path) -> Iterator[str]:
    """The texts that a file has; where something is put in when it runs there is a NUL."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(
                part.value if isinstance(part, ast.Constant) else "\0" for part in node.values
            )


def errors_on(page: Path) -> list[str]:
    """The error texts in the first column of the tables under the last heading."""
    lines = page.read_text(encoding="utf-8").split("\n## ")[-1].splitlines()
    return [cell[1] for line in lines if (cell := re.match(r"\| `([^`]+)` \|", line))]


def test_every_error_text_on_the_page_is_in_the_source() -> None:
    texts = [text for path in SOURCE.rglob("*.py") for text in texts_in(path)]
    errors = errors_on(RANKS_PAGE)
    assert len(errors) > 15
    for error in errors:
        # Three dots stand for anything, a NUL is what the text gets when it is made.
        wanted = re.compile(".*".join(map(re.escape, error.split("..."))), re.DOTALL)
        assert any(wanted.search(text) for text in texts), error
