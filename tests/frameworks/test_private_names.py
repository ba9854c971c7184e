"""As tests/integrations/test_framework_names.py, of the frameworks that are installed here."""

from __future__ import annotations

import pytest

from tests.integrations.test_framework_names import ELSEWHERE, check, names_of


@pytest.mark.parametrize(("framework", "name"), names_of(ELSEWHERE))
def test_the_framework_still_has_the_name(framework, name):
    check(framework, name)
