"""The options of `quire serve`: one frozen object, from file, environment and command line.

options.py    Settings: every option with its default and what it means
values.py     how one value is written and checked
sources.py    default < file < environment < command line; every value remembers where it is from
machine.py    what "auto" means on this machine
check.py      contradictions between options
starting.py   what an engine is started with
reference.py  the options as Markdown, which is docs/configuration.md

Nothing here loads torch, opens a store or starts anything.
"""

from quire.settings.check import check
from quire.settings.machine import Machine, effective, make_cache_dir, probe
from quire.settings.options import OPTIONS, Option, Settings
from quire.settings.sources import Loaded, Origin, Source, load
from quire.settings.starting import engine_config, served_name

__all__ = [
    "OPTIONS",
    "Loaded",
    "Machine",
    "Option",
    "Origin",
    "Settings",
    "Source",
    "check",
    "effective",
    "engine_config",
    "load",
    "make_cache_dir",
    "probe",
    "served_name",
]
