"""How much memory is free, where the system says so. Knows nothing of what it is for."""

from pathlib import Path

__all__ = ["free_memory"]

_SYSTEM = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def free_memory() -> int | None:
    """Bytes that may still be taken: those of the machine, and of the control group where it has a limit.

    None where the system does not say (it has no ``/proc/meminfo``).
    """
    try:
        lines = dict(line.split(":", 1) for line in _SYSTEM.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    try:
        limit, used = (int((_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no control group, or one without a limit ("max")
        return free
    return min(free, max(limit - used, 0))
