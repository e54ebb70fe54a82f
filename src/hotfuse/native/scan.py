"""Native scans over the elements of a row-major tensor, for guards on values: early out, a cache line at a time."""

from __future__ import annotations

_LOOP = """
define internal i32 @NAME(ptr %data, i64 %count EXTRA) {
entry:
  SPLAT
  %whole = and i64 %count, -LANES
  br label %wide
wide:
  %i = phi i64 [0, %entry], [%i1, %line]
  %more = icmp slt i64 %i, %whole
  br i1 %more, label %line, label %rest
line:
  %at = getelementptr iBITS, ptr %data, i64 %i
  %v = load <LANES x iBITS>, ptr %at, align 1
  %off = icmp WRONG <LANES x iBITS> %v, %wanted.v
  %word = bitcast <LANES x i1> %off to iLANES
  %clean = icmp eq iLANES %word, 0
  %i1 = add i64 %i, LANES
  br i1 %clean, label %wide, label %no
rest:
  %j = phi i64 [%whole, %wide], [%j1, %one]
  %left = icmp slt i64 %j, %count
  br i1 %left, label %one, label %yes
one:
  %at1 = getelementptr iBITS, ptr %data, i64 %j
  %v1 = load iBITS, ptr %at1, align 1
  %off1 = icmp WRONG iBITS %v1, %wanted.1
  %j1 = add i64 %j, 1
  br i1 %off1, label %no, label %rest
yes:
  ret i32 1
no:
  ret i32 0
}
"""


def _scan(name: str, width: int, wrong: str, *, given: bool) -> str:
    lanes = 512 // width
    value = "%wanted" if given else "0"
    splat = (
        f"%wanted.1 = add i{width} {value}, 0\n"
        f"  %first.v = insertelement <{lanes} x i{width}> poison, i{width} %wanted.1, i32 0\n"
        f"  %wanted.v = shufflevector <{lanes} x i{width}> %first.v, <{lanes} x i{width}> poison, <{lanes} x i32> zeroinitializer"
    )
    text = _LOOP.replace("NAME", name).replace(" EXTRA", f", i{width} %wanted" if given else "").replace("SPLAT", splat)
    return text.replace("LANES", str(lanes)).replace("BITS", str(width)).replace("WRONG", wrong)


SCANS = {f"hf_all_{w}": _scan(f"hf_all_{w}", w, "ne", given=True) for w in (8, 16, 32, 64)}
"""`i32 hf_all_64(ptr data, i64 count, i64 bits)`: 1 if every element has these bits.
`i32 hf_all_true(ptr data, i64 count)`: 1 if no byte is 0."""
SCANS["hf_all_true"] = _scan("hf_all_true", 8, "eq", given=False)
