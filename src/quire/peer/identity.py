"""Identity: everything that must be equal for one engine's pages to mean the same in another.

Knows names and numbers; no sockets. How heads are shared among ranks is not part of it: pages are
cut and joined at heads on the way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from quire.memory.page_layout import PageLayout

FORMAT_VERSION = 3
"""Of everything two engines say to each other. Raise it with every change they could notice."""


class ComponentIdentity(msgspec.Struct, frozen=True):
    name: str
    num_layers: int
    num_heads: int
    """Of the whole model."""
    head_dim: int
    dtype: str
    num_planes: int
    inner: str
    page_size: int


class Identity(msgspec.Struct, frozen=True):
    version: int
    model_fingerprint: str
    page_size: int
    dtype: str
    components: list[ComponentIdentity]


def make_identity(
    model_fingerprint: str, layouts: Sequence[PageLayout], num_heads: Mapping[str, int]
) -> Identity:
    """Of an engine with these layouts (any rank's) and these heads in all, by component. The first
    layout's page size and dtype are the engine's."""
    return Identity(
        FORMAT_VERSION,
        model_fingerprint,
        layouts[0].page_size,
        layouts[0].dtype,
        [
            ComponentIdentity(
                name=layout.component,
                num_layers=layout.num_layers,
                num_heads=num_heads[layout.component],
                head_dim=layout.head_dim,
                dtype=layout.dtype,
                num_planes=layout.num_planes,
                inner=layout.inner.value,
                page_size=layout.page_size,
            )
            for layout in layouts
        ],
    )


def other_version(ours: int, theirs: int) -> str:
    return (
        f"the peer speaks format version {theirs} and we speak {ours}: "
        "run the same version of Quire on both sides"
    )


def why_not(ours: Identity, theirs: Identity) -> str:
    """Why pages cannot be exchanged, in one sentence; empty when they can."""
    if theirs.version != ours.version:
        return other_version(ours.version, theirs.version)
    if theirs.model_fingerprint != ours.model_fingerprint:
        return (
            f"the peer's model weights are {_short(theirs.model_fingerprint)} and ours are "
            f"{_short(ours.model_fingerprint)}: serve the same model files on both sides"
        )
    if theirs.page_size != ours.page_size:
        return (
            f"the peer's page size is {theirs.page_size} and ours is {ours.page_size}: "
            "set the same page_size on both sides"
        )
    if theirs.dtype != ours.dtype:
        return (
            f"the peer keeps its pages in {_short(theirs.dtype)} and we in {ours.dtype}: "
            "set the same dtype on both sides"
        )
    return _why_not_components(ours, theirs)


def _why_not_components(ours: Identity, theirs: Identity) -> str:
    mine = {component.name: component for component in ours.components}
    other = {component.name: component for component in theirs.components}
    if mine.keys() != other.keys():
        return (
            f"the peer's pages have the parts {_names(other)} and ours {_names(mine)}: "
            "run the same version of Quire with the same model on both sides"
        )
    for name, component in mine.items():
        for field in ComponentIdentity.__struct_fields__:
            there, here = getattr(other[name], field), getattr(component, field)
            if there != here:
                return (
                    f"the peer's layout of '{name}' has {field} {_short(str(there))} and ours "
                    f"{here}: use the same model, dtype and page layout on both sides"
                )
    return ""


def _names(components: Mapping[str, ComponentIdentity]) -> str:
    return _short(", ".join(sorted(components)) or "none")


def _short(text: str) -> str:
    """For a message: what a stranger sent may be long, or not for printing."""
    clean = "".join(char if char.isprintable() else "?" for char in text[:40])
    return clean + "…" if len(text) > 40 else clean or "empty"
