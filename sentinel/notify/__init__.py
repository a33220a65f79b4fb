"""Alerts that arrive: one file per channel, one place that sends."""
