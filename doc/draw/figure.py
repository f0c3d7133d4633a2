"""What the drawings share: a figure that collects shapes and becomes SVG in both colour schemes."""

from collections.abc import Iterable
from html import escape

LIGHT = {
    "ink": "#1d2330", "faint": "#667085", "rule": "#c3cad6", "paper": "#ffffff", "a": "#9ec5f4", "b": "#f6c58f",
    "c": "#a9dbb8", "d": "#d7b8ee", "e": "#f2a9a9", "f": "#e3e7ee",
}  # fmt: skip
DARK = {
    "ink": "#dde2ea", "faint": "#98a2b3", "rule": "#4a5261", "paper": "#14171d", "a": "#2f5f9e", "b": "#8a5a1c",
    "c": "#2c6b45", "d": "#6a4590", "e": "#8c3b3b", "f": "#343b47",
}  # fmt: skip


def scheme(colours: dict[str, str]) -> str:
    """Rules of CSS for the classes of all shapes: `name` is filled with the colour, `on-name` drawn with it."""
    return " ".join(f".{name} {{ fill: {c} }} .on-{name} {{ stroke: {c} }}" for name, c in colours.items())


def paint(fill: str = "", stroke: str = "") -> str:
    """Attributes of a shape: its light colours, which every program shows, and classes, which the dark rules name."""
    names = [fill] * bool(fill) + [f"on-{stroke}"] * bool(stroke)
    inside, edge = LIGHT[fill] if fill else "none", f' stroke="{LIGHT[stroke]}"' if stroke else ""
    return f'class="{" ".join(names)}" fill="{inside}"{edge}'


class Figure:
    """Shapes on a transparent sheet of width x height. Fills and strokes are names of colours."""

    def __init__(self, width: float, height: float, title: str):
        self.width, self.height, self.title, self.shapes = width, height, title, []

    def rect(self, x: float, y: float, w: float, h: float, fill: str = "f", stroke: str = "") -> None:
        place = f'x="{x:.4g}" y="{y:.4g}" width="{w:.4g}" height="{h:.4g}"'
        self.shapes.append(f"<rect {place} {paint(fill, stroke)}/>")

    def text(
        self, x: float, y: float, words: str, size: float = 14, anchor: str = "start", colour: str = "ink",
        turned: int = 0, bold: bool = False,
    ) -> None:  # fmt: skip
        turn = f' transform="rotate({turned} {x:.4g} {y:.4g})"' if turned else ""
        weight = ' font-weight="bold"' if bold else ""
        self.shapes.append(
            f'<text x="{x:.4g}" y="{y:.4g}" font-size="{size}" text-anchor="{anchor}" {paint(colour)}'
            f"{weight}{turn}>{escape(words)}</text>"
        )

    def lines(self, x: float, y: float, step: float, words: Iterable[str], size: float = 14) -> None:
        """Lines of text below each other."""
        for i, line in enumerate(words):
            self.text(x, y + step * i, line, size)

    def box(
        self, x: float, y: float, w: float, h: float, fill: str, words: str, size: float, down: float, edge: str = "",
        colour: str = "ink", bold: bool = False,
    ) -> None:  # fmt: skip
        """A rectangle with words in its middle, `down` below its upper edge."""
        self.rect(x, y, w, h, fill, edge)
        self.text(x + w / 2, y + down, words, size, "middle", colour, bold=bold)

    def key(self, x: float, y: float, fill: str, words: str, size: float = 13, wide: int = 18, edge: str = "") -> None:
        """What a colour means."""
        self.rect(x, y, wide, 14, fill, edge)
        self.text(x + wide + 8, y + 12, words, size)

    def line(
        self, x1: float, y1: float, x2: float, y2: float, colour: str = "ink", width: float = 1, dashed: bool = False,
        arrow: bool = False,
    ) -> None:  # fmt: skip
        more = (' stroke-dasharray="4 3"' if dashed else "") + (' marker-end="url(#arrow)"' if arrow else "")
        place = f'x1="{x1:.4g}" y1="{y1:.4g}" x2="{x2:.4g}" y2="{y2:.4g}"'
        self.shapes.append(f'<line {place} {paint("", colour)} stroke-width="{width}"{more}/>')

    def path(self, points: list[tuple[float, float]], colour: str, width: float) -> None:
        """Straight lines from point to point."""
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.shapes.append(f'<polyline points="{places}" {paint("", colour)} stroke-width="{width}"/>')

    def dot(self, x: float, y: float, radius: float, fill: str) -> None:
        self.shapes.append(f'<circle cx="{x:.4g}" cy="{y:.4g}" r="{radius}" {paint(fill, "ink")}/>')

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'font-family="sans-serif" role="img">\n<title>{escape(self.title)}</title>\n<style>\n'
            f"@media (prefers-color-scheme: dark) {{ {scheme(DARK)} }}\n</style>\n"
            '<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0 L8 4 L0 8 z" {paint("ink")}/></marker>\n'
        )
        return head + "\n".join(self.shapes) + "\n</svg>\n"
