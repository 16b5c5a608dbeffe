"""What the bundled model is taught of the world is so."""

from __future__ import annotations

import calendar

from rabbitllm.demo.tasks import RELATIONS


def test_tables_agree_with_the_calendar_and_themselves() -> None:
    tables = {relation.name: relation.answers for relation in RELATIONS}
    months = list(calendar.month_name)[1:]
    for index, month in enumerate(months):
        if month != "February":
            assert tables["days"][month] == str(calendar.monthrange(2023, index + 1)[1])
        assert tables["next month"][month] == months[(index + 1) % 12]
    days = list(calendar.day_name)
    for index, day in enumerate(days):
        assert tables["next day"][day] == days[(index + 1) % 7]
    for there, back in (
        ("capital", "country"),
        ("symbol", "element"),
        ("next day", "previous day"),
        ("next month", "previous month"),
    ):
        assert {value: name for name, value in tables[there].items()} == tables[back]
        assert len(tables[there]) == len(tables[back])
