"""Whether a picture can be drawn: asked before anything is measured."""

from __future__ import annotations

import os
from pathlib import Path


def check_plot(path: str | os.PathLike[str]) -> None:
    """Raise unless `plot` can write to `path`: call it before measuring takes its time.

    Raises
    ------
    RuntimeError
        matplotlib is not installed; the message has the command.
    ValueError
        The folder does not exist, or matplotlib can't write files of that name.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RuntimeError('a plot needs matplotlib: pip install "beaconkv_gguf[plot]"') from None
    path = Path(path)
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path}: there is no such folder")
    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise ValueError(f"{path}: a plot ends in .png, or one of {', '.join(sorted(kinds))}")
