"""Where the seconds of a run go: data, forward and backward, optimizer, hooks."""

import time
from dataclasses import dataclass, field


@dataclass
class Clock:
    """Adds up time by phase. A device that works behind the processor's back is waited for where a number is read."""

    seconds: dict[str, float] = field(default_factory=dict)
    """By phase, since `take`."""
    phase: str = ""
    """What time counts for now."""
    _since: float = 0.0

    @property
    def before_update(self) -> bool:
        """Whether the weights are those of the last finished step, whose hooks have run."""
        return self.phase in ("data", "forward_backward")

    @property
    def at_work(self) -> float:
        """Seconds since `take` that training took: those of all phases that have ended, but for hooks."""
        return sum(seconds for phase, seconds in self.seconds.items() if phase != "hooks")

    def enter(self, phase: str) -> None:
        """From now on time counts for this phase."""
        now = time.perf_counter()
        if self.phase:
            self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now - self._since
        self.phase, self._since = phase, now

    def take(self) -> dict[str, float]:
        """The seconds of each phase since the last time that they were taken."""
        self.enter(self.phase)
        taken, self.seconds = self.seconds, {}
        return {phase: round(seconds, 4) for phase, seconds in taken.items()}
