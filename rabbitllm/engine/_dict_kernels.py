"""Compiled code of `_dict_changes.py`, of the signature `compiling.CALLBACK`."""

from __future__ import annotations

from rabbitllm.base.compiling import own_word, share, shared


def compare(is_note, address, pairs, unused):  # type: ignore[no-untyped-def]
    """Note words, or return how many are not what was noted; of each its address and that lie at an address."""
    different = 0
    for place in range(address, address + 16 * pairs, 16):
        word = shared(shared(place))
        if is_note:
            share(place + 8, word)
        different += word != shared(place + 8)
    return different


def count_change(event, address, key, value):  # type: ignore[no-untyped-def]
    """Count a change, as a callback of PyDict_AddWatcher; or, for none, write where that is counted."""
    count = own_word(0)
    if event < 0:
        share(address, count)
    else:
        share(count, shared(count) + 1)
    return 0
