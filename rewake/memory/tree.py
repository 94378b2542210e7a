"""The prefix tree: full pages under their parents, and the branches whose last, unfinished page hangs from them.

        root ── page ── page ── page ── branch "coder" (37 rows)
                   └── page ── branch "coder", older (200 rows)
                   └── branch "reviewer" (5 rows)

A path from the root to a branch is a transcript, token for token. Knows what was remembered; not where it is kept.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from rewake.quant import PAGE_TOKENS
from rewake.store.base import StoredFile

__all__ = ["Agent", "Branch", "Page", "Prefix", "PrefixTree", "Resident", "SavedTurn", "common_length", "page_key", "to_tokens"]

TOKEN = "i"  # array code: signed 32-bit
FEW = 8  # candidates to look at more closely
OWN_BRANCH = 64  # tokens worth computing again to go on in place: about what copying a page costs


def to_tokens(tokens: Sequence[int] = ()) -> array[int]:
    return array(TOKEN, tokens)


def page_key(namespace: str, signature: bytes, parent: bytes, tokens: array[int], group: int = 0, secret: bytes = b"") -> bytes:
    """SHA-256 (with a `secret`, HMAC-SHA256) over everything a page's content depends on; fields are tagged and length-prefixed."""
    digest = hmac.new(secret, digestmod=hashlib.sha256) if secret else hashlib.sha256()
    for tag, value in (
        (b"ns", namespace.encode()),
        (b"sig", signature),
        (b"grp", group.to_bytes(4, "little")),
        (b"par", parent),
        (b"tok", tokens.tobytes()),
    ):
        digest.update(tag + len(value).to_bytes(8, "little") + value)
    return digest.digest()


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading items two sequences of one type share, in O(log n) slice comparisons."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(eq=False, slots=True)
class Agent:
    """Who remembers. `name` is None for all who do not say who they are. `ttl` counts from the last use, in seconds."""

    id: str
    namespace: str
    name: str | None
    created: float = field(default_factory=time.time)
    used: float = field(default_factory=time.time)
    pinned: bool = False
    ttl: float | None = None
    branches: list[Branch] = field(default_factory=list)

    @property
    def head(self) -> Branch | None:
        """The branch used last."""
        return max(self.branches, key=lambda b: b.used, default=None)


@dataclass(eq=False, slots=True)
class Resident:
    """Something that occupies slots of the arena, plane by plane, while it is hot.

    `refs` counts sequences and writes that are at it, `needs` for each plane those of them that need it there. Without any a plane
    is merely cached, and may be evicted.
    """

    slots: dict[int, tuple[int, ...]] = field(default_factory=dict, init=False)  # of each plane that is in the arena
    refs: int = field(default=0, init=False)
    needs: dict[int, int] = field(default_factory=dict, init=False)
    forgotten: bool = field(default=False, init=False)  # out of the tree: its slots are given back with the last need
    stale: bool = field(default=False, init=False)  # what is in its slots are not its rows any more: as above
    newer: tuple[int, ...] = field(default=(), init=False)  # planes that are not, or do not refine, what its files hold of them


@dataclass(eq=False, slots=True)
class Page(Resident):
    """256 tokens and their K/V; immutable. `files` are its planes on disk. The root is a page without tokens.

    `named`: somebody who says who they are has it in a transcript. `saving`: planes on their way to the disk, as `file_name`.
    """

    key: bytes
    namespace: str
    parent: Page | None
    tokens: array[int]
    files: tuple[StoredFile, ...] = ()
    children: dict[bytes, Page] = field(default_factory=dict)
    branches: list[Branch] = field(default_factory=list)
    named: bool = False
    saving: tuple[int, ...] = ()
    file_name: str = ""
    number: int = field(init=False)  # among the pages of its transcripts; -1: the root

    def __post_init__(self) -> None:
        self.number = self.parent.number + 1 if self.parent is not None else -1

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return (self.number + 1) * PAGE_TOKENS

    @property
    def is_orphan(self) -> bool:
        """Whether no transcript needs it: nobody could ever forget it by name."""
        return self.parent is not None and not (self.children or self.branches)

    def path(self) -> list[Page]:
        """The pages from the first to this one."""
        pages: list[Page] = []
        page = self
        while page.parent is not None:
            pages.append(page)
            page = page.parent
        return pages[::-1]

    @property
    def stored_rows(self) -> int:
        return PAGE_TOKENS

    def stored(self, plane: int) -> int:
        """How many rows of a plane are on disk."""
        return 0 if plane in self.newer else sum(f.rows for f in self.files if f.plane == plane)


