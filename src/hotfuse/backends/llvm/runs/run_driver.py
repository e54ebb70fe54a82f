"""The driver of a native run as LLVM IR: sizes, offsets and branches computed in native code, kernels called in order.

Two functions, both `void name(ptr buffers, ptr sizes)` where sizes are the run's symbols and then the number of threads:

    layout    buffers is written: [bytes of the arena, for every output its sizes and then its strides]
    body      buffers is read:    [table, arena, control, inputs..., outputs...]

`control` is two words and more: the first is set to 1 where a branch without native code was taken (nothing but the arena and
the outputs has been written then). The second says what is wanted besides, as bits: `CLOCK`, the time at the beginning and after
each partition, in the words behind it; `OUTCOMES`, for every branch in the words behind those, 1 where it went to its second side
and 2 where it went to its first (both bits where it is in a loop and went both ways), for every loop one more than its iterations.
A call that may have several threads opens a team before its first step and closes it behind its last (`gather`): threads that a
kernel woke stay for those behind it. Behind those words are the counters of counting kernels (`tile.instrument`), which a table
may hold in place of plain ones: every kernel is called with [its buffers..., its own memory, its counters, its own memory].
"""

from __future__ import annotations

from collections.abc import Sequence

from hotfuse.backends.llvm.emission.code import Fn, Module
from hotfuse.backends.llvm.runs.loops import emit_loop
from hotfuse.backends.llvm.runs.size_dispatch import emit_choice, emit_leaving
from hotfuse.backends.llvm.runs.symbols import BODY, CONTROL_HEAD, HEAD, LAYOUT, TEAM_TIMES, outcomes_at
from hotfuse.backends.llvm.threads import alone, fork_join
from hotfuse.backends.llvm.threads.forks import emit_fork
from hotfuse.base.errors import InternalError
from hotfuse.ir.dims import Dim, expr, sym
from hotfuse.lower.run.description import (
    CLOCK,
    OUTCOMES,
    THREADS,
    Base,
    BranchStep,
    Call,
    ChoiceStep,
    LoopStep,
    Mark,
    MemoryAddress,
    MoveStep,
    Run,
    Step,
    branches,
    calls,
    entered,
)
from hotfuse.lower.run.forks import Fork
from hotfuse.native.target import CpuTarget
from hotfuse.tile.instrument import WIDTH
from hotfuse.tile.program import Kernel

_STEPS = f"{BODY}.steps"
_CLOCK_MONOTONIC = 1


def emit_driver(run: Run, target: CpuTarget) -> str:
    """The text of a module with both functions."""
    module = Module(target)
    _layout(run, module)
    _Body(run, module).write()
    _teamed(module, len(run.sizes))
    return module.text()


