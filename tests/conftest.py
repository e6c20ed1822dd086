"""For all tests: how models use the cores, who runs beside whom, and what Hypothesis may do."""

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Bounded, without deadlines, and the same on every machine.
settings.register_profile(
    "quire",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.load_profile("quire")

# The real vLLM is installed by `make test-vllm` alone, which says where.
collect_ignore = [] if "QUIRE_VLLM_PYTHON" in os.environ else ["vllm"]

# Before anything imports torch: see quire.engine.startup.model_environment.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`make test` has two processes. A file goes to one of them; a folder of end-to-end tests too,
    since its files share the models and servers that they have started. With a GPU there are many
    cores: there each test goes by itself, or with those for which it compiles the same.

    In the order of collection, and not by the number of tests: folders of end-to-end tests have few
    and take minutes, so they come first, and many short files fill both processes to the end."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if file.startswith("tests/gpu/test_forward"):
                return f"{file}::{nodeid.rpartition('-')[2]}"
            if file.startswith("tests/gpu/test_sampling"):
                return nodeid.partition("[")[0]
            if file.startswith("tests/gpu/"):
                return nodeid
            return file.rpartition("/")[0] if file.startswith("tests/e2e/") else file

    config.option.loadscopereorder = False
    return Scheduling(config, log)
