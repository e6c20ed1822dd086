"""Requests made from /openapi.json by schemathesis, with all of its checks.

What is valid by the document is answered, but for what a schema cannot say (REFUSALS): each has an
error code of its own. That cases reach the logic is counted.
"""

from collections import Counter

import pytest

from quire.engine.messages import (
    Detach,
    Drain,
    Events,
    GetEvents,
    GetRequests,
    GetTenants,
    Requests,
    StoreStatus,
    Tenants,
)
from quire.server.config import ServerConfig
from unit.server.scripted import ADMIN_KEY, Rig, TinyTokenizer, status
from unit.server.test_fuzz import answering

schemathesis = pytest.importorskip("schemathesis")
GenerationMode = schemathesis.GenerationMode

CONFIG = {
    "headers": {"Authorization": f"Bearer {ADMIN_KEY}"},
    "checks": {
        "positive_data_acceptance": {
            "expected-statuses": ["2xx", "400", "404"]  # narrowed down by `refused`
        },
    },
    "generation": {"max-examples": 3, "deterministic": True, "database": "none"},
}
REFUSALS = {
    "fields_disagree": "one field is of no use without another, or beside it",
    "context_length_exceeded": "tokens of a text are counted by the model's tokenizer",
    "invalid_schema": "whether a grammar can be made of a schema",
    "unknown_token": "names of fields in logit_bias that are numbers below a bound",
    "not_an_integer": "1.0, which JSON Schema calls one",
    "invalid_store_url": "what a store's options may be, only the store knows",
    "previous_response_not_found": "names of what was answered before",
}
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
"""Takes messages in any order, which is for a model to say."""
DRAIN = "/admin/drain"


def schema_of():
    engine = answering()
    engine.answers |= {
        Drain: status(),
        Detach: StoreStatus("detached", ""),
        GetEvents: Events(0, [], True),
        GetRequests: Requests([]),
        GetTenants: Tenants([], 1, 1),
    }
    config = ServerConfig(admin_key=ADMIN_KEY, api_key=ADMIN_KEY)
    rig = Rig(engine, config, tokenizer=TinyTokenizer(template=TEMPLATE))
    return schemathesis.openapi.from_asgi(
        "/openapi.json", rig.app, config=schemathesis.Config.from_dict(CONFIG)
    )


answered: Counter[str] = Counter()
operations = schema_of().exclude(path=DRAIN)
draining = schema_of().include(path=DRAIN)  # its server takes nothing else afterwards


@operations.parametrize()
def test_every_operation(case):
    response = case.call_and_validate()
    answered[case.operation.label] += response.status_code == 200
    if case.meta.generation.mode is GenerationMode.POSITIVE and response.status_code >= 300:
        error = response.json()["error"]
        assert error["code"] in REFUSALS, error
        assert error["code"] != "unknown_token" or error["param"] == "logit_bias", error


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
