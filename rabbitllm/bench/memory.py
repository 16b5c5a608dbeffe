"""The most memory that this process has had. Knows nothing of models."""

from __future__ import annotations

import sys
from pathlib import Path


def peak_memory() -> int | None:
    """Bytes resident at the peak, pages of mapped files included; None where the system does not tell."""
    try:
        # not what getrusage tells: on Linux that includes what the parent had before this program was started
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return _from_usage()


def _from_usage() -> int | None:
    if sys.platform == "win32":
        import psutil

        peak: int = psutil.Process().memory_info().peak_wset
        return peak
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
