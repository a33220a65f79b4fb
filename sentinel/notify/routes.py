"""Decide which channels hear of an incident."""

from sentinel.alert_settings import NotifySettings, RouteSettings
from sentinel.records import Incident
from sentinel.vocabulary import AlertChannel


def channels_for(
    settings: NotifySettings, channels: frozenset[AlertChannel], incident: Incident
) -> list[AlertChannel]:
    """Those of `channels` that a route leads to, each once. Without routes: all, from warning up."""
    routes = settings.route or tuple(RouteSettings(channel=name) for name in channels)
    wanted = {route.channel for route in routes if _passes(route, incident)}
    return [name for name in AlertChannel if name in channels and name in wanted]


def _passes(route: RouteSettings, incident: Incident) -> bool:
    return incident.severity in route.severity and (not route.kinds or incident.kind in route.kinds)