@dataclass(frozen=True, eq=False, slots=True)
class SavedTurn:
    """A branch as the manifest has it; an ancestor of what it is now."""

    parent: Page
    tokens: array[int]
    segments: tuple[StoredFile, ...]
    turns: array[int]


@dataclass(eq=False, slots=True)
class Branch(Resident):
    """One transcript, ending in a page that is not full: `tokens` are those behind `parent`.

    The first `num_rows` of them have K/V. A last one may not: it was sampled, but never computed on.
    `segments` hold rows [0, saved_rows) on disk, each plane in files of its own. `running` says that a sequence is appending to it,
    that the turn it has appended is still being saved, or that it is being exported: nobody else may go on with it.
    `turns` are the lengths of the transcript at which answers ended.
    """

    id: str
    owner: Agent
    parent: Page
    tokens: array[int] = field(default_factory=to_tokens)
    num_rows: int = 0
    segments: list[StoredFile] = field(default_factory=list)
    saved: SavedTurn | None = None
    running: bool = False
    created: float = field(default_factory=time.time)
    used: float = field(default_factory=time.time)
    turns: array[int] = field(default_factory=to_tokens)
    moved: tuple[StoredFile, ...] = ()  # segments that the manifest may still name as its own, and that are a page's now

    @property
    def namespace(self) -> str:
        return self.owner.namespace

    @property
    def agent(self) -> str | None:
        return self.owner.name

    @property
    def saved_rows(self) -> int:
        return sum(s.rows for s in self.segments if s.plane == 0)

    def note_saved(self) -> None:
        """The manifest has it as it is."""
        self.saved = SavedTurn(self.parent, self.tokens, tuple(self.segments), self.turns)
        self.moved = tuple(f for f in self.moved if f in self.segments)

    def obsolete_files(self) -> tuple[StoredFile, ...]:
        """Segments the manifest names that are no longer part of anything: its page has been filled since."""
        return tuple(s for s in self.saved.segments if s not in self.segments and s not in self.moved) if self.saved else ()

    @property
    def stored_rows(self) -> int:
        return self.num_rows

    @property
    def files(self) -> tuple[StoredFile, ...]:
        return tuple(self.segments)

    def stored(self, plane: int) -> int:
        return sum(s.rows for s in self.segments if s.plane == plane)

    @property
    def next_query(self) -> int:
        """The first position that is computed when it is gone on with."""
        return self.parent.end + min(self.num_rows, len(self.tokens) - 1)

    def transcript(self) -> array[int]:
        """All token ids, from the first."""
        whole = to_tokens()
        for page in self.parent.path():
            whole.extend(page.tokens)
        whole.extend(self.tokens)
        return whole

    @property
    def num_tokens(self) -> int:
        return self.parent.end + len(self.tokens)


@dataclass(frozen=True)
class Prefix:
    """The longest remembered prefix of some tokens: whole `pages`, then `rows` rows of `partial`.

    `partial` is the page or branch to continue or copy from; with 0 rows it only shows where the tokens part.
    """

    pages: tuple[Page, ...]
    partial: Page | Branch | None
    rows: int

    @property
    def length(self) -> int:
        return len(self.pages) * PAGE_TOKENS + self.rows

    @property
    def ends_branch(self) -> bool:
        """Whether all that some branch has computed is in this prefix."""
        return isinstance(self.partial, Branch) and self.rows == self.partial.num_rows


