"""What people mistype at first: each gets one line that says what came and the way out."""

from __future__ import annotations

import pytest

from gradilocks.cli import main
from tests.cli.cli_process import run


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('ran')\n")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["python", "train.py", "--lr", "3"], "out, as in gradilocks run train.py --lr 3."),
        (["python3.11", "-u", "-m", "pkg.train"], "gradilocks run -m pkg.train."),
        (["/usr/bin/python3", "train.py"], "gradilocks run train.py."),
        (["python"], "gradilocks run train.py."),
        (["torchrun", "train.py"], "torchrun ... -m gradilocks run train.py"),
        (["accelerate", "launch", "train.py"], "launch ... --module gradilocks run train.py"),
    ],
)  # fmt: skip
def test_a_launcher_in_place_of_a_script_gets_the_command_to_type(folder, capsys, words, said):
    assert main(["run", *words]) == 2
    captured = capsys.readouterr()
    assert f"{words[0]} is no script." in captured.err
    assert said in captured.err
    assert "Invalid value" not in captured.err
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("command", ["run", "audit", "demo", "selftest"])
def test_a_bad_environment_variable_is_told_of_before_anything_runs(
    folder, capfd, monkeypatch, command
):
    monkeypatch.setenv("GRADILOCKS_NATIVE", "1")
    words = ["train.py"] if command in ("run", "audit") else []
    assert main([command, *words]) != 0
    captured = capfd.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert "GRADILOCKS_NATIVE must be auto" in captured.err
    assert "got '1'. Set it to one of these, or unset it." in captured.err
    assert [path.name for path in folder.iterdir()] == ["train.py"]


def test_a_script_that_is_called_python_is_one(folder):
    (folder / "python.py").write_text("print('ran')\n")
    assert run("run", "python.py", cwd=folder).stdout == "ran\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nope"], "--nope is no option of gradilocks run. Options of the script come after"),
        (["--nope", "train.py"], "its name: gradilocks run train.py --nope ..."),
        (["--detail-evry", "3", "train.py"], "Did you mean --detail-every?"),
    ],
)
def test_an_option_that_is_none_says_where_the_scripts_own_go(folder, capsys, words, said):
    assert main(["run", *words]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.endswith("Try 'gradilocks run --help'.\n")


@pytest.mark.parametrize("way", [["--force"], ["--append"], []])
@pytest.mark.parametrize("content", ["", "\n\n", "import torch\n", "{}\n"])
def test_a_source_file_is_never_written_to(folder, capsys, way, content):
    (folder / "model.py").write_text(content)
    assert main(["run", *way, "-o", "model.py", "train.py"]) == 1
    said = capsys.readouterr().err
    assert "model.py" in said
    assert "choose another name" in said.lower()
    assert (folder / "model.py").read_text() == content


@pytest.mark.parametrize("way", [["--force"], ["--append"]])
@pytest.mark.parametrize("content", ["[1]\n", '{"a": 1}\n', "weights"])
def test_what_is_no_run_file_is_never_written_to(folder, capsys, way, content):
    (folder / "notes").write_text(content)
    assert main(["run", *way, "-o", "notes", "train.py"]) == 1
    assert "choose another name" in capsys.readouterr().err
    assert (folder / "notes").read_text() == content


def test_a_new_file_is_not_given_a_source_files_name_either(folder, capsys):
    assert main(["run", "-o", "new.py", "train.py"]) == 1
    assert not (folder / "new.py").exists()


@pytest.mark.parametrize(
    "command", ["run", "report", "watch", "ls", "compare", "page", "export", "audit", "explain"]
)
def test_help_shows_arguments_as_they_are_typed(capsys, command):
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "<" not in text
    assert "Path" not in text
    usage = text.splitlines()[0]
    assert usage.startswith(f"Usage: gradilocks {command} [OPTIONS] ")
    arguments = text.split("Arguments:\n")[1]
    assert arguments.split("  ")[1] == usage.partition(" [OPTIONS] ")[2]


def test_a_sink_whose_package_is_missing_is_said_before_the_script_runs(
    folder, capsys, monkeypatch
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["run", "--to", "wandb", "train.py"]) == 1
    captured = capsys.readouterr()
    assert captured.err == (
        "gradilocks: Weights & Biases is not installed: pip install 'gradilocks[wandb]'\n"
    )
    assert captured.out == ""
    assert main(["run", "--to", "mlflow", "train.py"]) == 2
    assert "expected tensorboard or wandb, got 'mlflow'" in capsys.readouterr().err
