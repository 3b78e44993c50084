from pathlib import Path

import pytest

from helpers.swift_package import write_symbol_graphs


@pytest.fixture(scope="session")
def symbol_graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_symbol_graphs(tmp_path_factory.mktemp("package"))
