"""What users hold: an Audit as text, table, plain data, JSON, picture, and a line of a run file."""

from __future__ import annotations

import json
from pathlib import Path

import pandas
import pytest
import torch
from torch import nn

import gradilocks
from gradilocks.errors import BadRunFile, GradilocksError, NoGradients
from gradilocks.lab.audit import Audit


def loss(model, batch):
    return model(batch).square().mean()


@pytest.fixture(scope="module")
def found() -> Audit:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    return gradilocks.audit(model, loss, [torch.randn(16, 6) for _ in range(3)])


def test_it_survives_json(found):
    plain = json.loads(json.dumps(found.to_plain(), allow_nan=False))
    assert plain["kind"] == "audit"
    assert Audit.from_plain(plain) == found
    assert Audit.from_plain(plain).to_plain() == found.to_plain()


def test_an_audit_written_before_the_records_were_one_is_read_and_written_as_it_was():
    written = json.loads((Path(__file__).parent / "data" / "audit_version_1.json").read_text())
    read = Audit.from_plain(written)
    assert read.to_plain() == written
    assert read.shares("fp16", read.initial_scale) == read.formats[0].scaled
    del written["modules"][0]["outputs"]  # The first audits had no outputs and no powers.
    del written["total"]["parameters"]["powers"]
    assert Audit.from_plain(written).modules[0].outputs is None


def test_the_plain_form_has_the_shares_of_every_module_and_format(found):
    plain = found.to_plain()
    for module in plain["modules"]:
        assert list(module["fates"]) == ["fp16", "bf16", "fp8 e5m2", "fp8 e4m3"]
        for each in plain["formats"]:
            fate = module["fates"][each["name"]]["scaled"]
            assert fate == vars(found.shares(each["name"], each["scale"], module=module["name"]))
    counts = [
        sum(module["parameters"]["counts"])
        for module in plain["modules"]
        if module["type"] == "Linear"
    ]
    assert sum(plain["total"]["parameters"]["counts"]) == sum(counts)


def test_shares_are_known_for_any_format_dtype_and_scale(found):
    assert found.shares(torch.float16, 4.0) == found.shares("half", 4.0)
    assert found.shares("fp4 e2m1", 3.7).lost > found.shares("fp16", 3.7).lost
    assert found.shares("fp16", 1e-9, module="0").lost == 1.0


def test_a_table_is_a_row_a_module(found):
    frame = pandas.DataFrame(found.table("fp16", 1.0))
    assert list(frame.module) == ["0", "1", "2"]
    assert frame.lost.tolist() == [found.shares("fp16", module=name).lost for name in "012"]
    assert found.table()[0]["headroom"] >= 4


def test_its_text_has_the_words_and_both_tables_within_80_columns(found):
    text = str(found)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert found.recommendation.words[0] in text
    for each in found.formats:
        assert each.format.name in text
    assert "3 steps in float32" in text


def test_long_names_and_many_modules_still_fit(capsys):
    model = nn.Sequential()
    inner = nn.Sequential(*(nn.Linear(3, 3) for _ in range(40)))
    model.add_module("a_rather_long_name_of_a_part_that_goes_on", inner)
    text = str(gradilocks.audit(model, loss, [torch.randn(4, 3)]))
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "16 more lose no more than these" in " ".join(text.split())


def test_the_recommended_scale_can_be_trained_with(found):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for policy in (
        gradilocks.DynamicScale(init_scale=found.initial_scale),
        gradilocks.StaticScale(found.initial_scale),
    ):
        control = gradilocks.GradientControl(optimizer, model=model, scale=policy)
        assert control.scale == found.recommendation.scale


def test_the_picture_is_one_html_page(found, tmp_path):
    found.save_picture(tmp_path / "audit.html", title="a model")
    page = (tmp_path / "audit.html").read_text()
    assert page.startswith("<!DOCTYPE html>") or page.lower().startswith("<!doctype html>")
    assert "a model" in page


def test_json_that_cannot_be_written_is_one_clear_line(found, tmp_path):
    found.to_json(tmp_path / "a.json")
    assert Audit.from_plain(json.loads((tmp_path / "a.json").read_text())) == found
    with pytest.raises(GradilocksError, match="cannot be written"):
        found.to_json(tmp_path)


def test_an_audit_is_replaced_by_another_and_nothing_else_is(found, tmp_path):
    found.to_json(tmp_path / "a.json")
    found.to_json(tmp_path / "a.json")
    for held in ("[1]", "dear diary"):
        (tmp_path / "b.json").write_text(held)
        with pytest.raises(GradilocksError, match="already there and is no audit; choose another"):
            found.to_json(tmp_path / "b.json")
        assert (tmp_path / "b.json").read_text() == held


@pytest.mark.parametrize("there", ["hello\n", None], ids=["no run file", "a folder"])
def test_a_run_file_that_cannot_be_is_refused_before_the_first_batch(tmp_path, there):
    path = tmp_path / "a.jsonl"
    path.mkdir() if there is None else path.write_text(there)
    seen = []
    with pytest.raises(BadRunFile):
        gradilocks.audit(
            nn.Linear(3, 1), lambda m, x: seen.append(x) or loss(m, x), [BATCH], record=path
        )
    assert seen == []


def test_one_batch_that_reaches_nothing_does_not_end_an_audit():
    def late(model, batch):
        return loss(model, batch) if batch.mean() > 0 else (0 * batch).requires_grad_().sum()

    found = gradilocks.audit(nn.Linear(3, 1), late, [-torch.ones(2, 3), torch.ones(2, 3)])
    assert (found.steps, found.parameters.values) == (2, 4)


