"""The book's pictures are what their scripts draw, and can be shown anywhere: well-formed, in both colour schemes, and
complete in themselves."""

import re
import runpy
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

DOC = Path(__file__).resolve().parents[1] / "doc"
DRAW = runpy.run_path(str(DOC / "draw.py"))
PICTURES, drawn = DRAW["PICTURES"], DRAW["drawn"]
SVG = "{http://www.w3.org/2000/svg}"
RULE = re.compile(r"\.([\w-]+) \{ (fill|stroke): (#\w+) \}")
SMALLEST = 11  # of letters, with the picture stretched to a width of 900


def test_every_picture_has_its_script_and_its_place_in_the_book():
    assert {path.stem for path in (DOC / "pictures").glob("*.svg")} == set(PICTURES)
    pages = "".join(path.read_text() for path in DOC.glob("*.md"))
    assert [name for name in PICTURES if f"](pictures/{name}.svg)" not in pages] == []


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_is_drawn_and_can_be_shown_anywhere_in_both_colour_schemes(name):
    text = (DOC / "pictures" / f"{name}.svg").read_text()
    assert drawn(name) == text, f"python doc/draw.py {name}"
    root = ElementTree.fromstring(text)
    _, _, width, height = map(float, root.get("viewBox").split())
    assert root.tag == f"{SVG}svg" and root.find(f"{SVG}title").text and width <= 900
    _, _, dark = root.find(f"{SVG}style").text.partition("@media (prefers-color-scheme: dark)")
    dark_colours = {(name, attribute): colour for name, attribute, colour in RULE.findall(dark)}
    assert not re.search(r"href|src=|http(?!://www.w3.org/2000/svg)|@import|<(script|image|foreignObject)", text)
    assert set(re.findall(r"url\((.*?)\)", text)) <= {f"#{element.get('id')}" for element in root.iter()}
    for element in root.iter():
        assert not re.search(r"\bnan\b|\binf\b", str(element.attrib)), element.attrib
        for attribute in "fill", "stroke":
            if (colour := element.get(attribute, "none")) != "none":
                classes = [dark_colours.get((one, attribute)) for one in element.get("class").split()]
                (other,) = filter(None, classes)
                assert re.fullmatch(r"#[0-9a-f]{6}", colour) and other != colour
        if element.tag == f"{SVG}text" and element.text:
            assert float(element.get("font-size")) * 900 / width >= SMALLEST, element.text
            assert -1 <= float(element.get("x")) <= width and 0 <= float(element.get("y")) <= height, element.text
