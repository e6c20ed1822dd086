"""`python -m quire`: the same as the `quire` command, for where that is not on the PATH."""

import sys

from quire.cli import main

if __name__ == "__main__":
    sys.exit(main())
