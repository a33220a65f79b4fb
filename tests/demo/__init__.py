"""Tests of sentinel.demo."""
