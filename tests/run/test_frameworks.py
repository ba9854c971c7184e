"""Scripts that train with a framework."""

from __future__ import annotations

from pathlib import Path

import pytest

from run.scripts import run_recorded

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.parametrize(
    ("program", "framework", "limit", "module", "operation"),
    [
        ("with_lightning", "lightning", 0.5, "body.1", "div"),
        ("with_accelerate", "accelerate", 1.0, "criterion", "log"),
        ("with_transformers", "transformers", 1.0, "transformer.h.1.mlp.act", "log"),
    ],
)
def test_steps_and_culprits_of_a_framework(program, framework, limit, module, operation, tmp_path):
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    finished = run_recorded(PROGRAMS / f"{program}.py", cwd=tmp_path)
    assert finished.exit_code == 0, finished.err
    assert [line["step"] for line in finished.steps] == [1, 2, 3, 4, 5, 6]
    assert all("loss" in line and line["limit"] == limit for line in finished.steps)
    first = finished.culprits[0]
    assert (first["step"], first["module"], first["operation"]) == (4, module, operation), finished.err
