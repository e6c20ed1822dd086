"""From a vLLM request to the prefix that it stands for. Knows the fields of a request, no vLLM.

Tokens name a prefix, in a namespace of the weights, the adapter and the tenant's salt. Where an
image or a sound lies among them its digest names the pages too. A request whose tokens do not say
what it computes on (embeddings as a prompt), or with an adapter that cannot be told from others,
has no name and is not cached.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from quire.integrations.vllm.adapters import Adapter, Identify
from quire.keys import Namespace, PrefixKey


class Placeholder(Protocol):
    offset: int
    length: int


class Feature(Protocol):
    identifier: str
    mm_position: Placeholder


class VllmRequest(Protocol):
    """What of vLLM's request is read here."""

    request_id: str
    all_token_ids: Sequence[int]
    num_computed_tokens: int
    cache_salt: str | None
    lora_request: Adapter | None
    mm_features: Sequence[Feature]
    prompt_embeds: object | None
    skip_reading_prefix_cache: bool


@dataclass(frozen=True, slots=True)
class Naming:
    """`base` has neither adapter nor salt."""

    base: Namespace
    identify: Identify
    generation: str = ""
    """Changes when all that was cached before is to be forgotten."""

    def next_generation(self, name: str) -> Naming:
        return replace(self, generation=name)

    def namespace(self, request: VllmRequest) -> Namespace | None:
        """None: it has no name."""
        if request.prompt_embeds is not None:
            return None
        adapter = request.lora_request
        parts = [self.generation]
        if adapter is not None:
            identity = self.identify(adapter)
            if identity is None:
                return None
            parts.append(identity)
        named = "\0".join(parts) if any(parts) else ""
        return replace(self.base, adapter=named, salt=request.cache_salt or "")

    def key(self, request: VllmRequest, num_tokens: int) -> PrefixKey | None:
        """Of the request's first tokens; None: it has no name."""
        namespace = self.namespace(request)
        if namespace is None:
            return None
        tokens = list(request.all_token_ids[:num_tokens])
        return PrefixKey(
            namespace,
            tokens,
            extra_material(request.mm_features, self.base.page_size, 0, len(tokens)),
        )

    def longer(
        self, key: PrefixKey, request: VllmRequest, num_known: int, num_tokens: int
    ) -> PrefixKey:
        """The key of the request's first `num_tokens` tokens, from that of `num_known`."""
        page_size = self.base.page_size
        first = num_known // page_size * page_size
        return key.extend(
            list(request.all_token_ids[num_known:num_tokens]),
            extra_material(request.mm_features, page_size, first, num_tokens),
        )


def extra_material(
    features: Sequence[Feature], page_size: int, first: int, last: int
) -> dict[int, bytes]:
    """By full page among tokens [first, last): what lies there that is no token, and where."""
    extra: dict[int, bytes] = {}
    for feature in features:
        start, end = feature.mm_position.offset, feature.mm_position.offset
        end += feature.mm_position.length
        begin = max(start, first) // page_size
        for page in range(begin, min(-(-end // page_size), last // page_size)):
            digest = hashlib.sha256(extra.get(page, b""))
            digest.update(f"{start - page * page_size} {feature.identifier}".encode())
            extra[page] = digest.digest()
    return extra
