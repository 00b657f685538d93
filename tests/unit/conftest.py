# SPDX-License-Identifier: Apache-2.0
"""Fixtures that several unit tests share."""

from pathlib import Path

import pytest

from gguf_files import llama


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of converted files of the test's own."""
    monkeypatch.setenv("HOFL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied tiny Llama's file."""
    return llama(tmp_path_factory.mktemp("gguf"))
