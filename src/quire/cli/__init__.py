"""The `quire` command. Commands parse options and print; the work is done elsewhere.

Exit codes: 0 it worked, 1 it found something wrong, 2 it was asked wrongly or could not.
"""

from quire.cli.app import main

__all__ = ["main"]
