"""The microscope's page, in a headless Chromium: dev/microscope.html with the launches of dev/microscope.py in it."""

import json
import re
import subprocess
import sys
from pathlib import Path

from dev.microscope import write_page

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAUNCHERS = ("layernorm_backward", "flash_attention_backward")


def place(code: str) -> str:
    """The line of layernorm.cu that has this, as the page names it."""
    lines = (ROOT / "kernels" / "layernorm.cu").read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if code in line)
    return f"layernorm.cu:{number}"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The address of a launcher's page. A process of its own makes it, for it needs a CPU device of its own."""
    folder, made = tmp_path_factory.mktemp("pages"), {}

    def make(launcher: str) -> str:
        if launcher not in made:
            made[launcher] = folder / f"{launcher}.html"
            command = [sys.executable, "dev/microscope.py", launcher, "--html", str(made[launcher])]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if "the microscope needs" in done.stderr:
                pytest.skip(done.stderr.strip())
            assert done.returncode == 0, done.stderr
        return made[launcher].as_uri()

    return make


@pytest.fixture
def visit(chromium):
    """Opens an address in a window of its own. What the page asks for or complains of is an error."""
    contexts, wrong = [], []

    def visit(address: str, width: int = 1200, scheme: str = "light"):
        contexts.append(chromium.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text))
        page.on("request", lambda request: address.startswith(request.url.split("#")[0]) or wrong.append(request.url))
        page.goto(address)
        return page

    yield visit
    for context in contexts:
        context.close()
    assert not wrong


def said(page) -> str:
    return page.inner_text("#announcement")


def picture(page) -> str:
    return page.evaluate("document.getElementById('drawing').toDataURL()")


def test_a_page_is_one_file_that_names_no_other(url):
    path = Path(url("layernorm_backward").removeprefix("file://"))
    text = path.read_bytes().decode("utf-8")
    template = (ROOT / "dev/microscope.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|\bsrc=|@import|\burl\(", template)
    assert text.startswith(template.split("/*DATA*/")[0]) and len(text) > len(template)


def test_no_source_text_ends_the_script(tmp_path):
    hostile = {"text": "</script><!-- <script> \u2028 \u00e9 /*DATA*/null"}
    write_page(tmp_path / "page.html", "title", [hostile])
    text = (tmp_path / "page.html").read_bytes().decode("utf-8")
    assert text.count("</script>") == 1 and "<!--" not in text and text.count("<script>") == 1
    data = re.search(r"^const DATA = (.*);$", text, re.MULTILINE)[1]
    assert json.loads(data) == {"title": "title", "kernels": [hostile]}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_kernel_of_a_page_can_be_stepped_through(url, visit, launcher):
    page = visit(url(launcher))
    kernels = page.locator("#kernel option").count()
    assert page.title().startswith(launcher) and kernels > 1
    for kernel in range(kernels):
        page.select_option("#kernel", str(kernel))
        steps = int(page.get_attribute("#slider", "max"))
        assert said(page).startswith(f"step 1 of {steps}: ")
        heard = page.evaluate("""() => range(30).map(i => {
            goToPosition(Math.floor(i * look().list.length / 30));
            const marked = document.querySelectorAll(".figures button[aria-pressed=true]").length;
            return [look().list.indexOf(state.step), $("announcement").textContent, marked];
        })""")
        for step, text, marked in heard:
            assert text.startswith(f"step {step + 1} of {steps}: ") and marked == 1
        assert len({text for _, text, _ in heard}) == min(30, steps)


def test_keys_slider_and_buttons_change_the_picture(url, visit):
    page = visit(f"{url('layernorm_backward')}#kernel=0&block=0&warp=0&step=2")
    pictures = [picture(page)]
    for act in (
        lambda: page.keyboard.press("ArrowRight"),
        lambda: page.keyboard.press("ArrowRight"),
        lambda: page.keyboard.press("End"),
        lambda: page.locator("#slider").fill("6"),
        lambda: page.click("#next"),
    ):
        before = said(page)
        act()
        pictures.append(picture(page))
        assert said(page) != before
    assert len(set(pictures)) == len(pictures)
    page.keyboard.press("Home")
    assert said(page).startswith("step 1 of ")
    page.keyboard.press("ArrowLeft")
    assert said(page).startswith("step 1 of ")


