"""The `quire` command. Commands parse options and print; the work is done elsewhere.

Exit codes: 0 it worked, 1 it found something wrong, 2 it was asked wrongly or could not.
"""

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script. Also leaves by SystemExit, as typer does."""
    from quire.cli.app import main as run  # every command, which its parts need not load

    return run(arguments)
