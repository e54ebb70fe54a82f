"""When not to look: after several looks in a row that were in vain nobody looks for a while, and longer each time."""

from __future__ import annotations

from hotfuse.base.lazy_dataclass import dataclass


@dataclass(slots=True)
class Rest:
    """Of one plan that asks each call whether its bet holds. Takes no lock: a lost update moves one look."""

    patience: int = 8
    """Looks in vain in a row that begin a rest."""
    first: int = 8
    """Calls of the first rest."""
    most_doubled: int = 4
    left: int = 0
    """Calls of this rest that are still to come: whoever asks counts them down."""
    in_vain: int = 0
    doubled: int = 0

    def missed(self) -> None:
        """A look was in vain."""
        self.in_vain += 1
        if self.in_vain >= self.patience:
            self.left = self.first << self.doubled
            self.doubled = min(self.doubled + 1, self.most_doubled)
            self.in_vain = self.patience - 1  # the next one in vain is enough

    def held(self) -> None:
        """The bet held: patience begins anew."""
        self.in_vain = self.doubled = 0

    def begin(self) -> None:
        """Forget what calls have shown."""
        self.left = self.in_vain = self.doubled = 0
