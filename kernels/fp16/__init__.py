"""Products of fp32 matrices whose operands are rounded to fp16 first (`--precision fp16`)."""
