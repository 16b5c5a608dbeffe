"""Compiled code that reads files: the threads of `readers.py`, which need no interpreter."""

from __future__ import annotations

from rabbitllm.base.compiling import (
    atomic_add,
    bytes_at,
    call_read,
    exchange_if,
    helper,
    integers_at,
    pause,
    share,
    shared,
    system_call,
    to_array,
)
from rabbitllm.base.parts import FUTEX, WAIT, WAKE

OWN, READ, SYSCALL, CLOCK = range(4)
"""Places of the own address, and of those of the C library's `pread`, `syscall` and `clock_gettime`."""
CLAIMED, SENT, FINISHED, EPOCH, ASLEEP, STOPPED = range(8, 56, 8)
"""Places of the numbers of requests that threads have claimed, that were sent, and that are finished; of what threads
sleep on, and how many do; and of whether they end. Each has a cache line of its own."""
RING, FIRST = 64, 64
"""Requests that wait at most, and the place of the first one's address."""
WORDS = FIRST + RING
MEMORY, SPANS, COUNT, BLOCK, STATE, TIME, ENDED, THREAD, WAITS = range(9)
"""Words of a request: the address of its memory, that of its spans, their number, and what offsets and addresses of
reads are multiples of; its state, and once it is over how many nanoseconds it took, when it ended, and a number of the
thread; and whether it begins only once nothing is being read."""
REQUEST_WORDS, SPAN_WORDS = 9, 4
"""A span has a descriptor, an offset in its file, bytes, and an offset in the memory."""
PENDING, DONE, FAILED, UNSENT = range(4)
"""States of a request."""
_PIECE, PAGE = 1 << 20, 4096
SCRATCH = _PIECE + 2 * PAGE
"""Bytes of a thread's own memory, on pages: two addresses, that of the words which all share and that of its second
page."""
_MONOTONIC = 1


@helper()
def _copy(source, target, count):  # type: ignore[no-untyped-def]
    """Copy bytes; an assignment of slices would allocate memory if they overlapped."""
    given, copied = to_array(bytes_at(source), count), to_array(bytes_at(target), count)
    for i in range(count):
        copied[i] = given[i]


@helper()
def _now(clock, place):  # type: ignore[no-untyped-def]
    """Nanoseconds; the system writes two words to a place."""
    call_read(clock, _MONOTONIC, place, 0, 0)
    return shared(place) * 1000000000 + shared(place + 8)


@helper()
def _read(read, descriptor, address, asked, offset, needed):  # type: ignore[no-untyped-def]
    """Read as many bytes as are asked for, or as a file has; whether those that are needed came."""
    done = 0
    while done < needed:
        count = call_read(read, descriptor, address + done, asked - done, offset + done)
        if count <= 0:
            return False
        done += count
    return True


@helper()
def _may_begin(own, claimed):  # type: ignore[no-untyped-def]
    """Whether there is a request after those that were claimed, and it waits for no other: the thread that ends the
    last one looks again."""
    if claimed == shared(own + 8 * SENT):
        return False
    return shared(shared(own + 8 * (FIRST + claimed % RING)) + 8 * WAITS) == 0 or shared(own + 8 * FINISHED) == claimed


@helper()
def _fill(read, span, memory, block, scratch):  # type: ignore[no-untyped-def]
    """Read a span to its place, in whole blocks; nothing else changes in the memory. Whether it was read."""
    descriptor, offset, nbytes, place = span[0], span[1], span[2], memory + span[3]
    if (place - offset) % block == 0:
        lead, tail = offset % block, -(offset + nbytes) % block
        _copy(place - lead, scratch, lead)
        _copy(place + nbytes, scratch + PAGE, tail)
        is_read = _read(read, descriptor, place - lead, lead + nbytes + tail, offset - lead, lead + nbytes)
        _copy(scratch, place - lead, lead)
        _copy(scratch + PAGE, place + nbytes, tail)
        return is_read
    done = 0
    while done < nbytes:
        lead = (offset + done) % PAGE
        count = min(nbytes - done, _PIECE - lead)
        asked = (lead + count + PAGE - 1) // PAGE * PAGE
        if not _read(read, descriptor, scratch, asked, offset + done - lead, lead + count):
            return False
        _copy(scratch + lead, place + done, count)
        done += count
    return True


