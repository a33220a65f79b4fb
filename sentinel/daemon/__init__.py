"""The sidecar process: receives what ranks see, exposes, judges, commands and keeps it. Never loads torch."""
