"""Adapters between training frameworks and sentinel: one small file per framework, public API only."""
