"""Training scripts that the tests of the adapters start."""
