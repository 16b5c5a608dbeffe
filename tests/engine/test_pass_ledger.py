"""What is said of passes, from entries and seconds that the test gives."""

from __future__ import annotations

from rabbitllm.engine.pass_line import PassLedger
from rabbitllm.telemetry.passes import PassInput


class Cache:
    """Stands for a KV cache: an object that is the same, or another."""


def test_tokens_and_their_pace() -> None:
    ledger, cache = PassLedger(4), Cache()
    assert ledger.begin(PassInput(1, 100, 0, 1), cache, 10.0)
    facts = ledger.facts(12.0)
    assert (facts.number, facts.prompt, facts.tokens, facts.tokens_per_second) == (1, 100, 0, None)
    assert facts.seconds == 2
    for number in range(5):  # the prompt takes 30 s, each token 2
        assert not ledger.begin(PassInput(1, 1, 100 + number, 1), cache, 40.0 + 2 * number)
    facts = ledger.facts(49.0)
    assert (facts.number, facts.prompt, facts.tokens) == (6, 0, 5)
    assert facts.tokens_per_second == 4 / 9  # the first came of the prompt


def test_candidates_that_were_right_count() -> None:
    ledger, cache = PassLedger(4), Cache()
    ledger.begin(PassInput(1, 10, 0, 1), cache, 0.0)
    ledger.begin(PassInput(1, 4, 10, 4), cache, 10.0)  # three candidates
    ledger.begin(PassInput(1, 4, 13, 4), cache, 12.0)  # two of them were right, and one token more came
    assert ledger.facts(12.0).tokens == 4
    assert ledger.facts(12.0).tokens_per_second == 1.5


def test_counts_of_another_sequence_begin_at_zero() -> None:
    ledger, first, second = PassLedger(4), Cache(), Cache()
    ledger.begin(PassInput(2, 10, 0, 1), first, 0.0)
    ledger.begin(PassInput(2, 1, 10, 1), first, 1.0)
    ledger.begin(PassInput(2, 1, 11, 1), first, 2.0)
    assert ledger.facts(3.0).tokens == 4
    assert ledger.begin(PassInput(2, 10, 0, 1), second, 5.0)
    facts = ledger.facts(6.0)
    assert (facts.number, facts.prompt, facts.tokens) == (4, 20, 0)
    assert ledger.begin(PassInput(1, 10), None, 7.0)
    assert ledger.begin(PassInput(1, 11), None, 8.0)  # without a cache nothing is known of the sequence
    assert ledger.facts(9.0).tokens_per_second is None


def test_where_the_time_goes() -> None:
    ledger, cache = PassLedger(2), Cache()
    ledger.begin(PassInput(1, 10, 0, 1), cache, 0.0)
    assert ledger.facts(0.0).spent.shares == {}
    ledger.spend(disk=6, dequantize=1)
    ledger.spend(compute=3)
    ledger.unit_done()
    facts = ledger.facts(10.0)
    assert facts.layer == 1
    assert facts.spent.shares == {"disk": 0.6, "copies": 0, "dequantize": 0.1, "compute": 0.3}
    ledger.begin(PassInput(1, 1, 10, 1), cache, 10.0)  # a further token is another thing
    assert ledger.facts(10.0).layer == 0
    ledger.spend(copies=1)
    ledger.begin(PassInput(1, 1, 11, 1), cache, 11.0)  # and the next one is the same
    assert ledger.facts(11.0).spent.shares["copies"] == 1
