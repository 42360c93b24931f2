"""The shop's day: what it sends is what it says that it sends."""

from __future__ import annotations

import json
from collections import Counter
from datetime import datetime

from nsparq.demo.events import CLOSING, DAY_S, KINDS, LATE_S, OPENED, WINDOW_S, Shop

EVENTS = 20_000


def whole_day() -> tuple[Shop, list[bytes]]:
    shop = Shop(EVENTS)
    return shop, [*shop.day(), shop.closing()]


def decoded(body: bytes) -> dict[str, object] | None:
    """As the pipeline's schema would have it."""
    try:
        event = json.loads(body)
    except ValueError:
        return None
    is_event = isinstance(event, dict) and isinstance(event.get("id"), int) and "at" in event
    return event if is_event else None


def seconds(text: object) -> float:
    assert isinstance(text, str)
    return datetime.fromisoformat(text).timestamp()


def test_the_same_seed_gives_the_same_day() -> None:
    assert whole_day()[1] == whole_day()[1]


def test_the_expected_result_follows_from_the_messages() -> None:
    shop, sent = whole_day()
    events = [event for body in sent if (event := decoded(body)) is not None]
    once = {event["id"]: event for event in events}
    late = [one for one in once.values() if seconds(one["sent"]) - seconds(one["at"]) > LATE_S]
    counted = [one for one in once.values() if one not in late and one["kind"] != CLOSING]
    windows = Counter((int(seconds(one["at"]) // WINDOW_S * WINDOW_S), one["kind"]) for one in counted)
    expected = shop.expected
    assert expected.sent == len(sent) == EVENTS + 1
    assert expected.broken == len(sent) - len(events)
    assert expected.twice == len(events) - len(once)
    assert expected.late == len(late)
    assert expected.rows == Counter(one["kind"] for one in events)
    assert expected.windows == windows
    assert expected.cents.total() == sum(int(str(one["cents"])) for one in counted)


def test_a_day_has_events_of_every_kind() -> None:
    shop, _ = whole_day()
    expected = shop.expected
    assert set(expected.rows) == {*KINDS, CLOSING}
    assert 50 < expected.broken < 200 and 100 < expected.twice < 400 and 100 < expected.late < 400


def test_events_in_time_are_within_the_watermark() -> None:
    """Else Spark would drop it, and nobody could say beforehand how much of it."""
    shop = Shop(EVENTS)
    newest, seen = 0.0, set()
    for body in shop.day():
        event = decoded(body)
        if event is None or event["id"] in seen:
            continue
        seen.add(event["id"])
        sent, at = seconds(event["sent"]), seconds(event["at"])
        assert at >= newest - LATE_S or sent - at > LATE_S
        newest = max(newest, at)


def test_the_closing_event_is_past_every_window_and_its_delay() -> None:
    shop, sent = whole_day()
    closing = decoded(sent[-1])
    assert closing is not None and closing["kind"] == CLOSING
    assert seconds(closing["at"]) - LATE_S > max(start for start, _ in shop.expected.windows) + WINDOW_S


def test_days_follow_each_other() -> None:
    shop = Shop(1000)
    first, second = list(shop.day(0)), list(shop.day(1))
    times = [seconds(event["sent"]) for body in (*first, *second) if (event := decoded(body)) is not None]
    assert OPENED.timestamp() <= min(times) and max(times) < OPENED.timestamp() + 2 * DAY_S
    assert times[-1] - times[0] > 1.9 * DAY_S
