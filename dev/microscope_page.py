"""The page that dev/microscope.py --html writes."""

import json
from pathlib import Path

from llmc.files import replacing


def write_page(path: Path, title: str, kernels: list[dict]) -> None:
    """Writes dev/microscope.html with the launches of `microscope.page_of` in it, one file that needs no network."""
    template = (Path(__file__).parent / "microscope.html").read_text(encoding="utf-8")
    data = json.dumps({"title": title, "kernels": kernels}, separators=(",", ":"))
    data = data.replace("<", "\\u003c")  # no "</script>" or "<!--" of a source may end or hide the script that holds it
    with replacing(path) as file:
        file.write(template.replace("/*DATA*/null", data, 1).encode())
