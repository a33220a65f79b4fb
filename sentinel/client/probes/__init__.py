"""One file per signal that the loop can tell."""
