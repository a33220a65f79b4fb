"""Tests of sentinel.respond."""
