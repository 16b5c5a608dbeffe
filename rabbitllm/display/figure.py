"""Common parts of all pictures: the formats, a figure without a screen, and writing it to a file.

Drawn by matplotlib, which is imported when the first figure is made. Independent of the content.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rabbitllm.errors import MissingPackageError, OptionError
from rabbitllm.storage.durable import write_whole

FORMATS = ("png", "svg", "pdf")


def check_picture(path: str | Path) -> None:
    """Refuse, before anything is measured, a picture that could not be drawn afterwards.

    Raises:
        OptionError: the suffix of the name is not a supported format.
        MissingPackageError: matplotlib is not installed.
    """
    ending = Path(path).suffix.removeprefix(".").lower()
    if ending not in FORMATS:
        raise OptionError(f"{path} is no name of a picture.", f"Give it one that ends in .{', .'.join(FORMATS)}.")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(
            "A picture needs the package matplotlib.", 'Install it: pip install ".[plot]" in a copy of the repository.'
        ) from error


def blank(width: float, height: float) -> Any:
    """An empty white figure of this size in inches, independent of the backend of the process."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def unframed(axes: Any) -> None:
    """Remove the sides of axes that have no scale."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def write(figure: Any, path: str | Path, dpi: int = 150) -> None:
    """Write a figure in the format of the file's suffix; an existing file is replaced.

    Raises:
        OSError: the file cannot be written.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format=Path(path).suffix[1:].lower(), dpi=dpi)
    write_whole(Path(path), buffer.getvalue())
