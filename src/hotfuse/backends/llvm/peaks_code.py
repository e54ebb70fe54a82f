"""Micro kernels that do one thing as fast as a core can, as LLVM IR: multiply-adds on registers, reads, writes, forks.

Every function has a kernel's signature, `void name(ptr buffers, ptr sizes)`:

    buffers   where threads work, each in its own part
    sizes     bytes of one thread's part, repeats, threads

The body runs once per thread, by the OpenMP runtime that kernels use.
"""

from __future__ import annotations

from hotfuse.backends.llvm.threads.fork_join import FORK
from hotfuse.native.target import CpuTarget

_FLOATS = {"f32": ("float", 4), "f64": ("double", 8)}
ROUNDS = 4
"""Times that every accumulator is used in one turn of the loop."""
STREAMS = 8
"""Vectors that one turn of a reading or writing loop moves."""
CHAIN = 6
"""Cycles of one repeat of `clock`: shifts and exclusive ors, each waiting for the one before, of one cycle each on x86."""
HEAD = f"""
declare void @{FORK}(ptr, ptr, i64, i64, i64)
"""


def accumulators(target: CpuTarget) -> int:
    """Enough to hide a multiply-add's latency, and few enough for the registers."""
    return 24 if target.vl_bytes == 64 or target.name == "neon" else 12


def dot_width(target: CpuTarget) -> int:
    """Lanes of 32 bits of the instruction that multiplies bytes; 0 where there is none."""
    if not target.dots_bytes:
        return 0
    return 16 if target.vl_bytes == 64 and target.has("avx512vnni") else 8


