"""Page 10 measures flash attention with parts left out: the parts are there, and the compiler removes no more."""

import functools
import importlib.util
import json

from doc import left_out
from doc.left_out import CLOCK, KEPT, LEFT_OUT, PAGE, PRECISIONS

import pytest

# Compiled by make test. Between them they have almost every replacement.
SOON = ("all but the products and the rounding", "tf32"), ("all products", "bf16")
kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}


needs_nvrtc = pytest.mark.skipif(not importlib.util.find_spec("cupy"), reason="CuPy, which binds NVRTC, is missing")


@functools.cache
def counted(part: str, precision: str) -> dict[str, int]:
    return left_out.instructions(left_out.replaced(LEFT_OUT[part]), precision)


PAIRS = [(part, precision) for precision in PRECISIONS for part in left_out.parts(precision)]


@needs_nvrtc
@pytest.mark.parametrize(
    "part, precision", [pytest.param(*pair, marks=[] if pair in SOON else pytest.mark.long) for pair in PAIRS]
)
def test_the_compiler_removes_what_is_left_out_and_nothing_else(part, precision):
    whole, rest = counted("nothing", precision), counted(part, precision)
    assert whole["products"] == 128  # of 32 queries by 32 keys; in bf16, whose products are twice as large, by 64
    assert left_out.more_than_meant(part, rest, whole) == ""
    assert (rest != whole) == (part not in ("nothing", "the triangle: all blocks have the mean length"))


@needs_nvrtc
@pytest.mark.long
def test_rounding_is_one_addition_for_each_number():
    kind = left_out.INTEGERS
    gone = counted("nothing", "tf32")[kind] - counted("the rounding to TF32", "tf32")[kind]
    assert abs(gone - (64 + 64 + 32)) <= 4  # of keys, values and p; the rest are addresses


@pytest.mark.parametrize("part", LEFT_OUT)
def test_what_is_replaced_is_in_the_kernel(part):
    text = left_out.replaced(LEFT_OUT[part])
    assert text != left_out.forward_text() or part == "nothing"


@needs_nvrtc
@pytest.mark.long
@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_else_is_measured_compiles(precision):
    products = left_out.PRODUCTS_KERNEL.replace("MMA", {"tf32": "mma", "bf16": "mma_bf16"}[precision])
    assert left_out.machine_code(left_out.replaced([CLOCK]) + products, precision)


def test_the_pages_tables_are_as_they_were_measured():
    page = PAGE.read_text()
    assert left_out.with_tables(page, kept) == page, "python doc/left_out.py --write"
    assert len(left_out.MARKERS.findall(page)) == page.count("left out: ") == 2


@pytest.mark.parametrize("precision", [precision for precision in PRECISIONS if precision in kept])
def test_what_was_measured_lacked_what_was_left_out_and_nothing_else(precision):
    counts = kept[precision]["instructions"]
    for part in left_out.parts(precision):
        assert left_out.more_than_meant(part, counts[part], counts["nothing"]) == ""


def measured(precision: str) -> dict:
    """As it is kept, with times that are made up: a part left out gains a tenth."""
    names = [left_out.name_of(B, T) for B, T in left_out.SHAPES]
    times = {part: 50.0 if part == "nothing" else 45.0 for part in left_out.parts(precision)}
    return {
        "MHz": dict.fromkeys(names, 1700), "products": 312.0, "times": dict.fromkeys(names, times),
        "batches": {"1": 20.0, "4": 50.0},
        "instructions": {"nothing": dict.fromkeys(left_out.KINDS, 1) | {"products": 128, left_out.REST: 2}},
    }  # fmt: skip


def test_a_share_that_rounds_to_zero_has_no_sign():
    assert [left_out.percent(share, "+") for share in (-0.004, 0.004, -0.006, 0.006)] == ["0%", "0%", "-1%", "+1%"]
    assert "-0%" not in PAGE.read_text() and left_out.percent(-0.004) == "0%"


def test_tables_stand_between_their_markers_and_nothing_where_nothing_was_measured():
    tables = "out", "bounds", "instructions", "batches"
    page = "".join(
        f"<!-- left out: {precision}, {table} -->\nold\n<!-- end of left out -->\n\n"
        for precision in PRECISIONS for table in tables
    )  # fmt: skip
    assert left_out.with_tables(page, {}) == page.replace("old\n", "")
    written = left_out.with_tables(page, {"multiprocessors": 132, "tf32": measured("tf32")})
    assert "| the exponentials | 45.0 | 10% | 45.0 | 10% | 45.0 | 10% |" in written
    # 12 * 4 heads of 32 warps, that have 1 to 32 tiles: 25344 rounds of 128 products of 2048 FLOPs.
    assert "| tensor cores | 128 products, at 312 TFLOP/s | 21.3 | 43% |" in written
    assert "| all | 139 | 1.09 |" in written and "| 4 | 384 | 1.45 | 50.0 | 12.50 | 129 |" in written
    assert written.endswith(page[page.index("<!-- left out: bf16, out") :].replace("old\n", ""))
