"""Tests of the Grafana dashboards, the alert rules, and the commands around them."""
