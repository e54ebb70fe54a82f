"""The cache's own contract: who is believed, what a name holds, how entries come, stay and leave."""

from __future__ import annotations

import errno
import io
import json
import multiprocessing
import os
import pwd
import random
import stat
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hotfuse.base.errors import InputError
from hotfuse.base.settings import Settings
from hotfuse.cache import folder as folders
from hotfuse.cache.address import Address, program
from hotfuse.cache.entry import MAGIC, EntryRefusal, Refused, pack, unpack
from hotfuse.cache.flight import flight
from hotfuse.cache.folder import Folder
from hotfuse.cache.keys import USER_KEY, Key, TrustedKeys, keys_for, make_key, read_key
from hotfuse.cache.notes import StartNotes
from hotfuse.cache.place import cache_stats, folder_of, root_of
from hotfuse.compile.kept import _holds, answered  # pyright: ignore[reportPrivateUsage]
from hotfuse.profile.store_place import location


def _keys(byte: int = 1) -> TrustedKeys:
    key = Key(bytes([byte]) * 32)
    return TrustedKeys(key, (key,))


def _folder(root: Path, limit: int = 1 << 20) -> Folder:
    return Folder(root / "code", _keys(), limit)


HERE = Address("unit", "subject", {"program": "1", "threads": "1", "sizes": "[]"})
BODY: dict[str, Any] = {"kernel": {"text": "x", "us": 1.5}, "notes": ["a", None]}


# --- keys -------------------------------------------------------------------------------------------------------------


def test_a_key_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    first = keys_for(tmp_path / "home", None)
    path = tmp_path / "home" / "cache.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert keys_for(tmp_path / "home", None) == first and len(first.own.secret) == 32
    assert first.own.secret.hex() not in repr(first)
    assert [p.name for p in path.parent.iterdir()] == ["cache.key"]


def test_processes_that_make_a_key_at_once_have_the_same_one(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(8) as pool:
        found = set(pool.map(_key_name, [str(tmp_path / "k" / "cache.key")] * 32))
    assert len(found) == 1


def _key_name(path: str) -> str:
    return make_key(Path(path)).name


@pytest.mark.parametrize("text", ["", "zz" * 32, "ab" * 8])
def test_what_is_no_key_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(InputError):
        read_key(path)


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("ab" * 32)
    path.chmod(0o644)
    with pytest.raises(InputError, match="not trusted"):
        read_key(path)
    with pytest.raises(InputError):
        keys_for(tmp_path, str(path))


def test_a_fleet_key_signs_and_the_users_own_is_still_believed(tmp_path: Path) -> None:
    shared = tmp_path / "fleet"
    shared.write_text("cd" * 32)
    shared.chmod(0o600)
    own = keys_for(tmp_path, None)
    both = keys_for(tmp_path, str(shared))
    assert both.own.secret == bytes.fromhex("cd" * 32)
    assert unpack(pack("n", BODY, [b"x"], own), "n", both, frozenset()) == (BODY, [b"x"])
    with pytest.raises(Refused):
        unpack(pack("n", BODY, [b"x"], both), "n", own, frozenset())


# --- entries ----------------------------------------------------------------------------------------------------------


def test_an_entry_comes_back_as_it_went() -> None:
    for blobs in ([], [b""], [b"a", b"", b"bc" * 1000]):
        assert unpack(pack("n", BODY, blobs, _keys()), "n", _keys(), frozenset()) == (BODY, blobs)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", EntryRefusal.DAMAGED),
        (MAGIC, EntryRefusal.DAMAGED),
        (b"\x7fELF" + b"\0" * 100, EntryRefusal.DAMAGED),
        (pack("n", BODY, [b"x"], _keys(2)), EntryRefusal.FOREIGN),
        (pack("other", BODY, [b"x"], _keys()), EntryRefusal.REPLAYED),
        (pack("n", BODY, [b"x"], _keys(), ["amx-tile"]), EntryRefusal.FEATURES),
        (pack("n", BODY, [b"x"], _keys())[:-32] + b"\0" * 32, EntryRefusal.FORGED),
        (pack("n", BODY, [b"x"], TrustedKeys(Key(b"\2" * 32), ())).replace(_keys(2).own.name.encode(), _keys().own.name.encode()),
         EntryRefusal.FORGED),
    ],
)
def test_what_is_not_believed_and_why(data: bytes, why: EntryRefusal) -> None:
    with pytest.raises(Refused) as e:
        unpack(data, "n", _keys(), frozenset({"avx2"}))
    assert e.value.why is why


