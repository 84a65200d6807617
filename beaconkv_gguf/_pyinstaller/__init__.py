"""Where PyInstaller finds our hook; the entry point ``hook-dirs`` leads it here."""

from __future__ import annotations

import os


def get_hook_dirs() -> list[str]:
    """Folders with hooks."""
    return [os.path.dirname(__file__)]
