"""Dead letters in groups: by the channel that they came from, and by reason, with examples."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from nsparq.broker.letters import Letter, Origin, Part
from nsparq.broker.redrive_choice import STATES


@dataclass(slots=True)
class LetterGroup:
    """Letters with the same origin and reason."""

    examples: deque[tuple[Letter, str]]
    """The newest letters, with their states."""
    states: Counter[str] = field(default_factory=Counter)
    """How many letters are in which state: see broker.redrive_choice.STATES."""
    first_ns: int = 0
    """When the oldest and the newest letter were given up."""
    last_ns: int = 0


class LetterGroups:
    """The groups of the letters that match a filter."""

    def __init__(self, examples: int) -> None:
        """`examples` is the number of letters to show of each group."""
        self._examples = examples
        self.groups: dict[tuple[Origin, str], LetterGroup] = {}
        self.letters = 0
        """Dead letters looked at, whether they match or not."""
        self.foreign = 0
        """Messages looked at that are not dead letters of nsqd."""

    def add(self, part: Part, states: dict[Origin, npt.NDArray[np.int64]]) -> None:
        """Add letters and their states. A thread may call this."""
        self.letters += part.letters
        self.foreign += part.foreign
        for origin, known in states.items():
            for letter, state in zip(part.origins[origin].matching, known.tolist(), strict=True):
                key = (origin, letter.reason)
                group = self.groups.get(key)
                if group is None:
                    group = self.groups[key] = LetterGroup(deque(maxlen=self._examples))
                    group.first_ns = letter.given_up_ns
                group.states[STATES[state]] += 1
                group.last_ns = letter.given_up_ns
                group.examples.append((letter, STATES[state]))
