"""docs/run-file.md names every field that the format has, with its type, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gradilocks.runfile import Detail
from gradilocks.runfile.lines import FIELDS, OPTIONAL

TEXT = (Path(__file__).parent.parent.parent / "docs" / "run-file.md").read_text(encoding="utf-8")
WORDS = {
    int: "whole number", float: "number", bool: "true or false", str: "text", dict: "object",
    list: "list", type(None): "null",
}  # fmt: skip


def table_of(kind: str) -> dict[str, str]:
    section = re.split(r"^### ", TEXT, flags=re.MULTILINE)
    (own,) = [part for part in section if part.startswith(f"{kind}\n")]
    own = own.split("The lists in `detail`")[0]
    return dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", own, flags=re.MULTILINE))


@pytest.mark.parametrize("kind", FIELDS)
def test_the_document_has_the_fields_of_a_line_and_their_types(kind):
    table = table_of(kind)
    further = {"kind", "detail"} if kind == "step" else {"kind"}
    fields = {**FIELDS[kind], **OPTIONAL.get(kind, {})}
    assert set(table) == {*fields, *further}
    for name, types in fields.items():
        words = {WORDS[each] for each in types if not (each is int and float in types)}
        said = {word.removesuffix("s") for word in re.split(r" or (?!false)", table[name])}
        said = {re.sub(r"^list of .*", "list", word) for word in said}
        assert said == words, name


def test_the_document_has_the_fields_of_detail():
    rows = TEXT.split("| in `detail`")[1].split("###")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", rows, flags=re.MULTILINE)) == Detail._fields
