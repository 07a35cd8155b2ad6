"""4-bit codes to 8 and to 16 bits, and e4m3 to bfloat16, as assembly for Triton's and Gluon's `inline_asm_elementwise`.

A byte holds two 4-bit codes, each plus 8.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import triton.language as tl

# Four bytes to 8 bits. Operands: registers for the low codes and for the high ones, and that of the bytes.
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
SHRUNK = tl.constexpr(33)  # log2 of how much smaller than they are the following decode weights: triton_four._to_half
# Two bytes to their low codes and their high ones, times the scale, in bfloat16. Operands: the results; the bytes; and,
# twice in a register each, the scale for nibbles at bit 0, that for nibbles at bit 4, what their excess of 8 comes to.
TO_BOTH = tl.constexpr("""{
    .reg .b32 bytes, nibbles, pair;
    cvt.u32.u16 bytes, $4;
    prmt.b32 bytes, bytes, 0, 0x4140;
    and.b32 nibbles, bytes, 0x000F000F;
    fma.rn.bf16x2 pair, nibbles, $5, $7;
    mov.b32 {$0, $1}, pair;
    and.b32 nibbles, bytes, 0x00F000F0;
    fma.rn.bf16x2 pair, nibbles, $6, $7;
    mov.b32 {$2, $3}, pair;
}""")
# The same of the low or of the high codes alone.
# Operands: the results; the bytes; and, twice in a register each, the scale of such nibbles and that of their excess.
TO_LOW = tl.constexpr("""{
    .reg .b32 both;
    cvt.u32.u16 both, $2;
    prmt.b32 both, both, 0, 0x4140;
    and.b32 both, both, 0x000F000F;
    fma.rn.bf16x2 both, both, $3, $4;
    mov.b32 {$0, $1}, both;
}""")
TO_HIGH = tl.constexpr(TO_LOW.value.replace("0x000F000F", "0x00F000F0"))
# A float32 scale, which is a bfloat16 value, to these: for nibbles at bit 0, at bit 4, and the excess. All are exact.
TO_SCALES = tl.constexpr("""{
    .reg .b32 twice, low, high, excess;
    prmt.b32 twice, $3, 0, 0x3232;
    mov.b32 low, 0x71807180;
    mov.b32 high, 0x6F806F80;
    mov.b32 excess, 0xB080B080;
    mul.rn.bf16x2 $0, twice, low;
    mul.rn.bf16x2 $1, twice, high;
    mul.rn.bf16x2 $2, twice, excess;
}""")
# Two pairs of e4m3 to their first and their second ones in bfloat16, both exact: the bits of a magnitude, put where a
# bfloat16 has them, are 2^-120 of it, for the exponents count from other numbers. NaN is not decoded: it becomes 480.
FROM_E4M3 = tl.constexpr("""{
    .reg .b32 sign, magnitude, factor;
    mov.b32 factor, 0x7B807B80;
    shl.b32 sign, $2, 8;
    shl.b32 magnitude, $2, 4;
    and.b32 sign, sign, 0x80008000;
    lop3.b32 magnitude, magnitude, 0x07F007F0, sign, 0xEA;
    mul.rn.bf16x2 $0, magnitude, factor;
    shr.u32 magnitude, $2, 4;
    and.b32 sign, $2, 0x80008000;
    lop3.b32 magnitude, magnitude, 0x07F007F0, sign, 0xEA;
    mul.rn.bf16x2 $1, magnitude, factor;
}""")
