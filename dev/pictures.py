"""Where pictures are written: to a new file, or over an older picture of ours, but over nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from device.errors import UserError
from llmc.files.files import open_file, replacing

if TYPE_CHECKING:  # who draws nothing needs no Matplotlib
    from matplotlib.figure import Figure

CREATOR = "drawn by llm.cupy"                  # what a picture of ours says of itself,
SAY_SO = ("png", "svg", "pdf", "eps", "ps")    # in the formats that can say it


def check_picture(out: Path) -> None:
    """Raises UserError where a file at `out` holds something else than a picture of ours."""
    try:
        with open_file(out) as file:
            before = file.read()
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror.lower()})") from None
    if before and CREATOR.encode() not in before:
        raise UserError(f"{out}: there is a file that this program has not drawn: name another, or remove it")


def save_picture(figure: Figure, out: Path, dpi: int = 150) -> None:
    """Writes a figure in the format of the suffix. Raises UserError as `check_picture` does, for a suffix of no format,
    and where `out` cannot be written."""
    suffix = out.suffix.lstrip(".").lower()
    if suffix not in figure.canvas.get_supported_filetypes():
        raise UserError(f"{out}: no picture can be written with that suffix; use .png, .svg or .pdf")
    check_picture(out)
    with replacing(out) as file:
        figure.savefig(file, format=suffix, dpi=dpi, metadata={"Creator": CREATOR} if suffix in SAY_SO else None)
