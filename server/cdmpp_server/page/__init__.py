"""``GET /``, the page, ``GET /docs``, the schema in readable form, and the files that they load.

Scripts and styles are separate files. The content security policy can therefore allow this server alone,
without a hash or nonce per script.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

import fastapi_offline
from fastapi import APIRouter, Request, Response

from cdmpp_server.problems import ProblemError

FOLDER = Path(__file__).parent
#: Swagger UI, which is installed with the service instead of loaded from its publisher by each reader.
SWAGGER = tuple(
    Path(fastapi_offline.__file__).parent / "static" / name for name in ("swagger-ui-bundle.js", "swagger-ui.css")
)
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
}
#: The page loads from and connects to this server only, and cannot be framed. Its script makes blob images itself, to
#: export a figure as PNG.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    # Revalidated at every load, with 304 while unchanged: a new release is visible at once.
    "cache-control": "no-cache",
}

router = APIRouter()


@cache
def files() -> Mapping[str, tuple[bytes, str]]:
    """Return content and entity tag of each file of the page by name; no other file is served."""
    contents = {}
    for path in (*sorted(FOLDER.iterdir()), *SWAGGER):
        if path.suffix in MEDIA_TYPES:
            content = path.read_bytes()
            contents[path.name] = (content, f'"{hashlib.sha256(content).hexdigest()[:20]}"')
    return MappingProxyType(contents)


def _respond(request: Request, name: str) -> Response:
    if name not in files():
        raise ProblemError("not_found", f"the page has no file {name[:80]!r}", "GET / is the page")
    content, tag = files()[name]
    headers = {**_HEADERS, "etag": tag}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=MEDIA_TYPES[Path(name).suffix])


#: File of each page by its path. Not part of the schema: pages are for people and give no guarantee to programs.
_PAGES = {"/": "index", "/docs": "docs", "/status": "status", "/support.html": "support", "/plans.html": "plans"}


async def page(request: Request) -> Response:
    """A page."""
    return _respond(request, f"{_PAGES[request.scope['route'].path]}.html")


for _path in _PAGES:
    router.add_api_route(_path, page, methods=["GET", "HEAD"], include_in_schema=False)


@router.api_route("/page/{name}", methods=["GET", "HEAD"], include_in_schema=False)
async def asset(request: Request, name: str) -> Response:
    """A script, a style sheet or the icon of a page."""
    return _respond(request, name)
