"""Handle messages in batches of up to a hundred, with one transaction for each batch."""

import sqlite3

from nsparq.client import Subscriptions

app = Subscriptions(nsqd=["127.0.0.1:4150"])


@app.subscribe("readings", "database", batch_size=100, batch_timeout=0.5)
def store(readings: list[dict[str, float]]) -> None:
    """A plain function: it runs in a thread and may block."""
    connection = sqlite3.connect("readings.db")
    with connection:
        connection.execute("create table if not exists readings (sensor, value)")
        rows = [(reading["sensor"], reading["value"]) for reading in readings]
        connection.executemany("insert into readings values (?, ?)", rows)
    connection.close()
    print("stored", len(readings), flush=True)


if __name__ == "__main__":
    app.run()
