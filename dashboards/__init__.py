"""Grafana dashboards, Prometheus rules and their provisioning; the Python here only writes the JSON (`generate`)."""
