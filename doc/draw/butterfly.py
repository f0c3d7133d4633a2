"""A butterfly over eight lanes: who adds what in three rounds, and what each lane then holds."""

from doc.draw.figure import Figure

LANES, LEFT, W, TOP, STEP = 8, 96, 96, 62, 92
COLOURS = "abcd"


def draw() -> str:
    figure = Figure(LEFT + LANES * W + 8, TOP + 3 * STEP + 70, "A butterfly: every lane adds what its partner holds")
    sums = [float(lane + 1) for lane in range(LANES)]
    offset, y = LANES // 2, TOP
    for lane in range(LANES):
        figure.text(LEFT + lane * W + W / 2, 20, f"lane {lane}", 14, "middle")
        figure.text(LEFT + lane * W + W / 2, 38, f"{lane:03b}", 13, "middle", "faint")
    while True:
        same = {value: i for i, value in enumerate(dict.fromkeys(sums))}
        for lane, value in enumerate(sums):
            colour = "f" if len(same) == LANES else COLOURS[same[value]]
            figure.box(LEFT + lane * W + 18, y, W - 36, 34, colour, f"{value:g}", 16, 23)
        if offset == 0:
            break
        for lane in range(LANES):
            x, partner = LEFT + lane * W + W / 2, lane ^ offset
            figure.line(x, y + 36, x, y + STEP - 2, "ink", 1.6)
            figure.line(LEFT + partner * W + W / 2, y + 36, x, y + STEP - 2, "faint", 1.2)
        figure.text(8, y + STEP / 2 + 22, f"xor {offset}", 15)
        sums = [sums[lane] + sums[lane ^ offset] for lane in range(LANES)]
        offset, y = offset // 2, y + STEP
    figure.text(LEFT, y + 58, "Lanes of one colour hold the same bits: a + b = b + a, rounded or not.", 15)
    return figure.svg()