def test_no_damage_of_any_kind_is_believed() -> None:
    """Ten thousand: bits turned, pieces cut off, put in, doubled, exchanged; headers written anew."""
    random.seed(7)
    good = pack("n", BODY, [bytes(range(256)) * 3, b"code"], _keys())
    for i in range(10_000):
        bad = bytearray(good)
        match i % 5:
            case 0:
                bad[random.randrange(len(bad))] ^= 1 << random.randrange(8)
            case 1:
                del bad[random.randrange(len(bad)) :]
            case 2:
                at = random.randrange(len(bad))
                bad[at:at] = random.randbytes(random.randrange(1, 40))
            case 3:
                a, b = sorted(random.sample(range(len(bad)), 2))
                del bad[a:b]
            case _:
                length = random.choice((0, 1, 2**31, 2**32 - 1, random.randrange(5000)))
                bad[8:12] = length.to_bytes(4, "little")
                head = json.dumps({"name": "n", "key": _keys().own.name, "features": [], "sizes": [random.randrange(-9, 99)],
                                   "body": random.choice(([], {}, {"a": 1}, None))}).encode()
                bad[12 : 12 + len(head)] = head
        if bytes(bad) != good:
            with pytest.raises(Refused):
                unpack(bytes(bad), "n", _keys(), frozenset())


# --- addresses --------------------------------------------------------------------------------------------------------


def test_everything_an_entry_rests_on_is_in_its_name() -> None:
    names = {HERE.name, HERE.head, Address("plan", HERE.subject, HERE.basis).name, Address("unit", "other", HERE.basis).name}
    names |= {Address("unit", "subject", {**HERE.basis, k: "other"}).name for k in ("program", "threads", "sizes", "new")}
    assert len(names) == 8
    assert Address("unit", "subject", dict(reversed(HERE.basis.items()))).name == HERE.name


def test_the_program_is_its_sources_and_not_when_they_were_written(tmp_path: Path) -> None:
    assert len(program()) == 24 and program.__wrapped__() == program()


@pytest.mark.parametrize(
    ("changed", "said"),
    [("program", "another version of Hotfuse"), ("threads", "number of threads"), ("machine", "another machine"),
     ("toolchain", "LLVM"), ("sizes", "other sizes"), ("torch", "torch")],
)
def test_a_miss_says_what_has_changed(tmp_path: Path, changed: str, said: str) -> None:
    held = _folder(tmp_path)
    basis = {"program": "1", "torch": "2", "toolchain": "3", "machine": "4", "threads": "1", "sizes": "[]"}
    held.put(Address("plan", "s", basis), BODY)
    assert held.get(Address("plan", "s", {**basis, changed: "9"})) is None
    assert any(said in k for k in held.stats()["reasons"]) and any(said in t for t in held.stats()["told"])
    assert held.get(Address("plan", "t", basis)) is None
    assert held.stats()["reasons"]["misses: nothing like it was kept"] == 1


