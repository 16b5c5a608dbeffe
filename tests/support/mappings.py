"""The properties of this process's memory, from /proc/self/smaps. Linux only."""

from __future__ import annotations

import re
from pathlib import Path


def flags_of(address: int) -> list[str]:
    """The flags of the mapping that contains an address, as proc_pid_smaps(5) abbreviates them."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) <= address < int(match[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []
