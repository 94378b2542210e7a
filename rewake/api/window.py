"""`/ui`: one page that shows what the server remembers. It speaks to the same HTTP interface as everybody, with the same key."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, RedirectResponse

__all__ = ["policy", "router"]


def policy(page: str) -> str:
    """A content security policy that lets the page's own script and styles run, by their hashes, and nothing else from anywhere."""

    def hashes(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in found)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def router() -> APIRouter:
    routes = APIRouter()
    page = files("rewake.api").joinpath("ui/index.html").read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": policy(page),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    @routes.get("/ui", include_in_schema=False)
    async def ui() -> HTMLResponse:
        return HTMLResponse(page, headers=headers)

    @routes.get("/", include_in_schema=False)
    @routes.get("/ui/", include_in_schema=False)
    async def elsewhere() -> RedirectResponse:
        return RedirectResponse("/ui")

    return routes
