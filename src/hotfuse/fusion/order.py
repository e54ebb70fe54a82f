"""Groups of a graph in an order in which they can run, and who waits for whom."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from hotfuse.fusion.closed import UseIndex
from hotfuse.fusion.groups import Group


class GroupOrder:
    """Groups and the dependences between them; raises ValueError where groups would wait for each other."""

    def __init__(self, index: UseIndex, groups: Sequence[Group]) -> None:
        self.index = index
        self._home = {i: k for k, g in enumerate(groups) for i in g.nodes}
        self._needs = _needs(index, groups, self._home)
        self.groups = _sorted(groups, self._needs)
        place = {g: k for k, g in enumerate(self.groups)}
        old = {k: place[g] for k, g in enumerate(groups)}
        self._home = {i: old[k] for i, k in self._home.items()}
        self._needs = _needs(index, self.groups, self._home)
        self._read: list[list[int]] = [[] for _ in self.groups]
        for k, needs in enumerate(self._needs):
            for m in needs:
                self._read[m].append(k)
        self._place = place

    def edges(self) -> Iterator[tuple[Group, Group]]:
        """Every producer with each of its consumers."""
        for k, needs in enumerate(self._needs):
            for m in sorted(needs):
                yield self.groups[m], self.groups[k]

    def siblings(self, most: int) -> Iterator[tuple[Group, Group]]:
        """Groups that read the same value, of which neither waits for the other; neighbours among its readers only."""
        seen: set[tuple[int, int]] = set()
        for readers in self.index.readers.values():
            homes = sorted({self._home[r] for r in readers})
            for n, a in enumerate(homes):
                for b in homes[n + 1 : n + 1 + most]:
                    if (a, b) not in seen and a not in self._needs[b] and not self._reaches(a, b):
                        seen.add((a, b))
                        yield self.groups[a], self.groups[b]

    def readers(self, g: Group) -> list[Group]:
        """The groups that read from one."""
        return [self.groups[k] for k in self._read[self._place[g]]]

    def between(self, a: Group, b: Group) -> Group | None:
        """A group that depends on one of two and that the other depends on."""
        first, last = sorted((self._place[a], self._place[b]))
        reached: set[int] = set()
        waiting = [k for k in self._read[first] if k != last]
        while waiting:
            k = waiting.pop()
            if k in reached or k > last:
                continue
            reached.add(k)
            if last in self._read[k]:
                return self.groups[k]
            waiting += [m for m in self._read[k] if m != last]
        return None

    def _reaches(self, a: int, b: int) -> bool:
        seen: set[int] = set()
        waiting = [a]
        while waiting:
            k = waiting.pop()
            if k == b:
                return True
            for m in self._read[k]:
                if m <= b and m not in seen:
                    seen.add(m)
                    waiting.append(m)
        return False


def _needs(index: UseIndex, groups: Sequence[Group], home: dict[int, int]) -> list[set[int]]:
    nodes = index.graph.nodes
    return [
        {home[index.maker[v.name]] for i in g.nodes for v in nodes[i].ins if v.name in index.maker} - {k}
        for k, g in enumerate(groups)
    ]


def _sorted(groups: Sequence[Group], needs: Sequence[set[int]]) -> tuple[Group, ...]:
    """Each group after those it reads from, otherwise in the order of their first nodes."""
    left = [len(n) for n in needs]
    readers: list[list[int]] = [[] for _ in groups]
    for k, found in enumerate(needs):
        for m in found:
            readers[m].append(k)
    ready = [(groups[k].nodes[0], k) for k, n in enumerate(left) if n == 0]
    heapq.heapify(ready)
    done: list[Group] = []
    while ready:
        _, k = heapq.heappop(ready)
        done.append(groups[k])
        for r in readers[k]:
            left[r] -= 1
            if left[r] == 0:
                heapq.heappush(ready, (groups[r].nodes[0], r))
    if len(done) != len(groups):
        raise ValueError("groups would wait for each other")
    return tuple(done)
