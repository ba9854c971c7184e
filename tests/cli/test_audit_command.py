"""`gradilocks audit` as a user has it: real processes, real scripts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gradilocks
from gradilocks.lab.audit import Audit
from tests.cli.audited_scripts import HEAD, LOOP, found_in
from tests.cli.cli_process import OnATerminal, run
from tests.cli.forked import Server, command_server


@pytest.fixture(scope="module")
def server() -> Server:
    return command_server()


@pytest.fixture
def audited(server, tmp_path):
    """Writes a script, audits it, and returns what the command printed."""

    def audited(source: str, *options: str, folder: Path = tmp_path):
        (folder / "train.py").write_text(source)
        return server.run("audit", *options, "train.py", cwd=folder)

    return audited


def test_a_script_is_stopped_after_its_steps_and_the_recommendation_is_printed(tmp_path):
    (tmp_path / "train.py").write_text(HEAD + LOOP)
    done = run("audit", "-n", "4", "train.py", cwd=tmp_path, OMP_NUM_THREADS="1", COLUMNS="80")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:3] == ["stepped 0", "stepped 1", "stepped 2"]
    assert "stepped 4" not in done.stdout
    assert "Take fp16 with an initial loss scale of" in done.stdout
    for name in ("fp16", "bf16", "fp8 e5m2", "fp8 e4m3"):
        assert any(line.strip().startswith(name) for line in lines)
    tables = done.stdout[done.stdout.index("format") :]
    assert max(map(len, tables.splitlines())) <= 80
    assert "…" not in tables
    (path,) = (tmp_path / "runs").glob("train-*.jsonl")
    assert f"gradilocks: recorded in runs/{path.name}" in done.stderr
    assert f"report runs/{path.name}" in done.stderr
    found = found_in(tmp_path)
    assert (found.steps, found.precision) == (4, "float32")
    run_file = gradilocks.read_run(path)
    assert (len(run_file.steps), run_file.end.status) == (4, "finished")


def test_what_is_counted_equals_the_function(audited, tmp_path):
    source = HEAD + LOOP + "\n"
    audited(source, "-n", "1")
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 1))
    batch = torch.randn(16, 6)
    expected = gradilocks.audit(model, lambda m, x: m(x).square().mean(), [batch])
    assert found_in(tmp_path) == expected


def test_gradients_accumulated_over_micro_batches_are_counted_each(audited, tmp_path):
    loop = """
for number in range(40):
    for _ in range(3):
        (model(torch.randn(16, 6)).square().mean() / 3).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    audited(HEAD + loop, "-n", "2")
    found = found_in(tmp_path)
    assert found.steps == 2
    assert found.parameters.values + found.parameters.zeros == 6 * 65


def test_models_inside_a_function_are_still_there_when_it_has_returned(audited, tmp_path):
    body = "\n".join("    " + line for line in (HEAD + LOOP).replace("40", "3").splitlines())
    done = audited(f"def main():\n{body}\nmain()\n")
    assert done.returncode == 0, done.stderr
    assert "to the end" in done.stdout
    assert [module.name for module in found_in(tmp_path).modules] == ["0", "1", "2"]
    assert found_in(tmp_path).steps == 3


def test_parameters_of_no_module_and_losses_in_modules(audited, tmp_path):
    source = """
import torch
weight = torch.nn.Parameter(torch.ones(3))
measure = torch.nn.MSELoss()
optimizer = torch.optim.SGD([weight], lr=0.1)
for number in range(40):
    optimizer.zero_grad()
    measure(weight * torch.arange(1.0, 4.0), torch.zeros(3)).backward()
    optimizer.step()
"""
    done = audited(source, "-n", "3")
    assert done.returncode == 0, done.stderr
    (module,) = found_in(tmp_path).modules
    assert (module.kind, module.parameters.values, module.activations) == ("Parameter", 9, None)


