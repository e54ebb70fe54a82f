"""Publishing records natively: what `profile.ring` describes, with the processor's own atomics.

Taking a ticket is one compare-and-swap, and only another producer's progress can make it try again; the record is released by
storing its sequence. The whole batch of a call goes in one entry, without the interpreter lock.
"""

from __future__ import annotations

from hotfuse.profile.records import WORDS
from hotfuse.profile.ring import DROPPED_AT, HEAD_AT, SLOT, SLOTS_AT

NAME = "hotfuse_publish"
TEXT = f"""
define void @{NAME}(ptr %pointers, ptr %sizes) {{
entry:
  %ring = load ptr, ptr %pointers
  %records.at = getelementptr ptr, ptr %pointers, i64 1
  %records = load ptr, ptr %records.at
  %count = load i64, ptr %sizes
  %slots.at = getelementptr i64, ptr %ring, i64 1
  %slots = load i64, ptr %slots.at
  %mask = sub i64 %slots, 1
  %head.at = getelementptr i8, ptr %ring, i64 {HEAD_AT}
  %dropped.at = getelementptr i8, ptr %ring, i64 {DROPPED_AT}
  %first = getelementptr i8, ptr %ring, i64 {SLOTS_AT}
  %some = icmp sgt i64 %count, 0
  br i1 %some, label %record, label %done
record:
  %i = phi i64 [0, %entry], [%i1, %next]
  %from.offset = mul i64 %i, {WORDS * 8}
  %from = getelementptr i8, ptr %records, i64 %from.offset
  br label %try
try:
  %ticket = load atomic i64, ptr %head.at monotonic, align 8
  %place = and i64 %ticket, %mask
  %offset = mul i64 %place, {SLOT}
  %slot = getelementptr i8, ptr %first, i64 %offset
  %sequence = load atomic i64, ptr %slot acquire, align 8
  %ahead = sub i64 %sequence, %ticket
  %free = icmp eq i64 %ahead, 0
  br i1 %free, label %claim, label %taken
taken:
  %full = icmp slt i64 %ahead, 0
  br i1 %full, label %drop, label %try
claim:
  %after = add i64 %ticket, 1
  %swap = cmpxchg ptr %head.at, i64 %ticket, i64 %after monotonic monotonic
  %mine = extractvalue {{i64, i1}} %swap, 1
  br i1 %mine, label %write, label %try
write:
  %to = getelementptr i8, ptr %slot, i64 8
  br label %word
word:
  %w = phi i64 [0, %write], [%w1, %word]
  %mixed = phi i64 [0, %write], [%mixed1, %word]
  %source = getelementptr i64, ptr %from, i64 %w
  %value = load i64, ptr %source
  %target = getelementptr i64, ptr %to, i64 %w
  store i64 %value, ptr %target
  %mixed1 = xor i64 %mixed, %value
  %w1 = add i64 %w, 1
  %more = icmp ult i64 %w1, {WORDS - 1}
  br i1 %more, label %word, label %finish
finish:
  %tied = mul i64 %after, {0x9E3779B97F4A7C15 - (1 << 64)}
  %check = xor i64 %mixed1, %tied
  %check.at = getelementptr i64, ptr %to, i64 {WORDS - 1}
  store i64 %check, ptr %check.at
  store atomic i64 %after, ptr %slot release, align 8
  br label %next
drop:
  %before = atomicrmw add ptr %dropped.at, i64 1 monotonic
  br label %next
next:
  %i1 = add i64 %i, 1
  %again = icmp slt i64 %i1, %count
  br i1 %again, label %record, label %done
done:
  ret void
}}
"""
