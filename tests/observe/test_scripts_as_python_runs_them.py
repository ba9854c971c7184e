"""A script under `gradilocks run` sees, shows and returns what it does under Python."""

from __future__ import annotations

import re

import pytest

from tests.observe.sessions import both, process, watched, write

LOOKS_AROUND = """
import os, sys
print(sys.argv, sys.path[0], os.getcwd(), __name__, __file__)
print(__spec__ and __spec__.name, __package__, type(__loader__).__name__, __doc__)
print(sys.modules["__main__"].__dict__ is globals(), sorted(globals()))
import beside
print(beside.NAME)
"""

SHOWS = {
    "prints": "print('a'); import sys; print('b', file=sys.stderr)",
    "exits with a number": "import sys; sys.exit(3)",
    "exits with 130": "import sys; sys.exit(130)",
    "exits with words": "import sys; sys.exit('no data')",
    "exits with nothing": "raise SystemExit",
    "raises": "def f():\n    raise ValueError('no')\nf()\n",
    "raises from another": (
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('x') from e\n"
    ),
    "raises in a sibling": "import beside\nbeside.fail()\n",
    "has no valid syntax": "x = 1\ndef f(:\n    pass\n",
    "imports what has no valid syntax": "import broken\n",
    "is not UTF-8": "# -*- coding: latin-1 -*-\nprint('caf\\u00e9')\n",
    "recurses without end": "def f():\n    f()\nf()\n",
    "asks": "print(input('name? ')); import sys; print(sys.stdin.read())",
    "sets an excepthook": (
        "import sys\nsys.excepthook = lambda t, e, tb: print('mine', e, tb.tb_lineno)\n"
        "raise ValueError(1)\n"
    ),
    "leaves by os._exit": "import os, sys\nprint('x', flush=True)\nos._exit(7)\n",
    "says farewell": "import atexit\natexit.register(print, 'bye')\nprint('here')\n",
    "raises a GradilocksError": (
        "from gradilocks.errors import NoGradients\nraise NoGradients('none')\n"
    ),
    "has a thread": (
        "import threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()\n"
        "print('early')\n"
    ),
    "pickles a class of its own": (
        "import pickle\nclass A:\n    x = 1\nprint(pickle.loads(pickle.dumps(A())).x)\n"
    ),
    "forks": (
        "import os, sys\npid = os.fork()\n"
        "if not pid:\n    print('child', flush=True)\n    sys.exit(4)\n"
        "print('parent', os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    ),
    "starts processes": (
        "import multiprocessing as mp\ndef f(x):\n    return x * x\n"
        "if __name__ == '__main__':\n"
        "    for kind in ('fork', 'spawn'):\n"
        "        with mp.get_context(kind).Pool(2) as pool:\n"
        "            print(pool.map(f, [1, 2]))\n"
    ),
    "hands work to threads": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "pool = ThreadPoolExecutor(2)\nprint(list(pool.map(abs, [-1, -2])))\n"
    ),
}


@pytest.fixture
def folder(tmp_path):
    write(tmp_path, "beside.py", "NAME = __name__\ndef fail():\n    raise OSError('from beside')\n")
    write(tmp_path, "broken.py", "x = = 1\n")
    return tmp_path


@pytest.mark.parametrize("what", SHOWS)
def test_a_script_shows_and_returns_the_same_when_it(what, folder):
    name = folder / "script.py"
    name.write_bytes(SHOWS[what].encode("latin-1"))
    python, ours = both("script.py", cwd=folder, stdin="Ada\nmore\n")
    assert (ours.status, ours.out) == (python.status, python.out)
    depth = re.compile(r"repeated \d+ more")  # Some frames above the script's are ours.
    assert depth.sub("", ours.others.strip()) == depth.sub("", python.err.strip())
    assert ours.told == ["gradilocks: script.py did not import torch, so nothing was recorded."]
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    "words", [["sub/look.py", "--lr", "3", "-o", "x", "--help"], ["-m", "look", "a"]]
)
def test_a_script_sees_its_own_arguments_names_and_folders(words, folder):
    write(folder, "sub/look.py", LOOKS_AROUND)
    write(folder, "sub/beside.py", "NAME = 'in sub'")
    write(folder, "look.py", LOOKS_AROUND)
    python, ours = both(*words, cwd=folder)
    assert python.status == 0
    assert (ours.status, ours.out) == (python.status, python.out)


