"""Files of tests are divided as by `--dist loadfile`, but a test that ended its process is not repeated.

pytest-xdist would give it to the next process, and one that hangs would do so in eight more.
"""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController


class Scheduling(LoadFileScheduling):
    """Of the tests of a process that has died, others run those that it had not begun."""

    def remove_node(self, node: WorkerController) -> str | None:
        """Return the test within which the process has died, if it had not run all."""
        units = self.assigned_work[node].values()
        begun = next(((unit, name) for unit in units for name, is_over in unit.items() if not is_over), None)
        if begun is not None:
            begun[0][begun[1]] = True
        super().remove_node(node)
        return begun and begun[1]
