"""One name, one thing: the rule of scripts/names.py holds, and would notice."""

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts/names.py"
spec = importlib.util.spec_from_file_location("names", SCRIPT)
names = importlib.util.module_from_spec(spec)
spec.loader.exec_module(names)


def test_every_name_stands_for_one_thing(capsys):
    assert names.main() == 0, capsys.readouterr().out


def test_a_name_for_two_things_is_noticed():
    found = {"Plan": ["a.py", "b.py"], "Tree": ["tree.py"]}
    (said,) = names.complaints("the type", found)
    assert said == "the type Plan stands for several things: a.py, b.py: rename all but one"


def test_rooms_commands_and_what_a_package_is_about_may_share_a_name():
    found = names.modules()
    assert not found.keys() & {"base", "run", "report"}
    assert "cli/store.py" not in found.get("store", [])
    assert "tree/tree.py" not in found.get("tree", [])


def test_names_that_stand_for_a_type_are_seen_and_type_variables_are_not():
    source = "Answer = dict[str, int]\nLIMIT = 3\n_Own = int\nT = TypeVar('T')\nclass Plan: ...\n"
    assert names.types_of(source) == ["Answer", "Plan"]
