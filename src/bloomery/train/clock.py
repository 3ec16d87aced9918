"""Where the seconds of a run go: data, forward and backward, optimizer, hooks."""

import time
from dataclasses import dataclass, field


@dataclass
class Clock:
    """Adds up time by phase. A device that works behind the processor's back is waited for where a number is read."""

    seconds: dict[str, float] = field(default_factory=dict)
    """By phase, since `take`."""
    _phase: str = ""
    _since: float = 0.0

    def enter(self, phase: str) -> None:
        """From now on time counts for this phase."""
        now = time.perf_counter()
        if self._phase:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now

    def take(self) -> dict[str, float]:
        """The seconds of each phase since the last time that they were taken."""
        self.enter(self._phase)
        taken, self.seconds = self.seconds, {}
        return {phase: round(seconds, 4) for phase, seconds in taken.items()}