def test_the_newest_for_other_sizes_or_threads_is_found_and_nothing_else_is(tmp_path: Path) -> None:
    held = _folder(tmp_path)
    held.put(Address("plan", "s", {"threads": "1", "sizes": "[1]"}), BODY)
    found = held.latest(Address("plan", "s", {"threads": "1", "sizes": "[2]"}))
    assert found is not None and found[0] == (BODY, []) and "other sizes" in found[1]
    found = held.latest(Address("plan", "s", {"threads": "2", "sizes": "[2]"}))
    assert found is not None and "another number of threads" in found[1], "which is raced before it serves (decision 391)"
    assert held.latest(Address("plan", "t", {"threads": "1", "sizes": "[2]"})) is None
    assert held.latest(Address("groups", "s", {"threads": "1", "sizes": "[2]"})) is None
    assert held.latest(Address("plan", "s", {"threads": "1", "sizes": "[1]"})) is None


# --- the folder -------------------------------------------------------------------------------------------------------


def test_a_folder_gives_back_what_was_put(tmp_path: Path) -> None:
    held = _folder(tmp_path)
    assert held.get(HERE) is None and held.put(HERE, BODY, [b"code"], ())
    assert held.get(HERE) == (BODY, [b"code"]) == _folder(tmp_path).get(HERE)
    counts = held.stats()
    assert (counts["hits"], counts["misses"], counts["refused"]) == (1, 1, 0)
    assert {p.suffix for p in (tmp_path / "code").rglob("*") if p.is_file()} == {".hf"}


def test_a_refused_entry_is_counted_told_and_gone(tmp_path: Path) -> None:
    held = _folder(tmp_path)
    held.put(HERE, BODY, [b"code"])
    other = Address("unit", "other", HERE.basis)
    held._path(other.name).parent.mkdir(parents=True, exist_ok=True)
    held._path(other.name).write_bytes(held._path(HERE.name).read_bytes())  # replayed
    assert held.get(other) is None and not held._path(other.name).exists()
    assert held.stats()["refused"] == 1 and any("another entry's name" in t for t in held.stats()["told"])
    assert held.get(HERE) is not None
    assert Folder(held.root, _keys(3), 1 << 20).get(HERE) is None and held.get(HERE) is not None  # it is no stranger's to delete


def test_a_pipe_for_an_entry_is_not_waited_for(tmp_path: Path) -> None:
    held = _folder(tmp_path)
    held.put(HERE, BODY, [b"code"])
    path = held._path(HERE.name)
    path.unlink()
    os.mkfifo(path)
    (found,) = [e for e in held.entries() if e.name == HERE.name]
    with ThreadPoolExecutor(1) as pool:
        try:
            assert pool.submit(held.verify, found).result(10) == EntryRefusal.DAMAGED
            assert pool.submit(held.get, HERE).result(10) is None
        finally:
            for end in [os.open(path, os.O_RDWR)] if path.exists() else ():  # whoever waits there goes on
                os.close(end)
    assert held.stats()["refused"] == 1 and held.put(HERE, BODY) and held.get(HERE) is not None


def test_a_pipe_for_a_key_or_a_note_is_not_waited_for(tmp_path: Path) -> None:
    notes = StartNotes(tmp_path, _keys())
    os.mkfifo(tmp_path / "features.note", 0o600)
    os.mkfifo(tmp_path / USER_KEY, 0o600)
    with ThreadPoolExecutor(2) as pool:
        found = pool.submit(notes.recall, "features", "now"), pool.submit(keys_for, tmp_path, None)
        try:
            assert found[0].result(10) is None
            with pytest.raises(InputError, match="is no key"):
                found[1].result(10)
        finally:
            for path in tmp_path.iterdir():  # whoever waits there goes on
                os.close(os.open(path, os.O_RDWR))


def test_the_least_recently_used_leaves_first(tmp_path: Path) -> None:
    held = _folder(tmp_path, limit=60_000)
    places = [Address("unit", str(i)) for i in range(10)]
    for i, place in enumerate(places):
        held.put(place, {}, [bytes(5000)])
        os.utime(held._path(place.name), (i, i))
        os.utime(held._path(place.head), (i, i))
    assert held.get(places[0]) is not None  # which renews it
    held.collect(limit=30_000)
    assert sum(h.bytes for h in held.entries()) <= 30_000
    assert held.get(places[0]) is not None and held.get(places[9]) is not None and held.get(places[1]) is None
    assert held.stats()["evicted"] > 0


