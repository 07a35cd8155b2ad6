"""The bus of a single process: a dictionary."""

from __future__ import annotations

from lockstep.types import Group


class Memory:
    """Implements protocols.Bus. Groups are handed over, not copied."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}

    async def put(self, group: Group) -> None:
        assert group.index not in self._groups, f"group {group.index} is on the bus already"
        self._groups[group.index] = group

    async def get(self, index: int) -> Group:
        return self._groups.pop(index)

    async def drop(self, index: int) -> None:
        self._groups.pop(index, None)
