"""Messages that wait for their time: deferred by the publisher, or put back with a delay."""

from __future__ import annotations

from heapq import heappop, heappush


class Deferred:
    """Due times by message id, and a heap of them."""

    def __init__(self) -> None:
        self.due_ns: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self.due_ns)

    def add(self, message_id: int, due_ns: int) -> None:
        self.due_ns[message_id] = due_ns
        heappush(self._heap, (due_ns, message_id))

    def next_due(self) -> int | None:
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now_ns: int) -> int | None:
        """The id of a message whose time has come."""
        if self._heap and self._heap[0][0] <= now_ns:
            message_id = heappop(self._heap)[1]
            del self.due_ns[message_id]
            return message_id
        return None

    def clear(self) -> None:
        self.due_ns.clear()
        self._heap.clear()
