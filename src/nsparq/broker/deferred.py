"""Deferred messages: published with a delay, or requeued with one.

There are two heaps over one dictionary, by time and by sequence number. An entry of a heap whose
message has left the dictionary is dead. It goes when it comes up, or when half of the heap is dead.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

_FEW = 64


class Deferred:
    """Due times by sequence number."""

    def __init__(self) -> None:
        self.due_ns: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []
        self._sequences: list[int] = []

    def __len__(self) -> int:
        return len(self.due_ns)

    def add(self, sequence: int, due_ns: int) -> None:
        self.due_ns[sequence] = due_ns
        heappush(self._heap, (due_ns, sequence))
        heappush(self._sequences, sequence)

    def _tidy(self) -> None:
        most = 2 * len(self.due_ns) + _FEW
        if len(self._sequences) > most:
            self._sequences = sorted(self.due_ns)
        if len(self._heap) > most:
            self._heap = [(due_ns, sequence) for sequence, due_ns in self.due_ns.items()]
            heapify(self._heap)

    def next_due(self) -> int | None:
        heap, due_ns = self._heap, self.due_ns
        while heap and due_ns.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else None

    def pop_due(self, now_ns: int) -> int | None:
        """The sequence number of a message that is due."""
        due_ns = self.next_due()
        if due_ns is None or due_ns > now_ns:
            return None
        sequence = heappop(self._heap)[1]
        del self.due_ns[sequence]
        self._tidy()
        return sequence

    def discard(self, sequence: int) -> None:
        self.due_ns.pop(sequence, None)
        self._tidy()

    def lowest(self) -> int | None:
        """The smallest sequence number."""
        sequences = self._sequences
        while sequences and sequences[0] not in self.due_ns:
            heappop(sequences)
        return sequences[0] if sequences else None

    def drop_below(self, sequence: int) -> list[int]:
        """Take out every message with a smaller number. Gives their numbers."""
        dropped = []
        while (lowest := self.lowest()) is not None and lowest < sequence:
            del self.due_ns[lowest]
            dropped.append(lowest)
        self._tidy()
        return dropped

    def soonest(self, count: int) -> list[int]:
        """The sequence numbers of the messages that are due first, in order. Looks at few
        others."""
        heap = self._heap
        found: list[int] = []
        seen: set[int] = set()
        border = [(heap[0], 0)] if heap else []
        while border and len(found) < count:
            (due_ns, sequence), index = heappop(border)
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(heap):
                    heappush(border, (heap[child], child))
            if self.due_ns.get(sequence) == due_ns and sequence not in seen:
                seen.add(sequence)
                found.append(sequence)
        return found

    def clear(self) -> None:
        self.due_ns.clear()
        self._heap.clear()
        self._sequences.clear()
