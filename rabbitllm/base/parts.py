"""Compiled code that divides work into parts, which threads claim one after the other.

On a quiet machine the threads are those of torch's team. Where other work takes cores, each wait for a thread that has
none takes milliseconds, and libgomp waits until all threads of a team have come. There helpers of our own come if they
can: the caller computes all parts that none of them has claimed, and waits for those that one has.
"""

from __future__ import annotations

import numpy as np

from rabbitllm.base.compiling import (
    atomic_add,
    call_parts,
    call_team,
    exchange_if,
    pause,
    share,
    shared,
    system_call,
    to_array,
    words_at,
)

WORDS = 64
"""Int64s that the threads share, those of which that change in cache lines of their own."""
RUN, PARALLEL, CLAIM, SYSCALL, HELPED, CLAIMS, DONE, OWNER, EPOCH, ASLEEP = 0, 1, 2, 3, 4, 8, 16, 24, 32, 40
"""Their places: the addresses of `run_parts`, GOMP_parallel, `claim_parts` and the C library's `syscall`; whether there
are helpers, and which; the claims of the work in hand (its number, its parts and the next one of these), and its function and
data; parts that helpers have computed; whether a caller has the helpers; what they sleep on, and whether some sleep."""
FUTEX, _YIELD, _WAIT, WAKE = 202, 24, 128, 129
"""System calls of Linux on x86-64, and operations of the first one on memory of this process only."""
SPINS, PATIENCE = 2000, 2000
"""Pauses, some 40 ns each, after which a helper sleeps, and after which a caller lets others run."""


def claim_parts(data):  # type: ignore[no-untyped-def]
    """Compute a thread's parts at a time, until all are claimed.

    Own address, the next part, parts at a time, the number of parts, the function and its data.
    """
    work = to_array(data, 6)
    first = atomic_add(work[0] + 8, work[2])
    while first < work[3]:
        call_parts(work[4], work[5], first, min(first + work[2], work[3]), work[3])
        first = atomic_add(work[0] + 8, work[2])


def run_parts(function, data, threads, parts, team):  # type: ignore[no-untyped-def]
    """Call `function(data, first, end, parts)` for all parts, in at most so many threads; return when all are computed."""
    words = to_array(words_at(team), 4 * WORDS).view(np.int64)
    if threads <= 1 or parts <= 1:
        call_parts(function, data, 0, parts, parts)
    elif words[HELPED] == 0:
        work = np.empty(8, np.int64)
        work[0], work[1], work[2], work[3] = work.ctypes.data, 0, -(-parts // threads), parts
        work[4], work[5] = function, data
        call_team(words[PARALLEL], words[CLAIM], work[0], min(threads, parts))
        work[0] = 0  # numba frees memory after its last use
    elif exchange_if(team + 8 * OWNER, 0, 1) == 0:  # another caller has them
        call_parts(function, data, 0, parts, parts)
    else:
        claims, done = team + 8 * CLAIMS, team + 8 * DONE
        words[CLAIMS + 1], words[CLAIMS + 2] = function, data
        share(done, 0)
        share(claims, ((shared(claims) >> 32) + 1) << 32 | parts << 16)
        if shared(team + 8 * ASLEEP) != 0:
            share(team + 8 * ASLEEP, 0)
            atomic_add(team + 8 * EPOCH, 1)
            system_call(words[SYSCALL], FUTEX, team + 8 * EPOCH, WAKE, threads)
        own = 0
        while True:
            claim = shared(claims)
            part = claim & 0xFFFF
            if part >= parts:
                break
            if exchange_if(claims, claim, claim + 1) != 0:
                call_parts(function, data, part, part + 1, parts)
                own += 1
        waits = 0
        while shared(done) < parts - own:
            pause(0)
            waits += 1
            if waits >= PATIENCE:
                system_call(words[SYSCALL], _YIELD, 0, 0, 0)
                waits = 0
        share(team + 8 * OWNER, 0)


def help_with_parts(data):  # type: ignore[no-untyped-def]
    """Compute parts of all that comes, until there are to be no helpers."""
    words = to_array(data, WORDS)
    team = words[WORDS - 1]
    claims, waits, own = team + 8 * CLAIMS, 0, words[HELPED]
    while own != 0 and shared(team + 8 * HELPED) == own:
        claim = shared(claims)
        part, parts = claim & 0xFFFF, claim >> 16 & 0xFFFF
        if part < parts:
            function, work = words[CLAIMS + 1], words[CLAIMS + 2]
            if exchange_if(claims, claim, claim + 1) != 0:
                call_parts(function, work, part, part + 1, parts)
                atomic_add(team + 8 * DONE, 1)
                waits = 0
            continue
        pause(0)
        waits += 1
        if waits >= SPINS:
            waits = 0
            share(team + 8 * ASLEEP, 1)
            epoch = shared(team + 8 * EPOCH)
            claim = shared(claims)
            if claim & 0xFFFF >= claim >> 16 & 0xFFFF and shared(team + 8 * HELPED) == own:
                system_call(words[SYSCALL], FUTEX, team + 8 * EPOCH, _WAIT, epoch & 0xFFFFFFFF)
