"""A run that carries an audit: the report shows it, or says in one sentence why it cannot."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradilocks.cli import main
from gradilocks.lab import AuditRecord, UnreadableAudit
from gradilocks.report.audit_page import recommendation_as_line
from gradilocks.report.report_page import render
from gradilocks.report.run_report import report_on
from tests.report.made_audits import made_audit, with_audit
from tests.report.made_runs import header, made_run, write

GOOD = made_audit()
MISSING = object()


def changed(*path: str | int, to: Any = MISSING) -> dict[str, Any]:
    """The audit with one thing left out, or put in its place."""
    made = copy.deepcopy(GOOD)
    at: Any = made
    for key in path[:-1]:
        at = at[key]
    if to is MISSING:
        del at[path[-1]]
    else:
        at[path[-1]] = to
    return made


BAD = {
    "another version": (changed("version", to=2), "it is of version 2"),
    "no version": (changed("version"), "it is of version None"),
    "a version in words": (changed("version", to=True), "it is of version True"),
    "nothing but a kind": ({"kind": "audit"}, "it is of version None"),
    "foreign": ({"kind": "audit", "version": 1, "formats": ["fp8"]}, "'formats' must be a list of"),
    "no formats": (changed("formats", to=[]), "at least one format"),
    "a format twice": (changed("formats", 1, "name", to="fp16"), "each once"),
    "no scale": (changed("formats", 0, "scale"), "'scale' is missing"),
    "scale zero": (changed("formats", 0, "scale", to=0), "'scale' must be a positive number"),
    "an endless scale": (changed("formats", 0, "scale", to=10**400), "'scale' must be a positive"),
    "a window inside out": (changed("formats", 0, "largest", to=1e-9), "the window of fp16"),
    "holds in words": (changed("formats", 0, "holds", to="yes"), "'holds' must be true or false"),
    "keep one name": (changed("formats", 0, "keep", to="head"), "'keep' must be a list of texts"),
    "a share in percent": (changed("formats", 0, "scaled", "lost", to=62.0), "'lost' must be"),
    "no recommendation": (changed("recommendation", to=None), "'recommendation' must be an"),
    "a fate too few": (changed("modules", 1, "fates", "bf16"), "'bf16' is missing"),
    "no histogram": (changed("modules", 0, "activations"), "'activations' is missing"),
    "negative counts": (changed("total", "parameters", "counts", to=[-1]), "'counts' must be"),
    "half a count": (changed("total", "parameters", "counts", to=[0.5]), "'counts' must be"),
    "far away": (changed("total", "parameters", "first", to=10**9), "lies beyond every number"),
    "endless": (changed("total", "parameters", "counts", to=[1] * 3000), "lies beyond every"),
    "unknown": (changed("formats", 1, "name", to="fp7"), "there is no format 'fp7'"),
    "no audit": (changed("kind", to="step"), "expected what Audit.to_plain() returns"),
    "powers of others": (
        changed("total", "parameters", "powers", to=[1]),
        "a histogram of parameters has ",
    ),
    "takers in words": (
        changed("modules", 0, "outputs", to={"largest": 1.0, "nonfinite": 0, "takers": "head"}),
        "'takers' must be a list of texts",
    ),
    "no total": (changed("total"), "'total' is missing"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_audit_that_cannot_be_read_is_one_sentence_and_no_harm(name: str) -> None:
    audit, why = BAD[name]
    with pytest.raises(UnreadableAudit):
        AuditRecord.from_plain(audit)
    page = render([report_on(replace(made_run(), audit=audit), "run")])
    said = page.split("The audit in the run file could not be shown: ")
    assert len(said) == 2
    sentence = said[1].split("</p>")[0].replace("&#39;", "'")
    assert why in sentence
    assert sentence.endswith(".")
    assert why in recommendation_as_line(audit)
    assert 'id="s0-loss"' in page


def test_an_audit_may_know_more_than_is_shown_and_need_not_know_all() -> None:
    audit = changed("note", to={"of": "a newer gradilocks"})
    audit["modules"][0]["parameters"] = audit["total"]["parameters"] = None
    audit["formats"][0]["scaled"]["headroom"] = None
    page = render([report_on(replace(made_run(), audit=audit), "run")])
    assert "could not be shown" not in page
    assert 'id="a0-window"' in page


def test_a_run_without_an_audit_has_no_panel_and_pays_nothing_for_it() -> None:
    page = render([report_on(made_run(), "run")])
    assert "udit" not in page.split("<style>")[0] + page.split("</style>")[1].split("<script>")[0]
    assert page.count("<script") == 3


def test_each_run_has_its_own_panel() -> None:
    runs = [replace(made_run(), audit=GOOD), made_run(20), replace(made_run(30), audit=GOOD)]
    reports = [report_on(run, f"run {at}") for at, run in enumerate(runs)]
    page = render(reports)
    assert page.count('<section class="audit"') == 2
    for key in ("a0", "a2"):
        assert f'id="{key}-window"' in page
        assert f'name="{key}-format"' in page
    assert page.count("plotly.js v") == 1


def test_the_command_names_the_recommendation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = with_audit(write(made_run(), tmp_path / "run.jsonl"), GOOD)
    assert main(["report", str(run_file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    kept = ", with blocks.0.attention.qkv in higher precision"
    assert f"Audit: fp16 at scale 2^20{kept}." in lines
    assert 'id="a0-window"' in run_file.with_suffix(".html").read_text(encoding="utf-8")
    assert main(["report", str(run_file), "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["runs"]
    assert told["audit"] == GOOD["recommendation"]


def test_the_command_bears_a_foreign_audit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = with_audit(write(made_run(), tmp_path / "run.jsonl"), changed("version", to=2))
    assert main(["report", str(run_file)]) == 0
    out, err = capsys.readouterr()
    assert "The audit in the run file could not be shown: it is of version 2, and this" in out
    assert err == ""
    assert main(["report", str(run_file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["audit"] is None


def test_half_an_audit_at_the_end_of_a_file_is_a_torn_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = write(made_run(header=header(started=8.0)), tmp_path / "run.jsonl")
    with run_file.open("a", encoding="utf-8") as file:
        file.write(json.dumps(GOOD)[:200])
    assert main(["report", str(run_file)]) == 0
    assert "Audit" not in capsys.readouterr().out
    assert 'class="audit"' not in run_file.with_suffix(".html").read_text(encoding="utf-8")
