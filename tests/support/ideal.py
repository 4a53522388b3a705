"""Gives tests the ideal trainer of the assertions' tests: a whole journal in a few lines."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

BUILDER = Path(__file__).parents[1] / "assertions" / "builder.py"


@pytest.fixture(scope="session")
def trainer() -> Any:
    """The class `Trainer` of tests/assertions/builder.py."""
    spec = spec_from_file_location("explain_tests_builder", BUILDER)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module.Trainer
