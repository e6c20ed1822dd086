"""Types that several threads decode for the first time at once do not crash the process."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import quire

SOURCE = Path(quire.__file__).parent
MAKER = SOURCE / "decoders.py"
PLAIN = {"dict", "list", "int", "str", "bytes"}
"""What types of nobody are named with."""

THREADS = """
import sys, threading
import msgspec
from quire.decoders import json_decoder, msgpack_decoder

sys.setswitchinterval(1e-6)
FIELDS = "".join(f"    f{i}: list[int] | None = None\\n" for i in range(20))


def meet(make, encode):
    space = {}
    exec(f"import msgspec\\nclass Inner(msgspec.Struct):\\n{FIELDS}", space)
    exec(f"class Outer(msgspec.Struct):\\n    many: list[Inner] = []\\n{FIELDS}", space)
    data, here, read = encode(space["Outer"]([space["Inner"]([1])])), threading.Barrier(8), []

    def thread():
        here.wait()
        read.append(make(space["Outer"]).decode(data).many[0].f0)

    threads = [threading.Thread(target=thread) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert read == [[1]] * 8, read


for _ in range(150):
    meet(msgpack_decoder, msgspec.msgpack.encode)
    meet(json_decoder, msgspec.json.encode)
"""


def test_threads_that_meet_a_type_for_the_first_time_together():
    """An engine had ended with signal 11 while it shook hands with many peers at once."""
    command = [sys.executable, "-c", THREADS]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def makes_a_decoder(call: ast.Call) -> bool:
    """Of a type of ours, by itself."""
    called = ast.unparse(call.func)
    if not called.startswith("msgspec."):
        return False
    if called.endswith(".Decoder") or called == "msgspec.convert":
        return True
    kinds = [word.value for word in call.keywords if word.arg == "type"]
    names = {node.id for kind in kinds for node in ast.walk(kind) if isinstance(node, ast.Name)}
    return bool(names - PLAIN - {"Any", "msgspec"})


OURS = ["msgspec.json.decode(x, type=Inner)", "msgspec.msgpack.Decoder(X)"]
NOT_OURS = ["msgspec.json.decode(x, type=dict[str, Any])", "msgspec.json.decode(x)"]


@pytest.mark.parametrize("source", OURS + NOT_OURS)
def test_what_the_next_test_looks_for(source):
    assert makes_a_decoder(ast.parse(source, mode="eval").body) is (source in OURS)


def test_decoders_of_our_types_are_made_in_one_place():
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        found += [f"{path.name}:{c.lineno}" for c in calls if path != MAKER and makes_a_decoder(c)]
    assert found == []
