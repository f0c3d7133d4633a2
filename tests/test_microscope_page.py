"""The microscope's page, in a headless Chromium: dev/microscope/page.html with the launches of dev/microscope in it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAUNCHERS = ("layernorm_backward", "flash_attention_backward")
each_launcher = pytest.mark.parametrize("launcher", LAUNCHERS)


@pytest.fixture(scope="module")
def url(chromium, tmp_path_factory) -> dict[str, str]:
    """The addresses of the launchers' pages. A process of its own makes each, for it needs a CPU device of its own."""
    pages = {launcher: tmp_path_factory.mktemp("pages") / f"{launcher}.html" for launcher in LAUNCHERS}
    for launcher, page in pages.items():
        command = [sys.executable, "dev/microscope", launcher, "--html", str(page)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if "the microscope needs" in done.stderr:
            pytest.skip(done.stderr.strip())
        assert done.returncode == 0, done.stderr
    return {launcher: page.as_uri() for launcher, page in pages.items()}


@pytest.fixture
def visit(chromium):
    """Opens an address in a window of its own. What the page asks for or complains of is an error."""
    contexts, wrong = [], []

    def visit(address: str, width: int = 1200):
        contexts.append(chromium.new_context(viewport={"width": width, "height": 800}))
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


@each_launcher
def test_every_kernel_of_a_page_can_be_stepped_through(url, visit, launcher):
    page = visit(url[launcher])
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


def test_a_line_of_the_source_is_chosen_by_click_and_by_enter_and_its_banks_are_drawn(url, visit):
    page = visit(url["layernorm_backward"])
    row = page.locator(".figures button", has_text="store 16")
    row.first.click()
    assert " store 16 " in said(page) and row.first.get_attribute("aria-pressed") == "true"
    assert "in shared memory" in page.inner_text("#array")
    assert [text.split(": ")[1] for text in page.locator("#lanes > span").all_inner_texts()] == ["1 pass"] * 4
    whole = picture(page)
    page.locator("#lanes button").nth(9).hover()
    assert picture(page) != whole  # the lane that is pointed at stands out
    page.mouse.move(0, 0)
    assert picture(page) == whole
    row.last.press("Enter")
    assert " store 16 partials, " in said(page)
    page.check("#only")
    assert said(page).startswith("step 1 of 1: ")


@each_launcher
def test_the_steps_add_up_to_the_table(url, visit, launcher):
    """Sectors and passes are counted here in JavaScript step by step, and by dev/microscope for each line."""
    page = visit(url[launcher])
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


@each_launcher
@pytest.mark.parametrize("step", [1, 8])
def test_a_phone_shows_all_without_scrolling_sideways(url, visit, launcher, step):
    page = visit(f"{url[launcher]}#kernel=0&block=0&warp=0&step={step}", width=360)
    for details in page.locator("details").all():
        details.evaluate("details => details.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.locator("#source").evaluate("panel => panel.scrollWidth <= panel.clientWidth")


def test_a_link_restores_what_was_shown(url, visit):
    page = visit(url["layernorm_backward"])
    page.select_option("#kernel", "1")
    page.select_option("#block", "2")
    page.select_option("#warp", "5")
    page.check("#only")
    page.keyboard.press("End")
    page.wait_for_url("**&only=1")
    again = visit(page.url)
    assert said(again) == said(page) and picture(again) == picture(page) and again.url == page.url
    assert again.input_value("#block") == "2" and again.input_value("#warp") == "5" and again.is_checked("#only")
