"""Memory of a device: what a program can still have of it, and whether that is enough to compute beside its calls.

Recordings keep memory, and proofs beside calls need as much as a call does. Near the end of memory that would be missing where the
program asks for it, in a call or between two, and nobody is asked for it back when its own code finds none. So nothing is recorded
or proven unless several times as much is free as calls seem to need: what torch keeps of what they gave back, and no more than it
ever had in use beyond what is in use now.
"""

from __future__ import annotations

import torch

from hotfuse.backends.device_protocol import MIN_LEFT


def free_bytes(device: torch.device) -> int:
    """What a program can still have: what nobody took, and what torch keeps of what was given back, outside of recordings."""
    untaken, _ = torch.cuda.mem_get_info(device)
    return untaken + _kept_bytes(device)


def short_of_memory(device: torch.device) -> str:
    """Why nothing should be computed beside the calls of a program; empty where there is memory enough."""
    in_use = torch.cuda.memory_stats(device)
    once = in_use.get("allocated_bytes.all.peak", 0) - in_use.get("allocated_bytes.all.current", 0)
    need, (untaken, _) = min(_kept_bytes(device), once), torch.cuda.mem_get_info(device)
    if untaken >= (1 + MIN_LEFT) * need:
        return ""
    return f"calls need up to {need >> 20} MiB of the device, and {untaken >> 20} MiB are free"


def _kept_bytes(device: torch.device) -> int:
    index = torch.empty(0, device=device).device.index
    kept = [s for s in torch.cuda.memory_snapshot() if s["device"] == index and not any(s.get("segment_pool_id", ()))]
    return sum(int(s["total_size"]) - int(s["allocated_size"]) for s in kept)