def test_a_package_runs_as_a_module_with_relative_imports(folder):
    write(folder, "pack/__init__.py", "")
    write(folder, "pack/parts.py", "def part():\n    return __name__\n")
    write(
        folder, "pack/__main__.py", "from .parts import part\nimport sys\nprint(part(), sys.argv)\n"
    )
    python, ours = both("-m", "pack", "--flag", cwd=folder)
    assert "pack.parts" in python.out
    assert ours.out == python.out


def test_argparse_of_the_script_answers_help(folder):
    write(
        folder,
        "train.py",
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr', type=float)\n"
        "print(p.parse_args().lr)\n",
    )
    python, ours = both("train.py", "--help", cwd=folder)
    assert "--lr" in ours.out
    assert ours.out == python.out
    assert watched("train.py", "--lr", "0.5", cwd=folder).out == "0.5\n"
    python, ours = both("train.py", "--lr", "x", cwd=folder)
    assert (ours.status, ours.others.strip()) == (2, python.err.strip())


def test_variables_set_before_the_import_of_torch_still_count(folder):
    write(
        folder,
        "train.py",
        "import os\nos.environ['OMP_NUM_THREADS'] = '2'\n"
        "import torch\nprint(torch.get_num_threads())\n",
    )
    python, ours = both("train.py", cwd=folder)
    assert python.out == "2\n"
    assert ours.out == python.out
    assert ours.told == ["gradilocks: train.py stepped no optimizer, so nothing was recorded."]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["missing.py"], "there is no script missing.py"),
        (["sub"], "sub is a folder"),
        (["image.py"], "is not Python: it holds binary data"),
        (["-m", "no_such_module"], "there is no module named no_such_module"),
        (["-m", "pack"], "is a package without a __main__ module"),
        ([], "expected a script"),
        (["--no-such-option", "beside.py"], "is no option of gradilocks run"),
        (["--detail-every", "0", "beside.py"], "expected a whole number of at least 1, got '0'"),
        (["--force", "beside.py"], "need -o FILE"),
        (["-o", "x.jsonl", "--force", "--append", "beside.py"], "cannot be given together"),
        (["--swap-optimizer", "Lion", "beside.py"], "expected AdamW, Adam or SGD, got 'Lion'"),
    ],
)
def test_a_mistake_in_the_command_is_one_line_and_status_2(words, said, folder):
    (folder / "image.py").write_bytes(b"\x89PNG\0\0\0")
    (folder / "sub").mkdir()
    write(folder, "pack/__init__.py", "")
    shown = watched(*words, cwd=folder)
    assert shown.status == 2
    assert len(shown.err.splitlines()) == 1
    assert said in shown.err


def test_a_run_file_that_is_there_is_refused_before_the_script_starts(folder):
    write(folder, "a.jsonl", "")
    write(folder, "train.py", "print('started')")
    shown = watched("-o", "a.jsonl", "train.py", cwd=folder)
    assert (shown.status, shown.out) == (1, "")
    assert re.search(r"a\.jsonl is there already.*--append.*--force", shown.err)


def test_torch_is_not_imported_before_the_script_asks_for_it(folder):
    write(folder, "train.py", "import sys\nprint('torch' in sys.modules, 'numpy' in sys.modules)\n")
    assert watched("train.py", cwd=folder).out == "False False\n"


def test_quiet_says_nothing(folder):
    write(folder, "train.py", "print('x')")
    shown = watched("--quiet", "train.py", cwd=folder)
    assert (shown.out, shown.err) == ("x\n", "")


def test_help_shows_the_examples(folder):
    shown = process("-m", "gradilocks", "run", "--help", cwd=folder)
    assert shown.status == 0
    assert "torchrun --nproc-per-node 2 -m gradilocks run train.py" in shown.out
