"""A small real training run that meets two faults, with and without sentinel."""