class PrefixTree:
    """All that is remembered under one signature, one tree for each namespace."""

    def __init__(self, signature: bytes, secret: bytes = b"") -> None:
        self.signature = signature
        self.secret = secret
        self.roots: dict[str, Page] = {}
        self.agents: dict[tuple[str, str | None], Agent] = {}

    def agent(self, namespace: str, name: str | None) -> Agent:
        """The agent of that name, or a new one, which is not known before it has a branch."""
        return self.agents.get((namespace, name)) or Agent(secrets.token_hex(16), namespace, name)

    def root(self, namespace: str) -> Page:
        return self.roots.setdefault(namespace, Page(b"", namespace, None, to_tokens()))

    def key(self, namespace: str, parent: Page, tokens: array[int]) -> bytes:
        return page_key(namespace, self.signature, parent.key, tokens, secret=self.secret)

    def longest_prefix(
        self, namespace: str, tokens: array[int], agent: str | None = None, is_whole: Callable[[Page | Branch], bool] = lambda _: True
    ) -> Prefix:
        """Walk whole pages as far as they go, then find the page or branch that shares most of what is left.

        What holds the whole prompt wins; else the asker's own branch, if all of it is in the prompt and it is not
        more than `OWN_BRANCH` tokens shorter than the best: it grows in place, without a copy or a second branch. Among equals what
        `is_whole` wins: of the others something is nowhere any more.
        """
        pages: list[Page] = []
        node, at = self.root(namespace), 0
        while len(tokens) - at >= PAGE_TOKENS:
            chunk = tokens[at : at + PAGE_TOKENS]
            child = node.children.get(self.key(namespace, node, chunk))
            if child is None or child.tokens != chunk:  # a hash alone is never trusted
                break
            pages.append(child)
            node, at = child, at + PAGE_TOKENS
        rest = tokens[at : at + PAGE_TOKENS]

        def shared(candidate: Page | Branch) -> int:
            return common_length(rest, candidate.tokens[: candidate.stored_rows])

        def worth(candidate: Page | Branch) -> tuple[bool, int, bool, bool, bool]:
            rows = shared(candidate)
            extends = isinstance(candidate, Branch) and rows == candidate.num_rows
            own = isinstance(candidate, Branch) and extends and candidate.agent == agent and not candidate.running
            return rows == len(rest), rows + OWN_BRANCH * own, own, extends, is_whole(candidate)

        candidates: list[Page | Branch] = [*node.children.values(), *node.branches]
        if rest and len(candidates) > FEW:  # most of many begin otherwise
            alike = [c for c in candidates if not c.stored_rows or c.tokens[0] == rest[0]]
            candidates = alike or candidates[:1]
        partial = max(candidates, key=worth, default=None)
        return Prefix(tuple(pages), partial, shared(partial) if partial is not None else 0)

    def add_page(self, namespace: str, parent: Page, tokens: array[int]) -> Page:
        """A new full page under `parent`; the caller has seen that there is none of its key."""
        assert len(tokens) == PAGE_TOKENS
        page = Page(self.key(namespace, parent, tokens), namespace, parent, tokens)
        assert page.key not in parent.children
        parent.children[page.key] = page
        return page

    def add_branch(self, branch: Branch) -> Branch:
        branch.owner = self.agents.setdefault((branch.namespace, branch.agent), branch.owner)  # it may have been forgotten meanwhile
        branch.parent.branches.append(branch)
        branch.owner.branches.append(branch)
        return branch

    def move_branch(self, branch: Branch, parent: Page) -> None:
        branch.parent.branches.remove(branch)
        branch.parent = parent
        parent.branches.append(branch)

    def remove_branch(self, branch: Branch) -> None:
        branch.parent.branches.remove(branch)
        branch.owner.branches.remove(branch)

    def remove_agent(self, agent: Agent) -> None:
        assert not agent.branches
        del self.agents[agent.namespace, agent.name]

    def remove_page(self, page: Page) -> None:
        assert page.parent is not None and not page.children and not page.branches
        del page.parent.children[page.key]

    def branches_of(self, namespace: str, agent: str | None) -> list[Branch]:
        """The agent's branches, the latest used first: that one is its head."""
        known = self.agents.get((namespace, agent))
        return sorted(known.branches, key=lambda b: b.used, reverse=True) if known else []

    def subtree(self, page: Page) -> list[Page]:
        """`page` and everything below it, children before parents."""
        pages, stack = [], [page]
        while stack:
            pages.append(stack.pop())
            stack.extend(pages[-1].children.values())
        return pages[::-1]

    def residents(self, namespace: str | None = None) -> Iterator[Page | Branch]:
        """All pages and branches; only of one namespace, if that is said."""
        for root in [root for space, root in self.roots.items() if namespace in (None, space)]:
            stack = [root]
            while stack:
                page = stack.pop()
                stack.extend(page.children.values())
                yield from page.branches
                if page.parent is not None:
                    yield page
