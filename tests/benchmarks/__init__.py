"""Measurements, as ratios against a named floor."""
