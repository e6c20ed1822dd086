"""Runs commands as `quire` would, and holds what they printed."""

import json
from collections.abc import Callable

import pytest
import typer

from quire.cli import main
from quire.cli.app import app


class Ran:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self):
        return json.loads(self.out)

    @property
    def sentence(self) -> str:
        """What went wrong, checked to be one line of ours without a traceback."""
        assert self.err.startswith("quire: ")
        assert self.err.count("\n") == 1
        assert "Traceback" not in self.err
        assert ": " in self.err.removeprefix("quire: "), "it says no fix"
        return self.err


def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Ran]:
    monkeypatch.setenv("COLUMNS", "240")
    monkeypatch.setenv("TERM", "dumb")

    def run(*arguments: object) -> Ran:
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code or 0
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run


def taken_apart(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> dict[str, object]:
    """What a command would be called with, by the command line's own parser; not carried out.
    Raises what that raises for a command or an option that there is not."""
    root = typer.main.get_command(app)
    began: list[dict[str, object]] = []

    def still(command) -> None:
        for each in getattr(command, "commands", {}).values():
            still(each)
        if not getattr(command, "commands", None):
            monkeypatch.setattr(command, "callback", lambda **options: began.append(options))

    still(root)
    root(args=list(words), prog_name="quire", standalone_mode=False)
    (options,) = began
    return options
