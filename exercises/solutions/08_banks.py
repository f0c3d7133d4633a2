"""Exercise 8: how many passes does this access to shared memory take?"""

import math


def passes(words: list[int]) -> int:
    """How many passes it takes to serve a warp's access to shared memory.

    words: for each lane that takes part, the number of the 4-byte word that it reads. Word w lies in bank w % 32. In
    one pass each bank gives one word, to all lanes that read this word.
    """
    banks = [word % 32 for word in set(words)]
    return max(banks.count(bank) for bank in banks)


def passes_of_stride(stride: int) -> int:
    """The passes if lane i of 32 reads word i * stride, stride >= 1. Write a formula, without a loop over lanes."""
    return math.gcd(stride, 32)