def test_it_stays_within_its_limit_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "CHECK_EVERY", 1)
    held = _folder(tmp_path, limit=100_000)
    for i in range(60):
        held.put(Address("unit", str(i)), {}, [bytes(5000)])
    assert sum(h.bytes for h in held.entries()) <= 110_000
    assert not held.put(Address("unit", "huge"), {}, [bytes(200_000)])


def test_what_crashed_half_way_is_no_entry_and_is_tidied_up(tmp_path: Path) -> None:
    held = _folder(tmp_path)
    held.put(HERE, BODY)
    torn = held.root / ".new-1-2-3"
    torn.write_bytes(b"HFCACHE1 half")
    old = time.time() - 2 * folders.STALE_S
    os.utime(torn, (old, old))
    held.collect()
    assert not torn.exists() and held.get(HERE) is not None


@pytest.mark.skipif(os.getuid() == 0 and not hasattr(os, "seteuid"), reason="needs a folder that cannot be written")
def test_a_folder_that_cannot_be_written_is_read_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = _folder(tmp_path)
    held.put(HERE, BODY)
    opened = os.open

    def read_only(path: Any, flags: int, *mode: Any, **more: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opened(path, flags, *mode, **more)

    monkeypatch.setattr(os, "open", read_only)
    fresh = _folder(tmp_path)
    assert fresh.get(HERE) == (BODY, [])
    assert not fresh.put(Address("unit", "new"), BODY) and "Read-only" in fresh.trouble
    assert fresh.stats()["not_written"] == 1 and fresh.get(HERE) is not None
    with fresh.making(Address("unit", "x"), 1.0) as alone:
        assert not alone


def test_a_full_disk_is_counted_and_nothing_is_left_behind() -> None:
    """/dev/full gives the real error where there is one; the entry never appears."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        held = _folder(Path(name))
        held.put(HERE, BODY)
        real = os.fdopen

        def full(fd: int, *how: Any, **more: Any) -> Any:
            os.close(fd)
            return real(os.open("/dev/full", os.O_WRONLY), *how, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fdopen", full)
            assert not held.put(Address("unit", "new"), BODY, [bytes(100_000)])
        assert "No space" in held.trouble and held.stats()["not_written"] == 1
        assert not list(held.root.glob(".new*")) and held.get(HERE) is not None
        assert not held.put(Address("unit", "new"), BODY)  # nobody tries again and again
        later = time.monotonic() + folders.RETRY_S
        with pytest.MonkeyPatch.context() as patch:  # a minute later there is room
            patch.setattr(folders.time, "monotonic", lambda: later)
            assert held.put(Address("unit", "new"), BODY) and not held.trouble
        assert held.get(Address("unit", "new")) is not None and held.put(HERE, BODY)


def test_a_user_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of its own in a container, and no HOME: serving a model raised RuntimeError."""

    def nobody(_number: int) -> None:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(RuntimeError):
        Path("~").expanduser()
    settings = Settings()
    assert settings.folder == root_of(settings).parent == Path(location(settings)).parent  # type: ignore[union-attr]
    assert str(settings.folder).startswith("/nonexistent/") and Settings(cache_dir=Path("/x")).folder == Path("/x")


def test_entries_unused_for_long_leave_a_full_disk_to_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A volume smaller than the limit was full for ever: what came later was never kept."""
    held = _folder(tmp_path)
    old, used, new = (Address("unit", n) for n in ("old", "used", "new"))
    for at, ago in ((old, 2 * folders.UNUSED_S), (used, folders.UNUSED_S / 2)):
        held.put(at, BODY, [bytes(300_000)])
        for name in (at.name, at.head):
            os.utime(held._path(name), (time.time() - ago,) * 2)
    room, real = sum(h.bytes for h in held.entries()) + 1000, os.fdopen

    class Disk(io.FileIO):
        """One that holds so many bytes."""

        def write(self, data: Any, /) -> int:
            if sum(h.bytes for h in held.entries()) + len(data) > room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    monkeypatch.setattr(os, "fdopen", lambda fd, how: Disk(fd, "wb") if how == "wb" else real(fd, how))
    assert held.put(new, BODY, [bytes(200_000)]) and not held.trouble
    assert held.get(new) is not None and held.get(used) is not None and held.get(old) is None
    assert held.stats()["evicted"] == 2 and not list(held.root.glob(".new*"))
    assert not held.put(Address("unit", "one more"), BODY, [bytes(300_000)]) and "No space" in held.trouble
    assert held.get(used) is not None, "what is in use does not leave"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")
def test_two_users_share_a_folder_that_both_may_write() -> None:
    """Directories of the first were closed to the second: a look for its own entry raised, and no plan of kernels was made."""
    import tempfile

    def as_user(number: int, work: Callable[[Folder], None]) -> None:
        child = os.fork()
        if not child:
            try:
                os.setgroups([])
                os.setgid(number)
                os.setuid(number)
                work(Folder(root, TrustedKeys(own := Key(bytes([number % 256]) * 32), (own,)), 1 << 20))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0

    def keeps(held: Folder) -> None:
        found = held.get(HERE)
        with held.making(HERE, 1.0) as alone:
            assert alone, "nobody else makes it"
            assert found is None and held.again(HERE) is None
        assert held.put(HERE, BODY) and held.get(HERE) == (BODY, []) and not held.trouble, held.stats()

    def finds(held: Folder) -> None:
        assert held.get(HERE) == (BODY, []) and held.put(HERE, BODY), held.stats()

    def repairs(held: Folder) -> None:
        """What the first user's process made is damaged: it cannot be replaced, so there is one beside it."""
        assert held.get(HERE) is None and held.put(HERE, BODY) and held.get(HERE) == (BODY, []), held.stats()

    def only_reads(held: Folder) -> None:
        assert held.get(HERE) is None and not held.put(HERE, BODY) and "Permission denied" in held.trouble, held.stats()

    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        root = Path(name) / "code"
        root.mkdir()
        root.chmod(0o1777)
        for user, work in ((1001, keeps), (1002, keeps), (1001, finds), (1002, finds)):
            as_user(user, work)
        for path in root.glob("??/*.hf"):
            path.write_bytes(b"damaged")
        as_user(1003, repairs)
        root.chmod(0o755)
        as_user(1004, only_reads)


def test_a_folder_of_its_own_is_its_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        held = _folder(tmp_path)
        held.put(HERE, BODY)
        with held.making(HERE, 1.0):
            pass
    finally:
        os.umask(before)
    assert all(not p.stat().st_mode & 0o022 for p in held.root.rglob("*")) and not held.root.stat().st_mode & 0o022
    assert all(not p.stat().st_mode & 0o077 for p in held.root.rglob("*.hf"))


def test_what_a_wrong_clock_wrote_is_not_believed_for_ever(tmp_path: Path) -> None:
    """A clock that was a year ahead: its unfinished files go, its reasons against a kernel are as old as those of a year ago."""
    held, year = _folder(tmp_path), 365 * 86_400
    held.put(HERE, BODY)
    abandoned, fresh = held.root / ".new-1-2-3", held.root / ".new-1-2-4"
    for path, ahead in ((abandoned, year), (fresh, 60)):
        path.write_bytes(b"x")
        os.utime(path, (time.time() + ahead, time.time() + ahead))
    held.collect()
    assert not abandoned.exists() and fresh.exists() and held.get(HERE) is not None
    for ahead in (-year, -60, 60, year):
        at = Address("unit", f"reason {ahead}")
        held.put(at, {"because": "it was no faster", "at": time.time() + ahead})
        made = answered(held, at, lambda: ({"made": "anew"}, []), 1.0, valid=_holds)[0]
        assert ("made" in made[0]) == (abs(ahead) == year)


_HOLD = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from hotfuse.cache.flight import flight
with flight(Path(sys.argv[1]), 10) as alone:
    print(int(alone), flush=True)
    time.sleep(60)
"""


def test_a_dead_owner_is_noticed_and_a_slow_one_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    lock = tmp_path / "locks" / "x"
    owner = subprocess.Popen([sys.executable, "-c", _HOLD, str(lock)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None and owner.stdout.readline().strip() == "1"
    assert int(lock.read_text()) == owner.pid
    with flight(lock, 0.1) as alone:
        assert not alone
    with flight(lock, 30.0, stop=lambda: True) as alone:
        assert not alone
    owner.kill()
    owner.wait()
    with flight(lock, 30.0) as alone:
        assert alone


_MANY = """
import sys, time, os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from hotfuse.cache.address import Address
from hotfuse.cache.folder import Folder
from hotfuse.cache.keys import keys_for
from hotfuse.compile.kept import answered
root = Path(sys.argv[1])
held = Folder(root / "code", keys_for(root, None), 1 << 30)
made = 0
for i in range(20):
    def make():
        global made
        made += 1
        time.sleep(0.01)
        return {"number": i}, [bytes([i]) * 10_000]
    (body, blobs), _ = answered(held, Address("unit", str(i)), make, 60.0)
    assert body == {"number": i} and blobs == [bytes([i]) * 10_000], body
print(made, held.stats()["refused"])
"""


def test_eight_processes_at_once_make_each_entry_once_and_none_is_torn(tmp_path: Path) -> None:
    running = [subprocess.Popen([sys.executable, "-c", _MANY, str(tmp_path)], stdout=subprocess.PIPE, text=True) for _ in range(8)]
    said = [p.communicate(timeout=240)[0].split() for p in running]
    assert sum(int(made) for made, _ in said) == 20
    assert all(refused == "0" for _, refused in said)


# --- settings ---------------------------------------------------------------------------------------------------------


def test_settings_say_where_and_whether(tmp_path: Path) -> None:
    base = Settings(cache_dir=tmp_path)
    assert root_of(base) == tmp_path / "code"
    assert root_of(base.with_(cache=str(tmp_path / "elsewhere"))) == tmp_path / "elsewhere"
    for off in (base.with_(cache="off"), base.with_(profiles=":memory:")):
        assert root_of(off) is None and folder_of(off) is None and "switched off" in cache_stats(off)["state"]
    assert folder_of(base.with_(capture="inline")) is None
    assert root_of(base.with_(profiles=":memory:", cache=str(tmp_path))) == tmp_path


def test_without_a_key_nothing_is_kept_and_why_is_told(tmp_path: Path) -> None:
    (tmp_path / "cache.key").write_text("ab" * 32)
    (tmp_path / "cache.key").chmod(0o644)
    settings = Settings(cache_dir=tmp_path)
    assert folder_of(settings) is None and "not trusted" in cache_stats(settings)["state"]


def test_users_who_share_a_folder_keep_their_own_entries(tmp_path: Path) -> None:
    """Neither believes the other; each finds what it kept, however often the other writes the same."""
    users = [lambda byte=byte: Folder(tmp_path / "code", _keys(byte), 1 << 20) for byte in (1, 2, 3)]
    for times in range(3):
        for number, opened in enumerate(users):
            held = opened()
            found = held.get(HERE)
            assert (found is None) == (times == 0) and (found is None or found[0] == {"user": number, "times": times - 1})
            assert held.counts["refused"] <= (2 if times == 0 and number else 0)
            assert held.put(HERE, {"user": number, "times": times})
    held = users[1]()
    assert [bool(held.verify(h)) for h in sorted(held.entries(), key=lambda h: h.file)].count(False) == 2  # its own, with the head
    assert len(held.entries()) == 6 and {h.name for h in held.entries()} == {HERE.name, HERE.head}
    assert held.collect(0) > 0 and not held.entries()
