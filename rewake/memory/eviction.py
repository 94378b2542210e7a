"""What leaves first: of the arena, what costs least to have back; of the disk, what is worth least for its bytes.

Knows the tree and the planes; drops nothing itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from rewake.memory.tree import Branch, Page, PrefixTree
from rewake.memory.value import worth
from rewake.planes import PagePlanes
from rewake.quant import PAGE_TOKENS

__all__ = ["Eviction"]

# What it costs to have a page back, in tokens computed: reading it takes about as long as some tokens do.
READ_COST, COMPUTE_COST, ANONYMOUS = 8.0, float(PAGE_TOKENS), 0.1
SORT_EVERY = 1.0  # seconds for which what is on disk keeps its order by worth: with thousands of agents, finding it takes a while


class Eviction:
    """The order in which pages and branches of one tree leave memory and disk."""

    def __init__(self, tree: PrefixTree, planes: PagePlanes) -> None:
        self._tree, self._planes = tree, planes
        self._pinned: set[Page | Branch] | None = None  # None: to be collected again
        self._by_worth: list[Branch] = []
        self._sorted_at = 0.0

    def pins_changed(self) -> None:
        """An agent was pinned or unpinned, or a pinned one's transcript has changed."""
        self._pinned = None

    # ---- memory

    def cost(self, resident: Page | Branch, plane: int) -> float:
        """What it takes to have it back, in tokens computed; 0 if nobody will ask for it. Pinned ones go when there is nothing else."""
        if isinstance(resident, Page) and not self._is_wanted(resident, plane):
            return 0.0
        if resident in self._pinned_ones():
            return math.inf
        saved = resident.stored(plane) >= resident.stored_rows
        if isinstance(resident, Branch):
            named, sharers = resident.agent is not None, 1
        else:
            named, sharers = resident.named, max(1, len(resident.children) + len(resident.branches))
        return (READ_COST if saved else COMPUTE_COST) * (sharers if named else ANONYMOUS)

    def _is_wanted(self, page: Page, number: int) -> bool:
        """Whether a transcript that is gone on with attends to this plane of a page; or one that begins where others have parted."""
        if self._planes.planes[number].reach_in(page.number) is None:
            return True
        return any(self.asking(page, number))

    def asking(self, page: Page, number: int) -> Iterator[Page | Branch]:
        """Branches below a page that attend to a plane of it where they go on, and pages at whose end several do."""
        plane, nodes = self._planes.planes[number], [page]
        while nodes:
            node = nodes.pop()
            yield from (b for b in node.branches if plane.is_needed(page.number, b.next_query))
            if plane.is_needed(page.number, node.end):
                if len(node.children) + len(node.branches) > 1:
                    yield node
                nodes.extend(node.children.values())

    def _pinned_ones(self) -> set[Page | Branch]:
        if self._pinned is None:
            branches = [b for a in self._tree.agents.values() if a.pinned for b in a.branches]
            self._pinned = set(branches).union(*(b.parent.path() for b in branches))
        return self._pinned

    # ---- disk

    def least_worth(self) -> list[Branch]:
        """What to forget next, so that the disk has more room; none if nothing would help."""
        is_fresh = False
        while not is_fresh:
            if is_fresh := not self._by_worth or time.time() > self._sorted_at + SORT_EVERY:
                self._by_worth, self._sorted_at = self._sorted_by_worth(), time.time()
            while self._by_worth:
                branch = self._by_worth.pop()
                if can_go(branch) and branch.used <= self._sorted_at and (branches := self._with_sharers(branch)):
                    return branches
        return []

    def _sorted_by_worth(self) -> list[Branch]:
        """What may be forgotten, what is worth least last."""
        now = time.time()
        heads = {a.head for a in self._tree.agents.values()}

        def value(branch: Branch) -> float:
            idle, anonymous = max(0.0, now - branch.used), branch.agent is None
            return worth(branch.num_tokens, self._own_bytes(branch), idle, anonymous=anonymous, is_head=branch in heads)

        return sorted((b for a in self._tree.agents.values() for b in a.branches if can_go(b)), key=value, reverse=True)

    def _with_sharers(self, branch: Branch) -> list[Branch]:
        """It, if that gives something back; else all that share its last page, unless one of these must stay."""
        if self._own_bytes(branch):
            return [branch]
        if not branch.parent.files:  # it is in memory only
            return []
        sharers = [b for page in self._tree.subtree(branch.parent) for b in page.branches]
        return sharers if all(map(can_go, sharers)) else []

    def _own_bytes(self, branch: Branch) -> int:
        """What forgetting it would give back."""
        files = [*branch.segments]
        page = branch.parent
        while page.parent is not None and len(page.children) + len(page.branches) == 1:
            files += page.files
            page = page.parent
        return sum(f.file_bytes for f in files)


def can_go(branch: Branch) -> bool:
    """Whether it may be forgotten for want of room."""
    return not (branch.owner.pinned or branch.running or branch.refs or branch.forgotten)