def test_a_run_file_is_made_and_gone_on_with(tmp_path):
    path = tmp_path / "runs" / "a.jsonl"
    model = nn.Linear(3, 1)
    first = gradilocks.audit(model, loss, [torch.randn(4, 3)], record=path)
    assert Audit.from_plain(gradilocks.read_run(path).audit) == first
    second = gradilocks.audit(model, loss, [torch.randn(4, 3)] * 2, record=str(path))
    run = gradilocks.read_run(path)
    assert Audit.from_plain(run.audit) == second
    assert run.end.status == "finished"


def test_an_open_recorder_takes_an_audit_between_its_steps(tmp_path):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradilocks.Recorder(tmp_path / "a.jsonl") as recorder:
        control = gradilocks.GradientControl(optimizer, model=model, record=recorder)
        found = gradilocks.audit(model, loss, [torch.randn(4, 3)], record=recorder)
        control.backward(loss(model, torch.randn(4, 3)))
        control.step()
    run = gradilocks.read_run(tmp_path / "a.jsonl")
    assert Audit.from_plain(run.audit) == found
    assert len(run.steps) == 1


def test_at_most_so_many_batches_are_taken():
    def endless():
        while True:
            yield torch.randn(4, 3)

    assert gradilocks.audit(nn.Linear(3, 1), loss, endless(), steps=4).steps == 4
    assert gradilocks.audit(nn.Linear(3, 1), loss, [torch.randn(4, 3)], steps=4).steps == 1


def test_formats_are_taken_by_name_or_dtype_and_each_once():
    found = gradilocks.audit(
        nn.Linear(3, 1), loss, [torch.randn(4, 3)], formats=[torch.float16, "fp16", "e4m3"]
    )
    assert [each.format.name for each in found.formats] == ["fp16", "fp8 e4m3"]
    for formats in ({"fp16"}, (name for name in ["fp16"])):
        found = gradilocks.audit(nn.Linear(3, 1), loss, [torch.randn(4, 3)], formats=formats)
        assert [each.format.name for each in found.formats] == ["fp16"]


BATCH = torch.randn(4, 3)


@pytest.mark.parametrize(
    ("arguments", "more", "error", "said"),
    [
        ((nn.ReLU(), loss, [BATCH]), {}, ValueError, "must have parameters, got ReLU"),
        ((nn.Linear(3, 1).requires_grad_(False), loss, [BATCH]), {}, ValueError, "requires grad"),
        (("model", loss, [BATCH]), {}, TypeError, "model must be a torch.nn.Module, got str"),
        ((nn.LazyLinear(2), loss, [BATCH]), {}, ValueError, "weight is lazy"),
        ((nn.Linear(3, 1, device="meta"), loss, [BATCH]), {}, ValueError, "meta device"),
        ((nn.Linear(3, 1), loss, []), {}, ValueError, "at least one batch, got none"),
        ((nn.Linear(3, 1), loss, BATCH), {}, TypeError, r"For one batch write \[batch\]"),
        ((nn.Linear(3, 1), loss, 3), {}, TypeError, "iterable of batches"),
        ((nn.Linear(3, 1), BATCH, [BATCH]), {}, TypeError, "loss_fn must be a function"),
        ((nn.Linear(3, 1), lambda m, b: m(b), [BATCH]), {}, ValueError, "must be a scalar"),
        ((nn.Linear(3, 1), lambda m, b: 1.0, [BATCH]), {}, TypeError, "must be a tensor"),
        ((nn.Linear(3, 1), lambda m, b: b.mean(), [BATCH]), {}, ValueError, "not require grad"),
        (
            (nn.Linear(3, 1), lambda m, b: BATCH.clone().requires_grad_().mean(), [BATCH]),
            {},
            NoGradients,
            "reaches no parameter of the model",
        ),
        ((nn.Linear(3, 1), loss, [BATCH]), {"steps": 0}, ValueError, "at least 1"),
        ((nn.Linear(3, 1), loss, [BATCH]), {"steps": 1.5}, TypeError, "must be an int"),
        ((nn.Linear(3, 1), loss, [BATCH]), {"formats": ["fp7"]}, ValueError, "no format 'fp7'"),
        ((nn.Linear(3, 1), loss, [BATCH]), {"formats": []}, ValueError, "at least one format"),
        ((nn.Linear(3, 1), loss, [BATCH]), {"record": 3}, TypeError, "record must be a path"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_line(arguments, more, error, said):
    with pytest.raises(error, match=said) as raised:
        gradilocks.audit(*arguments, **more)
    assert "\n" not in str(raised.value)


def test_an_unknown_module_or_scale_is_one_clear_line(found):
    with pytest.raises(ValueError, match=r"got '00'\. Did you mean '0'"):
        found.shares("fp16", module="00")
    with pytest.raises(ValueError, match="scale must be positive and finite, got 0"):
        found.shares("fp16", 0.0)
    with pytest.raises(TypeError, match="scale must be a number, got str"):
        found.shares("fp16", "x")


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        ({"kind": "step"}, "expected what Audit.to_plain"),
        (
            {"kind": "audit", "version": 9},
            r"it is of version 9, and this .* reads version 1\. Install",
        ),
        ({"kind": "audit", "version": 1}, "not as it must be"),
    ],
)
def test_what_is_no_audit_is_refused(plain, said):
    with pytest.raises(BadRunFile, match=said):
        Audit.from_plain(plain)
