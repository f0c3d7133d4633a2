"""Exercise 7: how many sectors does this access move?"""


def sectors(addresses: list[int]) -> int:
    """How many sectors of device memory an access of one warp moves.

    addresses: for each lane that takes part, the number of the byte where its access begins. A lane reads 4, 8 or 16
    bytes, from a multiple of as many on. A sector is 32 bytes from a multiple of 32 on; it is moved as a whole, and
    once, however many lanes want some of it.
    """
    return len({address // 32 for address in addresses})
