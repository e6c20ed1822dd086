"""What a process may have open, in a process of its own."""

import subprocess
import sys

import pytest

PROGRAM = """
import logging, resource, sys
from quire.web.listening import allow_open_files
logging.basicConfig()
soft, hard, count = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
allow_open_files(count)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("count", "allowed"), [(500, 500), (100, 200), (700, 600)], ids=["more", "enough", "too many"]
)
def test_as_many_files_as_are_needed_and_the_system_allows(count: int, allowed: int) -> None:
    given = [str(each) for each in (200, 600, count)]
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, *given], capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == [str(allowed), "600"]
    assert ("ulimit" in ran.stderr) == (count > 600)
