"""How threads of a fork come together: counts that are waited for, and a core for each."""

from __future__ import annotations

import ctypes
import os
import threading

import pytest
import torch  # loads the OpenMP runtime

from hotfuse.backends.llvm.threads import alone, fork_join, parallel
from hotfuse.machine import openmp
from hotfuse.native.jit import assembly, compile_object, load_object
from hotfuse.native.target import cross_neon, host

assert torch.get_num_threads() > 0
BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
FORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
OPEN = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
CLOSE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
WAIT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
WAKE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

pytestmark = pytest.mark.skipif(parallel.runtime().kind != "gomp", reason="there is no OpenMP runtime here")


def fork(body: object, threads: int, awake: int = 0, given: int = 0) -> None:
    call = FORK(parallel.runtime().symbols[fork_join.FORK])
    call(ctypes.cast(body, ctypes.c_void_p), None, threads, awake or threads, given or threads)  # type: ignore[arg-type]


class Run:
    """A native run, as its driver opens and closes a team."""

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(fork_join.BYTES + 128)
        self._at = -(-ctypes.addressof(self._memory) // 128) * 128

    def __enter__(self) -> Run:
        OPEN(parallel.runtime().symbols[fork_join.OPEN])(self._at, None)
        return self

    def __exit__(self, *_: object) -> None:
        CLOSE(parallel.runtime().symbols[fork_join.CLOSE])(self._at)


def openmp_library() -> ctypes.CDLL:
    """Its functions, called without the interpreter lock: bodies of other threads need it."""
    found = openmp.torchs()
    assert found is not None
    return ctypes.CDLL(found.library._name)


def regions() -> int:
    team = parallel.runtime().team
    assert team is not None
    return team.regions


@pytest.mark.parametrize("threads", [1, 2, 7, 16])
def test_every_thread_runs_the_body_once(threads: int) -> None:
    ran: list[tuple[int, int]] = []

    @BODY
    def body(_: int, thread: int, team: int) -> None:
        ran.append((thread, team))

    for _ in range(5):
        ran.clear()
        fork(body, threads)
        assert sorted(ran) == [(i, threads) for i in range(threads)]


def test_a_run_has_one_region_whatever_its_kernels_ask_for() -> None:
    """Fewer threads take part than are there, in any order, and parts of one fork are done before the next begins."""
    order: list[int] = []
    forked: list[int] = []

    @BODY
    def body(_: int, thread: int, team: int) -> None:
        order.append(len(forked) * 1000 + team)

    wanted = [5, 2, 1, 7, 3, 7, 1, 2, 6] * 6
    before = regions()
    with Run():
        for n in wanted:
            fork(body, n, given=7)
            forked.append(n)
    assert regions() == before + 1
    assert order == [i * 1000 + n for i, n in enumerate(wanted) for _ in range(n)]
    with Run():
        fork(body, 1, given=7)
    assert regions() == before + 1, "nobody asks the runtime for what one thread does"
    for _ in range(3):
        fork(body, 2)
    assert regions() == before + 4, "outside a run every fork is a region"


def test_less_work_is_worth_a_thread_that_is_awake() -> None:
    teams: list[int] = []

    @BODY
    def body(_: int, thread: int, team: int) -> None:
        if thread == 0:
            teams.append(team)

    with Run():
        fork(body, 1, awake=3, given=4)
        fork(body, 4, awake=4, given=4)
        fork(body, 1, awake=3, given=4)
    fork(body, 1, awake=3, given=4)
    assert teams == [1, 4, 3, 1]


def test_a_kernel_that_is_timed_finds_threads_awake() -> None:
    teams: list[int] = []

    @BODY
    def body(_: int, thread: int, team: int) -> None:
        if thread == 0:
            teams.append(team)

    with parallel.awake(4):
        fork(body, 1, awake=3, given=4)
    with parallel.awake(1):
        fork(body, 1, awake=3, given=4)
    with pytest.raises(KeyError), parallel.awake(4):
        raise KeyError("what is timed may fail")
    fork(body, 1, awake=3, given=4)
    assert teams == [3, 1, 1]


def test_runs_of_several_callers_have_a_team_each() -> None:
    wrong: list[str] = []

    def call() -> None:
        ran: list[int] = []

        @BODY
        def body(_: int, thread: int, team: int) -> None:
            ran.append(thread)

        for n in range(10):
            with Run():
                for k in (3, 2, 4):
                    ran.clear()
                    fork(body, k, given=4)
                    if sorted(ran) != list(range(k)):
                        wrong.append(f"run {n}: {ran} of {k}")

    callers = [threading.Thread(target=call) for _ in range(3)]
    for c in callers:
        c.start()
    for c in callers:
        c.join()
    assert not wrong


def test_a_run_inside_a_region_of_others_is_on_one_thread() -> None:
    """A caller that is itself in a parallel region gets no threads of its own, and does everything."""
    library = openmp_library()
    teams: list[int] = []

    @BODY
    def body(_: int, thread: int, team: int) -> None:
        teams.append(team)

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def region(_: int) -> None:
        if library.omp_get_thread_num() == 0:
            with Run():
                fork(body, 3)

    library.GOMP_parallel(region, None, 2, 0)
    assert teams == [1]


class System:
    """A system on which every thread finds itself on core 0, may run on some cores, and has a clock that is set."""

    def __init__(self, cores: set[int]) -> None:
        self.cores, self.now_ns, self.moves = cores, 10**12, list[set[int]]()

        @ctypes.CFUNCTYPE(ctypes.c_int)
        def getcpu() -> int:
            return 0

        @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_void_p)
        def getaffinity(_: int, size: int, at: int) -> int:
            mask = (ctypes.c_uint64 * (size // 8)).from_address(at)
            for w in range(size // 8):
                mask[w] = sum(1 << (c % 64) for c in self.cores if c // 64 == w)
            return 0

        @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_void_p)
        def setaffinity(_: int, size: int, at: int) -> int:
            mask = (ctypes.c_uint64 * (size // 8)).from_address(at)
            self.moves.append({c for c in range(size * 8) if mask[c // 64] >> (c % 64) & 1})
            return 0

        @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
        def gettime(_: int, at: int) -> int:
            words = (ctypes.c_int64 * 2).from_address(at)
            words[0], words[1] = divmod(self.now_ns, 10**9)
            return 0

        self._kept = {
            "sched_getcpu": getcpu, "sched_getaffinity": getaffinity, "sched_setaffinity": setaffinity, "clock_gettime": gettime,
        }  # fmt: skip
        openmp = {n: library_symbol(n) for n in fork_join.OPENMP}
        system = {n: ctypes.cast(f, ctypes.c_void_p).value or 0 for n, f in self._kept.items()}
        self.team = fork_join.fork_join_of(openmp, system)

    def fork(self, threads: int) -> None:
        @BODY
        def body(_: int, thread: int, team: int) -> None:
            return None

        FORK(self.team.symbols[fork_join.FORK])(ctypes.cast(body, ctypes.c_void_p), None, threads, threads, threads)


def library_symbol(name: str) -> int:
    """A function of the OpenMP runtime itself."""
    return ctypes.cast(getattr(openmp_library(), name), ctypes.c_void_p).value or 0


class Paced:
    """Runs on a clock of their own: what a call takes depends on whether it has its team, and whether that had to be woken."""

    def __init__(self, *, serial_ns: int, team_ns: int, wake_ns: int, threads: int = 2) -> None:
        self.system = System({0, 1})
        self.serial_ns, self.team_ns, self.wake_ns, self.threads = serial_ns, team_ns, wake_ns, threads
        self.words = (ctypes.c_int64 * (alone.WORDS * alone.CLASSES))()
        self._memory = ctypes.create_string_buffer(fork_join.BYTES + 128)
        self._at = -(-ctypes.addressof(self._memory) // 128) * 128
        self._ended = -(10**12)
        self.system.now_ns = 10**12

    def call(self, pause_ns: int = 0) -> int:
        """One call; how many threads it had."""
        had: list[int] = []

        @BODY
        def body(_: int, thread: int, team: int) -> None:
            if thread == 0:
                had.append(team)

        self.system.now_ns += pause_ns
        symbols = self.system.team.symbols
        OPEN(symbols[fork_join.OPEN])(self._at, ctypes.addressof(self.words))
        FORK(symbols[fork_join.FORK])(ctypes.cast(body, ctypes.c_void_p), None, self.threads, self.threads, self.threads)
        asleep = self.system.now_ns - self._ended > alone.PAUSE_NS
        together = had[0] > 1
        self.system.now_ns += (self.team_ns + asleep * self.wake_ns) if together else self.serial_ns
        FORK(symbols[fork_join.FORK])(ctypes.cast(body, ctypes.c_void_p), None, self.threads, self.threads, self.threads)
        CLOSE(symbols[fork_join.CLOSE])(self._at)
        assert had[0] == had[1], "a run that begins on one thread stays on it"
        if together:
            self._ended = self.system.now_ns
        return had[0]

    def learned(self) -> alone.TeamTimes:
        (row,) = alone.read(ctypes.addressof(self.words))
        return row


def test_calls_after_a_pause_stay_on_one_thread_where_waking_costs_more() -> None:
    calls = Paced(serial_ns=200_000, team_ns=120_000, wake_ns=4_000_000)
    after_pauses = [calls.call(pause_ns=20_000_000) for _ in range(400)]
    assert after_pauses[:2] == [2, 1] and after_pauses.count(2) < 20, "tried, then seldom"
    assert calls.learned().serial_after_a_pause
    assert set(calls.call() for _ in range(3)) == {1}, "nobody is awake in between either"
    quick = Paced(serial_ns=200_000, team_ns=120_000, wake_ns=50_000)
    assert [quick.call(pause_ns=20_000_000) for _ in range(400)].count(1) < 20
    assert not quick.learned().serial_after_a_pause


def test_bursts_of_calls_wake_their_team_when_they_have_lost_what_waking_costs() -> None:
    """A call after a pause stays on one thread, where waking costs more than it saves; the ones right behind it must not."""
    calls = Paced(serial_ns=1_200_000, team_ns=700_000, wake_ns=900_000)
    for _ in range(40):
        calls.call(pause_ns=100_000_000)
        calls.call()
    assert calls.learned().serial_after_a_pause
    bursts = [[calls.call(pause_ns=100_000_000 * (k == 0)) for k in range(60)] for _ in range(20)]
    assert sum(b[0] == 1 for b in bursts) >= 15, "the first one wakes nobody"
    assert all(b[4:] == [2] * 56 for b in bursts), "900 us of waking are lost after two calls"
    assert calls.learned().woken >= 15
    apart = Paced(serial_ns=1_200_000, team_ns=700_000, wake_ns=900_000)
    for _ in range(100):
        apart.call(pause_ns=100_000_000)
    assert apart.learned().woken == 0, "calls that come one by one have none behind them"


def test_a_call_that_was_held_up_takes_no_team_from_those_behind_it() -> None:
    calls = Paced(serial_ns=1_160_000, team_ns=680_000, wake_ns=900_000)
    for _ in range(600):
        calls.call()
    calls.team_ns = 900_000
    for _ in range(10):
        calls.call()  # crowded for a while: one thread is tried, and lost
    calls.team_ns = 680_000
    for _ in range(50):
        calls.call()
    assert calls.learned().hot_alone > 0
    calls.team_ns = 90_000_000
    assert calls.call() == 2
    calls.team_ns = 680_000
    assert [calls.call() for _ in range(200)].count(1) <= 2, "a hundred times as long, once"


def test_a_team_that_lost_its_cores_for_a_moment_is_believed_at_its_first_quick_call() -> None:
    calls = Paced(serial_ns=1_160_000, team_ns=680_000, wake_ns=900_000)
    for _ in range(600):
        calls.call()
    calls.team_ns = 2_500_000
    crowded = [calls.call() for _ in range(40)]
    assert crowded.count(1) > 25
    calls.team_ns = 680_000
    after = [calls.call() for _ in range(250)]
    assert after[-50:] == [2] * 50 and after.count(1) < 130


def test_calls_in_a_row_have_their_team_unless_others_have_its_cores() -> None:
    calls = Paced(serial_ns=200_000, team_ns=120_000, wake_ns=500_000)
    quiet = [calls.call() for _ in range(100)]
    assert quiet.count(1) == 0, "there is nothing to gain, and nothing is tried"
    calls.team_ns = 900_000
    busy = [calls.call() for _ in range(200)]
    assert busy[50:].count(1) > 120
    calls.team_ns = 120_000
    again = [calls.call() for _ in range(1_000)]
    assert again[-100:].count(2) == 100, "a machine that is quiet again is noticed"


@pytest.mark.parametrize(("wake_ns", "every"), [(60_000, 20), (500_000, 20), (120_000, 300)])
def test_a_moment_in_which_somebody_had_a_core_costs_no_more_than_itself(wake_ns: int, every: int) -> None:
    """Two quiet cores have such moments some ten times a second: calls behind one are as quick with their team as those before."""
    calls = Paced(serial_ns=290_000, team_ns=160_000, wake_ns=wake_ns)
    had: list[int] = []
    for k in range(1_000):
        calls.team_ns = 1_500_000 if k % every == every - 1 else 160_000
        had.append(calls.call())
    assert had.count(1) < 40


def test_what_was_given_up_for_one_thread_is_found_again_soon() -> None:
    calls = Paced(serial_ns=290_000, team_ns=160_000, wake_ns=60_000)
    for _ in range(1_000):
        calls.call()
    for _ in range(2):
        calls.team_ns = 1_500_000
        assert [calls.call() for _ in range(200)].count(1) > 150, "others have the cores for a while"
        calls.team_ns = 160_000
        assert [calls.call() for _ in range(300)].count(1) < 150


def test_long_runs_have_their_team_whether_or_not_it_has_to_be_woken() -> None:
    """Other work between calls (eager in turns, a race) puts threads to sleep; waking them is a hundredth of what they save."""
    calls = Paced(serial_ns=580_000_000, team_ns=300_000_000, wake_ns=4_000_000)
    assert {calls.call(pause_ns=300_000_000 * (k % 3 != 0)) for k in range(200)} == {2}
    calls.team_ns = 900_000_000
    busy = [calls.call(pause_ns=20_000_000) for _ in range(40)]
    assert busy.count(1) > 30, "others have its cores"
    calls.team_ns = 300_000_000
    again = [calls.call(pause_ns=20_000_000) for _ in range(40)]
    assert set(again[alone.TEAM_AGAIN :]) == {2}, "free cores are noticed soon"


def test_a_long_run_that_is_crowded_tries_one_thread_rarely() -> None:
    calls = Paced(serial_ns=580_000_000, team_ns=300_000_000, wake_ns=0)
    for _ in range(3):
        calls.call()
    calls.team_ns = 450_000_000
    assert [calls.call() for _ in range(alone.RETRY)].count(1) == 1, "half again as slow as alone on the machine, still the best"


def test_a_long_run_that_was_held_up_for_a_moment_has_its_team_again_at_once() -> None:
    """One call took a little longer than one thread does: that is tried once, and no eight calls stay on it."""
    calls = Paced(serial_ns=580_000_000, team_ns=300_000_000, wake_ns=0)
    for _ in range(5):
        calls.call()
    calls.team_ns = 600_000_000
    calls.call()
    calls.team_ns = 300_000_000
    assert [calls.call() for _ in range(60)].count(1) <= 2


def test_what_was_learned_of_a_team_can_be_forgotten() -> None:
    calls = Paced(serial_ns=200_000, team_ns=120_000, wake_ns=4_000_000)
    for _ in range(50):
        calls.call(pause_ns=20_000_000)
    assert calls.learned().serial_after_a_pause
    alone.forget(ctypes.addressof(calls.words))
    assert alone.read(ctypes.addressof(calls.words)) == ()
    assert calls.call(pause_ns=20_000_000) == 2


def test_many_threads_are_given_up_only_within_a_bound() -> None:
    """One thread in place of sixteen may take sixteen times as long: that has to be less than twice what the team takes now."""
    calls = Paced(serial_ns=3_200_000, team_ns=200_000, wake_ns=400_000, threads=16)
    assert 1 not in [calls.call(pause_ns=20_000_000 if k % 2 else 0) for k in range(40)]
    asleep = Paced(serial_ns=2_900_000, team_ns=200_000, wake_ns=4_000_000, threads=16)
    assert asleep.call() == asleep.call() == 16
    assert [asleep.call(pause_ns=20_000_000) for _ in range(30)].count(1) > 15


def test_who_shares_a_core_moves_to_another_and_is_as_free_as_before() -> None:
    system = System({0, 1, 70})
    system.fork(2)
    assert system.moves == [{1, 70}, {0, 1, 70}] and system.team.moved == 1
    system.now_ns += fork_join.EVERY_NS - 1
    system.fork(2)
    assert system.team.moved == 1, "not so soon again"
    system.now_ns += 1
    system.fork(2)
    assert system.team.moved == 2
    system.now_ns += 10 * fork_join.EVERY_NS
    system.fork(1)
    assert system.team.moved == 2, "one thread has its core for itself"


def test_where_every_core_is_taken_nobody_moves() -> None:
    system = System({0})
    system.fork(3)
    assert system.moves == [] and system.team.moved == 0


def test_threads_may_run_where_they_might_before() -> None:
    allowed = os.sched_getaffinity(0)
    masks: list[set[int]] = []

    @BODY
    def body(_: int, thread: int, team: int) -> None:
        masks.append(os.sched_getaffinity(0))

    for _ in range(20):
        fork(body, 3)
    assert len(masks) == 60 and all(m == allowed for m in masks)


def test_a_waiting_thread_sleeps_until_the_count_is_there() -> None:
    symbols = parallel.runtime().symbols
    wait, wake = WAIT(symbols[fork_join.WAIT]), WAKE(symbols[fork_join.WAKE])
    words = (ctypes.c_int64 * 2)(0, 0)
    at = ctypes.addressof(words)
    waiters = [threading.Thread(target=wait, args=(at, 3), daemon=True) for _ in range(4)]
    for w in waiters:
        w.start()
    for n in (1, 2, 3):
        words[0] = n
        wake(at)
        while n == 3 and any(w.is_alive() for w in waiters):
            wake(
                at
            )  # the count above is no atomic addition, so that one may have looked at the old one and not yet slept
    for w in waiters:
        w.join()
    assert list(words) == [3, 0], "nobody is counted as asleep any more"
    wait(at, 3)


def test_the_code_of_other_processors() -> None:
    neon = cross_neon()
    assert "yield" in assembly(fork_join.text(neon.triple, 1), neon)
    if host().triple.startswith("x86"):
        assert "pause" in assembly(fork_join.text(host().triple, 1), host())


def test_one_thread_where_there_is_no_runtime() -> None:
    code = load_object(compile_object(fork_join.SERIAL_TEXT, host()).code, parallel.SYMBOLS)
    ran: list[int] = []

    @BODY
    def body(_: int, thread: int, team: int) -> None:
        ran.append(team)

    OPEN(code.address(fork_join.OPEN))(None, None)
    FORK(code.address(fork_join.FORK))(ctypes.cast(body, ctypes.c_void_p), None, 4, 4, 4)
    CLOSE(code.address(fork_join.CLOSE))(None)
    assert ran == [1]
    words = (ctypes.c_int64 * 2)(0, 0)
    WAIT(code.address(fork_join.WAIT))(ctypes.addressof(words), 1)