def test_the_models_of_two_optimizers_are_told_apart(audited, tmp_path):
    source = """
import torch
from torch import nn
maker, critic = nn.Linear(3, 3), nn.Linear(3, 1)
makes, learns = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (maker, critic))
for number in range(40):
    for optimizer, sign in ((learns, 1), (makes, -1)):
        makes.zero_grad(), learns.zero_grad()
        (sign * critic(maker(torch.randn(5, 3)))).mean().backward()
        optimizer.step()
"""
    done = audited(source, "-n", "2")
    assert done.returncode == 0, done.stderr
    found = found_in(tmp_path)
    assert sorted(module.name for module in found.modules) == ["critic", "maker"]
    assert found.steps == 2


def test_a_failure_of_ours_ends_the_audit_and_says_why(audited, tmp_path):
    broken = "from gradilocks.lab.audit.counting import Tally\nTally.add = None\n"
    done = audited(broken + HEAD + LOOP)
    assert done.returncode == 1
    first, second = done.stderr.splitlines()
    assert first.startswith("gradilocks: the audit failed: TypeError: ")
    assert second == "gradilocks: train.py could not be audited, for the reason given above."
    assert "stepped 1" not in done.stdout


def test_an_except_clause_does_not_keep_the_script_going(audited, tmp_path):
    swallow = """
while True:
    try:
        optimizer.zero_grad()
        model(torch.randn(16, 6)).square().mean().backward()
        optimizer.step()
    except {}:
        print("swallowed")
"""
    done = audited(HEAD + swallow.format("Exception"), "-n", "2")
    assert (done.returncode, done.stdout.count("swallowed")) == (0, 0)
    assert "Take " in done.stdout
    done = audited(HEAD + swallow.format("BaseException"), "-n", "2", "-o", "b.jsonl")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("swallowed") == 3
    assert "Take " in done.stdout


def test_json_on_standard_output_is_all_there_is(audited, tmp_path):
    done = audited(HEAD + LOOP, "-n", "2", "--json", "-", "-q")
    assert Audit.from_plain(json.loads(done.stdout)) == found_in(tmp_path)
    assert "stepped 0" in done.stderr
    assert "gradilocks" not in done.stderr


def test_files_are_written_where_they_were_asked_for_wherever_the_script_goes(audited, tmp_path):
    source = f"import os\nos.makedirs('deep')\nos.chdir('deep')\n{HEAD}{LOOP}"
    done = audited(source, "-n", "2", "--json", "a.json", "--html", "a.html")
    assert done.returncode == 0, done.stderr
    assert Audit.from_plain(json.loads((tmp_path / "a.json").read_text())).steps == 2
    assert "<html" in (tmp_path / "a.html").read_text()
    assert list((tmp_path / "deep").iterdir()) == []


