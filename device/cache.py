"""Folders of compiled kernels. Who can write there makes us run code of theirs, so a folder is for its user alone."""

import os
import stat
from pathlib import Path

from device.errors import UserError


def private_folder(path: Path, variable: str) -> int:
    """Opens a folder that is, or becomes, accessible to this user alone (mode 0700). Makes it if it is missing. Returns
    the descriptor.

    variable: the environment variable that names another folder. Raises UserError if the folder belongs to somebody
    else, and OSError if the system refuses.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    found = os.fstat(folder)
    if found.st_uid != os.geteuid():
        os.close(folder)
        raise UserError(f"{path} belongs to another user, whose kernels we will not run: set {variable} to your own")
    if stat.S_IMODE(found.st_mode) != 0o700:
        os.fchmod(folder, 0o700)
    return folder


def refuse_anothers(file: Path, found: os.stat_result, variable: str) -> None:
    """Raises UserError if a file belongs to somebody else, or may be written by somebody else. It may have come while
    its folder was still open to others. found: what stat says of it. variable: as for private_folder."""
    if found.st_uid != os.geteuid() or not stat.S_ISLNK(found.st_mode) and found.st_mode & 0o022:
        raise UserError(f"{file} belongs to another user, or can be written by one: remove it, or set {variable}")


def own_folder() -> Path:
    """The folder of this user's caches, if nobody has named one. Raises RuntimeError without a home directory."""
    home = Path.home()
    if home.is_dir() and home.stat().st_uid != os.geteuid():  # users of a container share one
        return home / f".cache-{os.geteuid()}"
    return home / ".cache"
