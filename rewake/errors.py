"""Every error a user can meet.

    RewakeError
    ├── ConfigError             a flag, variable or file of the configuration is wrong
    ├── ModelError              a model cannot be found, converted or represented
    ├── StoreError              the directory of memories cannot be used
    │   ├── DirectoryLocked     another process owns it
    │   ├── DiskFull            the budget or the disk has no room: answered, not saved
    │   ├── StoreLost           it was deleted while in use: begun anew
    │   └── CorruptFile         a page or segment is not what was written: recomputed, never attended to
    └── RequestError            answered over HTTP, see `status`
        ├── InvalidRequest      a field is malformed, unknown or unsupported
        │   ├── ContextLengthExceeded
        │   ├── BodyTooLarge    more bytes than are taken
        │   └── BodyTooSlow     it was begun, and does not come
        ├── Unauthorized        no key, or one that is not known
        ├── Forbidden           not with this key, or not from this page
        ├── NotFound            no such model or agent
        ├── Conflict            the agent is busy
        ├── Cancelled           somebody else has stopped it; what was computed is kept
        ├── DeadlineExceeded    the time its client gave it is over; what was computed is kept
        ├── Overloaded          the queue is full: try again later
        │   └── RateLimited     so many requests a minute are more than the key may make
        ├── ShuttingDown        the server is on its way out
        └── InternalError       our fault

Asserts are for our bugs; these are for everything else.
"""

from __future__ import annotations

__all__ = [
    "BodyTooLarge",
    "BodyTooSlow",
    "Cancelled",
    "ConfigError",
    "Conflict",
    "ContextLengthExceeded",
    "CorruptFile",
    "DeadlineExceeded",
    "DirectoryLocked",
    "DiskFull",
    "Forbidden",
    "InternalError",
    "InvalidRequest",
    "ModelError",
    "NotFound",
    "Overloaded",
    "RateLimited",
    "RequestError",
    "RewakeError",
    "ShuttingDown",
    "StoreError",
    "StoreLost",
    "Unauthorized",
]


RESTART = 5  # seconds that a new server takes to be there once the old one is gone, if somebody starts one


class RewakeError(Exception):
    """The root of the tree."""


class ConfigError(RewakeError):
    """A setting is wrong; the message says which and what would be right."""


class ModelError(RewakeError):
    """A model cannot be found, converted or represented."""


class StoreError(RewakeError):
    """The directory of memories cannot be used."""


class DirectoryLocked(StoreError):
    """Another process owns the directory."""


class DiskFull(StoreError):
    """What is to be written is more than the disk budget, or the free-space floor, allows."""


class StoreLost(StoreError):
    """The directory was deleted or replaced while in use; it has been begun anew."""


class CorruptFile(StoreError):
    """A stored file is missing, short, foreign or damaged; the message says which."""


class RequestError(RewakeError):
    """A request that gets an error instead of an answer. If the same may be answered later, `retry_after` is in how many seconds."""

    status = 500
    kind = "internal_error"
    code: str | None = None
    retry_after: int | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or type(self).code
        self.retry_after = retry_after or type(self).retry_after


class InvalidRequest(RequestError):
    """A field is malformed, unknown or unsupported; `param` names it."""

    status = 400
    kind = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and answer cannot fit; raised before any work."""

    code = "context_length_exceeded"


class BodyTooLarge(InvalidRequest):
    """The body has more bytes than this server, or this key, takes."""

    status = 413
    code = "request_too_large"


class BodyTooSlow(InvalidRequest):
    """The body was begun, and the rest of it does not come."""

    status = 408
    code = "request_timeout"


class Unauthorized(RequestError):
    """There is no API key in the request, or one that is not known. Does not say more."""

    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


class Forbidden(RequestError):
    """This key may not, or the request comes from a web page that may not ask."""

    status = 403
    kind = "permission_error"


class NotFound(RequestError):
    """No such model or agent."""

    status = 404
    kind = "not_found_error"


class Conflict(RequestError):
    """The agent is in use."""

    status = 409
    kind = "conflict_error"


class Cancelled(RequestError):
    """Somebody else than its client has stopped a request."""

    status = 409
    kind = "conflict_error"
    code = "cancelled"


class DeadlineExceeded(RequestError):
    """The time its client gave a request is over."""

    status = 504
    kind = "timeout_error"
    code = "deadline_exceeded"


class Overloaded(RequestError):
    """The queue is full, or there is no room."""

    status = 429
    kind = "overloaded_error"
    retry_after = 1


class RateLimited(Overloaded):
    """The key has made as many requests as it may in a minute."""

    kind = "rate_limit_error"
    code = "rate_limit_exceeded"


class ShuttingDown(RequestError):
    """The server no longer takes requests."""

    status = 503
    kind = "unavailable_error"
    retry_after = RESTART


class InternalError(RequestError):
    """Something of ours broke; the log has the details."""
