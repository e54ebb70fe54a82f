"""Whether a call has its team or runs on the calling thread alone: native code that times both and remembers.

Threads that had nothing to do for some milliseconds are asleep. Waking one costs 60 us on one machine and 4 ms on another, more
than many a run takes on one thread. And where other programs or other callers have the cores, a team waits for its slowest member.
What that costs is known only where it happens, so every run keeps some words (`WORDS`) per size class, times in ns:

    HOT, HOT_ALONE     a call soon after a team was busy (its threads are awake): with the team, and on one thread
    COLD, COLD_ALONE   a call after a pause: with the team, which has to be woken, and on one thread
    QUICKEST              the quickest call with an awake team

A kind of calls takes the quicker side and tries the other one again now and then. While there were few calls, that is after a
quarter as many calls as there were so far, since one time says little on a busy machine. Later it is after `RETRY` calls times how
much longer the other side took, which costs under a hundredth of the time.

A run that takes `LONG_NS` or more is another matter. Waking its threads is too small a part of it to save, so a call after a pause
counts as one in a row, and its newest time says all. One thread is tried rarely from the beginning, since such a try costs as much
as a team saves. Where one thread won, the team is tried again soon.

One thread is tried only within a bound: it cannot take longer than QUICKEST times the threads, and that must be at most twice what
the team takes now. On a quiet machine with many threads nothing is ever tried; there is nothing to gain. A team that is woken where
calls in a row had been given to one thread makes the run forget HOT: the calls behind it find out anew.

Times are averages that forget: a quarter of the weight is the newest call's, which counts for at most twice the average. Some ten
times a second somebody else has a core for a moment. One such call alone must not decide (decision 155).

Calls after a pause that stay on one thread wake nobody, so the calls right behind them find a team asleep, too. Each loses what an
awake team would save. When calls in a row have lost what waking costs, the team is woken (`_LOST`, decision 165): at worst they
pay waking twice, however many there are.
"""

from __future__ import annotations

import ctypes

from hotfuse.backends.protocol import TeamTimes

HOT, COLD, COLD_ALONE, HOT_ALONE = range(4)
"""How a call ran; also the word that its time goes to. From `COLD_ALONE` on it had one thread."""
COLD_CALLS, _COLD_TRIED, HOT_CALLS, _HOT_TRIED, QUICKEST = range(4, 9)
"""Calls of either kind, each followed by the number of the call that last tried the slower way."""
_LOST, WOKEN = 9, 10
"""What calls in a row lost on one thread since the last pause, in ns; and how often a team was woken for that."""
WORDS = 11
CLASSES = 96
"""Sizes of a call, four to a power of two: calls of a class differ in time by no more than a team does that shares its cores."""
PAUSE_NS = 2_000_000
"""Threads that were idle for as long count as asleep."""
RETRY = 128
SOONEST = 48
"""Calls between two tries at least, where both take about as long."""
LONG_NS = 16_000_000
"""Four times the longest waking that was seen: two threads save more than that by then."""
TEAM_AGAIN = 8
"""Calls that a long run stays on one thread for at most before it tries its team again: cores may be free by then."""
TRY_COSTS = 16
"""The part of the time, one in so many, that such a try may cost; what took hardly longer than one thread is tried in the next
call, since the moment that held it up may be over, and every call on one thread costs all that a team saves."""
CROWDED = (5, 4)
"""A team that takes more than this ratio of its least time shares its cores with somebody."""


def read(address: int) -> tuple[TeamTimes, ...]:
    """What stands in a run's words, for the size classes that had calls on several threads."""
    words = list((ctypes.c_int64 * (WORDS * CLASSES)).from_address(address))
    rows = [words[WORDS * k : WORDS * (k + 1)] for k in range(CLASSES)]
    return tuple(
        TeamTimes(r[HOT], r[COLD], r[COLD_ALONE], r[HOT_ALONE], r[COLD_CALLS], r[HOT_CALLS], r[WOKEN])
        for r in rows
        if r[COLD_CALLS] or r[HOT_CALLS]
    )


def forget(address: int) -> None:
    """Have a run learn anew: what proofs beside calls took says nothing of calls."""
    ctypes.memset(address, 0, 8 * WORDS * CLASSES)


