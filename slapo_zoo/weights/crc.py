"""CRC-32 of a tensor that many ranks write in pieces, computed without any rank holding all its bytes.

A CRC is linear: crc(M) = L(M) ^ Z(len M), where Z(n) is the CRC of n zeros and L(M) is the sum (XOR)
over the pieces A of M of L(A) * x^(8 * bytes behind A), modulo the polynomial. So each rank sums what
it writes, and the XOR of all ranks' sums and Z is the `zlib.crc32` of the tensor.
Source: W. W. Peterson and D. T. Brown, "Cyclic Codes for Error Detection", Proc. IRE 49, 1961.
"""

import zlib
from collections.abc import Sequence
from functools import cache

import numpy as np

POLYNOMIAL = 0xEDB88320  # zlib's, reflected: bit 31 is x^0
ONES = 0xFFFFFFFF


def times(a: int, b: int) -> int:
    """Multiply two polynomials over GF(2), given as reflected 32-bit integers, modulo the CRC polynomial."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (POLYNOMIAL if b & 1 else 0)
    return product


@cache
def _power(k: int) -> int:
    """Return x^(8 * 2^k) modulo the CRC polynomial: the shift by 2^k bytes."""
    return 1 << 23 if k == 0 else times(_power(k - 1), _power(k - 1))


@cache
def shift(count: int) -> int:
    """Return x^(8 * count) modulo the CRC polynomial: the factor for the CRC of bytes with `count` bytes behind them."""
    found, k = 1 << 31, 0
    while count >> k:
        if count >> k & 1:
            found = times(found, _power(k))
        k += 1
    return found


def zeros(count: int) -> int:
    """Return Z(count), the CRC-32 of `count` zero bytes."""
    return times(ONES, shift(count)) ^ ONES


def linear(piece: "memoryview | bytes") -> int:
    """Return the part of the CRC-32 of `piece` that is linear over GF(2): its CRC-32 XOR that of as many zero bytes."""
    return zlib.crc32(piece) ^ zeros(len(piece))


def of_rows(piece: memoryview, rows: int, chunk: int, stride: int) -> int:
    """Return the CRC-32, XOR that of as many zero bytes, of rows that lie `stride` bytes apart (from start to start),
    with zeros between them, none at the end. `piece` has the rows' bytes without gaps, `chunk` bytes for each row.
    """
    if rows == 1:
        return linear(piece[:chunk])
    raw = [zlib.crc32(piece[i * chunk : (i + 1) * chunk]) for i in range(rows)]
    return _fold(np.array(raw, np.uint32) ^ np.uint32(zeros(chunk)), shift(stride))


def _fold(sums: np.ndarray, factor: int) -> int:
    """Return the XOR over i of sums[i] * factor^(len(sums) - 1 - i), polynomials modulo the polynomial of the CRC."""
    while len(sums) > 1:
        if len(sums) % 2:
            sums = np.concatenate([np.zeros(1, np.uint32), sums])  # leading zeros do not change L
        sums = _times_each(sums[0::2], factor) ^ sums[1::2]
        factor = times(factor, factor)
    return int(sums[0])


def _times_each(sums: np.ndarray, factor: int) -> np.ndarray:
    found = np.zeros_like(sums)
    for bit in range(31, -1, -1):
        found ^= np.where(sums >> np.uint32(bit) & np.uint32(1), np.uint32(factor), np.uint32(0))
        factor = factor >> 1 ^ (POLYNOMIAL if factor & 1 else 0)
    return found


def combined(sums: Sequence[int], size: int) -> int:
    """Return the CRC-32 of a tensor of `size` bytes: that of as many zero bytes, XOR all `sums`. Each of these, in any
    order, is what one rank's bytes, at their place among zeros, change in the CRC-32 of zeros.
    """
    total = 0
    for one in sums:
        total ^= one
    return total ^ zeros(size)
