"""Why a group of nodes cannot become a kernel."""

from __future__ import annotations

from hotfuse.base.errors import HotfuseError
from hotfuse.ir.graph import Value


class CannotLower(HotfuseError):
    """A group that has no kernel here: the plan keeps the library's operators for it, or cuts it differently."""

    def __init__(self, because: str, *, where: str = "") -> None:
        super().__init__("a group of nodes cannot be lowered", where=where, because=because)


class NotInOneNest(CannotLower):
    """A value that the loops around its use cannot make: it can be computed before them, into the kernel's own memory."""

    def __init__(self, value: Value, because: str, *, where: str = "") -> None:
        super().__init__(because, where=where)
        self.value = value
