"""Tests of sentinel.detect."""
