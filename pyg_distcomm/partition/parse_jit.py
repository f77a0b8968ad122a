"""Compiles a reader of text with two node ids a line; importing this imports Numba."""

from __future__ import annotations

import numpy as np

from pyg_distcomm.kernels.compile import entry

Array = np.ndarray

FINE, NO_NUMBER, TOO_FEW, TOO_MANY, TOO_LARGE = range(5)
NEWLINE, RETURN, MINUS = 10, 13, 45
COMMENTS = (35, 37)  # "#" and "%"
BETWEEN = (32, 9, 44, 59)  # space, tab, comma, semicolon
ZERO, NINE = 48, 57


@entry
def pairs(text: Array, limit: int, out: Array) -> tuple[int, int, int, int, int]:
    """Reads lines of two ids in 0 .. limit - 1; text ends with a newline.

    Empty lines, and lines that begin with "#" or "%", are skipped. Returns the number of
    pairs in out [.., 2], the number of lines read, FINE or the fault of the next line, and
    the places where that line begins and ends in the text.
    """
    found, lines, at = 0, 0, 0
    while at < text.size:
        begin, fields, inside = at, 0, False
        wrong = FINE
        value = 0
        comment = False
        while text[at] != NEWLINE:
            c = text[at]
            at += 1
            if comment:
                continue
            if c == RETURN:
                if text[at] != NEWLINE and text[at] != RETURN:
                    wrong = NO_NUMBER
                continue
            if c in BETWEEN:
                inside = False
            elif fields == 0 and c in COMMENTS:
                comment = True
            elif ZERO <= c <= NINE:
                if not inside:
                    inside, value = True, 0
                    fields += 1
                value = 10 * value + (c - ZERO)
                if value >= limit:
                    wrong = wrong if wrong != FINE else TOO_LARGE
                    value = 0
                if fields <= 2 and found < out.shape[0]:
                    out[found, fields - 1] = value
            else:
                wrong = NO_NUMBER
                fields += not inside
                inside = True
        if fields > 2 and wrong != NO_NUMBER:
            wrong = TOO_MANY
        if fields == 1 and wrong == FINE:
            wrong = TOO_FEW
        if wrong != FINE:
            return found, lines, wrong, begin, at
        found += fields == 2
        lines += 1
        at += 1
    return found, lines, FINE, 0, 0
