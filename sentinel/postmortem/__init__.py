"""Explain a run afterwards, or while it is going: what happened, what was done, what it cost."""
