"""gradilocks explain: the numbers, the words, and what is refused."""

from __future__ import annotations

import json

import pytest

from gradilocks.cli import main


def test_it_says_it_right_about_subnormals(capsys):
    assert main(["explain", "6e-8", "--scale", "32768"]) == 0
    out = capsys.readouterr().out
    assert "0 00000 0000000001                  5.96046e-08" in out
    assert "subnormal, 1 bit, off by 0.66 %" in out
    assert "6e-08 times 32768 is 0.00196608" in out
    assert "Under 6.1e-5 fp16 loses precision, not the number: here it keeps 1 of 11 bits." in out
    assert "With the scale it is stored with all 11 bits." in out


def test_a_number_may_be_negative_and_be_lost(capsys):
    assert main(["explain", "-1e-9"]) == 0
    out = capsys.readouterr().out
    assert "1 00000 0000000000" in out
    assert out.endswith("In fp16 it is rounded to zero.\n")


@pytest.mark.parametrize(
    ("text", "value"),
    [("2^-25", 2**-25), ("2**-25", 2**-25), ("-2^4", -16.0), ("1/3", 1 / 3), ("-1/4", -0.25)],
)
def test_powers_and_quotients_are_worked_out(text, value, capsys):
    assert main(["explain", "--json", "--", text]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["value"] for row in rows} == {value}


def test_json_has_every_format_at_both_scales(capsys):
    assert main(["explain", "70000", "--scale", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 14
    half = [row for row in rows if row["format"] == "fp16"]
    assert [(row["scale"], row["fate"], row["stored"]) for row in half] == [
        (1.0, "overflow", None),
        (2.0, "overflow", None),
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nan"], "expected a finite number, got 'nan'"),
        (["inf"], "expected a finite number, got 'inf'"),
        (["six"], "expected a number such as 6e-8, 2^-25 or 1/3, got 'six'"),
        (["1/0"], "expected a number such as 6e-8, 2^-25 or 1/3, got '1/0'"),
        (["2^99999"], "expected a finite number, got '2^99999'"),
        (["1", "--scale", "0"], "expected a scale above 0, got '0'"),
        (["1e300", "--scale", "1e300"], "beyond every format"),
        ([], "Missing argument"),
    ],
)
def test_what_is_no_number_is_one_clear_line(words, told, capsys):
    assert main(["explain", *words]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1
