"""Records as an encrypted manifest has them: names, token ids and turns sealed, and bound to the rest of their row.

A row whose parts were not written together is not believed. Of its files it has the secrets, which stand for all else: a
secret opens under its file's name and rows only, and the data under the secret. Keys, depths, sizes and times stay in clear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from rewake.errors import CorruptFile
from rewake.store.base import AgentRecord, BranchRecord, Commit, PageRecord, Snapshot
from rewake.store.crypto import Cipher, fields

__all__ = ["Sealing"]

Record = TypeVar("Record", AgentRecord, BranchRecord, PageRecord)


class Sealing:
    """Seals what goes into the manifest, and opens what comes out of it."""

    def __init__(self, cipher: Cipher, signature: bytes) -> None:
        self._cipher = cipher
        self._signature = signature

    def sealed(self, commit: Commit) -> Commit:
        return replace(
            commit,
            pages=tuple(map(self._seal_page, commit.pages)),
            branches=tuple(map(self._seal_branch, commit.branches)),
            agents=tuple(map(self._seal_agent, commit.agents)),
        )

    def opened(self, stored: Snapshot) -> tuple[Snapshot, Commit]:
        """What can be believed, and a commit that forgets the rest."""
        pages, bad_pages = sorted_out(stored.pages, self._open_page)
        branches, bad_branches = sorted_out(stored.branches, self._open_branch)
        agents, bad_agents = sorted_out(stored.agents, self._open_agent)
        gone = Commit(
            gone_pages=tuple(p.key for p in bad_pages),
            gone_branches=tuple(b.id for b in bad_branches),
            gone_agents=tuple(a.id for a in bad_agents),
        )
        return Snapshot(pages, branches, agents), gone

    def _seal_page(self, page: PageRecord) -> PageRecord:
        tokens = self._cipher.seal(page.namespace, page.tokens, self._about_page(page))
        return replace(page, namespace=self._cipher.seal_namespace(page.namespace), tokens=tokens)

    def _open_page(self, page: PageRecord) -> PageRecord:
        namespace = self._cipher.open_namespace(page.namespace)
        return replace(page, namespace=namespace, tokens=self._cipher.open(namespace, page.tokens, self._about_page(page)))

    def _about_page(self, page: PageRecord) -> bytes:
        secrets = (f.secret for f in sorted(page.files, key=lambda f: (f.plane, f.first)))
        return fields("page", self._signature, page.key, page.parent, page.depth, *secrets)

    def _seal_branch(self, branch: BranchRecord) -> BranchRecord:
        namespace, cipher = branch.namespace, self._cipher
        agent = None if branch.agent is None else cipher.seal_name(namespace, branch.agent)
        stored = replace(branch, namespace=cipher.seal_namespace(namespace), agent=agent)
        about = self._about_branch(stored)
        tokens, turns = cipher.seal(namespace, branch.tokens, b"tokens" + about), cipher.seal(namespace, branch.turns, b"turns" + about)
        return replace(stored, tokens=tokens, turns=turns)

    def _open_branch(self, stored: BranchRecord) -> BranchRecord:
        cipher, about = self._cipher, self._about_branch(stored)
        namespace = cipher.open_namespace(stored.namespace)
        return replace(
            stored,
            namespace=namespace,
            agent=None if stored.agent is None else cipher.open_name(namespace, stored.agent),
            tokens=cipher.open(namespace, stored.tokens, b"tokens" + about),
            turns=cipher.open(namespace, stored.turns, b"turns" + about),
        )

    def _about_branch(self, stored: BranchRecord) -> bytes:
        """Its segments too: one that is missing would move the rows of those behind it."""
        segments = (s.secret for s in sorted(stored.segments, key=lambda s: (s.plane, s.first)))
        return fields("branch", self._signature, stored.id, stored.agent or "", stored.parent, *segments)

    def _seal_agent(self, agent: AgentRecord) -> AgentRecord:
        name = self._cipher.seal_name(agent.namespace, agent.name)
        return replace(agent, namespace=self._cipher.seal_namespace(agent.namespace), name=name)

    def _open_agent(self, stored: AgentRecord) -> AgentRecord:
        namespace = self._cipher.open_namespace(stored.namespace)
        return replace(stored, namespace=namespace, name=self._cipher.open_name(namespace, stored.name))


def sorted_out(stored: Iterable[Record], opened: Callable[[Record], Record]) -> tuple[tuple[Record, ...], list[Record]]:
    good: list[Record] = []
    bad: list[Record] = []
    for record in stored:
        try:
            good.append(opened(record))
        except CorruptFile:
            bad.append(record)
    return tuple(good), bad
