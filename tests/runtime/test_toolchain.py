# pyright: reportPrivateUsage=false
"""A serving process has its few pieces of code compiled elsewhere, and kept for the next one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hotfuse.native import toolchain
from hotfuse.native.target import host

CODE = """
import ctypes, os, sys
from pathlib import Path
from hotfuse import Settings
from hotfuse.base.errors import InternalError
from hotfuse.base.faults import faults
from hotfuse.cache.place import folder_of
from hotfuse.native import toolchain
from hotfuse.native.jit import load_object

asked = toolchain._asked
counted = []
toolchain._asked = lambda *a: (counted.append(1), asked(*a))[1]
settings = Settings(cache_dir=Path(sys.argv[1]))
toolchain.keep_in(lambda: folder_of(settings))

def f(n):
    code = toolchain.helper_object("define i64 @f(i64 %x) { %y = add i64 %x, NNN  ret i64 %y }".replace("NNN", str(n)))
    loaded = load_object(code, ["f"])
    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(loaded.address("f"))(5)

assert f(7) == 12 and f(8) == 13
if sys.argv[2] == "refused":
    try:
        toolchain.helper_object("this is no text of LLVM")
        raise SystemExit("compiled")
    except InternalError as e:
        assert "not well formed" in str(e) or "expected" in str(e), e
    toolchain._process.kill(); toolchain._process.wait()
    assert f(9) == 14                                                  # another one is started
if sys.argv[2] == "nowhere":
    toolchain._forget()
    sys.executable = "/nonexistent/python"
    assert f(11) == 16                                                 # compiled in place, and told
    assert "llvmlite" in sys.modules and faults.counts()
else:
    assert "llvmlite" not in sys.modules, "LLVM is in the serving process"
print(len(counted))
"""


def asked(home: Path, how: str) -> int:
    done = subprocess.run([sys.executable, "-c", CODE, str(home), how], capture_output=True, text=True, timeout=300, env=os.environ)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def test_llvm_stays_outside_and_what_it_made_is_kept(tmp_path: Path) -> None:
    assert asked(tmp_path, "") == 2
    assert asked(tmp_path, "") == 0
    assert asked(tmp_path, "refused") == 2
    assert asked(tmp_path, "nowhere") == 1


def test_a_compiler_whose_asker_ended_says_nothing() -> None:
    asker = subprocess.Popen([sys.executable, "-m", "hotfuse.native.compiler"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, env=os.environ)  # fmt: skip
    assert asker.stdin is not None and asker.stdout is not None and asker.stderr is not None
    target = host()
    request = json.dumps({"text": "define i64 @f(i64 %x) { ret i64 %x }", "triple": target.triple, "cpu": target.cpu,
                          "features": target.features, "vl_bytes": target.vl_bytes, "name": target.name}).encode()  # fmt: skip
    asker.stdout.close()
    asker.stdin.write(len(request).to_bytes(8, "little") + request)
    asker.stdin.flush()
    assert asker.wait(60) == 0 and asker.stderr.read() == b""


def test_a_compiler_that_ended_leaves_no_pipe_open(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = toolchain._running()
    ended.kill()
    ended.wait()
    assert toolchain._running() is not ended
    assert ended.stdin is not None and ended.stdin.closed and ended.stdout is not None and ended.stdout.closed
    toolchain._forget()
