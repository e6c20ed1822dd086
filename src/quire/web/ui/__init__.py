"""/ui: one page for a person to look at a server or a router. Three files, nothing from elsewhere.

The page asks what anybody may ask (/health, /metrics) and, with a key that is typed into it, what
an administrator may (/admin). So it is served without a key, and knows nothing itself.
"""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter, Response

_FILES = {
    "/ui": ("index.html", "text/html; charset=utf-8"),
    "/ui/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/ui/draw.js": ("draw.js", "text/javascript; charset=utf-8"),
    "/ui/style.css": ("style.css", "text/css; charset=utf-8"),
}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


def ui_router() -> APIRouter:
    router = APIRouter(tags=["operation"])
    folder = resources.files("quire.web.ui")
    for path, (name, kind) in _FILES.items():
        content = (folder / name).read_bytes()

        def page(content: bytes = content, kind: str = kind) -> Response:
            return Response(content, media_type=kind, headers=_HEADERS)

        router.add_api_route(path, page, methods=["GET"], include_in_schema=False)
    return router
