"""A compiler that takes milliseconds: it writes down what it was asked, and makes what it is told.

`Fake` makes a recipe of a few sources that it "compiles". What it links is no library, so tests
that load replace `native.loaded`.
"""

from __future__ import annotations

import shlex
import sysconfig
from pathlib import Path

import torch

from gradilocks.kernels.native_build import Compiler, Recipe, sources_hash

SCRIPT = """#!/bin/sh
case " $* " in *" --version "*) echo "fake++ (for tests) {version}"; exit;; esac
here={here}
echo "$*" >> "$here/asked"
env > "$here/environment"
nice > "$here/priority"
ls -l /proc/$PPID/fd > "$here/open files"
echo $PPID > "$here/builder.new" && mv "$here/builder.new" "$here/builder"
while [ -e "$here/wait" ]; do sleep 0.02; done
if [ -e "$here/broken" ]; then cat "$here/broken" >&2; exit 1; fi
while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done
echo "made by fake++" > "$out"
"""


class Fake:
    """A compiler in a folder, and the recipe of what it compiles.

    Args:
        folder: of its own.
        version: that it says it has.
    """

    def __init__(self, folder: Path, version: str = "1.0") -> None:
        self.folder = folder
        self.program = folder / "fake++"
        self.program.write_text(SCRIPT.format(here=shlex.quote(str(folder)), version=version))
        self.program.chmod(0o755)
        self.sources = folder / "sources"
        self.sources.mkdir()
        (self.sources / "module.cpp").write_text("#include <Python.h>\n")
        (self.sources / "cpu_kernels.cpp").write_text("// nothing\n")
        self.version = version

    def recipe(self, **facts: str) -> Recipe:
        return Recipe(
            sources=str(self.sources),
            includes=(f"{Path(torch.__file__).parent}/include", sysconfig.get_path("include")),
            libraries=(),
            compilers=(Compiler((str(self.program),), f"fake++ {self.version}"),),
            flags=("-O2",),
            kernel_flags=("-O3", "-march=native", "-DGRADILOCKS_OPENMP"),
            facts={
                "sources": sources_hash(self.sources),
                "torch": "2.0",
                "machine": "x86_64",
                "cpu": "fpu",
                **facts,
            },
        )

    def asked(self) -> list[str]:
        """What it was asked to do, a line each."""
        path = self.folder / "asked"
        return path.read_text().splitlines() if path.exists() else []

    def linked(self) -> int:
        """How many libraries it has made."""
        return sum("-shared" in line for line in self.asked())

    def said(self, name: str) -> str:
        """What it has written down of its surroundings."""
        return (self.folder / name).read_text()

    def break_with(self, text: str) -> None:
        """From here on it fails, and says so."""
        (self.folder / "broken").write_text(text)

    def mend(self) -> None:
        """From here on it works."""
        (self.folder / "broken").unlink()

    def hold(self) -> None:
        """From here on it does not finish before `go_on`."""
        (self.folder / "wait").touch()

    def go_on(self) -> None:
        """Finishes what it was asked."""
        (self.folder / "wait").unlink()
