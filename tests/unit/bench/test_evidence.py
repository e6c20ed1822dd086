"""Benchmarks behind single claims: commands in a checkout, a sentence in a package without them."""

import typer
from typer.testing import CliRunner

from evidence.commands import COMMANDS
from quire.cli import evidence
from quire.errors import ConfigError


def app_of(folder) -> typer.Typer:
    app = typer.Typer()
    evidence.add_to(app, folder)
    return app


def test_a_checkout_has_them_all():
    names = typer.main.get_command(app_of(evidence.FOLDER)).commands
    assert tuple(names) == evidence.NAMES == tuple(COMMANDS)


def test_a_package_without_them_says_where_they_are(tmp_path):
    for arguments in (["pd", "--layers", "12"], ["schemas", "--help"], ["overhead"]):
        ran = CliRunner().invoke(app_of(tmp_path), arguments)
        assert isinstance(ran.exception, ConfigError)
        assert f"`quire bench {arguments[0]}` checks a claim" in str(ran.exception)
        assert "in a checkout" in str(ran.exception)
