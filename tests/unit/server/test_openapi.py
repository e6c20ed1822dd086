"""Requests made from /openapi.json by schemathesis, with all of its checks.

What is valid by the document may be refused with 400: how fields go together, and how much this
model can read, a schema does not say. That cases reach the logic nevertheless is counted.
"""

from collections import Counter

import pytest

from quire.engine.messages import Drain
from quire.server.config import ServerConfig
from unit.server.scripted import ADMIN_KEY, Rig, status
from unit.server.test_fuzz import answering

schemathesis = pytest.importorskip("schemathesis")

CONFIG = {
    "headers": {"Authorization": f"Bearer {ADMIN_KEY}"},
    "checks": {
        "positive_data_acceptance": {
            "expected-statuses": ["2xx", "400", "401", "403", "404", "409", "413", "429"]
        },
    },
    "generation": {"max-examples": 3, "deterministic": True, "database": "none"},
}
DRAIN = "/admin/drain"


def schema_of():
    engine = answering()
    engine.answers[Drain] = status()
    config = ServerConfig(admin_key=ADMIN_KEY, api_key=ADMIN_KEY)
    return schemathesis.openapi.from_asgi(
        "/openapi.json", Rig(engine, config).app, config=schemathesis.Config.from_dict(CONFIG)
    )


answered: Counter[str] = Counter()
operations = schema_of().exclude(path=DRAIN)
draining = schema_of().include(path=DRAIN)  # its server takes nothing else afterwards


@operations.parametrize()
def test_every_operation(case):
    response = case.call_and_validate()
    answered[case.operation.label] += response.status_code == 200


@draining.parametrize()
def test_draining(case):
    case.call_and_validate()


def test_requests_reach_the_logic():
    generating = {"POST /v1/chat/completions", "POST /v1/completions", "POST /v1/responses"}
    tokens = {"POST /tokenize", "POST /detokenize"}
    wanted = generating | tokens | {"PUT /admin/store", "POST /admin/cache/prefetch"}
    if not wanted <= answered.keys():
        pytest.skip("when all of the file is run")
    assert [operation for operation in wanted if not answered[operation]] == []