def send(data, requests, count, woken):  # type: ignore[no-untyped-def]
    """Send requests, whose addresses are somewhere, as far as there is room and unless threads are to end; wake so many
    threads that sleep. The caller has the interpreter lock, as the one who stops them."""
    words = to_array(data, WORDS)
    own = words[OWN]
    addresses = to_array(integers_at(requests), count)
    for i in range(count):
        number = shared(own + 8 * SENT)
        if number - shared(own + 8 * CLAIMED) < RING and shared(own + 8 * STOPPED) == 0:
            share(addresses[i] + 8 * STATE, PENDING)
            share(own + 8 * (FIRST + number % RING), addresses[i])
            share(own + 8 * SENT, number + 1)
    atomic_add(own + 8 * EPOCH, 1)
    if shared(own + 8 * ASLEEP) > 0:
        system_call(words[SYSCALL], FUTEX, own + 8 * EPOCH, WAKE, woken)


def withdraw(data):  # type: ignore[no-untyped-def]
    """Take back all requests that no thread has begun. The caller has the interpreter lock, as the one who sends."""
    words = to_array(data, WORDS)
    own = words[OWN]
    sent, claimed = shared(own + 8 * SENT), shared(own + 8 * CLAIMED)
    while exchange_if(own + 8 * CLAIMED, claimed, sent) == 0:
        claimed = shared(own + 8 * CLAIMED)
    for number in range(claimed, sent):
        share(shared(own + 8 * (FIRST + number % RING)) + 8 * STATE, UNSENT)
    atomic_add(own + 8 * FINISHED, sent - claimed)
    system_call(words[SYSCALL], FUTEX, own + 8 * FINISHED, WAKE, 1)  # a fork may wait for what no thread has begun


def await_change(data, place, value, spins):  # type: ignore[no-untyped-def]
    """Wait until a word at a place has probably another value: by pauses, then asleep until woken or interrupted."""
    words, waits = to_array(data, WORDS), 0
    while waits < spins and shared(place) == value:
        pause(0)
        waits += 1
    if shared(place) == value:
        system_call(words[SYSCALL], FUTEX, place, WAIT, value)


def serve(data):  # type: ignore[no-untyped-def]
    """Read what is asked for, until threads are to end."""
    mine = to_array(data, 2)
    own, scratch = mine[0], mine[1]  # nothing is allocated: without room a thread would end, and requests stay pending
    words = to_array(integers_at(own), WORDS)
    while True:
        epoch, claimed = shared(own + 8 * EPOCH), shared(own + 8 * CLAIMED)
        stopped = shared(own + 8 * STOPPED)  # before what was sent: nothing is sent afterwards
        if _may_begin(own, claimed):
            request = shared(own + 8 * (FIRST + claimed % RING))
            if exchange_if(own + 8 * CLAIMED, claimed, claimed + 1) == 0:
                continue
            asked, state = to_array(integers_at(request), REQUEST_WORDS), DONE
            begun = _now(words[CLOCK], request + 8 * TIME)
            spans = to_array(integers_at(asked[SPANS]), SPAN_WORDS * asked[COUNT])
            block = max(asked[BLOCK], 1)  # a division by 0 would end the thread
            for i in range(asked[COUNT]):
                span = spans[SPAN_WORDS * i : SPAN_WORDS * i + SPAN_WORDS]
                if state == DONE and not _fill(words[READ], span, asked[MEMORY], block, scratch):
                    state = FAILED
            ended = _now(words[CLOCK], request + 8 * TIME)
            asked[TIME], asked[ENDED], asked[THREAD] = ended - begun, ended, scratch
            share(request + 8 * STATE, state)
            atomic_add(own + 8 * FINISHED, 1)
            system_call(words[SYSCALL], FUTEX, request + 8 * STATE, WAKE, 1)
            system_call(words[SYSCALL], FUTEX, own + 8 * FINISHED, WAKE, 1)
        elif stopped != 0:
            break
        else:
            atomic_add(own + 8 * ASLEEP, 1)
            system_call(words[SYSCALL], FUTEX, own + 8 * EPOCH, WAIT, epoch & 0xFFFFFFFF)
            atomic_add(own + 8 * ASLEEP, -1)
