"""Exercise 7: how many sectors does this access move?"""


def sectors(addresses: list[int]) -> int:
    """How many sectors of device memory an access of one warp moves.

    addresses: for each lane that takes part, the first byte that it reads. A lane reads 4, 8 or 16 bytes, and its
    address is a multiple of that size. A sector is 32 bytes and begins at a multiple of 32. It moves as a whole, and
    only once, however many lanes read a part of it.
    """
    return len({address // 32 for address in addresses})