def _teamed(module: Module, sizes: int) -> None:
    """The body as it is entered: its steps, with a team around them where the call may have several threads. What it learns of
    its team (`alone`) stands in its own data, by its sizes' sum, four classes to a power of two."""
    module.declared[fork_join.OPEN] = f"declare void @{fork_join.OPEN}(ptr, ptr)"
    module.declared[fork_join.CLOSE] = f"declare void @{fork_join.CLOSE}(ptr)"
    module.declared["llvm.ctlz.i64"] = "declare i64 @llvm.ctlz.i64(i64, i1)"
    module.declared["llvm.usub.sat.i64"] = "declare i64 @llvm.usub.sat.i64(i64, i64)"
    module.declared["llvm.umin.i64"] = "declare i64 @llvm.umin.i64(i64, i64)"
    module.constants[TEAM_TIMES] = f"@{TEAM_TIMES} = global [{alone.WORDS * alone.CLASSES} x i64] zeroinitializer, align 64"
    total = "0"
    summed: list[str] = []
    for k in range(sizes):
        summed += [f"  %size{k}.at = getelementptr i64, ptr %sizes, i64 {k}", f"  %size{k} = load i64, ptr %size{k}.at",
                   f"  %total{k} = add i64 {total}, %size{k}"]  # fmt: skip
        total = f"%total{k}"
    module.defined[BODY] = [
        f"define void @{BODY}(ptr %buffers, ptr %sizes) #0 {{",
        f"  %team = alloca [{fork_join.BYTES} x i8], align 128",
        f"  %threads.at = getelementptr i64, ptr %sizes, i64 {sizes}",
        "  %threads = load i64, ptr %threads.at",
        "  %many = icmp sgt i64 %threads, 1",
        "  br i1 %many, label %several, label %one",
        "one:",
        f"  call void @{_STEPS}(ptr %buffers, ptr %sizes)",
        "  ret void",
        "several:",
        *summed,
        f"  %zeros = call i64 @llvm.ctlz.i64(i64 {total}, i1 false)",
        "  %bits = sub i64 64, %zeros",
        "  %above = call i64 @llvm.usub.sat.i64(i64 %bits, i64 3)",
        f"  %leading = lshr i64 {total}, %above",
        "  %quarter = and i64 %leading, 3",
        "  %octave = shl i64 %bits, 2",
        "  %fine = or i64 %octave, %quarter",
        f"  %class = call i64 @llvm.umin.i64(i64 %fine, i64 {alone.CLASSES - 1})",
        f"  %word = mul i64 %class, {alone.WORDS}",
        f"  %state = getelementptr i64, ptr @{TEAM_TIMES}, i64 %word",
        f"  call void @{fork_join.OPEN}(ptr %team, ptr %state)",
        f"  call void @{_STEPS}(ptr %buffers, ptr %sizes)",
        f"  call void @{fork_join.CLOSE}(ptr %team)",
        "  ret void",
        "}",
    ]


def _function(run: Run, module: Module, name: str) -> Fn:
    """A function that knows the run's symbols."""
    names = (*(s.symbol for s in run.sizes), THREADS)
    fn = Fn(module, name, "ptr %buffers, ptr %sizes", Kernel(name, names, (), ()))
    with fn.at(fn.scopes[0]):
        for k, symbol in enumerate(names):
            fn.symbol[symbol] = fn.val(f"load i64, ptr {fn.val(f'getelementptr i64, ptr %sizes, i64 {k}')}")
            fn.depth_of[symbol] = 0
    return fn


def _layout(run: Run, module: Module) -> None:
    fn = _function(run, module, LAYOUT)
    wanted: list[Dim] = [expr("+", run.arena, expr("*", run.scratch, run.lanes))]
    for out in run.outputs:
        wanted += [*out.shape, *out.strides]
    for k, d in enumerate(wanted):
        value = fn.i64(d)
        fn.do(f"store i64 {value}, ptr {fn.val(f'getelementptr i64, ptr %buffers, i64 {k}')}")
    fn.do("ret void")


