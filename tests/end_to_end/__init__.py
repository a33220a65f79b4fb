"""Whole processes together: a training loop, a daemon, and the services around them."""