def operations(target: CpuTarget, dtype: str) -> int:
    """Operations of one repeat of `rate_<dtype>` on one thread."""
    per = 8 * dot_width(target) if dtype == "i8" else 2 * (target.vl_bytes // _FLOATS[dtype][1])
    return per * accumulators(target) * ROUNDS


def module_text(target: CpuTarget) -> str:
    """Everything that can be measured on a target."""
    parts = [
        HEAD,
        _function("read", _stream(target, write=False)),
        _function("write", _stream(target, write=True)),
        FORKS,
    ]
    for dtype, (ty, size) in _FLOATS.items():
        parts.append(_function(f"rate_{dtype}", _rate(target, f"<{target.vl_bytes // size} x {ty}>", dtype)))
        n = target.vl_bytes // size
        parts.append(f"declare <{n} x {ty}> @{_multiply_add(target)}.v{n}{dtype}(<{n} x {ty}>, <{n} x {ty}>, <{n} x {ty}>)")
    if width := dot_width(target):
        raw = f"<{4 * width} x i8>"
        parts.append(_function("rate_i8", _rate(target, f"<{width} x i32>", "i8")))
        parts.append(f"declare <{width} x i32> @llvm.x86.avx512.vpdpbusd.{32 * width}(<{width} x i32>, {raw}, {raw})")
    if has_clock(target):
        parts.append(_function("clock", CLOCK))
    return "\n".join(parts)


def has_clock(target: CpuTarget) -> bool:
    """Whether cycles can be counted by a chain of instructions whose latencies are known."""
    return target.triple.startswith("x86")


def names(target: CpuTarget) -> tuple[str, ...]:
    """The functions of the module."""
    return ("read", "write", "forks", "rate_f32", "rate_f64", *(["rate_i8"] if dot_width(target) else []),
            *(["clock"] if has_clock(target) else []))  # fmt: skip


def _function(name: str, body: str) -> str:
    return f"""
define void @{name}(ptr %buffers, ptr %sizes) {{
  %context = alloca [2 x ptr], align 16
  store ptr %buffers, ptr %context
  %second = getelementptr ptr, ptr %context, i64 1
  store ptr %sizes, ptr %second
  %threads.at = getelementptr i64, ptr %sizes, i64 2
  %threads = load i64, ptr %threads.at
  %many = icmp sgt i64 %threads, 1
  br i1 %many, label %fork, label %alone
fork:
  call void @{FORK}(ptr @{name}.part, ptr %context, i64 %threads, i64 %threads, i64 %threads)
  ret void
alone:
  call void @{name}.part(ptr %context, i64 0, i64 1)
  ret void
}}
define internal void @{name}.part(ptr %context, i64 %thread, i64 %team) noinline {{
entry:
  %buffers = load ptr, ptr %context
  %base = load ptr, ptr %buffers
  %second = getelementptr ptr, ptr %context, i64 1
  %sizes = load ptr, ptr %second
  %bytes = load i64, ptr %sizes
  %repeats.at = getelementptr i64, ptr %sizes, i64 1
  %repeats = load i64, ptr %repeats.at
  %skip = mul i64 %thread, %bytes
  %mine = getelementptr i8, ptr %base, i64 %skip
{body}
}}"""


def _multiply_add(target: CpuTarget) -> str:
    """What a kernel multiplies and adds with: without an instruction for both, `llvm.fma` would be C's function for each."""
    return "llvm.fma" if target.fma else "llvm.fmuladd"


def _rate(target: CpuTarget, ty: str, dtype: str) -> str:
    """Independent chains of multiply-adds; the sums are stored, so that they are wanted."""
    count = accumulators(target)
    lanes = int(ty[1:].split()[0])
    if dtype == "i8":
        raw = f"<{4 * lanes} x i8>"

        def step(x: str) -> str:
            ones = ", ".join(["i8 1"] * (4 * lanes))
            return f"call {ty} @llvm.x86.avx512.vpdpbusd.{32 * lanes}({ty} {x}, {raw} <{ones}>, {raw} <{ones}>)"

        first = "zeroinitializer"
    else:
        scalar = _FLOATS[dtype][0]
        half, one = (f"<{', '.join([f'{scalar} {n}'] * lanes)}>" for n in ("0.5", "1.0"))

        def step(x: str) -> str:
            return f"call {ty} @{_multiply_add(target)}.v{lanes}{dtype}({ty} {x}, {ty} {half}, {ty} {one})"

        first = one
    lines = ["  br label %loop", "loop:", "  %i = phi i64 [0, %entry], [%i1, %loop]"]
    last = [f"%a{k}.{ROUNDS - 1}" for k in range(count)]
    lines += [f"  %a{k} = phi {ty} [{first}, %entry], [{last[k]}, %loop]" for k in range(count)]
    for r in range(ROUNDS):
        lines += [f"  %a{k}.{r} = {step(f'%a{k}' if r == 0 else f'%a{k}.{r - 1}')}" for k in range(count)]
    lines += [
        "  %i1 = add i64 %i, 1",
        "  %more = icmp slt i64 %i1, %repeats",
        "  br i1 %more, label %loop, label %done",
        "done:",
    ]
    size = target.vl_bytes if dtype != "i8" else 4 * lanes
    for k in range(count):
        lines += [
            f"  %o{k} = getelementptr i8, ptr %mine, i64 {k * size}",
            f"  store {ty} {last[k]}, ptr %o{k}, align 64",
        ]
    return "\n".join([*lines, "  ret void"])


def _stream(target: CpuTarget, *, write: bool) -> str:
    """Over and over through a thread's part, several vectors at a time."""
    ty, size = f"<{target.vl_bytes // 8} x i64>", target.vl_bytes
    zero = "zeroinitializer"
    lines = [
        "  br label %again",
        "again:",
        "  %r = phi i64 [0, %entry], [%r1, %next]",
    ]
    sums = range(0 if write else STREAMS)
    lines += [f"  %s{k} = phi {ty} [{zero}, %entry], [%n{k}, %next]" for k in sums]
    lines += ["  br label %loop", "loop:", "  %at = phi i64 [0, %again], [%at1, %loop]"]
    lines += [f"  %t{k} = phi {ty} [%s{k}, %again], [%n{k}, %loop]" for k in sums]
    lines.append("  %p = getelementptr i8, ptr %mine, i64 %at")
    for k in range(STREAMS):
        lines.append(f"  %p{k} = getelementptr i8, ptr %p, i64 {k * size}")
        if write:
            lines.append(f"  store {ty} {zero}, ptr %p{k}, align {size}")
        else:
            lines += [f"  %v{k} = load {ty}, ptr %p{k}, align {size}", f"  %n{k} = or {ty} %t{k}, %v{k}"]
    lines += [
        f"  %at1 = add i64 %at, {STREAMS * size}",
        "  %more = icmp slt i64 %at1, %bytes",
        "  br i1 %more, label %loop, label %next",
        "next:",
        '  call void asm sideeffect "", "~{memory}"()',
        "  %r1 = add i64 %r, 1",
        "  %on = icmp slt i64 %r1, %repeats",
        "  br i1 %on, label %again, label %done",
        "done:",
    ]
    if not write:
        total = "%n0"
        for k in range(1, STREAMS):
            lines.append(f"  %u{k} = or {ty} {total}, %n{k}")
            total = f"%u{k}"
        lines.append(f'  call void asm sideeffect "", "x"({ty} {total})' if target.triple.startswith("x86") else
                     f"  store {ty} {total}, ptr %mine, align {size}")  # fmt: skip
    return "\n".join([*lines, "  ret void"])


CLOCK = """  br label %loop
loop:
  %i = phi i64 [0, %entry], [%i1, %loop]
  %x = phi i64 [88172645463325252, %entry], [%x3, %loop]
  %s1 = shl i64 %x, 13
  %x1 = xor i64 %x, %s1
  %s2 = lshr i64 %x1, 7
  %x2 = xor i64 %x1, %s2
  %s3 = shl i64 %x2, 17
  %x3 = xor i64 %x2, %s3
  %i1 = add i64 %i, 1
  %more = icmp slt i64 %i1, %repeats
  br i1 %more, label %loop, label %done
done:
  store i64 %x3, ptr %mine, align 8
  ret void"""
FORKS = f"""
define internal void @nothing(ptr %context, i64 %thread, i64 %team) {{
  ret void
}}
define void @forks(ptr %buffers, ptr %sizes) {{
entry:
  %repeats.at = getelementptr i64, ptr %sizes, i64 1
  %repeats = load i64, ptr %repeats.at
  %threads.at = getelementptr i64, ptr %sizes, i64 2
  %threads = load i64, ptr %threads.at
  %any = icmp sgt i64 %repeats, 0
  br i1 %any, label %loop, label %done
loop:
  %i = phi i64 [0, %entry], [%i1, %loop]
  call void @{FORK}(ptr @nothing, ptr null, i64 %threads, i64 %threads, i64 %threads)
  %i1 = add i64 %i, 1
  %more = icmp slt i64 %i1, %repeats
  br i1 %more, label %loop, label %done
done:
  ret void
}}"""