def test_the_report_of_such_a_run_shows_the_audit(audited, server, tmp_path):
    audited(HEAD + LOOP, "-n", "2", "-o", "a.jsonl")
    done = server.run("report", "a.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fp8 e4m3" in (tmp_path / "a.html").read_text()


def test_a_module_is_audited_as_python_m_runs_it(server, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(HEAD + "print(sys.argv[1:])" + LOOP)
    done = server.run("audit", "-n", "2", "-m", "package.train", "--lr", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("['--lr', '3']\n")


def test_a_compiled_model_is_audited_too(audited, tmp_path):
    source = (HEAD + LOOP).replace(
        "optimizer = ", 'model = torch.compile(model, backend="eager")\noptimizer = '
    )
    done = audited(source, "-n", "2")
    assert done.returncode == 0, done.stderr
    assert [module.name for module in found_in(tmp_path).modules] == ["0", "1", "2"]


def test_a_script_that_steps_nothing_is_one_clear_line(audited, tmp_path):
    done = audited(HEAD)
    assert done.returncode == 1
    assert done.stderr == (
        "gradilocks: train.py stepped no optimizer, so there is nothing to audit.\n"
    )
    assert not (tmp_path / "runs").exists()


def test_an_optimizer_that_no_gradient_reaches_is_one_clear_line(audited, tmp_path):
    done = audited(HEAD + "for _ in range(20):\n    optimizer.step()\n", "-o", "a.jsonl")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "gradilocks: recorded in a.jsonl\n"
        "gradilocks: train.py stepped an optimizer, but no gradient reached it, so there is "
        "nothing to audit.\n"
    )


def test_what_was_found_is_shown_even_if_the_script_has_taken_the_place_of_a_file(
    audited, tmp_path
):
    taken = "open('a.html', 'w').write('mine')\n"
    done = audited(HEAD + taken + LOOP, "-n", "2", "--html", "a.html")
    assert done.returncode == 1
    assert "Take " in done.stdout
    assert "gradilocks: recorded in runs/" in done.stderr
    assert "a.html is already there and is no audit of train.py" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "a.html").read_text() == "mine"


def test_a_loop_in_a_thread_is_stopped_without_a_traceback(audited):
    body = "\n".join("    " + line for line in LOOP.splitlines())
    threaded = f"import threading\ndef work():\n{body}\nthread = threading.Thread(target=work)\n"
    done = audited(HEAD + threaded + "thread.start(), thread.join()\n", "-n", "2")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "Take " in done.stdout


def test_a_script_without_torch_is_one_clear_line_and_torch_is_not_imported_for_it(tmp_path):
    (tmp_path / "train.py").write_text(
        "import atexit, sys\natexit.register(lambda: print('torch' in sys.modules))"
    )
    done = run("audit", "train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "False\n")
    assert done.stderr == (
        "gradilocks: train.py did not import torch, so there is nothing to audit.\n"
    )
    assert not (tmp_path / "runs").exists()


def test_an_interrupt_before_torch_is_there_is_not_taken_for_a_script_without_it(tmp_path):
    (tmp_path / "train.py").write_text("raise KeyboardInterrupt")
    done = run("audit", "train.py", cwd=tmp_path)
    assert done.returncode != 0
    assert "train.py was interrupted before it had imported torch" in done.stderr
    assert "did not import" not in done.stderr


def test_a_script_that_fails_shows_its_traceback_and_what_was_seen_before(audited, tmp_path):
    source = (HEAD + LOOP).replace("print(", "1 / (2 - number), print(", 1)
    done = audited(source)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "gradilocks/" not in done.stderr.split("ZeroDivisionError")[0]
    assert found_in(tmp_path).steps == 3
    assert "Take " in done.stdout


def test_a_script_that_exits_by_itself_keeps_its_status(audited, tmp_path):
    done = audited(HEAD + LOOP.replace("40", "2") + "sys.exit(3)")
    assert done.returncode == 3
    assert "Take " in done.stdout
    done = audited("import sys\nsys.exit(4)")
    assert done.returncode == 4
    assert "nothing to audit" in done.stderr


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["audit"], 2, "expected a script, as in 'gradilocks audit train.py'."),
        (["audit", "none.py"], 2, "there is no script none.py."),
        (["audit", "--format", "fp7", "train.py"], 2, "there is no format 'fp7'. Known are fp32"),
        (["audit", "-n", "0", "train.py"], 2, "expected a whole number of at least 1, got '0'."),
        (["audit", "--lr", "3", "train.py"], 2, "--lr is no option of gradilocks audit."),
        (["audit", "-o", "there.jsonl", "train.py"], 1, "there.jsonl is there already. Choose"),
        (["audit", "--json", "there.jsonl", "train.py"], 1, "--json there.jsonl is already there"),
        (["audit", "--html", "there.jsonl", "train.py"], 1, "is already there and is no audit of"),
        (["audit", "--html", "none/a.html", "train.py"], 1, "none/a.html cannot be written: No"),
    ],
)
def test_bad_input_is_one_clear_line_before_the_script_runs(words, status, said, tmp_path):
    (tmp_path / "train.py").write_text("open('ran', 'w')")
    (tmp_path / "there.jsonl").touch()
    done = run(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (status, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "ran").exists()


def test_on_a_terminal_the_steps_are_counted_while_it_runs(tmp_path):
    (tmp_path / "train.py").write_text(HEAD + LOOP)
    shown = OnATerminal("audit", "-n", "3", "train.py", cwd=tmp_path, OMP_NUM_THREADS="1")
    assert shown.close() == 0
    for number in (1, 2, 3):
        assert f"gradilocks: step {number} of 3" in shown.seen
    assert "Take " in shown.seen
