"""The daemon, with real sockets and real processes."""
