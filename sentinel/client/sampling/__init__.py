"""The dear signals: taken now and then, at the same steps on every rank, for a bounded share of the loop's time."""
