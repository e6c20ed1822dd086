"""Every error Quire raises on purpose.

    QuireError
    ├── ConfigError          an option is wrong or contradicts another: names it and the fix
    ├── StoreError           a store cannot be opened or administered
    │   └── StoreURLError    the URL itself is wrong
    ├── MemoryBudgetError    a pool does not fit this machine or container
    ├── LeaseError           a lease was used after release, or released twice
    ├── WorkerError          a worker process failed to start or died
    ├── ModelError           a model cannot be found, read or served
    ├── EngineError          an engine process failed to start, to answer, or died
    ├── InputError           what is asked of a model cannot be: names the field and the fix
    └── InvariantError       our own bookkeeping is broken: a bug in Quire

Faults of a store, disk or peer while serving are *not* exceptions: they come back per page as a
`PageStatus` and end as a counted miss.
"""


class QuireError(Exception):
    """Base of all of Quire's errors."""


class ConfigError(QuireError):
    """An option is wrong, or two options contradict each other."""


class StoreError(QuireError):
    """A store cannot be opened, attached or administered."""


class StoreURLError(StoreError):
    """A store URL is malformed, or names a scheme or option nobody knows."""


class MemoryBudgetError(QuireError):
    """A memory pool does not fit into what this machine or container may use."""


class LeaseError(QuireError):
    """A lease was released twice, or used after its release."""


class WorkerError(QuireError):
    """A worker process could not be started, or is gone."""


class ModelError(QuireError):
    """A model cannot be found, read, converted or served."""


class EngineError(QuireError):
    """An engine process could not be started, did not answer, or is gone."""


class InputError(QuireError):
    """What somebody asks of a model cannot be. `param`: the field that is wrong; `code`: a name for
    what is wrong with it, for programs."""

    def __init__(self, param: str | None, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class InvariantError(QuireError):
    """A structural invariant does not hold. Always a bug in Quire."""
