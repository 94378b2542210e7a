"""Who asks: every request has a caller before any route sees it, and a route cannot forget whose memories it may touch.

Without keys there is one namespace, and only programs on this machine are served. Web pages are not among them: their browser runs here,
but they come from anywhere. It says so in `Origin`, or, if a page's own name was made to point here, in `Host`.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from rewake.config import LOOPBACK, Config
from rewake.errors import ConfigError, Forbidden, InternalError, Unauthorized
from rewake.keys import Key, KeyFile, Limits

__all__ = ["EVERYBODY", "Access", "Caller", "caller", "namespace"]

log = logging.getLogger(__name__)

WITHOUT_KEYS = "default"  # the namespace of everybody, where there are no keys
EVERYBODY = Key("", "everybody", WITHOUT_KEYS, "", 0.0, Limits(), operator=True)
BEARER = "bearer "


@dataclass(frozen=True)
class Caller:
    """`arrived` is when the request did, on time.perf_counter's clock."""

    key: Key
    arrived: float

    @property
    def namespace(self) -> str:
        return self.key.namespace

    @property
    def limits(self) -> Limits:
        return self.key.limits


caller: ContextVar[Caller] = ContextVar("caller")  # no default: what has no caller is refused, not shared


def namespace() -> str:
    """Whose memories the request at hand may touch."""
    return caller.get().namespace


class Access:
    """Knows the keys, and the origins of pages that may ask."""

    def __init__(self, config: Config) -> None:
        """Raises ConfigError where the address can be reached by others, and there are no keys."""
        self.file = KeyFile(Path(config.keys).expanduser()) if config.keys else None
        self.origins = frozenset(config.origins)
        if self.file is not None and not self.file.keys():
            raise ConfigError(f"there are no keys in {self.file.path}: make one with `rewake keys create NAME --keys {self.file.path}`")
        if self.file is None and not config.is_loopback:
            raise ConfigError(f"host is {config.host!r}: without --keys, only loopback addresses are served")

    def key_of(self, headers: Headers) -> Key:
        """Raises Forbidden for pages that may not ask, and Unauthorized for who has no key."""
        self._check_page(headers)
        if self.file is None:
            return EVERYBODY
        given = set(headers.getlist("x-api-key"))
        given |= {value[len(BEARER) :].strip() for value in headers.getlist("authorization") if value.lower().startswith(BEARER)}
        try:
            key = self.file.who(given.pop()) if len(given) == 1 else None
        except ConfigError as error:  # closed, until it is a file of keys again
            log.error("nobody is let in: %s", error)
            raise InternalError("the server cannot read its keys: see its log") from error
        if key is None:
            raise Unauthorized("give a key that this server knows: `Authorization: Bearer KEY`, or `x-api-key: KEY`")
        return key

    def _check_page(self, headers: Headers) -> None:
        host = headers.get("host", "")
        if self.file is None and name_in(f"//{host}") not in LOOPBACK:
            raise Forbidden(f"the request is for {host!r}: without keys, only requests for {', '.join(LOOPBACK)} are served")
        origin = headers.get("origin")
        if origin is not None and origin not in self.origins and (not host or origin.partition("://")[2] != host):
            raise Forbidden(f"pages of {origin!r} may not ask: --cors names those that may")


def name_in(url: str) -> str | None:
    """Its host, in small letters, without the port."""
    try:
        return urlsplit(url).hostname
    except ValueError:  # half of an IPv6 address
        return None
