"""What is said where no picture can be drawn, before anything is measured for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rabbitllm.display.figure import check_picture
from rabbitllm.errors import MissingPackageError, OptionError


def test_another_ending_is_refused_before_anything(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"\.png, \.svg, \.pdf"):
        check_picture(tmp_path / "time.txt")


def test_without_matplotlib_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackageError, match=r'pip install "\.\[plot\]"'):
        check_picture("time.png")
