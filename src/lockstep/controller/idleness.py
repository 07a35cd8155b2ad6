"""Steps that move no weight: told with the reason, for such a run looks as busy as any other."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.protocols import IDLE, Recorder

AGAIN = 10  # idle steps in a row after which it is told once more


@dataclass(slots=True)
class Idleness:
    """Tells of the first idle step, and of every AGAIN in a row."""

    recorder: Recorder
    _in_a_row: int = 0
    _told: bool = False

    def note(self, step: int, reason: str | None) -> None:
        """`reason`: why this step moved no weight; None if it did."""
        self._in_a_row = self._in_a_row + 1 if reason else 0
        if reason and (not self._told or self._in_a_row % AGAIN == 0):
            many = (
                f"no weight has moved for {self._in_a_row} steps" if self._in_a_row > 1 else "this step moved no weight"
            )
            self.recorder.event(step, IDLE, f"{many}: {reason}")
            self._told = True
