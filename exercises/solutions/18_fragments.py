"""Exercise 18: which lane holds which element?

One instruction, mma.m16n8k8, makes a warp multiply A (16, 8) by B (8, 8) and add C (16, 8). No lane holds a whole
matrix. Each of the 32 lanes has four elements of A, a[0] to a[3], two of B, and four of C and of the result. With
g = lane // 4 and t = lane % 4:

         of A  column t  t + 4        of B  column g         of C  column 2t  2t + 1
  row g          a[0]    a[2]        row t     b[0]          row g      c[0]    c[1]
  row g + 8      a[1]    a[3]    row t + 4     b[1]          row g + 8  c[2]    c[3]
"""


def a_at(lane: int, i: int) -> tuple[int, int]:
    """The row and the column, in A, of a lane's a[i]."""
    return lane // 4 + i % 2 * 8, lane % 4 + i // 2 * 4


def b_at(lane: int, i: int) -> tuple[int, int]:
    """The row and the column, in B, of a lane's b[i]."""
    return lane % 4 + i * 4, lane // 4


def c_at(lane: int, i: int) -> tuple[int, int]:
    """The row and the column, in C, of a lane's c[i]."""
    return lane // 4 + i // 2 * 8, lane % 4 * 2 + i % 2


def holder_of_c(row: int, column: int) -> tuple[int, int]:
    """The inverse of c_at: the lane that has this element of C, and the i of its c[i]."""
    return row % 8 * 4 + column // 2, row // 8 * 2 + column % 2
