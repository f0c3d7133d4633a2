"""The book's pictures are what their scripts draw, and can be shown anywhere: well-formed, in both colour schemes, and
complete in themselves."""

import re
import runpy
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOC = ROOT / "doc"
DRAW = runpy.run_path(str(DOC / "draw.py"))
PICTURES, drawn = DRAW["PICTURES"], DRAW["drawn"]
SVG = "{http://www.w3.org/2000/svg}"
RULE = re.compile(r"\.([\w-]+) \{ (fill|stroke): (#\w+) \}")
SMALLEST = 11  # of letters, with the picture stretched to a width of 900

each_picture = pytest.mark.parametrize("name", PICTURES)


def text_of(name: str) -> str:
    return (DOC / "pictures" / f"{name}.svg").read_text()


def test_every_picture_has_its_script_and_its_place_in_the_book():
    assert {path.stem for path in (DOC / "pictures").glob("*.svg")} == set(PICTURES)
    pages = "".join(path.read_text() for path in DOC.glob("*.md"))
    assert [name for name in PICTURES if f"](pictures/{name}.svg)" not in pages] == []


@each_picture
def test_what_is_kept_is_what_is_drawn(name):
    assert drawn(name) == text_of(name), f"python doc/draw.py {name}"


@each_picture
def test_a_picture_is_well_formed_and_complete_in_itself(name):
    text = text_of(name)
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg" and root.find(f"{SVG}title").text
    elements = list(root.iter())
    for element in elements:
        for attribute, value in element.attrib.items():
            assert "href" not in attribute and "src" not in attribute, (element.tag, attribute)
            assert "url(" not in value or re.fullmatch(r"url\(#\w+\)", value), value
            assert not re.search(r"\bnan\b|\binf\b", value), (element.tag, attribute, value)
        assert element.tag.removeprefix(SVG) not in {"script", "image", "foreignObject"}, element.tag
    style = root.find(f"{SVG}style").text
    assert "@import" not in style and "url(" not in style and "http" not in style
    assert {e.get("id") for e in elements if e.get("id")} >= set(re.findall(r"url\(#(\w+)\)", text))


@each_picture
def test_every_colour_is_said_on_the_shape_and_has_a_dark_one(name):
    root = ElementTree.fromstring(text_of(name))
    _, _, dark = root.find(f"{SVG}style").text.partition("@media (prefers-color-scheme: dark)")
    found = {(colour, attribute): value for colour, attribute, value in RULE.findall(dark)}
    for element in root.iter():
        for attribute in "fill", "stroke":
            if (colour := element.get(attribute, "none")) != "none":
                classes = [found[one, attribute] for one in element.get("class").split() if (one, attribute) in found]
                assert re.fullmatch(r"#[0-9a-f]{6}", colour) and len(classes) == 1 and classes[0] != colour


@each_picture
def test_a_picture_can_be_read_on_a_phone(name):
    root = ElementTree.fromstring(text_of(name))
    _, _, width, height = map(float, root.get("viewBox").split())
    assert width <= 900
    for words in root.iter(f"{SVG}text"):
        if words.text:
            assert float(words.get("font-size")) * 900 / width >= SMALLEST, words.text
            assert -1 <= float(words.get("x")) <= width and 0 <= float(words.get("y")) <= height, words.text
