"""Several sequences of one prompt: who shares with whom, and who waits for whom.

The first of a group to run computes the prompt. The others wait until it has, and begin with its blocks. Where it has
ended before they could, the next one computes what the prefix cache does not have.
"""

from __future__ import annotations

from pellucid_server.engine.sequence import SequenceState


class Groups:
    """Live sequences by group. A sequence that is alone is a group of its own."""

    def __init__(self) -> None:
        self._members: dict[int, list[SequenceState]] = {}

    def add(self, sequence: SequenceState) -> None:
        self._members.setdefault(_group(sequence), []).append(sequence)

    def remove(self, sequence: SequenceState) -> None:
        members = self._members[_group(sequence)]
        members.remove(sequence)
        if not members:
            del self._members[_group(sequence)]

    def siblings(self, sequence: SequenceState) -> list[SequenceState]:
        """Running sequences of the same group, for one that does not run."""
        return [other for other in self._members[_group(sequence)] if other.blocks]

    def awaits(self, sequence: SequenceState) -> bool:
        """Whether others of the group run, but have not computed the prompt yet."""
        siblings, prompt = self.siblings(sequence), len(sequence.request.prompt)
        return bool(siblings) and all(
            other.output_count == 0 and other.computed + other.offset < prompt for other in siblings
        )


def _group(sequence: SequenceState) -> int:
    return sequence.request.key if sequence.request.group is None else sequence.request.group
