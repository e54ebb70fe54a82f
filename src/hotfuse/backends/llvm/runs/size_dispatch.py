"""Choosing between kernels of one group by a size of the call, in native code.

    %n <= 6    ->  call k3          a comparison and a branch for each end, which a processor foresees when sizes repeat
    %n <= 300  ->  call k0
    else       ->  the library      decided before the run begins, so that nothing is computed twice

Sizes are known where a run begins, so every condition here is arithmetic on its symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hotfuse.backends.llvm.emission.code import Fn
from hotfuse.base.errors import InternalError
from hotfuse.lower.run.description import Call, ChoiceStep, Step, choices


def emit_choice(fn: Fn, choice: ChoiceStep, call: Callable[[Call], None]) -> None:
    """Write the comparisons, and each way where it is taken."""
    check(choice)
    size = fn.i64(choice.size)
    *tests, after = fn.labels(*(f"variant{k}_" for k in range(len(choice.variants))), "chosen")
    last = len(choice.variants) - 1
    for k, variant in enumerate(choice.variants):
        taken, beyond = tests[k], fn.labels("beyond")[0]
        if k < last:
            here = fn.val(f"icmp sle i64 {size}, {choice.ends[k]}")
            fn.do(f"br i1 {here}, label %{taken}, label %{beyond}")
        else:
            fn.do(f"br label %{taken}")
        fn.label(taken)
        if variant is not None:  # else the run has been left before
            call(variant)
        fn.do(f"br label %{after}")
        if k < last:
            fn.label(beyond)
    fn.label(after)


def emit_leaving(fn: Fn, steps: Sequence[Step], control: str) -> None:
    """Leave a run for its fallback, before anything is computed, where the library is better at one of the call's sizes."""
    for choice in choices(steps):
        check(choice)
        for k, variant in enumerate(choice.variants):
            if variant is not None:
                continue
            size = fn.i64(choice.size)
            above = fn.val(f"icmp sgt i64 {size}, {choice.ends[k - 1]}") if k else "true"
            below = fn.val(f"icmp sle i64 {size}, {choice.ends[k]}") if k < len(choice.ends) else "true"
            leave, stay = fn.labels("leave", "stay")
            fn.do(f"br i1 {fn.val(f'and i1 {above}, {below}')}, label %{leave}, label %{stay}")
            fn.label(leave)
            fn.do(f"store i64 1, ptr {control}")
            fn.do("ret void")
            fn.label(stay)


def check(choice: ChoiceStep) -> None:
    """Raises InternalError where ends and variants do not fit each other."""
    rising = all(a < b for a, b in zip(choice.ends, choice.ends[1:], strict=False))
    if len(choice.variants) != len(choice.ends) + 1 or not rising or all(w is None for w in choice.variants):
        raise InternalError(f"{len(choice.variants)} variants with the ends {list(choice.ends)}")
