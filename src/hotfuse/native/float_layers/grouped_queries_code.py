"""Grouped queries over a cache in native code, as text: the cache grows, heads are rotated, and each row attends to its own keys.

Heads that share keys are rows that are computed together: a row of keys is read once for up to four of them. A tile has as many
sums as a vector has lanes (some rows times some keys), and a tree of shuffles adds up all of them at once: one by one, adding up
the lanes took three times as long as the products.
"""

from __future__ import annotations

from collections.abc import Sequence

from hotfuse.native.byte_text import FunctionText
from hotfuse.native.float_layers.gate_formulas import VectorMath, number
from hotfuse.native.float_layers.word_table import field
from hotfuse.native.target import CpuTarget

GROUPED_FIELDS = ("heads", "groups", "size", "half", "interleaved", "window", "q_step", "kv_step")
"""Of a node. `heads`: of queries; `groups`: of keys; `size`: of a head, whole vectors. `half`: pairs of a head that are rotated.
`window`: keys that a row sees, 0 for all. `q_step`, `kv_step`: elements from one position to the next."""
HEIGHTS = (4, 2, 1)
"""Rows that are computed together."""


class _LaneText:
    """Loads, stores and numbers in every lane."""

    def __init__(self, f: FunctionText, lanes: int) -> None:
        self.f, self.lanes, self.math = f, lanes, VectorMath(f, lanes)
        self.type = self.math.type

    def load(self, base: str, at: str | int) -> str:
        return self.f.new(f"load {self.type}, ptr {self.f.moved(base, at, 'float')}, align 4")

    def store(self, value: str, base: str, at: str | int) -> None:
        self.f.do(f"store {self.type} {value}, ptr {self.f.moved(base, at, 'float')}, align 4")

    def splat(self, value: str, element: str = "float") -> str:
        kind = f"<{self.lanes} x {element}>"
        one = self.f.new(f"insertelement {kind} poison, {element} {value}, i64 0")
        return self.f.new(f"shufflevector {kind} {one}, {kind} poison, <{self.lanes} x i32> zeroinitializer")

    def loaded_splat(self, base: str, at: str | int) -> str:
        return self.splat(self.f.new(f"load float, ptr {self.f.moved(base, at, 'float')}, align 4"))

    def shuffled(self, a: str, b: str, places: Sequence[int]) -> str:
        mask = ", ".join(f"i32 {p}" for p in places)
        return self.f.new(f"shufflevector {self.type} {a}, {self.type} {b}, <{len(places)} x i32> <{mask}>")

    def added_up(self, sums: Sequence[str]) -> str:
        """As many vectors as there are lanes: what each of them adds up to, in their order."""
        segment, left = self.lanes, list(sums)
        while len(left) > 1:
            low = [p for p in range(2 * self.lanes) if p % segment < segment // 2]
            high = [p + segment // 2 for p in low]
            left = [
                self.math.op("fadd", self.shuffled(a, b, low), self.shuffled(a, b, high))
                for a, b in zip(left[::2], left[1::2], strict=True)
            ]
            segment //= 2
        return left[0]


def _rotate_text(target: CpuTarget) -> str:
    """`void rotate(ptr x, ptr cos, ptr sin, ptr to, ptr d)`: one head at one position; what is not rotated is copied."""
    f = FunctionText("void @hf_rotate(ptr %x, ptr %cos, ptr %sin, ptr %to, ptr %d)")
    size, half, interleaved = (field(f, GROUPED_FIELDS, n) for n in ("size", "half", "interleaved"))

    def turn(lanes: int, i: str, first: str, second: str) -> int:
        kind = "float" if lanes == 1 else f"<{lanes} x float>"

        def load(base: str, at: str) -> str:
            return f.new(f"load {kind}, ptr {f.moved(base, at, 'float')}, align 4")

        def times(a: str, b: str) -> str:
            return f.new(f"fmul {kind} {a}, {b}")

        a, b, cos, sin = load("%x", first), load("%x", second), load("%cos", i), load("%sin", i)
        made = ("fsub", times(cos, a), times(sin, b), first), ("fadd", times(sin, a), times(cos, b), second)
        for name, left, right, at in made:
            f.do(f"store {kind} {f.new(f'{name} {kind} {left}, {right}')}, ptr {f.moved('%to', at, 'float')}, align 4")
        return lanes

    def neighbours() -> None:
        f.loop(half, lambda i: turn(1, i, f.op("shl", i, 1), f.op("add", f.op("shl", i, 1), 1)))

    def halves() -> None:
        whole = f.op("and", half, -target.lanes)
        f.loop(whole, lambda i: turn(target.lanes, i, i, f.op("add", i, half)))
        f.loop(half, lambda i: turn(1, i, i, f.op("add", i, half)), whole)

    f.when(f.new(f"icmp ne i64 {interleaved}, 0"), neighbours, halves)
    done = f.op("shl", half, 1)
    given = f"ptr {f.moved('%x', done, 'float')}, ptr {f.moved('%to', done, 'float')}, i64 {f.op('sub', size, done)}"
    f.do(f"call void @hf_copy({given})")
    return f.done()


def _scores_text(target: CpuTarget, rows: int) -> str:
    """`void scores(ptr q, ptr k, i64 n, ptr to, i64 row, i64 size)`: products of some rows with `n` keys, `row` floats from one row
    of results to the next. The last key is read again where a tile has more."""
    f, lanes = FunctionText(f"void @hf_scores_{rows}(ptr %q, ptr %k, i64 %n, ptr %to, i64 %row, i64 %size)"), target.lanes
    v, many = _LaneText(f, lanes), lanes // rows
    last = f.op("sub", "%n", 1)

    def tile(j: str) -> int:
        keys = [f.moved("%k", f.op("mul", f.smaller(f.op("add", j, u), last), "%size"), "float") for u in range(many)]
        places = [(r, u) for r in range(rows) for u in range(many)]
        before, head, body, end = (f.label() for _ in range(4))
        f.do(f"br label %{before}")
        f.at(before)
        f.do(f"br label %{head}")
        f.at(head)
        i = f"%i.{head}"
        f.do(f"{i} = phi i64 [0, %{before}], [{i}.next, %{body}]")
        for r, u in places:
            f.do(f"%s{r}.{u}.{head} = phi {v.type} [zeroinitializer, %{before}], [%n{r}.{u}.{head}, %{body}]")
        f.branch(f.new(f"icmp slt i64 {i}, %size"), body, end)
        f.at(body)
        asked = [v.load("%q", f.op("add", f.op("mul", "%size", r), i)) for r in range(rows)]
        for u, key in enumerate(keys):
            k = v.load(key, i)
            for r, q in enumerate(asked):
                given = f"{v.type} {q}, {v.type} {k}, {v.type} %s{r}.{u}.{head}"
                f.do(f"%n{r}.{u}.{head} = call {v.type} @llvm.fma.v{lanes}f32({given})")
        f.do(f"{i}.next = add i64 {i}, {lanes}")
        f.do(f"br label %{head}")
        f.at(end)
        total = v.added_up([f"%s{r}.{u}.{head}" for r, u in places])
        for r in range(rows):
            part = v.shuffled(total, "poison", range(r * many, (r + 1) * many))
            at = f.moved("%to", f.op("add", f.op("mul", "%row", r), j), "float")
            f.do(f"store <{many} x float> {part}, ptr {at}, align 4")
        return many

    f.loop("%n", tile)
    return f.done()


def _values_text(target: CpuTarget, rows: int) -> str:
    """`void weighted(ptr p, i64 row, ptr v, i64 n, ptr y, i64 size)`: some rows of weights times `n` values."""
    f, lanes = FunctionText(f"void @hf_weighted_{rows}(ptr %p, i64 %row, ptr %v, i64 %n, ptr %y, i64 %size)"), target.lanes
    v = _LaneText(f, lanes)

    def columns(first: str, vectors: int) -> int:
        places = [(r, c) for r in range(rows) for c in range(vectors)]
        before, head, body, end = (f.label() for _ in range(4))
        f.do(f"br label %{before}")
        f.at(before)
        f.do(f"br label %{head}")
        f.at(head)
        j = f"%j.{head}"
        f.do(f"{j} = phi i64 [0, %{before}], [{j}.next, %{body}]")
        for r, c in places:
            f.do(f"%s{r}.{c}.{head} = phi {v.type} [zeroinitializer, %{before}], [%n{r}.{c}.{head}, %{body}]")
        f.branch(f.new(f"icmp slt i64 {j}, %n"), body, end)
        f.at(body)
        at = f.op("add", f.op("mul", j, "%size"), first)
        values = [v.load("%v", f.op("add", at, c * lanes)) for c in range(vectors)]
        for r in range(rows):
            weight = v.loaded_splat("%p", f.op("add", f.op("mul", "%row", r), j))
            for c, value in enumerate(values):
                given = f"{v.type} {weight}, {v.type} {value}, {v.type} %s{r}.{c}.{head}"
                f.do(f"%n{r}.{c}.{head} = call {v.type} @llvm.fma.v{lanes}f32({given})")
        f.do(f"{j}.next = add i64 {j}, 1")
        f.do(f"br label %{head}")
        f.at(end)
        for r, c in places:
            v.store(f"%s{r}.{c}.{head}", "%y", f.op("add", f.op("add", f.op("mul", "%size", r), first), c * lanes))
        return vectors * lanes

    start: str | int = 0
    for vectors in (4, 2, 1) if target.name == "avx512" else (2, 1):
        until = f.op("and", "%size", -vectors * lanes)
        f.loop(until, lambda i, vectors=vectors: columns(i, vectors), start)
        start = until
    return f.done()


def _weights_text(target: CpuTarget) -> str:
    """`void weights(ptr p, i64 first, i64 limit, i64 n, float scale, float softcap)`: the softmax of one row's scores from the
    first key to the limit, zeros in the others of `n`. Whole vectors are written."""
    head = "ptr %p, i64 %first, i64 %limit, i64 %n, float %scale, float %softcap"
    f, lanes = FunctionText(f"void @hf_weights({head})"), target.lanes
    v = _LaneText(f, lanes)
    ints, flags = f"<{lanes} x i64>", f"<{lanes} x i1>"
    steps = f"<{', '.join(f'i64 {k}' for k in range(lanes))}>"
    low, high, scale = v.splat("%first", "i64"), v.splat("%limit", "i64"), v.splat("%scale")
    most, total = f.new(f"alloca {v.type}, align 64"), f.new(f"alloca {v.type}, align 64")
    f.do(f"store {v.type} {v.math.all(float('-inf'))}, ptr {most}")
    f.do(f"store {v.type} zeroinitializer, ptr {total}")
    capped = f.new("fcmp une float %softcap, 0.0")
    cap = v.splat("%softcap")

    def seen(j: str) -> str:
        places = f.new(f"add {ints} {v.splat(j, 'i64')}, {steps}")
        left, right = f.new(f"icmp sge {ints} {places}, {low}"), f.new(f"icmp slt {ints} {places}, {high}")
        return f.new(f"and {flags} {left}, {right}")

    def picked(mask: str, yes: str, no: str) -> str:
        return f.new(f"select {flags} {mask}, {v.type} {yes}, {v.type} {no}")

    def cut(j: str) -> int:
        s = v.load("%p", j)
        v.store(v.math.op("fmul", v.math.tanh(v.math.op("fdiv", v.math.op("fmul", s, scale), cap)), cap), "%p", j)
        return lanes

    f.when(capped, lambda: f.loop("%n", cut))
    factor = v.splat(f.new(f"select i1 {capped}, float 1.0, float %scale"))

    def largest(j: str) -> int:
        s = picked(seen(j), v.math.op("fmul", v.load("%p", j), factor), v.math.all(float("-inf")))
        v.store(s, "%p", j)
        before = f.new(f"load {v.type}, ptr {most}")
        f.do(f"store {v.type} {picked(f.new(f'fcmp ogt {v.type} {s}, {before}'), s, before)}, ptr {most}")
        return lanes

    f.loop("%n", largest)

    def reduced(name: str, start: str, at: str) -> str:
        return f.new(f"call float @llvm.vector.reduce.{name}.v{lanes}f32({start}{v.type} {f.new(f'load {v.type}, ptr {at}')})")

    top = v.splat(reduced("fmax", "", most))

    def raised(j: str) -> int:
        less = v.math.op("fsub", v.load("%p", j), top)
        far = f.new(f"fcmp olt {v.type} {less}, {v.math.all(-87.0)}")
        e = picked(far, "zeroinitializer", v.math.exp(less))
        e = picked(seen(j), e, "zeroinitializer")
        v.store(e, "%p", j)
        f.do(f"store {v.type} {v.math.op('fadd', f.new(f'load {v.type}, ptr {total}'), e)}, ptr {total}")
        return lanes

    f.loop("%n", raised)
    whole = reduced("fadd", f"float {number(-0.0)}, ", total)
    part = v.splat(f.new(f"fdiv float 1.0, {whole}"))

    def divided(j: str) -> int:
        v.store(v.math.op("fmul", v.load("%p", j), part), "%p", j)
        return lanes

    f.loop("%n", divided)
    return f.done()


class _GroupedWords:
    """What a function with the table `%d` and a scratch reads first."""

    def __init__(self, f: FunctionText) -> None:
        self.f = f
        self.heads, self.groups, self.size, self.half, self.window, self.q_step, self.kv_step = (
            field(f, GROUPED_FIELDS, n) for n in GROUPED_FIELDS if n != "interleaved"
        )
        self.times = f.op("udiv", self.heads, self.groups)
        self._rotated = f.new(f"icmp ne i64 {self.half}, 0")

    def copied(self, source: str, to: str, n: str) -> None:
        self.f.do(f"call void @hf_copy(ptr {source}, ptr {to}, i64 {n})")

    def turned(self, source: str, position: str, to: str) -> None:
        """A head, rotated by its position where the node rotates."""
        f, place = self.f, self.f.op("mul", position, self.half)
        angles = f"ptr {f.moved('%cos', place, 'float')}, ptr {f.moved('%sin', place, 'float')}"
        f.when(
            self._rotated,
            lambda: f.do(f"call void @hf_rotate(ptr {source}, {angles}, ptr {to}, ptr %d)"),
            lambda: self.copied(source, to, self.size),
        )


_PASSED = "ptr %q, ptr %y, ptr %cos, ptr %sin, ptr %scratch, ptr %d, i64 %steps, i64 %row, float %scale, float %softcap"
"""What the function of the operator hands on to that of one group."""


def _group_text(target: CpuTarget) -> str:
    """`void attended(ptr keys, ptr values, i64 at, i64 positions, i64 g, ...)`: the rows of a group of heads of one sequence, over
    a cache that has grown. Rows are steps by heads; what a block begins with is whole vectors before its first key."""
    f = FunctionText(f"void @hf_attended(ptr %keys, ptr %values, i64 %at, i64 %positions, i64 %g, {_PASSED})")
    word = _GroupedWords(f)
    size, times = word.size, word.times
    asked, made = "%scratch", f.moved("%scratch", f.op("mul", size, HEIGHTS[0]), "float")
    scores = f.moved("%scratch", f.op("mul", size, 2 * HEIGHTS[0]), "float")
    everything = f.new(f"icmp eq i64 {word.window}, 0")

    def first_key(limit: str) -> str:
        """The first key that a row sees."""
        return f.new(f"select i1 {everything}, i64 0, i64 {f.larger(f.op('sub', limit, word.window), 0)}")

    def place(r: str) -> tuple[str, str]:
        """The step of a row, and its head."""
        return f.op("udiv", r, times), f.op("add", f.op("mul", "%g", times), f.op("urem", r, times))

    def limit_of(r: str) -> str:
        return f.op("add", f.op("add", "%at", place(r)[0]), 1)

    def block(i: str, rows: int) -> int:
        def ask(r: str) -> int:
            s, head = place(f.op("add", i, r))
            source = f.op("add", f.op("mul", f.op("add", "%positions", s), word.q_step), f.op("mul", head, size))
            to = f.moved(asked, f.op("mul", r, size), "float")
            word.turned(f.moved("%q", source, "float"), f.op("add", "%at", s), to)
            return 1

        f.loop(str(rows), ask)
        start = f.op("and", first_key(limit_of(i)), -target.lanes)
        n = f.op("sub", limit_of(f.op("add", i, rows - 1)), start)
        filled = f.op("and", f.op("add", n, target.lanes - 1), -target.lanes)
        skipped = f.op("mul", start, size)
        k, v = f.moved("%keys", skipped, "float"), f.moved("%values", skipped, "float")
        f.do(f"call void @hf_scores_{rows}(ptr {asked}, ptr {k}, i64 {n}, ptr {scores}, i64 %row, i64 {size})")

        def weigh(r: str) -> int:
            limit, here = limit_of(f.op("add", i, r)), f.moved(scores, f.op("mul", r, "%row"), "float")
            told = f"i64 {f.op('sub', first_key(limit), start)}, i64 {f.op('sub', limit, start)}, i64 {filled}"
            f.do(f"call void @hf_weights(ptr {here}, {told}, float %scale, float %softcap)")
            return 1

        f.loop(str(rows), weigh)
        f.do(f"call void @hf_weighted_{rows}(ptr {scores}, i64 %row, ptr {v}, i64 {n}, ptr {made}, i64 {size})")

        def put(r: str) -> int:
            s, head = place(f.op("add", i, r))
            to = f.op("mul", f.op("add", f.op("mul", f.op("add", "%positions", s), word.heads), head), size)
            word.copied(f.moved(made, f.op("mul", r, size), "float"), f.moved("%y", to, "float"), size)
            return 1

        f.loop(str(rows), put)
        return rows

    total, start = f.op("mul", "%steps", times), "0"
    for rows in HEIGHTS:
        until = f.op("sub", total, rows - 1)
        begin = start
        start = f.op("add", begin, f.op("and", f.op("sub", total, begin), -rows))
        f.loop(until, lambda i, rows=rows: block(i, rows), begin)
    return f.done()


def _operator_text(target: CpuTarget) -> str:
    """`void grouped_queries(ptr q, ptr k, ptr v, ptr past_k, ptr past_v, ptr keys, ptr values, ptr y, ptr before, ptr cos, ptr sin,
    ptr scratch, ptr d, i64 batch, i64 steps, i64 past, i64 length, float scale, float softcap)`.

    `before` are 64-bit counts of keys before the step. The scratch has eight rows of a head, and four rows of `length` filled up to
    whole vectors.
    """
    pointers = ("q", "k", "v", "past_k", "past_v", "keys", "values", "y", "before", "cos", "sin", "scratch", "d")
    numbers = "i64 %batch, i64 %steps, i64 %past, i64 %length, float %scale, float %softcap"
    f = FunctionText(f"void @hf_grouped_queries({', '.join(f'ptr %{p}' for p in pointers)}, {numbers})")
    word = _GroupedWords(f)
    size = word.size
    f.do(f"%filled = add i64 %length, {target.lanes - 1}")
    f.do(f"%row = and i64 %filled, {-target.lanes}")

    def sequence(b: str) -> int:
        at = f.new(f"load i64, ptr {f.moved('%before', b, 'i64')}")
        positions = f.op("mul", b, "%steps")

        def group(g: str) -> int:
            cache = f.op("add", f.op("mul", b, word.groups), g)
            kept, grown = (f.op("mul", f.op("mul", cache, n), size) for n in ("%past", "%length"))
            keys, values = f.moved("%keys", grown, "float"), f.moved("%values", grown, "float")
            old, behind = f.op("mul", at, size), f.op("mul", f.op("add", at, "%steps"), size)
            rest = f.op("sub", f.op("mul", "%length", size), behind)
            for past, whole in (("%past_k", keys), ("%past_v", values)):
                given = f"ptr {whole}, ptr {f.moved(past, kept, 'float')}, i64 {f.op('shl', old, 2)}"
                f.do(f"call void @llvm.memcpy.p0.p0.i64({given}, i1 false)")
                given = f"ptr {f.moved(whole, behind, 'float')}, i8 0, i64 {f.op('shl', rest, 2)}"
                f.do(f"call void @llvm.memset.p0.i64({given}, i1 false)")

            def fresh(s: str) -> int:
                source = f.op("add", f.op("mul", f.op("add", positions, s), word.kv_step), f.op("mul", g, size))
                position = f.op("add", at, s)
                to = f.op("mul", position, size)
                word.turned(f.moved("%k", source, "float"), position, f.moved(keys, to, "float"))
                word.copied(f.moved("%v", source, "float"), f.moved(values, to, "float"), size)
                return 1

            f.loop("%steps", fresh)
            f.do(f"call void @hf_attended(ptr {keys}, ptr {values}, i64 {at}, i64 {positions}, i64 {g}, {_PASSED})")
            return 1

        f.loop(word.groups, group)
        return 1

    f.loop("%batch", sequence)
    return f.done()


def text(target: CpuTarget) -> str:
    """All of it; `copy` is that of `layer_code`."""
    lanes = target.lanes
    return "\n".join((
        f"declare float @llvm.vector.reduce.fmax.v{lanes}f32(<{lanes} x float>)",
        f"declare float @llvm.vector.reduce.fadd.v{lanes}f32(float, <{lanes} x float>)",
        "declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)", "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)",
        "declare i64 @llvm.smax.i64(i64, i64)", _rotate_text(target), _weights_text(target),
        *(make(target, rows) for rows in HEIGHTS for make in (_scores_text, _values_text)), _group_text(target),
        _operator_text(target),
    ))  # fmt: skip
