"""The documents' blocks whose fence names a framework, as `python fastai`, run in their order."""

from __future__ import annotations

import pytest

from tests.frameworks import STAND_INS
from tests.test_documents import DOCUMENTS, FRAMEWORKS, is_python, read, run_python


@pytest.mark.filterwarnings("ignore")  # Of the frameworks' own making.
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_blocks_of_a_framework_run(framework, tmp_path, monkeypatch, capsys):
    if framework == "timm":
        monkeypatch.syspath_prepend(STAND_INS)
    if framework == "torchtitan":  # The document puts ours in its place.
        from torchtitan.distributed import utils as dist_utils

        monkeypatch.setattr(dist_utils, "clip_grad_norm_", dist_utils.clip_grad_norm_)
    found = False
    for path in DOCUMENTS:
        blocks = [block for block in read(path)[0] if is_python(block, framework)]
        if blocks:
            found = True
            run_python(path, blocks, tmp_path, monkeypatch)
    assert found, f"no document has a block for {framework}"
