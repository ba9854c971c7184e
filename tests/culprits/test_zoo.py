"""Of every faulty training the truth is said, by an untouched script, at its first bad step."""

from __future__ import annotations

import pytest

from gradilocks import read_run
from tests.culprits.zoo import SCRIPT, ZOO, Case, said_of, verdict
from tests.observe.sessions import forked


@pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
def test_the_planted_fault_is_named(case: Case, tmp_path):
    shown = forked("-o", "a.jsonl", str(SCRIPT), *case.words, cwd=tmp_path)
    assert shown.status == 0, shown.err
    said = said_of(read_run(tmp_path / "a.jsonl"))
    assert verdict(case, said) == "right", said
    assert said.certainty == "certain", said.text
