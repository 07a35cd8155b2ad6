"""Four bytes of 4-bit codes to 8 bits, as assembly for Triton's and Gluon's `inline_asm_elementwise`.

A byte holds two codes, each plus 8. Operands: registers for the low codes and for the high ones, and that of the bytes.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import triton.language as tl

OPERANDS = tl.constexpr("=&r,=&r,r")
# 16·code in int8: a nibble at the top of a byte with its first bit flipped.
TO_INT8 = tl.constexpr("""{
    .reg .b32 shifted;
    shl.b32 shifted, $2, 4;
    lop3.b32 $0, shifted, 0xF0F0F0F0, 0x80808080, 0x6A;
    lop3.b32 $1, $2, 0xF0F0F0F0, 0x80808080, 0x6A;
}""")
# code/512 in e4m3, whose smallest numbers are a magnitude under a sign bit: 7 less the nibble, plus 1, where that is
# below 8; else the nibble without its first bit.
TO_E4M3 = tl.constexpr("""{
    .reg .b32 shifted, positive, magnitude, negative;
    shl.b32 shifted, $2, 4;
    prmt.b32 positive, shifted, 0, 0xBA98;
    lop3.b32 magnitude, $2, positive, 0x07070707, 0x82;
    lop3.b32 negative, positive, 0x81818181, 0, 0x0C;
    add.u32 $0, magnitude, negative;
    shr.u32 shifted, $2, 4;
    prmt.b32 positive, $2, 0, 0xBA98;
    lop3.b32 magnitude, shifted, positive, 0x07070707, 0x82;
    lop3.b32 negative, positive, 0x81818181, 0, 0x0C;
    add.u32 $1, magnitude, negative;
}""")