class _Body:
    """The body, or the function of one lane of a fork in it."""

    def __init__(self, run: Run, module: Module, name: str = _STEPS, lane: int = 0) -> None:
        self.run = run
        self.lane = lane
        self.fn = fn = _function(run, module, name)
        self.loaded: dict[tuple[Base, int], str] = {}
        made = list(entered(run.steps))
        self.outcomes = outcomes_at(sum(isinstance(s, Mark) for s in run.steps))
        """Where the next branch's outcome goes."""
        self.pointers = fn.alloca(f"[{max((len(c.buffers) for c in made), default=0) + 3} x ptr], align 16")
        self.counters = self.outcomes + sum(1 for _ in branches(run.steps))
        """Where the next call's counters are."""
        self.numbers = fn.alloca(f"[{max((len(c.sizes) for c in made), default=0) + 1} x i64], align 16")
        self.clock = fn.alloca("[2 x i64], align 16")
        with fn.at(fn.scopes[0]):
            self.table, self.arena, self.control = (self._buffer(k) for k in range(HEAD))
            flag = fn.val(f"load i64, ptr {fn.val(f'getelementptr i64, ptr {self.control}, i64 1')}")
            self.timed = fn.val(f"icmp ne i64 {fn.val(f'and i64 {flag}, {CLOCK}')}, 0")
            self.told = fn.val(f"icmp ne i64 {fn.val(f'and i64 {flag}, {OUTCOMES}')}, 0")
            for k, symbol in enumerate(run.words):
                if symbol:
                    fn.symbol[symbol] = fn.val(f"load i64, ptr {fn.val(f'getelementptr i64, ptr {self.table}, i64 {k}')}")
                    fn.depth_of[symbol] = 0

    def _buffer(self, k: int) -> str:
        return self.fn.val(f"load ptr, ptr {self.fn.val(f'getelementptr ptr, ptr %buffers, i64 {k}')}")

    def write(self) -> None:
        emit_leaving(self.fn, self.run.steps, self.control)
        self._look(0)
        at = 0
        for number, fork in enumerate(self.run.forks):
            self._steps(self.run.steps[at : fork.first])
            self._fork(fork, number)
            at = fork.last
        self._steps(self.run.steps[at:])
        self.fn.do("ret void")

    def _fork(self, fork: Fork, number: int) -> None:
        """Lanes side by side, or the steps one after the other: those of a timed call, whose parts are told apart."""
        run, fn = self.run, self.fn
        names = [f"{BODY}.fork{number}.lane{k}" for k in range(len(fork.lanes))]
        for k, (name, steps) in enumerate(zip(names, fork.lanes, strict=True)):
            _Body(run, fn.module, name, k).write_lane(steps)
        untimed = fn.val(f"xor i1 {self.timed}, true")
        switch = self._base(MemoryAddress(Base.TABLE, len(run.words) - 1, 0))
        emit_fork(fn, names, switch, fn.symbol[THREADS], len(run.sizes) + 1, untimed,
                  lambda: self._steps(run.steps[fork.first : fork.last]))  # fmt: skip

    def write_lane(self, steps: Sequence[int]) -> None:
        """Some of the run's steps, all of them calls; their counters are where the body has them."""
        first = self.counters
        for i in steps:
            self.counters = first + WIDTH * sum(len(c.made) for c in calls(self.run.steps[:i]))
            self._steps((self.run.steps[i],))
        self.fn.do("ret void")

    def _steps(self, steps: Sequence[Step]) -> None:
        for step in steps:
            match step:
                case Call():
                    self._call(step)
                case BranchStep():
                    self._branch(step)
                case ChoiceStep():
                    self._choice(step)
                case LoopStep():
                    self._loop(step)
                case Mark():
                    self._look(step.partition + 1)
                case MoveStep():
                    into, source, size = self._address(step.into), self._address(step.source), self.fn.i64(step.bytes)
                    self.fn.call("llvm.memcpy.p0.p0.i64", "void", ("ptr", into), ("ptr", source), ("i64", size), ("i1", "false"))

    def _base(self, a: MemoryAddress) -> str:
        """The beginning of some memory, loaded once."""
        if a.base is Base.ARENA:
            return self.arena
        key = (a.base, a.index)
        if key not in self.loaded:
            fn = self.fn
            with fn.at(fn.scopes[0]):
                match a.base:
                    case Base.TABLE:
                        at = fn.val(f"getelementptr ptr, ptr {self.table}, i64 {a.index}")
                        self.loaded[key] = fn.val(f"load ptr, ptr {at}")
                    case Base.INPUT:
                        self.loaded[key] = self._buffer(HEAD + a.index)
                    case _:
                        self.loaded[key] = self._buffer(HEAD + len(self.run.inputs) + a.index)
        return self.loaded[key]

    def _address(self, a: MemoryAddress) -> str:
        base = self._base(a)
        if a.offset == 0:
            return base
        return self.fn.val(f"getelementptr i8, ptr {base}, i64 {self.fn.i64(a.offset)}")

    def _call(self, call: Call) -> None:
        fn = self.fn
        for k, a in enumerate(call.buffers):
            pointer = self._address(a)
            fn.do(f"store ptr {pointer}, ptr {fn.val(f'getelementptr ptr, ptr {self.pointers}, i64 {k}')}")
        behind = [fn.val(f"getelementptr ptr, ptr {self.pointers}, i64 {len(call.buffers) + k}") for k in range(3)]
        if call.scratch:
            before = expr("*", self.run.scratch, self.lane)
            own = self._address(MemoryAddress(Base.ARENA, 0, expr("+", self.run.arena, before)))
            for slot in behind[::2]:
                fn.do(f"store ptr {own}, ptr {slot}")
        counters = fn.val(f"getelementptr i64, ptr {self.control}, i64 {self.counters}")
        fn.do(f"store ptr {counters}, ptr {behind[1]}")
        self.counters += WIDTH * len(call.made)
        for k, d in enumerate((*call.sizes, sym(THREADS))):
            value = fn.i64(d)
            fn.do(f"store i64 {value}, ptr {fn.val(f'getelementptr i64, ptr {self.numbers}, i64 {k}')}")
        code = self._base(MemoryAddress(Base.TABLE, call.word, 0))
        fn.do(f"call void {code}(ptr {self.pointers}, ptr {self.numbers})")

    def _choice(self, choice: ChoiceStep) -> None:
        """Every variant stores the same values, so all of them write the same counters."""
        counters = self.counters

        def variant(call: Call) -> None:
            self.counters = counters
            self._call(call)

        emit_choice(self.fn, choice, variant)

    def _branch(self, branch: BranchStep) -> None:
        fn = self.fn
        byte = fn.val(f"load i8, ptr {self._address(branch.condition)}")
        true = fn.val(f"icmp ne i8 {byte}, 0")
        self._outcome(true)
        then, other, after = fn.labels("then", "else", "after")
        fn.do(f"br i1 {true}, label %{then}, label %{other}")
        for label, steps in ((then, branch.then), (other, branch.other)):
            fn.label(label)
            if steps is None:
                fn.do(f"store i64 1, ptr {self.control}")
                fn.do("ret void")
            else:
                self._steps(steps)
                fn.do(f"br label %{after}")
        if branch.then is None and branch.other is None:
            raise InternalError("a branch without native code on either side")
        fn.label(after)

    def _loop(self, loop: LoopStep) -> None:
        fn, place = self.fn, self.outcomes
        self.outcomes += 1
        trips = emit_loop(fn, loop, self._address, lambda: self._steps(loop.steps), self.control)
        tell, after = fn.labels("tell", "go")
        fn.do(f"br i1 {self.told}, label %{tell}, label %{after}")
        fn.label(tell)
        slot = fn.val(f"getelementptr i64, ptr {self.control}, i64 {place}")
        fn.do(f"store i64 {fn.val(f'add i64 {trips}, 1')}, ptr {slot}")
        fn.do(f"br label %{after}")
        fn.label(after)

    def _outcome(self, true: str) -> None:
        """Write down which way the next branch goes, where it is asked for."""
        fn = self.fn
        tell, after = fn.labels("tell", "go")
        fn.do(f"br i1 {self.told}, label %{tell}, label %{after}")
        fn.label(tell)
        slot = fn.val(f"getelementptr i64, ptr {self.control}, i64 {self.outcomes}")
        seen = fn.val(f"or i64 {fn.val(f'load i64, ptr {slot}')}, {fn.val(f'select i1 {true}, i64 2, i64 1')}")
        fn.do(f"store i64 {seen}, ptr {slot}")
        fn.do(f"br label %{after}")
        fn.label(after)
        self.outcomes += 1

    def _look(self, at: int) -> None:
        """Write down the time, where it is asked for."""
        fn = self.fn
        look, after = fn.labels("look", "go")
        fn.do(f"br i1 {self.timed}, label %{look}, label %{after}")
        fn.label(look)
        fn.call("clock_gettime", "i32", ("i32", str(_CLOCK_MONOTONIC)), ("ptr", self.clock))
        seconds = fn.val(f"load i64, ptr {self.clock}")
        rest = fn.val(f"load i64, ptr {fn.val(f'getelementptr i64, ptr {self.clock}, i64 1')}")
        now = fn.val(f"add i64 {fn.val(f'mul i64 {seconds}, 1000000000')}, {rest}")
        slot = fn.val(f"getelementptr i64, ptr {self.control}, i64 {CONTROL_HEAD + at}")
        fn.do(f"store i64 {now}, ptr {slot}")
        fn.do(f"br label %{after}")
        fn.label(after)

