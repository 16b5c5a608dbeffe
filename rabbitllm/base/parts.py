"""Compiled code that divides work into parts, which threads claim.

On a quiet machine the threads are those of torch's team, and each claims its parts at once. Where other work takes
cores, libgomp waits until all threads of a team have had one, milliseconds each time. There helpers of our own come if
they can: the caller computes all parts that none of them has claimed, and waits for those that one has.
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
)

WORDS = 48
"""Int64s that the threads share; those that change have cache lines of their own."""
OWN, RUN, PARALLEL, CLAIM, SYSCALL, HELPED, EACH = range(7)
"""Places of the own address, and of those of `run_parts`, GOMP_parallel, `claim_parts` and the C library's `syscall`,
of the number of the present helpers, 0 without any, and of how many parts a thread has."""
CLAIMS, DONE, OWNER, EPOCH, ASLEEP = range(8, 48, 8)
"""Places of the claims of the present work (its number, its parts, and the next of these), before its function and
data; of the parts that helpers have computed; of whether a caller has the helpers; of what they sleep on, and whether
some do."""
FUTEX, WAIT, WAKE, _YIELD = 202, 128, 129, 24
"""System calls of Linux on x86-64, and operations of the first one on memory of one process."""
SPINS = 20000
"""Pauses of some 15 ns before a helper sleeps, and before a caller that waits for one lets others run: waking takes
some 50 microseconds of the caller's time in a virtual machine, and Python computes as long between two layers."""


def claim_parts(data):  # type: ignore[no-untyped-def]
    """Compute a thread's parts at a time until all are claimed.

    Own address, next part, number of parts, function and data, and the parts of a thread.
    """
    work = to_array(data, 6)
    first = atomic_add(work[0] + 8, work[5])
    while first < work[2]:
        call_parts(work[3], work[4], first, first + work[5], work[2])
        first = atomic_add(work[0] + 8, work[5])


def run_parts(data, function, given, threads):  # type: ignore[no-untyped-def]
    """Compute the parts of so many threads by a function of `given`, which is called as `call_parts` does.

    Returns when all are computed; there may be fewer threads.
    """
    words = to_array(data, WORDS)
    team, parts = words[OWN], threads * words[EACH]
    if threads > 1 and words[HELPED] == 0:
        work = np.empty(6, np.int64)
        work[0], work[1], work[2], work[3], work[4] = work.ctypes.data, 0, parts, function, given
        work[5] = words[EACH]
        call_team(words[PARALLEL], words[CLAIM], work[0], threads)
        work[0] = 0  # numba frees memory after its last use
    elif threads <= 1 or exchange_if(team + 8 * OWNER, 0, 1) == 0:  # another caller has the helpers
        call_parts(function, given, 0, parts, parts)
    else:
        claims, done = team + 8 * CLAIMS, team + 8 * DONE
        words[CLAIMS + 1], words[CLAIMS + 2] = function, given
        share(done, 0)
        share(claims, ((shared(claims) >> 32) + 1) << 32 | parts << 16)
        if shared(team + 8 * ASLEEP) != 0:
            share(team + 8 * ASLEEP, 0)
            atomic_add(team + 8 * EPOCH, 1)
            system_call(words[SYSCALL], FUTEX, team + 8 * EPOCH, WAKE, threads)
        own = waits = 0
        claim = shared(claims)
        while claim & 0xFFFF < parts:
            if exchange_if(claims, claim, claim + 1) != 0:
                part = claim & 0xFFFF
                call_parts(function, given, part, part + 1, parts)
                own += 1
            claim = shared(claims)
        while own + shared(done) < parts:
            pause(0)
            waits += 1
            if waits % SPINS == 0:
                system_call(words[SYSCALL], _YIELD, 0, 0, 0)
        share(team + 8 * OWNER, 0)


def run_program(data):  # type: ignore[no-untyped-def]
    """Set the words that are addresses, and call each function; see `programs.Program`."""
    head = to_array(data, 9)
    begin, places, team, each, first = head[2], head[3], head[5], head[6], head[8]
    words = to_array(data, head[1])
    end = begin + 3 * places
    for i in range(begin, end, 3):
        words[words[i]] = words[words[i + 1]] + words[i + 2]
    i = end + 3 * first
    while i < end + 3 * words[4]:  # one of the functions may set it
        if words[i + 2] > 1:
            call_parts(shared(team + 8 * RUN), team, words[i], words[i + 1], words[i + 2])
        else:
            call_parts(words[i], words[i + 1], 0, each, each)
        i += 3


def help_with_parts(data):  # type: ignore[no-untyped-def]
    """Compute parts of what comes, until there are other helpers or none."""
    words = to_array(data, WORDS)
    team, present, waits = words[OWN], words[HELPED], 0
    claims, epoch_at = team + 8 * CLAIMS, team + 8 * EPOCH
    while present != 0 and shared(team + 8 * HELPED) == present:
        claim = shared(claims)
        part, parts = claim & 0xFFFF, claim >> 16 & 0xFFFF
        if part < parts:
            function, given = words[CLAIMS + 1], words[CLAIMS + 2]
            if exchange_if(claims, claim, claim + 1) != 0:  # so they are those of this work
                call_parts(function, given, part, part + 1, parts)
                atomic_add(team + 8 * DONE, 1)
                waits = 0
        elif waits < SPINS:
            pause(0)
            waits += 1
        else:
            share(team + 8 * ASLEEP, 1)
            epoch = shared(epoch_at)
            if shared(claims) == claim and shared(team + 8 * HELPED) == present:
                system_call(words[SYSCALL], FUTEX, epoch_at, WAIT, epoch & 0xFFFFFFFF)
            waits = 0
