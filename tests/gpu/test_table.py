"""The code that is generated from the table of symbols."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
from reference import PAGES

from torchaos.harness.host.native_libraries import NVML


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    import sys

    spec = importlib.util.spec_from_file_location("nvml_generate", NVML.sources / "generate.py")
    assert spec
    assert spec.loader
    module = sys.modules["nvml_generate"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_generated_is_up_to_date(generate: ModuleType) -> None:
    """symbols.inc is what generate.py makes of the table now."""
    symbols = generate.read()
    assert (NVML.sources / "symbols.inc").read_text() == generate.include(symbols)


def test_the_page_has_a_row_for_each_function_that_a_program_calls() -> None:
    """The reference is made of the same table."""
    page = PAGES["reference/nvml.md"]()
    lines = (NVML.sources / "consumers.tsv").read_text().splitlines()
    assert [line for line in lines if line[0] != "#" and f"| `{line.split(chr(9))[1]}` |" not in page] == []


def test_every_function_that_a_consumer_calls_is_exported(generate: ModuleType) -> None:
    """Every function in consumers.tsv is in symbols.tsv."""
    names = {one.name for one in generate.read()}
    called = {
        line.split("\t")[1] for line in (NVML.sources / "consumers.tsv").read_text().splitlines() if line[0] != "#"
    }
    assert called - names == set()
