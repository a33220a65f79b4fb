"""Detectors: a record in, a finding out. Pure; one file per anomaly."""
