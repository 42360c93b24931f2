"""Messages that wait for their time: deferred by the publisher, or put back with a delay.

Two heaps over one dictionary, by time and by id. Whatever has left the dictionary is dead in the heaps, and
goes when it comes up, or when a heap is half dead.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

_FEW = 64


class Deferred:
    """Due times by message id."""

    def __init__(self) -> None:
        self.due_ns: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []
        self._ids: list[int] = []

    def __len__(self) -> int:
        return len(self.due_ns)

    def add(self, message_id: int, due_ns: int) -> None:
        self.due_ns[message_id] = due_ns
        heappush(self._heap, (due_ns, message_id))
        heappush(self._ids, message_id)

    def _tidy(self) -> None:
        most = 2 * len(self.due_ns) + _FEW
        if len(self._ids) > most:
            self._ids = sorted(self.due_ns)
        if len(self._heap) > most:
            self._heap = [(due_ns, message_id) for message_id, due_ns in self.due_ns.items()]
            heapify(self._heap)

    def next_due(self) -> int | None:
        heap, due_ns = self._heap, self.due_ns
        while heap and due_ns.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else None

    def pop_due(self, now_ns: int) -> int | None:
        """The id of a message whose time has come."""
        due_ns = self.next_due()
        if due_ns is None or due_ns > now_ns:
            return None
        message_id = heappop(self._heap)[1]
        del self.due_ns[message_id]
        self._tidy()
        return message_id

    def lowest(self) -> int | None:
        """The smallest id."""
        ids = self._ids
        while ids and ids[0] not in self.due_ns:
            heappop(ids)
        return ids[0] if ids else None

    def drop_below(self, message_id: int) -> list[int]:
        """Take out every message with a smaller id. Gives their ids."""
        dropped = []
        while (lowest := self.lowest()) is not None and lowest < message_id:
            del self.due_ns[lowest]
            dropped.append(lowest)
        self._tidy()
        return dropped

    def soonest(self, count: int) -> list[int]:
        """The ids of those that are due first, in order. Looks at little more than it gives."""
        heap = self._heap
        found: list[int] = []
        seen: set[int] = set()
        border = [(heap[0], 0)] if heap else []
        while border and len(found) < count:
            (due_ns, message_id), index = heappop(border)
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(heap):
                    heappush(border, (heap[child], child))
            if self.due_ns.get(message_id) == due_ns and message_id not in seen:
                seen.add(message_id)
                found.append(message_id)
        return found

    def clear(self) -> None:
        self.due_ns.clear()
        self._heap.clear()
        self._ids.clear()
