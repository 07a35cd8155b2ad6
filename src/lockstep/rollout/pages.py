"""Pages of KV memory: reference counts, and a prefix cache that is exact.

A cached page is found by (the page before it, its tokens), so equal keys mean equal prefixes: no hash can collide. The
first page's parent is a root per weight version, so keys computed under old weights are never found under new ones.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Node:
    """A full page in the prefix cache."""

    uid: int  # never reused: a child can only be found through the very node it was computed after
    page: int
    key: tuple[int, tuple[int, ...]]  # (parent's uid, tokens)


class PagePool:
    """Hands out pages, lowest number first, so that an idle pool always behaves the same."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages))
        self._users = [0] * num_pages
        self._nodes: dict[tuple[int, tuple[int, ...]], Node] = {}
        self._node_of_page: dict[int, Node] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()  # cached pages nobody uses, oldest first
        self._next_uid = 0
        self.root = self._new_uid()

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._unused)

    def take(self) -> int | None:
        """A page for one user, evicting the cached page unused for longest; None if all are in use."""
        if not self._free and self._unused:
            page, _ = self._unused.popitem(last=False)
            self._forget(page)
        if not self._free:
            return None
        page = heapq.heappop(self._free)
        self._users[page] = 1
        return page

    def share(self, node: Node) -> int:
        """One more user of a cached page."""
        self._users[node.page] += 1
        self._unused.pop(node.page, None)
        return node.page

    def release(self, pages: Sequence[int]) -> None:
        for page in reversed(pages):  # the end of a sequence is evicted before its beginning
            self._users[page] -= 1
            assert self._users[page] >= 0, f"page {page} released twice"
            if self._users[page] == 0:
                if page in self._node_of_page:
                    self._unused[page] = None
                else:
                    heapq.heappush(self._free, page)

    def find(self, parent: int, tokens: Sequence[int]) -> Node | None:
        return self._nodes.get((parent, tuple(tokens)))

    def cache(self, parent: int, tokens: Sequence[int], page: int) -> Node:
        """Makes a full page findable. If an equal one is cached already that one stays, and is returned."""
        key = (parent, tuple(tokens))
        if key not in self._nodes:
            node = Node(self._new_uid(), page, key)
            self._nodes[key] = self._node_of_page[page] = node
        return self._nodes[key]

    def reset(self) -> None:
        """Forgets every cached prefix (new weights, or a caller that wants a clean slate); pages in use stay so."""
        self.root = self._new_uid()
        for page in list(self._node_of_page):
            self._forget(page)
        self._unused.clear()

    def _forget(self, page: int) -> None:
        node = self._node_of_page.pop(page)
        del self._nodes[node.key]
        if self._users[page] == 0:
            heapq.heappush(self._free, page)

    def _new_uid(self) -> int:
        self._next_uid += 1
        return self._next_uid
