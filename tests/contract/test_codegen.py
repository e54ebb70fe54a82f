"""What LLVM is told about generated code: where values are computed is decided when the text is written."""

from __future__ import annotations

from hotfuse.native import jit
from hotfuse.native.target import level

_WIDE = level("avx512", {"sse4.2", "avx", "avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"})
_TEXT = """
declare void @g(i64)
define void @f(i64 %n, i64 %k) {
entry:
  %c = icmp eq i64 %k, 7
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%next, %after]
  br i1 %c, label %then, label %after
then:
  call void @g(i64 %i)
  br label %after
after:
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %n
  br i1 %more, label %loop, label %done
done:
  ret void
}
"""


def test_what_is_computed_before_a_loop_stays_there() -> None:
    lines = jit.assembly(_TEXT, _WIDE).splitlines()
    loop = next(i for i, line in enumerate(lines) if line.startswith(".LBB"))
    assert any("$7" in line for line in lines[:loop]) and not any("$7" in line for line in lines[loop:])
