"""bitsandbytes has torch compile some of its functions; tests run them as they are, with the same bits.

Compiling one takes seconds for each odd shape; and the first mention of it has torch import its compiler, in a second
and a half of each process that imports bitsandbytes.
"""

from __future__ import annotations

from typing import Any


def leave_as_they_are(torch: Any) -> None:
    """From now on torch returns functions of bitsandbytes that it is to compile; others it compiles."""
    compile_another = torch.compile

    def compiled(model: Any = None, **options: Any) -> Any:
        if getattr(model, "__module__", "").startswith("bitsandbytes."):
            return model
        return compile_another(model, **options)

    torch.compile = compiled