def test_a_line_of_the_source_is_chosen_by_click_and_by_enter(url, visit):
    page = visit(url("layernorm_backward"))
    row = page.locator(".figures button", has_text="store 16")
    row.first.click()
    assert " store 16 " in said(page) and row.first.get_attribute("aria-pressed") == "true"
    row.last.press("Enter")
    assert " store 16 partials, " in said(page)
    page.check("#only")
    assert said(page).startswith("step 1 of 1: ")


def test_shared_memory_is_drawn_as_its_banks(url, visit):
    page = visit(url("layernorm_backward"))
    page.locator(".figures button", has_text="store 16").first.click()
    assert "in shared memory" in page.inner_text("#array")
    assert [text.split(": ")[1] for text in page.locator("#lanes > span").all_inner_texts()] == ["1 pass"] * 4
    whole = picture(page)
    page.locator("#lanes button").nth(9).hover()
    assert picture(page) != whole  # the lane that is pointed at stands out
    page.mouse.move(0, 0)
    assert picture(page) == whole


def test_passes_of_strides(url, visit):
    page = visit(url("layernorm_backward"))

    def passes(stride: int, size: int) -> list[int]:
        lanes = f"lanesOf({{mask: 0xffffffff, at: [0, {stride}]}})"
        return page.evaluate(f"groupsOf({lanes}, {size}).map(group => group.passes)")

    assert passes(4, 4) == [1] and passes(132, 4) == [1]    # a word of each bank
    assert passes(0, 4) == [1]                              # one word for all lanes
    assert passes(8, 4) == [2] and passes(128, 4) == [32]   # two words of every other bank; 32 of one
    assert passes(8, 8) == [1, 1] and passes(16, 8) == [2, 2] and passes(16, 16) == [1] * 4


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_steps_add_up_to_the_table(url, visit, launcher):
    """Sectors and passes are counted here in JavaScript step by step, and by dev/microscope.py for each line."""
    page = visit(url(launcher))
    compared = page.evaluate("""() => DATA.kernels.flatMap((kernel, k) => kernel.blocks_shown < kernel.blocks ? [] :
        kernel.lines.map((line, kind) => {
            let [cost, least] = [0, 0];
            kernel.steps.forEach((step, i) => {
                if (step.kind !== kind) return;
                [state.kernel, state.step] = [k, i];
                const view = look(), sectors = view.sectors.size;
                const [takes, needs] = view.inShared ? passesOf(view.groups) : [sectors, sectors * usedOf(view)];
                cost += takes;
                least += needs;
            });
            return kernel.arrays[line.array].shared ? [cost / least, line.mean, 0.005]
                : [cost + least / cost, line.sectors + line.used, 0.0001];
        }))""")
    assert len(compared) > 20
    for counted, of_table, rounded in compared:
        assert abs(counted - of_table) < 1.001 * rounded


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("step", [1, 8])
def test_a_phone_shows_all_without_scrolling_sideways(url, visit, launcher, step):
    page = visit(f"{url(launcher)}#kernel=0&block=0&warp=0&step={step}", width=360)
    for details in page.locator("details").all():
        details.evaluate("details => details.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.locator("#source").evaluate("panel => panel.scrollWidth <= panel.clientWidth")


def luminance(colour: list[int]) -> float:
    """Of the definition of contrast in WCAG 2.1."""
    linear = [(c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4) for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_can_be_read_in_both_schemes(url, visit):
    backgrounds = {}
    for scheme in ("light", "dark"):
        page = visit(f"{url('layernorm_backward')}#line={place('rstd_of[warp] = s')}", scheme=scheme)
        colours = page.evaluate("""() => {
            const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
            const rgb = colour => {
                context.clearRect(0, 0, 1, 1);
                context.fillStyle = colour;
                context.fillRect(0, 0, 1, 1);
                return [...context.getImageData(0, 0, 1, 1).data];
            };
            const behind = node => {
                const colour = rgb(getComputedStyle(node).backgroundColor);
                return colour[3] ? colour : behind(node.parentElement);
            };
            const nodes = document.querySelectorAll("h1, h2, output, summary, code, .dim, .bad, button, .lanes b");
            return [...nodes].filter(node => !node.disabled)
                .map(node => [rgb(getComputedStyle(node).color), behind(node), node.className]);
        }""")
        assert len(colours) > 100
        for text, behind, name in colours:
            dark, light = sorted((luminance(text[:3]), luminance(behind[:3])))
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (scheme, name, text, behind)  # WCAG 2.1, level AA
        backgrounds[scheme] = colours[0][1]
    assert sum(backgrounds["light"]) > sum(backgrounds["dark"])


def test_a_link_restores_what_was_shown(url, visit):
    page = visit(url("layernorm_backward"))
    page.select_option("#kernel", "1")
    page.select_option("#block", "2")
    page.select_option("#warp", "5")
    page.check("#only")
    page.keyboard.press("End")
    page.wait_for_url("**&only=1")
    again = visit(page.url)
    assert said(again) == said(page) and picture(again) == picture(page) and again.url == page.url
    assert again.input_value("#block") == "2" and again.input_value("#warp") == "5" and again.is_checked("#only")


@pytest.mark.parametrize(
    "link, place",
    [
        (f"line={place('rstd_of[warp] = s')}", f"{place('rstd_of[warp] = s')} store 4 rstd_of"),
        ("kernel=9&block=0&warp=99&step=-3", f"{place('const float m = mean[begin')} load 4"),
        ("kernel=0&block=0&warp=0&step=x", f"{place('const float m = mean[begin')} load 4"),
        ("kernel=length", f"{place('const float m = mean[begin')} load 4"),
        ("step&&=%%", f"{place('const float m = mean[begin')} load 4"),
    ],
)
def test_a_link_by_hand_goes_to_a_line_or_to_the_beginning(url, visit, link, place):
    assert place in said(visit(f"{url('layernorm_backward')}#{link}"))


def test_odd_arrays_and_hostile_text_are_drawn(tmp_path, visit):
    """Rows that are no multiple of a sector, elements of 1 and 8 bytes, no dimension, and a kernel without steps."""
    arrays = [("ragged", 1400, [7, 50]), ("wide", 120, [3, 5]), ("bytes", 5, [5]), ("scalar", 4, []), ("none", 4, [1])]
    line = {"source": 0, "line": 1, "kind": "load", "warps": 1, "lanes": 32, "bytes": 1, "sectors": 1, "used": 1.0}
    kernel = {
        "kernel": "odd", "grid": [1, 1, 1], "block": [32, 1, 1], "blocks": 1, "blocks_shown": 1, "totals": ["moved"],
        "sources": [{"name": "odd.cu", "text": "<img src=x onerror=alert(1)>\n"}], "waits": [],
        "arrays": [{"name": name, "shared": False, "bytes": size, "shape": shape} for name, size, shape in arrays],
        "lines": [{**line, "array": i, "size": size} for i, size in enumerate((4, 8, 1, 4))],
        "steps": [
            [kind, 0, 0, 0, mask, at]
            for kind, mask, at in ((0, 3, [200, 204]), (1, 1, [112, 0]), (2, 31, [0, 1]), (3, 1, [0, 0]))
        ],
    }  # fmt: skip
    write_page(tmp_path / "odd.html", "odd", [kernel, {**kernel, "kernel": "idle", "steps": []}])
    page = visit((tmp_path / "odd.html").as_uri())
    heard = [said(page)]
    for _ in arrays[1:-1]:
        page.keyboard.press("ArrowRight")
        heard.append(said(page))
    assert [text.split(" load ")[1] for text in heard] == [
        "4 ragged, lanes 0-1, 1 sector, 25% used", "8 wide, lane 0, 1 sector, 25% used",
        "1 bytes, lanes 0-4, 1 sector, 15.6% used", "4 scalar, lane 0, 1 sector, 12.5% used",
    ]  # fmt: skip
    assert page.inner_text("code").startswith("<img src=x")
    page.select_option("#kernel", "1")
    assert not page.is_visible("#accesses")
