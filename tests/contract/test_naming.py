"""A model's name: the same in every process, another one whenever capture might see something else."""

from __future__ import annotations

import builtins
import functools
import importlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hotfuse.frontends.naming import Unnamed, structure_name

SCALE = 2.0
LIMITS = {"low": -1.0}


class Config:
    def __init__(self, gain: float) -> None:
        self.gain = gain


CONFIG = Config(1.0)


def _helper(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


@functools.lru_cache
def _cached(n: int) -> int:
    return n + 1


class Net(nn.Module):
    def __init__(self, width: int = 8, flag: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 4)
        self.register_buffer("a", torch.zeros(3), persistent=False)
        self.register_buffer("b", torch.zeros(3), persistent=False)
        self.flag = flag
        self.names = {"one", "two", "three"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _helper(self.linear(x)) * CONFIG.gain * LIMITS["low"] * _cached(1)


def test_weights_do_not_matter_and_structure_does() -> None:
    torch.manual_seed(1)
    one = structure_name(Net())
    assert structure_name(Net()) == one
    others = [Net(16), Net(flag=True), Net().eval(), Net().double(), nn.Sequential(Net())]
    assert len({one, *(structure_name(n) for n in others)}) == 1 + len(others)


@pytest.mark.parametrize("change", ["SCALE", "helper", "config", "dict", "cached", "hook", "attribute"])
def test_whatever_code_reads_is_in_the_name(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = sys.modules[__name__]
    net = Net()
    before = structure_name(net)
    match change:
        case "SCALE":
            monkeypatch.setattr(module, "SCALE", 3.0)
        case "helper":
            monkeypatch.setattr(module, "_helper", lambda x: x + 1)
        case "config":
            monkeypatch.setattr(CONFIG, "gain", 2.0)
        case "dict":
            monkeypatch.setitem(LIMITS, "low", -2.0)
        case "cached":
            monkeypatch.setattr(module, "_cached", functools.lru_cache(lambda n: n + 2))
        case "hook":
            net.register_forward_hook(lambda *_: None)
        case _:
            net.linear.bias = None
    assert structure_name(net) != before
    monkeypatch.undo()
    assert structure_name(Net()) == before


def test_small_plain_tensors_are_named_by_what_they_hold() -> None:
    nets = [Net(), Net(), Net()]
    for net, value in zip(nets, (1.0, 1.0, 2.0), strict=True):
        net.plain = torch.full((4,), value)
    one, same, other = map(structure_name, nets)
    assert one == same != other


def test_functions_and_their_closures_have_names() -> None:
    def made(k: float) -> Any:
        return lambda x: x * k

    assert structure_name(made(1.0)) == structure_name(made(1.0)) != structure_name(made(2.0))
    net = Net()
    assert structure_name(net.forward) != structure_name(_helper)


def test_torch_state_that_tracing_reads_is_in_the_name() -> None:
    before = structure_name(Net())
    torch.set_default_dtype(torch.float64)
    try:
        net = Net().float()
        assert structure_name(net) != before
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("thing", [threading.Lock(), {object(), 1}])
def test_what_cannot_be_named_says_so(thing: Any) -> None:
    net = Net()
    net.thing = thing
    with pytest.raises(Unnamed):
        structure_name(net)


_NET = """
import torch
from torch import nn
{head}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        {init}
    def forward(self, h):
        {body}
"""
_CLIP = "def clip(x):\n    return x.clamp(max={k})\n"
_READ_BY_CODE: dict[str, dict[str, str]] = {
    "module of a package": {"pack/__init__.py": "", "pack/sub.py": "K = {k}",
                            "net": "import pack.sub|pass|return h.clamp(max=pack.sub.K)"},
    "function of a package": {"pack/__init__.py": "", "pack/sub.py": "import pack.deep\ndef clip(x): return pack.deep.clip(x)",
                              "pack/deep.py": _CLIP, "net": "import pack.sub|pass|return pack.sub.clip(h)"},
    "inner function": {"near.py": "K = {k}", "net": "import near|pass|return (lambda t: t.clamp(max=near.K))(h)"},
    "comprehension": {"near.py": _CLIP, "net": "import near|pass|return sum([near.clip(t) for t in (h,)])"},
    "import in a call": {"near.py": _CLIP, "net": "|pass|from near import clip; return clip(h)"},
    "imports of that": {"near.py": "from far import clip", "far.py": _CLIP, "net": "|pass|from near import clip; return clip(h)"},
    "relative import": {"pack/__init__.py": "", "pack/near.py": _CLIP,
                        "pack/made.py": "net|pass|from .near import clip; return clip(h)",
                        "net": "from pack.made import Net as Other|self.inner = Other()|return self.inner(h)"},
    "import by text": {"near.py": "K = {k}", "net": "import importlib|pass|return h.clamp(max=importlib.import_module('near').K)"},
    "getattr": {"near.py": "K = {k}", "net": "import near|pass|return h.clamp(max=getattr(near, 'K'))"},
    "globals": {"net": "K = {k}|pass|return h.clamp(max=globals()['K'])"},
    "module's getattr": {"near.py": "def __getattr__(name): return {k}", "net": "import near|pass|return h.clamp(max=near.K)"},
    "module in a module": {"near.py": "K = {k}", "net": "import near|self.near = near|return h.clamp(max=self.near.K)"},
    "module in a dict": {"near.py": "K = {k}", "net": "import near; D = dict(n=near)|pass|return h.clamp(max=D['n'].K)"},
    "module in a class": {"near.py": "K = {k}", "net": "import near; C = type('C', (), dict(n=near))|pass|"
                          "return h.clamp(max=C.n.K)"},
    "metaclass": {"near.py": "class Meta(type):\n    K = property(lambda c: {k})\nclass C(metaclass=Meta): pass",
                  "net": "from near import C|pass|return h.clamp(max=C.K)"},
    "function's attribute": {"near.py": "def clip(x): return x.clamp(max=clip.k)\nclip.k = {k}",
                             "net": "from near import clip|pass|return clip(h)"},
    "decorating object": {"near.py": "import functools\nclass D:\n    def __init__(self, f): functools.update_wrapper(self, f)\n"
                          "    def __call__(self, x): return x.clamp(max={k})\n@D\ndef clip(x): return x",
                          "net": "from near import clip|pass|return clip(h)"},
    "overloads": {"near.py": "import functools\n@functools.singledispatch\ndef clip(x): return x\n"
                  "@clip.register\ndef _(x: int): return x + {k}", "net": "from near import clip|pass|return h + clip(1)"},
    "cached property": {"net": "import functools|pass|return h.clamp(max=self.k)"
                        "\n    k = functools.cached_property(lambda s: {k})"},
    "builtin": {"near.py": "import builtins\nbuiltins.LIMIT_OF_A_TEST = {k}", "net": "import near|pass|"
                "return h.clamp(max=LIMIT_OF_A_TEST)"},
    "torch's": {"near.py": "import torch.nn.functional as F\nF.limit_of_a_test = {k}",
                "net": "import near|pass|return h.clamp(max=nn.functional.limit_of_a_test)"},
}  # fmt: skip


def _named_in(where: Path, files: dict[str, str], k: int) -> str:
    """The name of a model whose files say this number, in a program that imported no more than it needs."""
    where.mkdir()
    for name, text in files.items():
        said = text.replace("{k}", str(k))
        if "|" in said:
            head, init, body = said.split("|")
            said = _NET.format(head=head if head != "net" else "", init=init, body=body)
        path = where / ("users_net.py" if name == "net" else name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(said)
    before = set(sys.modules)
    sys.path.insert(0, str(where))
    try:
        return structure_name(importlib.import_module("users_net").Net())
    finally:
        sys.path.remove(str(where))
        for name in set(sys.modules) - before:
            del sys.modules[name]
        for owner, name in ((builtins, "LIMIT_OF_A_TEST"), (nn.functional, "limit_of_a_test")):
            vars(owner).pop(name, None)


@pytest.mark.parametrize("how", _READ_BY_CODE)
def test_however_code_reaches_what_it_reads(how: str, tmp_path: Path) -> None:
    """A model that is limited by another number has another name: its first calls may exceed neither."""
    one, same, other = (_named_in(tmp_path / n, _READ_BY_CODE[how], k) for n, k in (("a", 100), ("b", 100), ("c", 3)))
    assert one == same != other


class _ByEnvironment(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(os.environ.get("GAIN_OF_A_TEST", "1"))


class _ByAnyVariable(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * _gain_of(os.environ)


def _gain_of(variables: Any) -> float:
    return float(variables.get("GAIN_OF_A_TEST", "1"))


@pytest.mark.parametrize("kind", [_ByEnvironment, _ByAnyVariable])
def test_variables_of_the_environment_that_code_reads(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    names: set[str] = set()
    for value in ("1", "2"):
        monkeypatch.setenv("GAIN_OF_A_TEST", value)
        names.add(structure_name(kind()))
    assert len(names) == 2
    monkeypatch.setenv("ANOTHER_OF_A_TEST", "1")
    assert (structure_name(kind()) in names) is (kind is _ByEnvironment)


def test_what_somebody_put_into_torchs_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    before, own = structure_name(nn.Sequential(nn.Linear(2, 2))), nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: own(self, x).clamp(max=3.0))
    assert structure_name(nn.Sequential(nn.Linear(2, 2))) != before


def test_an_installed_package_is_what_its_files_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines of a fleet install the same packages at other times: what one of them built would be unknown to all others."""
    names = list[str]()
    for at, (folder, k) in enumerate((("a", 1), ("b", 1), ("c", 2))):
        installed = tmp_path / folder / "site-packages"
        installed.mkdir(parents=True)
        path = installed / "net_of_a_test.py"
        path.write_text(_NET.format(head="", init="pass", body=f"return h.clamp(max={k})"))
        os.utime(path, (1e9 + at, 1e9 + at) if folder == "b" else (1e9, 1e9))
        with monkeypatch.context() as m:
            m.syspath_prepend(str(installed))
            names.append(structure_name(importlib.import_module("net_of_a_test").Net()))
        del sys.modules["net_of_a_test"]
    assert names[0] == names[1] != names[2]


_SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import {module} as m
from hotfuse.frontends.naming import structure_name
print(structure_name(m.{make}))
"""


def _in_a_process(seed: int, where: Path, module: str, make: str) -> str:
    done = subprocess.run([sys.executable, "-c", _SCRIPT.format(module=module, make=make), str(where)], capture_output=True,
                          text=True, check=True, env={**os.environ, "PYTHONHASHSEED": str(seed)})  # fmt: skip
    return done.stdout.strip()


def test_a_name_is_the_same_in_every_process(tmp_path: Path) -> None:
    source = Path(__file__).read_text()
    (tmp_path / "users_model.py").write_text(source)
    names = {_in_a_process(seed, tmp_path, "users_model", "Net()") for seed in (1, 2, 3)}
    assert len(names) == 1
    (tmp_path / "users_model.py").write_text(source.replace("return x * SCALE", "return x + SCALE"))
    assert _in_a_process(1, tmp_path, "users_model", "Net()") not in names


_BERT = """
from transformers import BertConfig, BertModel
def made(**more):
    size = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=99)
    return BertModel(BertConfig(**size, **more))
"""


def test_a_model_of_an_installed_package_has_a_stable_name(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "users_bert.py").write_text(_BERT)
    names = {_in_a_process(seed, tmp_path, "users_bert", "made()") for seed in (1, 2)}
    assert len(names) == 1
    assert _in_a_process(1, tmp_path, "users_bert", "made(hidden_act='relu')") not in names


_GPT2 = """
from transformers import GPT2Config, GPT2LMHeadModel
def made(**more):
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=99, bos_token_id=0, eos_token_id=0, **more))
"""


def test_a_hash_that_a_configuration_keeps_is_not_in_the_name(tmp_path: Path) -> None:
    """Hashes of text differ between processes: no model that generates would ever be known again."""
    pytest.importorskip("transformers")
    (tmp_path / "users_gpt2.py").write_text(_GPT2)
    names = {_in_a_process(seed, tmp_path, "users_gpt2", "made()") for seed in (1, 2)}
    assert len(names) == 1
    assert _in_a_process(1, tmp_path, "users_gpt2", "made(activation_function='relu')") not in names


class Hashed:
    """Keeps a hash, as configurations do, beside what models are made of."""

    def __init__(self, kept: int, buckets: int = 7) -> None:
        self.kept_hash = kept
        self.hash_buckets = buckets

    def __hash__(self) -> int:
        return self.kept_hash


def test_numbers_of_buckets_are_in_the_name() -> None:
    def named(kept: int, buckets: int) -> str:
        net = nn.Linear(2, 2)
        net.about = Hashed(kept, buckets)  # type: ignore[assignment]
        return structure_name(net)

    assert named(1 << 50, 7) == named(-(1 << 51), 7)
    assert len({named(1 << 50, 7), named(1 << 50, 8), named(5, 7), named(6, 7)}) == 4
