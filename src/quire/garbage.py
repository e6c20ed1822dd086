"""No long pauses for garbage in processes that serve.

Python looks for garbage among all that is alive: also modules, models and tokenizers, which live as
long as the process. That takes tenths of a second, in which no token is computed and nothing is
sent. What a process has made by the time it is ready is therefore left out; what it makes later is
looked at as ever. So what may be replaced later and is part of a circle stays for ever: a store
that was attached at the start gives back what is large when it is closed.
"""

import gc


def spare_what_stands() -> None:
    """Once, by a process that has started, before anybody asks it for something."""
    gc.collect()
    gc.freeze()