def text(state_at: int, began_at: int, mode_at: int) -> str:
    """`alone(team, given)`: whether a run whose first fork would wake `given` threads stays on one; `noted(team)`: it has ended.

    The offsets are those of a team's words: the run's state for its size class (or null), when its first fork was, and how it ran.
    """

    def word(name: str, index: int) -> str:
        return (f"  %{name}.at = getelementptr i64, ptr %state, i64 {index}\n"
                f"  %{name} = load atomic i64, ptr %{name}.at monotonic, align 8\n")  # fmt: skip

    more, less = CROWDED
    return f"""
@ended = global i64 0
@ran = global i64 0

define internal i64 @clock() {{
  %time = alloca [2 x i64]
  %failed = call i32 @clock_gettime(i32 1, ptr %time)
  %ns.at = getelementptr i64, ptr %time, i64 1
  %s = load i64, ptr %time
  %ns = load i64, ptr %ns.at
  %s.ns = mul i64 %s, 1000000000
  %now = add i64 %s.ns, %ns
  ret i64 %now
}}

; which of two is quicker, or due to be tried; `single` only where it may, and rarely from the beginning where runs are long
define internal i1 @serial(ptr %calls.at, i64 %team, i64 %single, i1 %may, i1 %long) {{
entry:
  %call = atomicrmw add ptr %calls.at, i64 1 monotonic
  %first = icmp eq i64 %team, 0
  br i1 %first, label %together, label %second
together:
  ret i1 false
second:
  %untried = icmp eq i64 %single, 0
  br i1 %untried, label %try, label %both
try:
  br i1 %may, label %try.it, label %together
try.it:
  %first.at = getelementptr i64, ptr %calls.at, i64 1
  store atomic i64 %call, ptr %first.at monotonic, align 8
  ret i1 true
both:
  %better = icmp slt i64 %single, %team
  %slow = call i64 @llvm.smax.i64(i64 %single, i64 %team)
  %quick = call i64 @llvm.smin.i64(i64 %single, i64 %team)
  %ratio = sdiv i64 %slow, %quick
  %rarely = mul i64 %ratio, {RETRY}
  %quarter = lshr i64 %call, 2
  %soon = add i64 %quarter, 2
  %gap = sub i64 %slow, %quick
  %gaps.rare = mul i64 %gap, {RETRY}
  %paid.rare = sdiv i64 %gaps.rare, %quick
  %seldom = call i64 @llvm.smax.i64(i64 %paid.rare, i64 {SOONEST})
  %sooner = call i64 @llvm.smin.i64(i64 %seldom, i64 %soon)
  %gaps = mul i64 %gap, {TRY_COSTS}
  %paid.after = sdiv i64 %gaps, %quick
  %paid = call i64 @llvm.smax.i64(i64 %paid.after, i64 1)
  %again = call i64 @llvm.smin.i64(i64 %paid, i64 {TEAM_AGAIN})
  %when.long = select i1 %better, i64 %again, i64 %rarely
  %interval = select i1 %long, i64 %when.long, i64 %sooner
  %tried.at = getelementptr i64, ptr %calls.at, i64 1
  %tried = load atomic i64, ptr %tried.at monotonic, align 8
  %since = sub i64 %call, %tried
  %due = icmp sge i64 %since, %interval
  br i1 %due, label %other, label %same
same:
  ret i1 %better
other:
  store atomic i64 %call, ptr %tried.at monotonic, align 8
  %worse = xor i1 %better, true
  %within = and i1 %worse, %may
  ret i1 %within
}}

define internal i1 @alone(ptr %team, i64 %given) {{
entry:
  %state.at = getelementptr i8, ptr %team, i64 {state_at}
  %state = load ptr, ptr %state.at
  %kept = icmp ne ptr %state, null
  br i1 %kept, label %look, label %plain
plain:
  ret i1 false
look:
  %mode.at = getelementptr i8, ptr %team, i64 {mode_at}
  %began.at = getelementptr i8, ptr %team, i64 {began_at}
  %now = call i64 @clock()
  store i64 %now, ptr %began.at
{word("least", QUICKEST)}
  %last = load atomic i64, ptr @ended monotonic, align 8
  %since = sub i64 %now, %last
  %paused = icmp sgt i64 %since, {PAUSE_NS}
{word("cold.team", COLD)}
  %known = icmp ne i64 %least, 0
  %quick = select i1 %known, i64 %least, i64 %cold.team
  %long = icmp sge i64 %quick, {LONG_NS}
  %short = xor i1 %long, true
  %woken = and i1 %paused, %short
  br i1 %woken, label %cold, label %hot
hot:
{word("hot.team", HOT)}
{word("hot.single", HOT_ALONE)}
  %hot.calls.at = getelementptr i64, ptr %state, i64 {HOT_CALLS}
  %hot.most = mul i64 %least, %given
  %hot.bound = shl i64 %hot.team, 1
  %hot.within = icmp sle i64 %hot.most, %hot.bound
  %hot.now = mul i64 %hot.team, {less}
  %hot.quiet = mul i64 %least, {more}
  %crowded = icmp sgt i64 %hot.now, %hot.quiet
  %hot.may = and i1 %hot.within, %crowded
  %hot.serial = call i1 @serial(ptr %hot.calls.at, i64 %hot.team, i64 %hot.single, i1 %hot.may, i1 %long)
  %hot.how = select i1 %hot.serial, i64 {HOT_ALONE}, i64 {HOT}
  store i64 %hot.how, ptr %mode.at
  ret i1 %hot.serial
cold:
{word("cold.single", COLD_ALONE)}
  %cold.calls.at = getelementptr i64, ptr %state, i64 {COLD_CALLS}
  %cold.most = mul i64 %quick, %given
  %cold.bound = shl i64 %cold.team, 1
  %cold.may = icmp sle i64 %cold.most, %cold.bound
  %cold.serial = call i1 @serial(ptr %cold.calls.at, i64 %cold.team, i64 %cold.single, i1 %cold.may, i1 false)
{word("old", HOT)}
  br i1 %cold.serial, label %row, label %together
row:
  %lost.at = getelementptr i64, ptr %state, i64 {_LOST}
  %ran = load atomic i64, ptr @ran monotonic, align 8
  %idle = sub i64 %now, %ran
  %behind = icmp sle i64 %idle, {PAUSE_NS}
  br i1 %behind, label %count, label %begins
begins:
  store atomic i64 0, ptr %lost.at monotonic, align 8
  br label %single
count:
  %perfect = sdiv i64 %cold.single, %given
  %guess = select i1 %known, i64 %least, i64 %perfect
  %measured = icmp ne i64 %old, 0
  %awake = select i1 %measured, i64 %old, i64 %guess
  %saved = sub i64 %cold.single, %awake
  %worth = icmp sgt i64 %saved, 0
  %before = load atomic i64, ptr %lost.at monotonic, align 8
  %lost = add i64 %before, %saved
  %waking = sub i64 %cold.team, %awake
  %paid = icmp sge i64 %lost, %waking
  %wake = and i1 %paid, %worth
  br i1 %wake, label %wake.it, label %add
add:
  %more.lost = select i1 %worth, i64 %lost, i64 %before
  store atomic i64 %more.lost, ptr %lost.at monotonic, align 8
  br label %single
single:
  store i64 {COLD_ALONE}, ptr %mode.at
  ret i1 true
wake.it:
  store atomic i64 0, ptr %lost.at monotonic, align 8
  %woken.at = getelementptr i64, ptr %state, i64 {WOKEN}
  %one.more = atomicrmw add ptr %woken.at, i64 1 monotonic
  br label %together
together:
  store i64 {COLD}, ptr %mode.at
{word("old.single", HOT_ALONE)}
  %cold.better = icmp slt i64 %cold.single, %cold.team
  %old.better = icmp slt i64 %old.single, %old
  %given.up = or i1 %cold.better, %old.better
  br i1 %given.up, label %forget, label %go
forget:
  store atomic i64 0, ptr %old.at monotonic, align 8
  br label %go
go:
  ret i1 false
}}

; a team that was awake is until `PAUSE_NS` later; a run on one thread wakes nobody
define internal void @noted(ptr %team) {{
entry:
  %began.at = getelementptr i8, ptr %team, i64 {began_at}
  %began = load i64, ptr %began.at
  %looked = icmp ne i64 %began, 0
  br i1 %looked, label %note, label %done
note:
  %now = call i64 @clock()
  %took = sub i64 %now, %began
  %mode.at = getelementptr i8, ptr %team, i64 {mode_at}
  %mode = load i64, ptr %mode.at
  %state.at = getelementptr i8, ptr %team, i64 {state_at}
  %state = load ptr, ptr %state.at
  %time.at = getelementptr i64, ptr %state, i64 %mode
  %before = load atomic i64, ptr %time.at monotonic, align 8
  %none = icmp eq i64 %before, 0
  %twice = shl i64 %before, 1
  %counted = call i64 @llvm.smin.i64(i64 %took, i64 %twice)
  %difference = sub i64 %counted, %before
  %part = sdiv i64 %difference, 4
  %mixed = add i64 %before, %part
  %long = icmp sge i64 %before, {LONG_NS}
  %newest = or i1 %none, %long
  %after = select i1 %newest, i64 %took, i64 %mixed
  %some = call i64 @llvm.smax.i64(i64 %after, i64 1)
  store atomic i64 %some, ptr %time.at monotonic, align 8
  store atomic i64 %now, ptr @ran monotonic, align 8
  %together = icmp ult i64 %mode, {COLD_ALONE}
  br i1 %together, label %awake, label %done
awake:
  store atomic i64 %now, ptr @ended monotonic, align 8
  %hot = icmp eq i64 %mode, {HOT}
  br i1 %hot, label %compare, label %done
compare:
{word("least", QUICKEST)}
  %new = icmp eq i64 %least, 0
  %lower = icmp slt i64 %took, %least
  %lowest = or i1 %new, %lower
  br i1 %lowest, label %lower.it, label %done
lower.it:
  store atomic i64 %took, ptr %least.at monotonic, align 8
  br label %done
done:
  ret void
}}
"""
