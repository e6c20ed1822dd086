"""The options as Markdown: what `quire config --reference` prints and docs/configuration.md is."""

from __future__ import annotations

from quire.settings.options import OPTIONS, Option
from quire.settings.sources import CACHE_VARIABLE, CONFIG_VARIABLE
from quire.settings.values import AUTO

_INTRODUCTION = f"""\
# Configuration

<!-- Written by `quire config --reference > docs/configuration.md`. Edit src/quire/settings. -->

Every option of `quire serve` has a default that works. It can be set in three places, each
overriding the one before:

1. a TOML file, given by `--config FILE` or by the variable `{CONFIG_VARIABLE}`:
   one `option = value` per line, no tables;
2. the environment, as `QUIRE_` and the option's name in capitals;
3. the command line, for the options that have a flag.

`quire config` shows what each option comes to and where it was set, without starting anything.
An unknown key, a wrong value and options that contradict each other are errors. Keys are
not taken from the command line, where everybody on the machine could read them; a file that holds
them should be readable by you alone (`chmod 600`).

```toml
# quire.toml
model = "/models/llama-3.1-8b"
host_memory = "64GiB"
store = "file:///mnt/nvme/quire?max=200GiB"
port = 8080
```
"""

_ENDING = f"""\
Sizes are a number and a unit: `20GiB`, `512M`, `1.5T`; one letter means powers of two. Quire keeps
converted models and the default store in `~/.cache/quire`, or where `{CACHE_VARIABLE}` says."""


def markdown() -> str:
    lines = [
        _INTRODUCTION,
        "| option | default | flag | variable | meaning |",
        "|---|---|---|---|---|",
        *(_row(option) for option in OPTIONS.values()),
        "",
        _ENDING,
    ]
    return "\n".join(lines)


def _row(option: Option) -> str:
    flag = f"`{option.flag}`" if option.flag else "–"
    meaning = f"{option.help} {_form(option)}".strip()
    cells = (f"`{option.name}`", _default(option), flag, f"`{option.variable}`", meaning)
    return f"| {' | '.join(cells)} |"


def _default(option: Option) -> str:
    if option.default is not None:
        return f"`{option.kind.show(option.default)}`"
    return f"{AUTO}: {option.auto}" if option.auto else "not set"


def _form(option: Option) -> str:
    if "|" in option.kind.metavar and option.kind.metavar.islower():
        return f"One of {', '.join(f'`{name}`' for name in option.kind.metavar.split('|'))}."
    return "" if option.is_secret else f"Example: `{option.example}`."
